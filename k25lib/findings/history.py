"""One metric, and the decode step by category, over the runs that can be compared with one another."""

import textwrap

import numpy as np
from scipy import stats

from . import compare
from .facts import Facts, categories_of, gather_trace
from .steps import captures, decode_step

SHOWN = 12


def history(run, runs):
    """The run's first metric over comparable runs, oldest first, and what a figure of it needs.

    (rows {"run", "value", "low", "high", "changed"}, {"title", "unit", "band"}). low and high: within the run, where
    the load gave them. band: where a further restart of the newest earlier run's configuration would lie 19 times
    in 20, by the restarts of it that there were.
    """
    alike = _until(run, runs)
    metric = next(iter(compare.measurements(run)), None)
    rows, before = [], None
    for other in alike:
        value = compare.measurements(other).get(metric)
        if value is None:
            continue
        low, high = _within(other, metric)
        changed = compare.environment_differences(before.manifest, other.manifest) if before else []
        texts = (f"{row['what'].split('.', 1)[-1]}: {row['before']} to {row['after']}" for row in changed[:3])
        note = "; ".join(textwrap.shorten(text, 80, placeholder=" …") for text in texts)
        rows.append({"run": other.path.name, "value": value, "low": low, "high": high, "changed": note})
        before = other
    if not rows:
        return [], {}
    values = {row["run"]: row["value"] for row in rows}
    earlier = [other for other in alike if other.path.name in values and other.path != run.path]
    same = next((group for group in compare.restarts(earlier) if earlier[-1] in group), [])
    earlier = np.log([values[other.path.name] for other in same])
    band = None
    if len(earlier) > 2:
        half = stats.t.ppf(0.975, len(earlier) - 1) * earlier.std(ddof=1) * (1 + 1 / len(earlier)) ** 0.5
        band = (float(np.exp(earlier.mean() - half)), float(np.exp(earlier.mean() + half)))
    return rows[-SHOWN:], {"title": f"{metric} over the runs", "unit": compare.unit(metric), "band": band}


def steps_by_run(run, runs):
    """Rows {"step", "category", "ms", "wall_ms"} of a decode step of each comparable run, oldest first; idle is among
    them. A run shows the capture nearest to a single stream; one that has none to stand beside shows all its captures.
    """
    bars = []
    for other in _until(run, runs)[-SHOWN:]:
        facts = Facts()
        gather_trace(facts, other, other.manifest)
        if facts.categories:
            bars.append((other.path.name, facts.step, {name: part["ms"] for name, part in facts.categories.items()}))
    if len(bars) < 2:
        table, parts = run.table("steps"), run.table("breakdown")
        found = ((name, decode_step(table, name), categories_of(parts, name)) for name in captures(table))
        bars = [(name, step, {k: v["ms"] for k, v in own.items()}) for name, step, own in found if step and own]
    rows = []
    for name, step, parts in bars:
        wall_ms = step["interval_ms"] or step["span_ms"]
        parts = {category: ms for category, ms in parts.items() if ms} | {"idle": max(0.0, wall_ms - step["busy_ms"])}
        rows += [{"step": name, "category": category, "ms": ms, "wall_ms": wall_ms} for category, ms in parts.items()]
    return rows


def _until(run, runs):
    """The runs that can be compared with `run`, up to it, oldest first."""
    own, last = compare.identity(run), compare.created(run)
    older = [other for other in runs if compare.created(other) <= last]
    return sorted((r for r in older if not compare.obstacles(own, compare.identity(r))), key=compare.created)


def _within(run, metric):
    """The interval that the load itself gives for a TPOT, or (None, None)."""
    for level in compare.usable_levels(run):
        if metric == f"TPOT at C={level['concurrency']:g}":
            return compare.number(level.get("tpot_ms_low")), compare.number(level.get("tpot_ms_high"))
    return None, None
