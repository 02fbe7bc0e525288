"""Where more concurrency stops to bring throughput: a verdict with its uncertainty, and the cause."""

import math

import numpy as np
from scipy.special import stdtrit

REAL_GAIN = 0.05  # a doubling that brings less is no gain
DOUBLING = 1.6  # times the concurrency, at least: what counts as a doubling


def gain(low, high):
    """(estimate, low, high): the relative gain in throughput for one doubling from level `low` to level `high`.

    95 % interval over the waves of both levels (difference of the means of their logarithms, Welch 1947). The interval
    is None where a level has a single wave.
    """
    doublings = math.log2(high["concurrency"] / low["concurrency"])
    estimate = math.log(high["output_tok_s"] / low["output_tok_s"])
    waves = [np.log(level["wave_tok_s"]) for level in (low, high)]
    if min(len(wave) for wave in waves) < 2:
        return math.expm1(estimate / doublings), None, None
    parts = [(wave.var(ddof=1) / len(wave), len(wave) - 1) for wave in waves]
    error = math.sqrt(sum(part for part, _ in parts))
    below = sum(part**2 / degrees for part, degrees in parts)
    margin = stdtrit(error**4 / below, 0.975) * error if below else 0.0
    return tuple(math.expm1(value / doublings) for value in (estimate, estimate - margin, estimate + margin))


def judge(gain_low, gain_high):
    """What an interval says of a doubling: "gain", "no gain" or "unclear"."""
    if gain_low is None:
        return "unclear"
    if gain_high < REAL_GAIN:
        return "no gain"
    return "gain" if gain_low >= REAL_GAIN else "unclear"


def usable(level):
    """Whether a closed-loop level may be used for conclusions."""
    return bool(level["concurrency"] and level["output_tok_s"] and not level["void"] and not level["client"]["limited"])


def above(levels, index):
    """The levels with at least a doubling of the concurrency of `levels[index]`."""
    return [other for other in levels[index + 1 :] if other["concurrency"] >= DOUBLING * levels[index]["concurrency"]]


def is_flat(levels, index):
    """Whether nothing above this level brings a gain: the interval up to the highest says so, no level denies it.

    Over several doublings the interval is narrower than over one: the noise of the ends counts once.
    """
    higher = above(levels, index)
    gains = [gain(levels[index], other) for other in higher]
    return bool(gains) and judge(*gains[-1][1:]) == "no gain" and all(each[0] < REAL_GAIN for each in gains)


def plateau(levels):
    """The verdict over the levels of a sweep, as the dict `plateau` of k25.load/1."""
    used = sorted((level for level in levels if usable(level)), key=lambda level: level["concurrency"])
    steps = [(used[index], above(used, index)[0]) for index in range(len(used)) if above(used, index)]
    found = {"verdict": "cannot tell", "concurrency": None, "output_tok_s": None, "cause": None, "why": None}
    found["doublings"] = []
    for low, high in steps:
        value, lower, upper = gain(low, high)
        step = {"from": low["concurrency"], "to": high["concurrency"], "gain": value, "low": lower, "high": upper}
        found["doublings"].append(step | {"says": judge(lower, upper)})
    found["latency_knee"] = knee(used)
    if not steps:
        left_out = sum(bool(level["concurrency"]) for level in levels) - len(used)
        found["why"] = "no two usable levels with a doubling between them" + (
            f" ({left_out} left out)" if left_out else ""
        )
        if levels and not any(level["concurrency"] for level in levels):
            found["why"] = "rates (an open loop) have no plateau: give concurrencies"
        return found
    start = next((index for index in range(len(used)) if is_flat(used, index)), None)
    at = None
    if start is not None:
        at, top = used[start], used[-1]
        found |= {"verdict": "plateau", "why": _shown(at, top), "cause": cause(at, above(used, start)[0])}
    else:
        found["why"] = _shown(*steps[-1])
        if found["doublings"][-1]["says"] == "gain":
            found["verdict"], at = "still rising", steps[-1][1]
        else:
            found["why"] += f"; {remedy(*steps[-1])}"
        limited = [level["concurrency"] for level in levels if level["client"]["limited"]]
        if limited and min(limited) > used[-1]["concurrency"]:
            found["cause"] = f"the client: it was the limit at C={', '.join(map(str, limited))}"
    if at:
        found |= {"concurrency": at["concurrency"], "output_tok_s": at["output_tok_s"]}
    return found


def _shown(low, high):
    value, lower, upper = gain(low, high)
    interval = "no interval: one wave of requests" if lower is None else f"95 %: {lower:+.1%} to {upper:+.1%}"
    return f"from C={low['concurrency']} to {high['concurrency']}: {value:+.1%} a doubling ({interval})"


def remedy(low, high):
    """How many waves (requests per slot x repeats) would settle whether the step is a gain, from its interval."""
    waves = min(len(level["wave_tok_s"]) for level in (low, high))
    value, lower, upper = gain(low, high)
    if lower is None:
        return "at least 2 requests per slot are needed, 4 are better"
    margin, distance = (upper - lower) / 2, abs(value - REAL_GAIN)
    needed = math.ceil(waves * (margin / distance) ** 2) + 1 if distance * 10 > margin else None
    settle = f"about {needed}" if needed else f"more than {100 * waves}"
    return f"{settle} waves a level (requests per slot x repeats; now {waves}) would settle it, or a higher C"


def sentence(found):
    """The verdict in a sentence."""
    where = f" at C={found['concurrency']}, {found['output_tok_s']:.1f} tok/s" if found["concurrency"] else ""
    knee_at = f"the knee of latency is at C={found['latency_knee']}" if found["latency_knee"] else None
    reasons = [found["why"], found["cause"], knee_at]
    return f"{found['verdict']}{where}: {'; '.join(reason for reason in reasons if reason)}"


def knee(levels):
    """The concurrency with the highest power, throughput / mean E2E latency (Kleinrock 1979); None without levels."""
    known = [level for level in levels if level["e2e_ms"]]
    if not known:
        return None
    return max(known, key=lambda level: level["output_tok_s"] / level["e2e_ms"]["mean"])["concurrency"]


def cause(low, high):
    """Why the doubling from `low` to `high` brought nothing, from the server's gauges during `high`."""
    server = high["server"]
    running, waiting, kv_usage = server["running_max"], server["waiting_max"], server["kv_usage_max"]
    if server["preemptions"]:
        return f"preemptions: {server['preemptions']:.0f} at C={high['concurrency']}, the KV cache is too small"
    if kv_usage is not None and kv_usage > 0.9 and waiting:
        return f"KV cache: {kv_usage:.0%} full, {waiting:.0f} requests waited"
    if waiting and running is not None and running < high["concurrency"]:
        return f"max-num-seqs: never more than {running:.0f} ran at C={high['concurrency']}, up to {waiting:.0f} waited"
    if waiting:
        return f"requests waiting: up to {waiting:.0f} at C={high['concurrency']}"
    if waiting is None:
        return "unknown: the server shows no metrics"
    return "the engine: all requests ran at once, none waited"
