"""One level of a sweep from its repeats: the dict in `levels` of k25.load/1."""

from collections import Counter

import numpy as np
from scipy.special import stdtrit

from k25lib.load.counters import crosscheck, pooled, prefix_hit_rate
from k25lib.load.metrics import latencies, rounded, run_figures

VOID_HIT_RATE = 0.01
MAX_CPU_SHARE = 0.8
MIN_IN_FLIGHT = 0.98
MAX_MET_SHARE = 0.01
HEADER = "C or rate     tok/s   TPOT ms       p99  TTFT p50 in flight failed  remarks"


def level(runs, concurrency, rate, slo, gpus, honest_concurrency):
    """Pool the repeats, a list of (requests, worker's result, server's figures); see design of k25.load/1."""
    every = [request for requests, _, _ in runs for request in requests]
    measured = [request for request in every if request.phase == "measured"]
    figures = [run_figures(requests, result, concurrency, rate, slo) for requests, result, _ in runs if requests]
    failures = Counter(request.row["kind"] for request in measured if not request.ok and not request.unfinished)
    found = {"mode": "closed" if rate is None else "open", "concurrency": concurrency if rate is None else None}
    found |= {"rate": rate, "requests": len(measured), "failed": sum(failures.values()), "errors": dict(failures)}
    found |= {"first_error": next((r.row["error"] for r in measured if not r.ok and not r.unfinished), None)}
    found |= {"warmup_requests": len(every) - len(measured), "repeats": len(runs)}
    found |= {"warmup_failed": sum(r.phase == "warmup" and not r.ok and not r.unfinished for r in every)}
    found |= {"unfinished": sum(request.unfinished for request in measured)}
    found |= {"not_sent": sum(result["not_sent"] for _, result, _ in runs)}
    for name in ("steady_s", "ramp_s", "drain_s"):
        found[name] = _pool(sum, figures, name)
    for name in ("output_tok_s", "output_tok_s_overall", "request_s", "in_flight_mean", "goodput"):
        found[name] = _pool(np.mean, figures, name)
    found["wave_tok_s"] = [rounded(rate) for each in figures for rate in each["wave_tok_s"]]
    found["output_tok_s_low"], found["output_tok_s_high"] = interval(found["output_tok_s"], found["wave_tok_s"])
    found |= latencies(measured)
    found["goodput_unit"] = "requests/s within the SLO" if slo else None
    sources = {request.row["tokens_from"] for request in measured if request.ok}
    several = [request for request in measured if request.ok and request.row["output_tokens"] > 1]
    found["came_whole"] = sum(bool(request.times_ns[0] == request.times_ns[-1]) for request in several)
    found["tokens_from"] = "usage" if sources <= {"usage"} else "chunks"
    tpot = found["tpot_ms"] and found["tpot_ms"]["mean"]
    found["tok_s_per_user"] = rounded(1e3 / tpot) if tpot else None
    found["tok_s_per_gpu"] = rounded(found["output_tok_s"] / gpus) if gpus and found["output_tok_s"] else None
    lengths = [request.row["input_tokens"] for request in measured if request.row["input_tokens"] is not None]
    found["input_tokens"] = {"min": min(lengths), "max": max(lengths)} if lengths else None
    found["server"] = pooled([server for _, _, server in runs])
    found["prefix_hit_rate"] = rounded(prefix_hit_rate(found["server"]))
    found["void"] = (found["prefix_hit_rate"] or 0) > VOID_HIT_RATE
    found["crosscheck"] = crosscheck(_as_the_server_counts(every), found["server"])
    found["client"] = client_state(figures, found, concurrency, rate, honest_concurrency)
    return found | {"remarks": remarks(found)}


def remarks(found):
    """What a reader must know of a level before its figures are used, as one line; None if there is nothing."""
    said = []
    if found["errors"]:
        said.append(", ".join(f"{kind}: {number}" for kind, number in found["errors"].items()))
        said[0] += f" (the first: {found['first_error']})"
    if found["warmup_failed"]:
        said.append(f"failed in the warm-up: {found['warmup_failed']}")
    if found["came_whole"]:
        said.append(f"{found['came_whole']} answers came at one moment (a proxy's buffer?): no TTFT or TPOT of theirs")
    if found["void"]:
        said.append(f"void: {found['prefix_hit_rate']:.1%} prefix hits")
    if found["client"]["limited"]:
        said.append(f"client: {found['client']['why']}")
    said += [
        f"the server counts otherwise: {name} {each['difference_percent']:+.1f} %"
        for name, each in found["crosscheck"].items()
        if each["agrees"] is False
    ]
    return "; ".join(said) or None


def line(each):
    """A level under HEADER."""
    tpot, ttft = each["tpot_ms"] or {}, each["ttft_ms"] or {}
    name = each["concurrency"] or f"{each['rate']:g}/s"
    figures = [each["output_tok_s"], tpot.get("mean"), tpot.get("p99"), ttft.get("p50"), each["in_flight_mean"]]
    cells = [f"{'-' if value is None else format(value, '.2f'):>9}" for value in figures]
    return f"{name:>9} {' '.join(cells)} {each['failed']:>6}  {each['remarks'] or ''}".rstrip()


def interval(output_tok_s, wave_tok_s):
    """95 % interval of a throughput from its waves (Student's t on their logarithms); None, None for a single wave."""
    size = len(wave_tok_s)
    if output_tok_s is None or size < 2:
        return None, None
    margin = stdtrit(size - 1, 0.975) * np.log(wave_tok_s).std(ddof=1) / size**0.5
    return rounded(output_tok_s * np.exp(-margin)), rounded(output_tok_s * np.exp(margin))


def _pool(how, figures, name):
    values = [each[name] for each in figures if each[name] is not None]
    return rounded(float(how(values))) if values else None


def _as_the_server_counts(requests):
    """Tokens of all requests, and the means over all of them, warm-up too: the server's counters hold them all."""
    both = latencies(requests)
    tokens = sum(request.row["output_tokens"] for request in requests)
    return {"tokens": tokens} | {name: both[name] and both[name]["mean"] for name in ("ttft_ms", "itl_ms")}


def client_state(figures, found, concurrency, rate, honest_concurrency):
    """What the client knows of itself, and whether (and why) it was the limit of the level."""
    state = {
        "cpu_us_per_token": _pool(np.mean, figures, "cpu_us_per_token"),
        "cpu_share": _pool(max, figures, "cpu_share"),
        "lag_ms_p99": _pool(max, figures, "lag_ms_p99"),
        "met_share": _pool(max, figures, "met_share"),
        "late_ms_p99": _pool(max, figures, "late_ms_p99"),
        "connects": sum(each["connects"] for each in figures),
        "stamps": "kernel" if all(each["stamps"] == "kernel" for each in figures) else "user",
        "priority": figures[0]["priority"] if figures else None,
    }
    tpot = found["tpot_ms"] and found["tpot_ms"]["mean"]
    reasons = []
    if rate is None and honest_concurrency is not None and concurrency > honest_concurrency:
        reasons.append(f"above the honest concurrency of the self-test, {honest_concurrency}")
    if (state["cpu_share"] or 0) > MAX_CPU_SHARE:
        reasons.append(f"the client used {state['cpu_share']:.0%} of a core")
    if (state["met_share"] or 0) > MAX_MET_SHARE:
        reasons.append(f"{state['met_share']:.1%} of the chunks met in the socket: TPOT may be too small by as much")
    elif tpot and (state["lag_ms_p99"] or 0) > tpot:  # up to here the kernel's stamps make up for it
        reasons.append(f"receive lag p99 {state['lag_ms_p99']:.1f} ms, more than a token's time")
    if rate is not None and tpot and (state["late_ms_p99"] or 0) > tpot:
        reasons.append(f"late sends: p99 {state['late_ms_p99']:.1f} ms after they were due")
    if rate is None and found["in_flight_mean"] and found["in_flight_mean"] < MIN_IN_FLIGHT * concurrency:
        reasons.append(f"only {found['in_flight_mean']:.1f} of {concurrency} requests in flight")
    return state | {"limited": bool(reasons), "why": "; ".join(reasons) or None}
