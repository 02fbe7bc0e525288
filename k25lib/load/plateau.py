"""Where more concurrency stops to bring throughput: a verdict with its uncertainty, and the cause."""

import math

import numpy as np
from scipy.special import stdtrit

REAL_GAIN = 0.05  # a doubling that brings less is no gain
RESAMPLES = 2000


def gain(low, high):
    """(estimate, low, high): the relative gain in throughput for one doubling from level `low` to level `high`.

    95 % bootstrap interval over the waves of both levels, widened for their small number (Student's t; a bootstrap of
    four samples is too narrow). The interval is None where a level has a single wave.
    """
    doublings = math.log2(high["concurrency"] / low["concurrency"])
    waves = [np.log(level["wave_tok_s"]) for level in (low, high)]
    estimate = math.log(high["output_tok_s"] / low["output_tok_s"])
    if min(len(wave) for wave in waves) < 2:
        return math.expm1(estimate / doublings), None, None
    source, spread = np.random.default_rng(0), np.zeros(RESAMPLES)
    for wave, sign in zip(waves, (-1, 1), strict=True):
        means = source.choice(wave, (RESAMPLES, len(wave))).mean(axis=1)
        spread += sign * (means - wave.mean()) * math.sqrt(len(wave) / (len(wave) - 1))
    spread *= stdtrit(_degrees(*waves), 0.975) / 1.96
    ends = estimate + np.quantile(spread, (0.025, 0.975))
    return tuple(math.expm1(value / doublings) for value in (estimate, *ends))


def _degrees(*samples):
    """Degrees of freedom of a difference of means (Welch 1947)."""
    parts = [(sample.var(ddof=1) / len(sample), len(sample) - 1) for sample in samples]
    below = sum(part**2 / degrees for part, degrees in parts)
    return sum(part for part, _ in parts) ** 2 / below if below else sum(degrees for _, degrees in parts)


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


def doublings(levels):
    """Each usable level with the next that has at least twice its concurrency (0.8 of that where none has)."""
    levels = sorted((level for level in levels if usable(level)), key=lambda level: level["concurrency"])
    pairs = []
    for index, level in enumerate(levels):
        above = [other for other in levels[index + 1 :] if other["concurrency"] >= 1.6 * level["concurrency"]]
        if above:
            pairs.append((level, above[0], *gain(level, above[0])))
    return levels, pairs


def plateau(levels):
    """The verdict over the levels of a sweep, as the dict `plateau` of k25.load/1."""
    used, pairs = doublings(levels)
    found = {"verdict": "cannot tell", "concurrency": None, "output_tok_s": None, "cause": None, "why": None}
    found["doublings"] = [
        {"from": low["concurrency"], "to": high["concurrency"], "gain": value, "low": lower, "high": upper}
        | {"says": judge(lower, upper)}
        for low, high, value, lower, upper in pairs
    ]
    found["latency_knee"] = knee(used)
    left_out = len(levels) - len(used)
    if not pairs:
        found["why"] = "no two usable levels with a doubling between them" + (
            f" ({left_out} left out)" * bool(left_out)
        )
        return found
    says = [step["says"] for step in found["doublings"]]
    last_gain = max((index for index, word in enumerate(says) if word != "no gain"), default=-1)
    if last_gain == len(says) - 1:
        low, high, value, lower, upper = pairs[-1]
        interval = "no interval: one wave of requests" if lower is None else f"95 %: {lower:+.1%} to {upper:+.1%}"
        found["why"] = f"from C={low['concurrency']} to {high['concurrency']}: {value:+.1%} a doubling ({interval})"
        if says[-1] == "gain":
            found |= {
                "verdict": "still rising",
                "concurrency": high["concurrency"],
                "output_tok_s": high["output_tok_s"],
            }
        limited = [level["concurrency"] for level in levels if level["client"]["limited"]]
        if limited and min(limited) > used[-1]["concurrency"]:
            found["cause"] = f"the client: it was the limit at C={', '.join(map(str, limited))}"
        return found
    low, high, value, lower, upper = pairs[last_gain + 1]
    found |= {"verdict": "plateau", "concurrency": low["concurrency"], "output_tok_s": low["output_tok_s"]}
    found["why"] = f"a doubling from C={low['concurrency']} brings {value:+.1%} (95 %: {lower:+.1%} to {upper:+.1%})"
    found["cause"] = cause(low, high)
    return found


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
