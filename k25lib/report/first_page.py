"""The figures at the top of the page, from what a run has: those without data are left out."""

import sys

import pandas as pd

from k25lib.report import notebook
from k25lib.report.figures import breakdown, collectives, gemm, macro, summary


def figures(run, findings):
    """The figures as plotly's JSON, the most telling first, from the run's findings (findings.summary) and tables.

    One that can't be made, from a table of another version or half of one, is told on stderr and left out.
    """
    made = []
    for make in (_waterfall, _steps, _lanes, _whatif, _throughput, _roofline, _collectives, _history):
        try:
            figure = make(run, findings)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            name = make.__name__.strip("_")
            print(f"{run.path.name}: no {name} figure: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if figure is not None:
            made.append(notebook.json_of(figure))
    return made


def _waterfall(run, findings):
    rows = _rows(findings, "closure", "part", "ms", "kind")
    return summary.waterfall(rows) if len(rows) else None


def _steps(run, findings):
    rows = _rows(findings, "steps_by_run", "step", "category", "ms", "wall_ms")
    return summary.step_by_category(rows) if len(rows) else None


def _lanes(run, findings):
    """One decode step of the lowest rank, of the capture that the findings are of."""
    rows = run.table("lanes")
    rows = rows[rows["capture"] == findings.get("capture")] if len(rows) else rows
    return breakdown.lanes(rows, ranks=1) if len(rows) else None


def _whatif(run, findings):
    rows = _rows(findings, "whatif", "change", "low_ms", "high_ms")
    return summary.whatif(rows) if len(rows) else None


def _throughput(run, findings):
    levels = run.table("levels")
    return macro.pareto(levels) if len(levels) else None


def _roofline(run, findings):
    frame = run.table("gemm")
    return gemm.roofline(frame, 1) if len(gemm.timed(frame, 1, "cold")) else None


def _collectives(run, findings):
    frame = run.table("collectives")
    return collectives.latency(frame) if len(collectives.timed(frame, "sizes", "expert parallel")) else None


def _history(run, findings):
    rows = _rows(findings, "history", "run", "value", "low", "high", "changed")
    return summary.history(rows, **findings["history_of"]) if len(rows) > 1 else None


def _rows(findings, key, *columns):
    """A table of the findings; empty where it lacks one of the columns."""
    rows = pd.DataFrame.from_records(findings.get(key) or [])
    return rows if set(columns) <= set(rows) else pd.DataFrame()
