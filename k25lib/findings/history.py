"""One metric, and the decode step by category, over the runs that can be compared with one another."""

import textwrap

import numpy as np
from scipy import stats

from . import compare
from .facts import Facts, gather_trace

SHOWN = 12


def history(run, runs):
    """The run's first metric over comparable runs, oldest first, and what a figure of it needs.

    (rows {"run", "value", "low", "high", "changed"}, {"title", "unit", "band"}). low and high: within the run, where
    the load gave them. band: where a further restart of the earlier runs' configuration would lie 19 times in 20.
    """
    own = compare.identity(run)
    alike = [other for other in runs if not compare.obstacles(own, compare.identity(other))]
    alike = sorted(alike, key=lambda r: str(r.manifest.get("created")))
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
    earlier = np.log([row["value"] for row in rows if row["run"] != run.path.name])
    band = None
    if len(earlier) > 2:
        half = stats.t.ppf(0.975, len(earlier) - 1) * earlier.std(ddof=1) * (1 + 1 / len(earlier)) ** 0.5
        band = (float(np.exp(earlier.mean() - half)), float(np.exp(earlier.mean() + half)))
    return rows[-SHOWN:], {"title": f"{metric} over the runs", "unit": compare.unit(metric), "band": band}


def steps_by_run(run, runs):
    """Rows {"step": run, "category", "ms"} of a capture of each comparable run, oldest first; `idle` is among them."""
    own = compare.identity(run)
    rows = []
    for other in [other for other in runs if not compare.obstacles(own, compare.identity(other))][-SHOWN:]:
        facts = Facts()
        gather_trace(facts, other, other.manifest)
        if not facts.categories:
            continue
        parts = {name: value["ms"] for name, value in facts.categories.items() if value["ms"]}
        parts["idle"] = max(0.0, (facts.step["interval_ms"] or facts.step["span_ms"]) - facts.step["busy_ms"])
        rows += [{"step": other.path.name, "category": name, "ms": ms} for name, ms in parts.items()]
    return rows


def _within(run, metric):
    """The interval that the load itself gives for a TPOT, or (None, None)."""
    for level in compare.usable_levels(run):
        if metric == f"TPOT at C={level['concurrency']:g}":
            return compare.number(level.get("tpot_ms_low")), compare.number(level.get("tpot_ms_high"))
    return None, None
