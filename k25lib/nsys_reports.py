"""Reports of Nsight Systems, fetched once they exist: nsys writes those of all captures when the server ends.

Seen with 2025.3 under --capture-range-end=repeat: nothing during the captures; at the end OUT.nsys-rep for a single
range, else OUT.1.nsys-rep, OUT.2.nsys-rep ...
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from k25lib.capture import of_ranks, write_record
from k25lib.errors import K25Error
from k25lib.server.startup import last_line
from k25lib.trace import nsys

SETTLE_S = 2.0  # a report whose size stands still this long has been written
CLOCKS_S = 2.0  # how far the clocks of the server's host and of this one may be apart


def fetch(folders, say=None):
    """Move the reports that captures wait for into their folders, exported to SQLite; returns {name: record}, of those.

    folders: of captures; those that wait for no report are left alone. A report belongs to the capture during which its
    first kernel ran. Raises K25Error, with what to do, where a report is missing, or can't be exported here.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    waiting = [(folder, record) for folder in folders if (record := _record(folder)).get("pending")]
    fetched, exported = {}, {}
    for folder, record in waiting:
        for report in _reports(folder.name, record["pending"]):
            if report not in exported:
                exported[report] = _export(report, say)
        off_s = {report: _off_s(record, ranks[0]["start_ns"] / 1e9) for report, ranks in exported.items()}
        mine = min(off_s, key=off_s.get)
        if off_s[mine] > CLOCKS_S:
            names = ", ".join(sorted(report.name for report in exported))
            raise K25Error(
                f"none of {names} in {record['pending']['traces']} is of the time of capture {folder.name} "
                f"({record['started']} to {record['ended']}): read it by itself, with `k25 breakdown FILE.sqlite`"
            )
        fetched[folder.name] = _take(mine, exported.pop(mine), folder, record)
    return fetched


def _record(folder):
    try:
        return json.loads((folder / "capture.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _reports(name, pending):
    """The reports that are new in the captures' folder, once none of them grows."""
    folder, earlier = Path(pending["traces"]), set(pending["earlier"])

    def listing():
        return {p: p.stat().st_size for p in sorted(folder.glob("*.nsys-rep")) if p.name not in earlier}

    found, last = listing(), None
    while found and found != last:
        time.sleep(SETTLE_S if max(p.stat().st_mtime for p in found) > time.time() - SETTLE_S else 0)
        found, last = listing(), found
    if not found:
        raise K25Error(
            f"capture {name} has no report yet: nsys writes it to {folder} when the server ends; stop the server, "
            "then run 06 again (`k25 run --resume RUN --only 06`)"
        )
    return list(found)


def _export(report, say):
    """Export a report to SQLite beside it; returns what it holds, a dict a rank (trace.nsys.peek)."""
    database = report.with_suffix(".sqlite")
    words = ["nsys", "export", "--type", "sqlite", "--force-overwrite=true", "--output", str(database), str(report)]
    if not shutil.which("nsys"):
        raise K25Error(f"nsys is not here: where it is, run `{shlex.join(words)}`, then `k25 breakdown {database}`")
    say(f"exporting {report.name}, {report.stat().st_size / 1e6:.0f} MB")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not database.is_file():
        raise K25Error(f"nsys export of {report} failed: {last_line(done.stderr or done.stdout)}")
    return nsys.peek(database)


def _off_s(record, start_s):
    """How far a time is outside the capture, s."""
    began, ended = (datetime.fromisoformat(record[key]).timestamp() for key in ("started", "ended"))
    return max(began - start_s, start_s - ended, 0.0)


def _take(report, ranks, folder, record):
    database = report.with_suffix(".sqlite")
    for path in (report, database):
        shutil.move(path, folder / path.name)
    base = {"file": database.name, "bytes": (folder / database.name).stat().st_size, "decode_steps": None, "fault": ""}
    files = [base | {"rank": rank["rank"]} for rank in ranks]
    record = {k: v for k, v in record.items() if k != "pending"} | {"files": files}
    record |= of_ranks(files, max(record["world_size"], len(files)))
    write_record(folder, record)
    return record
