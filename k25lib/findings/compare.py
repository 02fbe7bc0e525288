"""What changed between runs: which can be compared, their metrics, the verdicts (of spread.py), the environment."""

import numpy as np

from k25lib.errors import K25Error

from .spread import CONFIDENCE, change, mean, percent, pooled_spread, restarts_for
from .steps import captures, decode_step

# Facts that change at every start, or from moment to moment, by the end of their names
_PASSING = ("url", "port", "log", "traces", "profiler_config", "torch_profiler_dir", "server.python", "server.config")
_PASSING += ("ready_ms", "temperature_c", "sm_mhz", "memory_mhz", "memory_used_bytes", "uuid")


def usable_levels(run):
    """The closed-loop levels of a run that may be used: not void (prefix cache), the client not the limit."""
    return [
        row
        for row in run.table("levels").to_dict("records")
        if number(row.get("concurrency")) and not (_yes(row, "void") or _yes(row, "client_limited"))
    ]


def measurements(run):
    """{metric: value} of one run, each a mean over one restart of the server, from its tables; headlines come first."""
    closed = usable_levels(run)
    found = {}
    if closed:
        first = min(closed, key=lambda row: row["concurrency"])
        best = max((v for row in closed if (v := number(row.get("output_tok_s")))), default=None)
        found[f"TPOT at C={first['concurrency']:g}"] = number(first.get("tpot_ms_mean"))
        found["best throughput"] = best
    table = run.table("steps")
    for capture in captures(table):
        step = decode_step(table, capture)
        if step:
            found[f"decode step of {capture}"] = step["interval_ms"] or step["span_ms"]
    for row in closed:
        names = (("TPOT", "tpot_ms_mean"), ("median TTFT", "ttft_ms_p50"), ("throughput", "output_tok_s"))
        for name, column in names:
            found.setdefault(f"{name} at C={row['concurrency']:g}", number(row.get(column)))
    return {metric: value for metric, value in found.items() if value and value > 0}


def readable(runs):
    """The runs whose manifest and levels can be read: a damaged neighbour does not stop the others' findings."""
    whole = []
    for run in runs:
        try:
            if run.manifest:
                measurements(run)
                whole.append(run)
        except (K25Error, ValueError, OSError, KeyError, TypeError):
            continue
    return whole


def identity(run):
    """What must be equal for two runs to be compared: {what: value}, of what is known."""
    manifest = run.manifest
    server, environment = manifest.get("server") or {}, manifest.get("environment") or {}
    load = manifest.get("macro") or {}
    told = load.get("settings") or {}
    gpus = [gpu.get("name") if isinstance(gpu, dict) else gpu for gpu in environment.get("gpus") or []]
    known = {
        "model": server.get("model") or environment.get("model"),
        "tensor parallel": server.get("tp"),
        "hardware": ", ".join(map(str, gpus)) or environment.get("cpu"),
        "input tokens": told.get("input_tokens"),
        "output tokens": told.get("output_tokens"),
        "API": told.get("api"),
        "method of the load": load.get("method"),
    }
    return {what: value for what, value in known.items() if value not in (None, "", {})}


def obstacles(one, other):
    """Why two identities cannot be compared: one sentence for each difference."""
    return [
        f"{what} differs: {one[what]} against {other[what]}"
        for what in one
        if what in other and one[what] != other[what]
    ]


def environment_differences(before, after):
    """Facts of the environment and server that differ, as rows {"what", "before", "after"}."""
    one, two = (_flat({k: m.get(k) or {} for k in ("environment", "server", "git")}) for m in (before, after))
    keys = [key for key in {**one, **two} if not is_passing(key)]
    return [
        {"what": key, "before": one.get(key), "after": two.get(key)} for key in keys if one.get(key) != two.get(key)
    ]


def is_passing(fact):
    """Whether a fact (dotted name) is of the moment, or of one start: no difference between configurations."""
    return f".{fact}".endswith(tuple(f".{end}" for end in _PASSING))


def created(run):
    """When a run was made, as text that sorts."""
    return str(run.manifest.get("created"))


def earlier(run, runs):
    """Those of `runs` with the name of `run` that were made before it, the newest first."""
    older = [r for r in runs if r.manifest.get("name") == run.manifest.get("name") and created(r) < created(run)]
    return sorted(older, key=created, reverse=True)


def unit(metric):
    """The unit of a metric of `measurements`: tok/s, where more is better, or ms, where less is."""
    return "tok/s" if "throughput" in metric else "ms"


def number(value):
    """A cell as a float; None for what is no finite number."""
    return float(value) if isinstance(value, (int, float, np.number)) and np.isfinite(value) else None


def compare_runs(before, after, history=()):
    """Compare runs: `before` and `after` are lists of Run, each a restart of one configuration.

    history: other runs; those that could be compared with these lend their spread, grouped by engine and flags.
    Returns {"comparable", "verdict", "meaning", "obstacles", "changes": rows by metric, "environment", "restarts"}.
    The verdict is that of the headline rows (single-stream TPOT, best throughput), whose intervals hold together at
    95 %; every other row has a false-alarm rate of 5 % of its own.
    """
    identities = [identity(run) for run in (*before, *after)]
    reasons = list(dict.fromkeys(reason for other in identities[1:] for reason in obstacles(identities[0], other)))
    sides = [[measurements(run) for run in runs] for runs in (before, after)]
    own = {run.path for run in (*before, *after)}
    like = [run for run in history if run.path not in own and not obstacles(identities[0], identity(run))]
    groups = [*sides, *([measurements(run) for run in group] for group in restarts(like))]
    metrics = [m for m in sides[0][0] if all(m in values for side in sides for values in side)] if not reasons else []
    headlines = metrics[:2]
    rows = []
    for metric in metrics:
        spread = pooled_spread([[v[metric] for v in group if metric in v] for group in groups])
        one, two = ([values[metric] for values in side] for side in sides)
        headline = metric in headlines
        lower = unit(metric) == "ms"
        confidence = 1 - (1 - CONFIDENCE) / len(headlines) if headline else CONFIDENCE
        row = {"metric": metric, "unit": unit(metric), "before": mean(one), "after": mean(two)}
        row |= change(one, two, spread, lower, confidence)
        row |= {"headline": headline, "lower_is_better": lower, "df": spread.df if spread else 0}
        row["spread_percent"] = percent(spread.sd) if spread else None
        row["restarts_for_5_percent"] = restarts_for(spread, 0.05, confidence) if spread else None
        rows.append(row | {"text": sentence(row)})
    return {
        "comparable": not reasons and bool(rows),
        "verdict": overall(rows),
        "meaning": meaning(rows),
        "obstacles": reasons or ([] if rows else ["the runs have no metric in common"]),
        "changes": rows,
        "environment": environment_differences(before[-1].manifest, after[-1].manifest),
        "restarts": {"before": len(before), "after": len(after)},
    }


def overall(rows):
    """One word for the headline rows: mixed, worse, better, unclear or same; empty where there is none."""
    said = {row["verdict"] for row in rows if row["headline"]}
    if {"worse", "better"} <= said:
        return "mixed"
    return next((word for word in ("worse", "better", "unclear", "same") if word in said), "")


def meaning(rows):
    """What an unclear verdict means: which change of a headline row would have been seen; "" for other verdicts."""
    headlines = [row for row in rows if row["headline"]]
    if overall(rows) != "unclear" or any(row["smallest_visible_percent"] is None for row in headlines):
        return ""
    seen = max(row["smallest_visible_percent"] for row in headlines)
    return f"no change seen, one of {seen:.3g} % would have been"


def sentence(row):
    """One comparison in words, with its interval and, for no change, what would have been seen."""
    said = f"{row['metric']}: {row['before']:.4g} to {row['after']:.4g} {row['unit']} ({row['change_percent']:+.1f} %"
    if row["low_percent"] is None:
        return f"{said}): unclear, the spread between restarts is unknown"
    said += f", {row['low_percent']:+.1f} to {row['high_percent']:+.1f} %): "
    seen = f"would have seen {row['smallest_visible_percent']:.1f} %"
    if row["smallest_visible_percent"] > 5:
        seen += f"; to see 5 %: {row['restarts_for_5_percent'] or 'over 100'} restarts a side"
    if row["verdict"] in ("better", "worse"):
        return said + row["verdict"]
    return said + (f"no change seen ({seen})" if row["low_percent"] <= 0 <= row["high_percent"] else f"small ({seen})")


def worse_beyond(rows, fraction):
    """The headline rows that are surely worse (verdict) and by more than `fraction` (best estimate)."""

    def size(row):
        factor = 1 + row["change_percent"] / 100
        return factor - 1 if row["lower_is_better"] else 1 / factor - 1

    return [row for row in rows if row["headline"] and row["verdict"] == "worse" and size(row) > fraction]


def restarts(runs):
    """The runs that are restarts of one configuration, as groups in order: same name, identity, engine and flags."""
    groups = {}
    for run in runs:
        environment = run.manifest.get("environment") or {}
        flags = {
            k: v for k, v in (environment.get("flags") or {}).items() if k not in ("port", "host", "profiler_config")
        }
        key = repr((run.manifest.get("name"), identity(run), environment.get("vllm_version"), sorted(flags.items())))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _yes(row, column):
    """Whether a flag of a table is set: true, or a reason; a missing value is no."""
    value = row.get(column)
    return bool(value) if isinstance(value, (bool, np.bool_, str)) else False


def _flat(value, prefix=""):
    if isinstance(value, dict):
        return {
            k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}" if prefix else key).items()
        }
    if isinstance(value, list):
        return {k: v for n, part in enumerate(value) for k, v in _flat(part, f"{prefix}.{n}").items()}
    return {prefix: value}
