"""Reads the profiler's text table (profiler_out_0.txt, dp0_..._rank0.profiler_out.txt): totals over a session.

It cross-checks a trace, or stands alone when no trace survived. Names are cut, operators and annotations are mixed with
kernels, prefill is included: it has no figure per decode step.
"""

import re
from pathlib import Path

from k25lib.errors import K25Error
from k25lib.trace import steps

_UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIME = re.compile(r"^(-?[\d.]+)(ns|us|ms|s)$")


def read(path):
    """Rows of dicts: name (cut where it ends in "..."), kind (kernel, copy, operator, annotation), calls, self_ns of the
    device (of the CPU where the table has no device column). Raises K25Error if there is no such table in the file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise K25Error(f"cannot read {path}: {error.strerror}") from None
    ruler = next((i for i, line in enumerate(lines) if re.match(r"^-{5,}(  -{3,})+\s*$", line)), None)
    if ruler is None or ruler + 2 >= len(lines):
        raise K25Error(f"{path} holds no profiler table")
    spans = [(m.start(), m.end()) for m in re.finditer(r"-+", lines[ruler])]
    header = [lines[ruler + 1][a:b].strip() for a, b in spans]
    column = {name: i for i, name in enumerate(header)}
    device = next((name for name in header if re.match(r"^Self (?!CPU)\w+$", name)), None)
    if "Name" not in column or "# of Calls" not in column:
        raise K25Error(f"{path} holds no profiler table with names and calls")
    rows = []
    for line in lines[ruler + 2 :]:
        cells = [line[a:b].strip() for a, b in spans]
        if not cells[column["# of Calls"]].isdigit():
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
    found = _TIME.match(text)
    return float(found[1]) * _UNITS_NS[found[2]] if found else 0.0


def _kind(name, cpu_ns, self_ns, has_device):
    if steps.parse(name) or re.match(r"^(gloo|nccl|c10d):|^ProfilerStep", name):
        return "annotation"
    if not has_device or cpu_ns or not self_ns:
        return "operator"
    return "copy" if re.match(r"Memcpy |Memset ", name) else "kernel"


def check(rows, session, has_device):
    """Compare a table with a trace's totals by name -> (calls, ns). Returns {"rows", "agree", "differ": [...]}.

    Cut names may stand for several kernels, and one kernel for several rows: both sides are summed by the cut name.
    """
    wanted = ("kernel", "copy") if has_device else ("operator",)
    table, traced = {}, {}
    rows = [row for row in rows if row["kind"] in wanted]
    cuts = {len(row["name"]) - 3 for row in rows if row["name"].endswith("...")}
    cut = cuts.pop() if len(cuts) == 1 else None

    def key(name):
        return name[:cut] if cut and len(name) > cut + 3 else name

    for row in rows:
        name = row["name"][:-3] if row["name"].endswith("...") else row["name"]
        calls, ns = table.get(name, (0, 0))
        table[name] = (calls + row["calls"], ns + row["self_ns"])
    for name, (calls, ns) in session.items():
        known = traced.get(key(name), (0, 0))
        traced[key(name)] = (known[0] + calls, known[1] + ns)
    differ = []
    for name, (calls, ns) in table.items():
        found_calls, found_ns = traced.get(name, (0, 0))
        if calls != found_calls or (has_device and abs(ns - found_ns) > max(0.002 * ns, 1000)):
            differ.append(
                {
                    "name": name,
                    "table_calls": calls,
                    "trace_calls": found_calls,
                    "table_ms": ns / 1e6,
                    "trace_ms": found_ns / 1e6,
                }
            )
    return {"rows": len(table), "agree": len(table) - len(differ), "differ": differ}
