"""The figures of the page's first screen, from what a run has: none is empty, and one that fails is told."""

import sys

import pandas as pd

from k25lib.report import notebook
from k25lib.report.figures import breakdown, collectives, gemm, macro, summary


def figures(run, found):
    """Plotly JSON of the first page's figures, made from the findings and the tables that exist, most telling first."""
    made = []
    for make in (_waterfall, _steps, _lanes, _whatif, _throughput, _roofline, _collectives, _history):
        try:
            figure = make(run, found)
        except (KeyError, ValueError, TypeError, AttributeError) as error:  # a table of another version, or half of one
            name = make.__name__.strip("_")
            print(f"{run.path.name}: no {name} figure: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if figure is not None:
            made.append(notebook.json_of(figure))
    return made


def _waterfall(run, found):
    rows = _rows(found, "closure", "part", "ms", "kind")
    return summary.waterfall(rows) if len(rows) else None


def _steps(run, found):
    rows = _rows(found, "steps_by_run", "step", "category", "ms", "wall_ms")
    return summary.step_by_category(rows) if len(rows) else None


def _lanes(run, found):
    """One decode step of the lowest rank, of the capture that the findings are of."""
    rows = run.table("lanes")
    rows = rows[rows["capture"] == found.get("capture")] if len(rows) else rows
    return breakdown.lanes(rows, ranks=1) if len(rows) else None


def _whatif(run, found):
    rows = _rows(found, "whatif", "change", "low_ms", "high_ms")
    return summary.whatif(rows) if len(rows) else None


def _throughput(run, found):
    levels = run.table("levels")
    return macro.pareto(levels) if len(levels) else None


def _roofline(run, found):
    frame = run.table("gemm")
    return gemm.roofline(frame, 1) if len(gemm.timed(frame, 1, "cold")) else None


def _collectives(run, found):
    frame = run.table("collectives")
    return collectives.latency(frame) if len(collectives.timed(frame, "sizes", "expert parallel")) else None


def _history(run, found):
    rows = _rows(found, "history", "run", "value", "low", "high", "changed")
    return summary.history(rows, **found["history_of"]) if len(rows) > 1 else None


def _rows(found, key, *columns):
    """A table of the findings; empty where it lacks one of the columns."""
    rows = pd.DataFrame.from_records(found.get(key) or [])
    return rows if set(columns) <= set(rows) else pd.DataFrame()
