"""From exchanges to the figures of a level: TTFT, TPOT, ITL, E2E in ms, tokens a second, and the client's own state.

Definitions: TTFT is from the send of the request (open loop: from when it was due) to the first chunk with a token;
TPOT is (last token - first token) / (output tokens - 1); ITL is per token: a chunk of k tokens after a gap g is k
intervals of g / k; E2E is to the last token.
"""

import math

import numpy as np

from k25lib.errors import UsageError
from k25lib.load.stream import Outcome
from k25lib.load.worker import GATHER_FROM, MAX_GATHER_S

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
SUMMARY = ("mean", "low", "high", "p50", "p90", "p99", "n")
RESAMPLES = 1000
LATE_READ_NS = 1_000_000


class Request:
    """One request: its table `row`, and its token times (ns), tokens per chunk and receive lags (ns)."""

    def __init__(self, exchange, output_tokens, name, phase, origin_ns):
        outcome = Outcome(exchange, output_tokens)
        pieces = exchange["pieces"]
        self.times_ns, self.tokens = np.array(outcome.times_ns, dtype=np.int64), np.array(outcome.tokens, dtype=float)
        self.lags_ns = [read_ns - stamp_ns for stamp_ns, read_ns, _ in pieces]
        lag_ns_at = {piece[0]: lag_ns for piece, lag_ns in zip(pieces, self.lags_ns, strict=True)}
        together = self.times_ns[1:][np.diff(self.times_ns) == 0]
        self.together_lags_ns = [lag_ns_at[at] for at in together.tolist()]  # of chunks in one read with the one before
        self.send_ns = exchange["send_ns"]
        self.from_ns = exchange["send_ns"] if exchange["due_ns"] is None else exchange["due_ns"]
        self.end_ns = pieces[-1][0] if pieces else exchange["end_ns"]
        self.slot, self.phase, self.ok = exchange["slot"], phase, outcome.kind == "ok"
        self.unfinished = outcome.kind in ("unfinished", "interrupted")  # no failure; its tokens count as they came
        wanted_ns = exchange["due_ns"] or exchange["free_ns"]
        gaps_ms, count = np.diff(self.times_ns) / 1e6, self.tokens[1:]
        self.itl_ms, self.itl_weights = gaps_ms / count, count
        first, last = (self.times_ns[0], self.times_ns[-1]) if len(self.times_ns) else (None, None)
        several = self.ok and outcome.output_tokens > 1
        self.row = {
            "request": name,
            "phase": phase,
            "slot": self.slot,
            "ok": self.ok,
            "kind": outcome.kind,
            "error": outcome.message,
            "status": outcome.status,
            "finish_reason": outcome.finish_reason,
            "sent_ms": (self.send_ns - origin_ns) / 1e6,
            "late_ms": (self.send_ns - wanted_ns) / 1e6 if wanted_ns else None,
            "send_us": (exchange["sent_ns"] - self.send_ns) / 1e3 if exchange["sent_ns"] else None,
            "ttft_ms": _ms(first, self.from_ns) if self.ok else None,
            "tpot_ms": _ms(last, first) / (outcome.output_tokens - 1) if several else None,
            "e2e_ms": _ms(last, self.from_ns) if self.ok else None,
            "input_tokens": outcome.usage.get("prompt_tokens"),
            "output_tokens": outcome.output_tokens,
            "tokens_from": outcome.tokens_from,
            "chunks": len(self.times_ns),
            "retried": exchange["retried"],
        }

    def chunk_rows(self):
        """Rows of the table `chunks`: the time of each chunk with tokens, in ms after the send."""
        return [
            {"request": self.row["request"], "phase": self.phase, "chunk": index}
            | {"time_ms": (int(at) - self.send_ns) / 1e6, "tokens": count}
            for index, (at, count) in enumerate(zip(self.times_ns, self.tokens, strict=True))
        ]


def _ms(later_ns, earlier_ns):
    return float(later_ns - earlier_ns) / 1e6


def rounded(value, digits=6):
    """A float with `digits` significant digits, for output; None for None, NaN and infinity."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def summary(groups, weights=None):
    """Mean with its 95 % bootstrap interval (low, high), p50, p90, p99 and n of groups of values.

    A group is resampled whole: the tokens of one request are no independent samples. `weights` has the shape of
    `groups`. None if there are no values.
    """
    pairs = [
        (np.asarray(values, float), np.ones(len(values)) if weights is None else np.asarray(weights[index], float))
        for index, values in enumerate(groups)
        if len(values)
    ]
    if not pairs:
        return None
    sums = np.array([float(values @ weight) for values, weight in pairs])
    totals = np.array([float(weight.sum()) for _, weight in pairs])
    picks = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[picks].sum(axis=1) / totals[picks].sum(axis=1)
    values = np.concatenate([values for values, _ in pairs])
    if weights is None:
        quantiles = np.quantile(values, (0.5, 0.9, 0.99))
    else:
        every = np.concatenate([weight for _, weight in pairs])
        quantiles = np.quantile(values, (0.5, 0.9, 0.99), weights=every, method="inverted_cdf")
    low, high = np.quantile(means, (0.025, 0.975))
    figures = map(rounded, (sums.sum() / totals.sum(), low, high, *quantiles))
    return dict(zip(SUMMARY, (*figures, round(float(totals.sum()))), strict=True))


def latencies(requests):
    """The four latency summaries of the requests that went well."""
    good = [request for request in requests if request.ok]
    found = {
        name: summary([[request.row[name]] for request in good if request.row[name] is not None])
        for name in ("ttft_ms", "tpot_ms", "e2e_ms")
    }
    itl = summary([request.itl_ms for request in good], [request.itl_weights for request in good])
    return {"ttft_ms": found["ttft_ms"], "tpot_ms": found["tpot_ms"], "itl_ms": itl, "e2e_ms": found["e2e_ms"]}


def steady_window(requests, concurrency):
    """(start, end) in ns of the time in which all slots were busy with requests after the warm-up; None if never.

    It starts when the last warm-up request ended (without one: when the last slot sent its first request), and ends
    when the first slot had no further request to send.
    """
    warm = [request.end_ns for request in requests if request.phase == "warmup"]
    first = sorted(request.send_ns for request in requests)[:concurrency]
    if len(first) < concurrency:
        return None
    last_of_slot = {}
    for request in requests:
        last_of_slot[request.slot] = max(request.end_ns, last_of_slot.get(request.slot, 0))
    start, end = max(warm) if warm else first[-1], min(last_of_slot.values())
    return (start, end) if end > start else None


def in_flight_mean(spans, window):
    """Mean number of requests in flight within the window, from the (first, last) ns of each request."""
    start, end = window
    return sum(max(0, min(last, end) - max(first, start)) for first, last in spans) / (end - start)


def tokens_within(requests, window):
    """Output tokens that arrived within the window, each credited when it came."""
    start, end = window
    return sum(
        float(request.tokens[(request.times_ns > start) & (request.times_ns <= end)].sum())
        for request in requests
        if request.ok or request.unfinished
    )


def wave_rates(requests, concurrency, in_flight):
    """Throughput of each wave of `concurrency` requests in tok/s, by Little's law: in flight x tokens / E2E.

    Requests of one wave share the server's state; waves are the independent samples of a level's throughput.
    """
    good = sorted((request for request in requests if request.ok), key=lambda request: request.send_ns)
    rates = []
    for at in range(0, len(good), concurrency):
        wave = good[at : at + concurrency]
        if len(wave) * 2 > concurrency:
            spans_s = [(request.end_ns - request.send_ns) / 1e9 for request in wave]
            tokens = sum(request.row["output_tokens"] for request in wave)
            rates.append(in_flight * tokens / sum(spans_s))
    return rates


def met_share(requests, concurrency):
    """Share of the chunks that seem to have met in the socket: in one read with the chunk before, and read late.

    A read keeps the stamp of its last segment, so the times of the others are lost: a first token that looks late
    makes TPOT too small, by about this share. A server may send several chunks at once; those are read at once. The
    lag of such a read is anywhere between nothing and a token's time, so this finds most of them, not all.
    """
    good = [request for request in requests if request.ok and request.row["tpot_ms"] is not None]
    gather_ns = MAX_GATHER_S * 1e9 if concurrency is None or concurrency >= GATHER_FROM else 0
    met = sum(
        lag_ns > max(gather_ns, LATE_READ_NS, request.row["tpot_ms"] * 1e6 / 4)
        for request in good
        for lag_ns in request.together_lags_ns
    )
    return met / sum(len(request.times_ns) for request in good) if good else None


def parse_slo(slo):
    """{"ttft": ms, ...} from "ttft=500,tpot=30", a dict of the same, or None."""
    if not slo:
        return {}
    try:
        pairs = slo.items() if isinstance(slo, dict) else [part.split("=") for part in slo.split(",")]
        limits = {name.strip(): float(limit) for name, limit in pairs}
    except (ValueError, AttributeError, TypeError):
        limits = {"": 0}
    if not set(limits) <= {"ttft", "tpot", "e2e"} or not all(0 < limit < math.inf for limit in limits.values()):
        raise UsageError(f'an SLO is limits in ms such as "ttft=500,tpot=30" (ttft, tpot, e2e), not {slo!r}')
    return limits


def meets(row, slo):
    """Whether a request went well and within the SLO, {"ttft": ms, "tpot": ms, "e2e": ms}."""
    return row["ok"] and all((row[f"{name}_ms"] or 0) <= limit for name, limit in slo.items())


def run_figures(requests, result, concurrency, rate, slo):
    """The figures of one run (a level's repeat) that cannot be pooled: rates, window, in flight, client."""
    if rate is None:
        window = steady_window(requests, concurrency)
    else:
        due = [request.from_ns for request in requests]
        window = (min(due), max(due)) if len(due) > 1 else None
    in_flight = in_flight_mean([(r.send_ns, r.end_ns) for r in requests], window) if window else None
    seconds = (window[1] - window[0]) / 1e9 if window else None
    measured = [request for request in requests if request.phase == "measured"]
    tokens = sum(float(request.tokens.sum()) for request in requests)
    first, last = min(r.send_ns for r in requests), max(r.end_ns for r in requests)
    good = [r for r in measured if slo and window and meets(r.row, slo) and window[0] < r.end_ns <= window[1]]
    lags = [lag for request in requests for lag in request.lags_ns]
    late = [request.row["late_ms"] for request in requests if request.row["late_ms"] is not None]
    return {
        "steady_s": seconds,
        "ramp_s": (window[0] - first) / 1e9 if window else None,
        "drain_s": (last - window[1]) / 1e9 if window else None,
        "output_tok_s": tokens_within(requests, window) / seconds if window else None,
        "output_tok_s_overall": tokens / ((last - first) / 1e9) if last > first else None,
        "request_s": sum(r.ok and window[0] < r.end_ns <= window[1] for r in requests) / seconds if window else None,
        "in_flight_mean": in_flight,
        "goodput": len(good) / seconds if slo and window else None,
        "wave_tok_s": wave_rates(measured, concurrency, in_flight) if window and rate is None else [],
        "cpu_us_per_token": result["cpu_s"] * 1e6 / tokens if tokens else None,
        "cpu_share": result["cpu_s"] / ((result["end_ns"] - result["start_ns"]) / 1e9),
        "lag_ms_p99": float(np.quantile(lags, 0.99)) / 1e6 if lags and result["stamps"] == "kernel" else None,
        "met_share": met_share(measured, concurrency) if result["stamps"] == "kernel" else None,
        "late_ms_p99": float(np.quantile(late, 0.99)) if late else None,
        "connects": result["connects"],
        "stamps": result["stamps"],
        "priority": result["priority"],
    }
