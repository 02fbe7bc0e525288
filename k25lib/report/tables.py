"""Tables as text: a frame or a list of records to headings with units and cells with sensible digits."""

import math
import re
import tomllib
from numbers import Number
from pathlib import Path

import pandas as pd

from k25lib.report.escape import cut

LONGEST = 110  # characters of a cell in the document
_UNITS = {  # the end of a column's name -> its unit in the heading
    "percent": "%", "ms": "ms", "us": "us", "ns": "ns", "s": "s", "bytes": "bytes", "gb_s": "GB/s", "tb_s": "TB/s",
    "tok_s": "tok/s", "tflop_s": "TFLOP/s", "w": "W", "mhz": "MHz", "gb": "GB",
}  # fmt: skip
# Other parts of a column's name that a heading writes differently, and statistics, which go before the unit.
_WORDS = {"percent": "%", "tpot": "TPOT", "ttft": "TTFT", "dram": "DRAM", "m": "M", "n": "N", "k": "K"}
_STATISTICS = {
    "mean", "median", "min", "max", "iqr", "low", "high", "least", "most", "interval", "p50", "p90", "p95", "p99",
}  # fmt: skip


def heading(column):
    """A column's heading, its unit in brackets: `time_us_median` -> `time median (us)`.

    That of a pair of columns `tpot_ms_low..tpot_ms_high` is of their interval: `TPOT interval (ms)`.
    """
    if ".." in str(column):
        return heading(re.sub(r"low$|low(?=_)", "interval", str(column).split("..")[0]))
    words = str(column).split("_")
    tail = []
    if words[-1] in _STATISTICS and len(words) > 1:
        tail = [words.pop()]
    for length in (2, 1):
        unit = _UNITS.get("_".join(words[-length:]))
        if unit and len(words) >= length:
            name = [_WORDS.get(word, word) for word in words[:-length] + tail]
            return f"{' '.join(name)} ({unit})" if name else unit
    return " ".join(_WORDS.get(word, word) for word in words + tail)


def cell(value):
    """A value as text: numbers as `number` has them, yes or no, lists with commas; a missing value is a dash."""
    if value is None or value is pd.NA or value is pd.NaT:
        return "–"
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if isinstance(value, Number):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(part)}" for key, part in value.items()) or "–"
    if isinstance(value, list | tuple | set):
        return ", ".join(cell(part) for part in value) or "–"
    return cut(str(value))


def number(value, digits=4):
    """A number as text with `digits` significant digits, and no fewer before the point: 12345.6 is 12,346, 0.25 is
    0.25."""
    value = float(value) if not isinstance(value, int) else value
    if isinstance(value, float) and not math.isfinite(value):
        return "–" if math.isnan(value) else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 1e-4 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])
    decimals = max(0, digits - 1 - exponent)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def interval(row):
    """A record's `low` and `high` as `11.9 – 12.3 ms (95 %)`, the brackets its `spread`; empty when it has none."""
    low, high = row.get("low"), row.get("high")
    if low is None or high is None:
        return ""
    what = f"({row['spread']})" if row.get("spread") else ""
    return " ".join(filter(None, (f"{cell(low)} – {cell(high)}", row.get("unit"), what)))


_SUMS = ("ms", "calls", "percent", "exposed_ms")  # sums over a step: a rank without a row has 0 of them


def over_ranks(frame, by, column="ms"):
    """A table with rows of every rank, reduced to one row for each combination of the columns `by`.

    Numbers become means over the ranks; of `column` the smallest and largest are kept too (`ms_least`, `ms_most`). A
    rank without a row counts as 0 in `ms`, `calls`, `percent` and `exposed_ms`. Sorted by `by[0]`, then by the mean of
    `column`, the largest first.
    """
    by = [name for name in by if name in frame]
    if not by or column not in frame:
        return frame
    ranks = frame.groupby(by[0], sort=False)["rank"].nunique() if "rank" in frame else None
    frame = frame.drop(columns="rank", errors="ignore").assign(**{column: pd.to_numeric(frame[column])})
    grouped = frame.groupby(by, sort=False)
    made = grouped.mean(numeric_only=True)
    made = made.join(grouped[column].agg(**{f"{column}_least": "min", f"{column}_most": "max"}))
    if ranks is not None:
        rows = grouped.size()
        share = (rows / rows.index.get_level_values(by[0]).map(ranks).to_numpy()).clip(upper=1.0)
        for name in (name for name in _SUMS if name in made):
            made[name] *= share
        if column in _SUMS:
            made.loc[share < 1, f"{column}_least"] = 0.0
    return made.reset_index().sort_values([by[0], column], ascending=[True, False], kind="stable", ignore_index=True)


def table(records, title="", columns=None, rows=None):
    """Records (list of dicts or DataFrame) as text for a reader: {"title", "head", "numeric", "rows", "left_out"}.

    columns: those to show, in order (default: all); `low_ms..high_ms` is one column with the interval of the two,
    `name=Heading` one with another heading. Columns that the records lack, or that hold nothing, are left out. rows:
    how many at most; `left_out` counts the others. None if nothing is left to show.
    """
    frame = records if isinstance(records, pd.DataFrame) else pd.DataFrame.from_records(list(records))
    heads = {name: head or heading(name) for name, _, head in (str(c).partition("=") for c in columns or frame.columns)}
    for pair in (name for name in heads if ".." in name and set(name.split("..")) <= set(frame)):
        low, high = (frame[name] for name in pair.split(".."))
        both = [None if pd.isna(a) or pd.isna(b) else f"{cell(a)} – {cell(b)}" for a, b in zip(low, high, strict=True)]
        frame = frame.assign(**{pair: both})
    columns = [c for c in heads if c in frame.columns and _says_something(frame[c])]
    if frame.empty or not columns:
        return None
    shown = frame[columns].head(rows) if rows else frame[columns]
    return {
        "title": title,
        "head": [heads[c] for c in columns],
        "numeric": [pd.api.types.is_numeric_dtype(frame[c]) and frame[c].dtype != bool for c in columns],
        "rows": [[cell(v) for v in row] for row in shown.astype(object).itertuples(index=False, name=None)],
        "left_out": len(frame) - len(shown),
    }


def shown(records, *columns):
    """Records as a notebook shows them, a pandas Styler of `table`'s text; a single `none` where there are none."""
    made = table(records, columns=list(columns) or None) or {"head": [""], "rows": [["none"]]}
    return pd.DataFrame(made["rows"], columns=made["head"]).style.hide()


def _says_something(column):
    return not (column.isna() | column.astype(object).map(lambda value: isinstance(value, str) and not value)).all()


def duration(seconds):
    """Seconds as a person says them: `0.4 s`, `12 s`, `3 min 20 s`, `1 h 05 min`; nothing if there are none."""
    if not isinstance(seconds, Number):
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def of_findings(found):
    """The tables of a run's findings that aren't empty, in the order of tables.toml: dicts of `table`, with `name`."""
    made = ((spec, table(found.get(spec["name"]) or [], spec["title"], spec["columns"])) for spec in _specs("finding"))
    return [{**made_table, "name": spec["name"]} for spec, made_table in made if made_table]


def of_run(run):
    """The tables of `run` that its document shows, in the order of tables.toml: what `table` returns, with `name`,
    `phase` and `whole`, the rows of the table in the run. Text longer than LONGEST is cut: a kernel's name can have a
    thousand characters.
    """
    found = []
    for spec in _specs("table"):
        frame = run.table(spec["name"])
        whole, shown = len(frame), _chosen(frame, spec)
        if "each" in spec and spec["each"] in shown:
            shown = shown.groupby(spec["each"], sort=True).head(spec["rows"])
        if made := table(shown, spec["title"], spec["columns"], None if "each" in spec else spec.get("rows")):
            made["rows"] = [[cut(text, LONGEST) for text in row] for row in made["rows"]]
            left_out = whole - len(made["rows"])
            found.append({**made, "left_out": left_out, "whole": whole, "name": spec["name"], "phase": spec["phase"]})
    return found


def _chosen(frame, spec):
    """The rows that a spec of tables.toml asks for, in its order."""
    for column, wanted in spec.get("only", {}).items():
        if column in frame:
            frame = frame[frame[column].astype(str) == wanted]
    if spec.get("first") in frame and len(frame):
        frame = frame[frame[spec["first"]] == frame[spec["first"]].min()]
    if "over_ranks" in spec:
        frame = over_ranks(frame, spec["over_ranks"])
    return frame.sort_values(spec["sort"], kind="stable") if spec.get("sort") in frame else frame


def _specs(kind):
    return tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))[kind]
