"""What the server counted meanwhile (/metrics before, during and after a level), beside what the client saw."""

import time

from k25lib.client import Client
from k25lib.errors import K25Error

SCRAPE_EVERY_S = 2.0  # a scrape holds up the loop that sends tokens for 4-30 ms
DISAGREE_PERCENT = 5.0
RUNNING, WAITING = ("vllm:num_requests_running",), ("vllm:num_requests_waiting",)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
TOTALS = {
    "tokens": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}
HISTOGRAMS = {
    "ttft_ms": ("vllm:time_to_first_token_seconds",),
    "itl_ms": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
}


def _sum(samples, names, suffix=""):
    """The sum over engines of the first of these metrics that the server has; None if it has none."""
    for name in names:
        if name + suffix in samples:
            return sum(value for _, value in samples[name + suffix])
    return None


class Counters:
    """Scrapes one level: `before()`, `tick()` while it runs, `after()`; a server without metrics gives None's."""

    def __init__(self, url, api_key=None):
        self._client = Client(url, api_key=api_key, timeout_s=3)
        self.running, self.waiting, self.kv_usage = [], [], []
        self._first = self._last = {}
        self._next_s = 0.0

    def _scrape(self):
        try:
            return self._client.metrics()
        except K25Error:
            return {}

    def before(self):
        """The counters as they stand before the level; its first look inside comes half a second later."""
        self.running, self.waiting, self.kv_usage = [], [], []
        self._first, self._last = self._scrape(), {}
        self._next_s = time.monotonic() + 0.5

    def tick(self):
        """Look at the gauges, if it is time and the server has any."""
        if not self._first or time.monotonic() < self._next_s:
            return
        samples = self._scrape()
        for values, names in ((self.running, RUNNING), (self.waiting, WAITING), (self.kv_usage, KV_USAGE)):
            value = _sum(samples, names)
            if value is not None:
                values.append(value)
        self._next_s = time.monotonic() + SCRAPE_EVERY_S

    def after(self):
        """The counters after the level."""
        self._last = self._scrape() if self._first else {}

    def delta(self, names, suffix=""):
        """The growth of a counter over the level; None if the server has none (or was restarted)."""
        first, last = _sum(self._first, names, suffix), _sum(self._last, names, suffix)
        return last - first if first is not None and last is not None and last >= first else None

    def figures(self):
        """Plain numbers of the level: totals, histogram means, gauges."""
        found = {name: self.delta(names) for name, names in TOTALS.items()}
        for name, names in HISTOGRAMS.items():
            total, count = self.delta(names, "_sum"), self.delta(names, "_count")
            found[name] = total / count * 1e3 if total is not None and count else None
        found |= {
            "running_max": max(self.running, default=None),
            "waiting_max": max(self.waiting, default=None),
            "kv_usage_max": max(self.kv_usage, default=None),
        }
        return found


def pooled(figures):
    """The figures of a level's repeats as one: totals added, means averaged, the largest gauges."""
    found = {}
    for name in figures[0]:
        values = [each[name] for each in figures if each[name] is not None]
        if not values:
            found[name] = None
        elif name in TOTALS:
            found[name] = sum(values)
        else:
            found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found


def prefix_hit_rate(figures):
    """Share of prompt tokens that the server's prefix cache served; None if it has none or does not tell."""
    queries, hits = figures["prefix_queries"], figures["prefix_hits"]
    return hits / queries if queries and hits is not None else None


def crosscheck(client, figures):
    """The client's tokens and mean TTFT and ITL beside the server's: {name: client, server, difference, agrees}."""
    rows = {}
    for name in ("tokens", "ttft_ms", "itl_ms"):
        ours, theirs = client.get(name), figures[name]
        difference = (ours / theirs - 1) * 100 if ours is not None and theirs else None
        agrees = None if difference is None else abs(difference) <= DISAGREE_PERCENT
        rows[name] = {"client": ours, "server": theirs, "difference_percent": difference, "agrees": agrees}
    return rows
