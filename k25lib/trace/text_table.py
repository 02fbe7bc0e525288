"""Reads the profiler's text table (profiler_out_0.txt, dp0_..._rank0.profiler_out.txt): totals over a session.

It cross-checks a trace, or stands alone when no trace survived. Names are cut, operators and annotations are mixed with
kernels, prefill is included: it has no figure per decode step.
"""

import re
from pathlib import Path

from k25lib.errors import K25Error
from k25lib.trace import annotations, ranks, steps
from k25lib.trace.table import loss

_UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIME = r"^(-?[\d.]+)(ns|us|ms|s)$"


def read(path):
    """Rows of dicts: name (cut where it ends in "..."), kind (kernel, copy, operator, annotation), calls, self_ns.

    `self_ns` is the device's, or the CPU's where the table has no device column. Raises K25Error if there is no table.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise K25Error(f"cannot read {path}: {error.strerror}") from None
    ruler = next((i for i, line in enumerate(lines) if re.match(r"^-{5,}(  -{3,})+\s*$", line)), None)
    if ruler is None or ruler + 2 >= len(lines):
        raise K25Error(f"{path} holds no profiler table")
    header = re.split(r"\s{2,}", lines[ruler + 1].strip())  # columns are wider than their rules: split on the blanks
    column = {name: i for i, name in enumerate(header)}
    device = next((name for name in header if re.match(r"^Self (?!CPU)\w+$", name)), None)
    if "Name" not in column or "# of Calls" not in column:
        raise K25Error(f"{path} holds no profiler table with names and calls")
    rows = []
    for line in lines[ruler + 2 :]:
        cells = re.split(r"\s{2,}", line.strip())
        extra = len(cells) - len(header)  # a name with blanks in it
        cells = ["  ".join(cells[: extra + 1]), *cells[extra + 1 :]] if extra > 0 else cells
        if len(cells) != len(header) or not cells[column["# of Calls"]].isdigit():
            continue
        cpu = _ns(cells[column["Self CPU"]]) if "Self CPU" in column else 0
        self_ns = _ns(cells[column[device]]) if device else cpu
        rows.append(
            {
                "name": cells[column["Name"]],
                "kind": _kind(cells[column["Name"]], cpu, self_ns, bool(device)),
                "calls": int(cells[column["# of Calls"]]),
                "self_ns": self_ns,
            }
        )
    return rows


def _ns(text):
    found = re.match(_TIME, text)
    return float(found[1]) * _UNITS_NS[found[2]] if found else 0.0


def _kind(name, cpu_ns, self_ns, has_device):
    if annotations.parse(name) or re.match(r"^(gloo|nccl|c10d):|^ProfilerStep", name):
        return "annotation"
    if not has_device or cpu_ns or not self_ns:
        return "operator"
    return "copy" if re.match(r"Memcpy |Memset ", name) else "kernel"


def check(rows, session, has_device):
    """Compare a table with a trace's totals by name -> (calls, ns). Returns {"rows", "agree", "differ": [...]}.

    Names are cut and only the first hundred rows are printed, so both sides are summed by the cut name, and a sum of
    the table may be less than the trace's, never more: more means that the trace has lost events.
    """
    wanted = ("kernel", "copy") if has_device else ("operator",)
    table, traced = {}, {}
    rows = [row for row in rows if row["kind"] in wanted]
    cut = max((len(row["name"]) - 3 for row in rows if row["name"].endswith("...")), default=None)
    for row in rows:
        _add(table, row["name"].removesuffix("..."), row["calls"], row["self_ns"])
    for name, (calls, ns) in session.items():
        _add(traced, name[:cut] if cut and len(name) > cut + 3 else name, calls, ns)
    differ = []
    for name, (calls, ns) in table.items():
        found_calls, found_ns = traced.get(name, (0, 0))
        other_time = (
            abs(ns - found_ns) > max(0.002 * ns, 1000) if calls == found_calls else ns > 1.002 * found_ns + 1000
        )
        if calls > found_calls or (has_device and other_time):
            differ.append({"name": name, "table_calls": calls, "trace_calls": found_calls})
            differ[-1] |= {"table_ms": ns / 1e6, "trace_ms": found_ns / 1e6}
    return {"rows": len(table), "agree": len(table) - len(differ), "differ": differ}


def _add(totals, name, calls, ns):
    known = totals.get(name, (0, 0))
    totals[name] = (known[0] + calls, known[1] + ns)


def cross_check(measured, tables, losses):
    """The profiler's own totals against each trace's: a row for each table with a trace beside it; appends losses."""
    checks = []
    for path in tables:
        owner = next((m for m in measured if _belongs(path, m)), None)
        if owner is None:
            continue
        try:
            rows = read(path)
        except K25Error as error:
            losses.append(loss(path, "unreadable table", 1, str(error)))
            continue
        result = check(rows, owner["session"], owner["kind"] == "gpu")
        checks.append({"rank": owner["rank"], "file": str(path), **result})
        if result["differ"]:
            worst = max(result["differ"], key=lambda d: abs(d["table_ms"] - d["trace_ms"]))
            detail = (
                f"the profiler's table has other totals than the trace, most for {worst['name'][:40]}: "
                f"{worst['table_calls']} calls, {worst['table_ms']:.3f} ms, not "
                f"{worst['trace_calls']}, {worst['trace_ms']:.3f}"
            )
            losses.append(loss(path, "table differs", len(result["differ"]), detail))
    return checks


def _belongs(table, m):
    name, trace = Path(table).name, Path(m["path"])
    if Path(table).parent != trace.parent:
        return False
    if name.startswith("profiler_out_"):
        return name == f"profiler_out_{m['rank']}.txt"
    return trace.name.startswith(name.split(".profiler_out")[0] + ".")


def totals(tables, losses, category):
    """What the tables alone tell, where no trace survived: a result with totals by kernel, and no figure per step.

    `category(name)` is a kernel's; appends to `losses`. Raises K25Error if no table can be read.
    """
    rows = []
    for number, path in enumerate(tables):
        try:
            found = read(path)
        except K25Error as error:
            losses.append(loss(path, "unreadable table", 1, str(error)))
            continue
        kind = "kernel" if any(row["kind"] == "kernel" for row in found) else "operator"
        known = {"rank": _rank(path, number)}
        for row in (row for row in found if row["kind"] == kind):
            told = {"category": category(row["name"]), "calls": row["calls"], "ms": row["self_ns"] / 1e6}
            rows.append({**known, "name": row["name"], **told})
    if not rows:
        raise K25Error("; ".join(told["detail"] for told in losses) or "no profiler table could be read")
    note = (
        "totals over the whole session from the profiler's text table, prefill included: no figure per decode step can "
        "be given; names are cut, so categories are a guess for long ones"
    )
    losses.append(loss(tables[0], "no trace", len(tables), note))
    found = sorted({row["rank"] for row in rows})
    world = max(found) + 1
    empty = "per_step categories kernels unknown census collectives skew by_kind cross_check passes"
    return {
        "capture": {
            "kind": "table",
            "note": note,
            "files": len(tables),
            "ranks": found,
            "world_size": world,
            "missing_ranks": sorted(set(range(world)) - set(found)),
            "clashes": [],
            "sessions": [],
        },
        "losses": losses,
        "steps": {"found_by": None, **dict.fromkeys(steps.KINDS, 0), "by_batch": {}, "by_rank": []},
        **{key: [] for key in empty.split()},
        "session_totals": rows,
    }


def _rank(path, number):
    """The rank in a table's name, or its number among the tables."""
    last = Path(path).stem.rpartition("_")[2]
    known = {"path": str(path), "rank": None, "process": None}
    ranks.identify([known])
    return int(last) if last.isdigit() else number if known["rank_from"].startswith("nothing") else known["rank"]
