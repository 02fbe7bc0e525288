"""The figures of the page's first screen, from what a run has: none is empty."""

import pandas as pd

from k25lib.report import notebook
from k25lib.report.figures import collectives, gemm, summary


def figures(run, found):
    """Plotly figures for the first page, made from the findings and the tables that exist, most telling first."""
    closure, whatif = (pd.DataFrame.from_records(found.get(key) or []) for key in ("closure", "whatif"))
    made = []
    if {"part", "ms", "kind"} <= set(closure):
        made.append(summary.waterfall(closure))
    steps = pd.DataFrame.from_records(found.get("steps_by_run") or [])
    steps = steps if len(steps) and steps.step.nunique() > 1 else _steps(run.table("breakdown"))
    if len(steps):
        made.append(summary.step_by_category(steps))
    if {"change", "low_ms", "high_ms"} <= set(whatif):
        made.append(summary.whatif(whatif))
    levels = run.table("levels")
    if len(levels) and {"tok_s_per_user", "tok_s_per_gpu", "concurrency"} <= set(levels):
        good = levels[levels["concurrency"].notna() & levels["tok_s_per_user"].notna()]
        if len(good):
            made.append(summary.throughput(good))
    if len(gemm.timed(run.table("gemm"), 1, "cold")):
        made.append(gemm.roofline(run.table("gemm"), 1))
    if len(collectives.timed(run.table("collectives"), "sizes", "expert parallel")):
        made.append(collectives.latency(run.table("collectives")))
    history = pd.DataFrame.from_records(found.get("history") or [])
    if len(history) > 1:
        made.append(summary.history(history, **found["history_of"]))
    return [notebook.json_of(figure) for figure in made]


def _steps(breakdown):
    """The breakdown as step, category, ms: one bar a capture, rank 0 (or the first there is), all batches pooled."""
    if breakdown.empty or not {"category", "ms"} <= set(breakdown):
        return pd.DataFrame()
    rows = breakdown
    for column, wanted in (("batch", "all"), ("group", "fine"), ("rank", None)):
        if column in rows:
            wanted = rows[column].min() if wanted is None else wanted
            rows = rows[rows[column].astype(str) == str(wanted)]
    names = rows.get("capture", "decode step")
    return pd.DataFrame({"step": names, "category": rows["category"], "ms": rows["ms"]})
