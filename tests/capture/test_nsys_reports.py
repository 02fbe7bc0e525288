"""Reports of nsys and the captures that wait for them: who gets which, and what can't be had."""

import json
import sqlite3
import stat
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from k25lib import nsys_reports
from k25lib.errors import K25Error
from k25lib.trace import nsys

STAND_IN = Path(__file__).parents[1] / "server" / "nsys.py"
AT_S = 1_796_000_000


@pytest.fixture(autouse=True)
def bin_folder(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nsys").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    (folder / "nsys").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(nsys_reports, "SETTLE_S", 0.05)
    return folder


def waiting(tmp_path, name, began_s, ended_s, earlier=()):
    """A capture of these seconds after AT_S that waits for a report in tmp_path/traces."""
    (tmp_path / "traces").mkdir(exist_ok=True)
    folder = tmp_path / "captures" / name
    folder.mkdir(parents=True)
    times = {
        k: datetime.fromtimestamp(AT_S + s, UTC).isoformat() for k, s in (("started", began_s), ("ended", ended_s))
    }
    pending = {"traces": str(tmp_path / "traces"), "earlier": list(earlier)}
    record = {"name": name, "world_size": 2, "files": [], "pending": pending, **times}
    (folder / "capture.json").write_text(json.dumps(record))
    return folder


def report(tmp_path, name, at_s):
    (tmp_path / "traces").mkdir(exist_ok=True)
    (tmp_path / "traces" / name).write_text(f"a report of {(AT_S + at_s) * 10**9}")


def test_a_report_goes_to_the_capture_of_its_time(tmp_path):
    """Also where a capture between them failed, and the numbers are those of ranges."""
    folders = [waiting(tmp_path, "c1", 0, 10), waiting(tmp_path, "c64", 100, 110, earlier=["old.nsys-rep"])]
    for name, at_s in (("k.1.nsys-rep", 1), ("k.2.nsys-rep", 50), ("k.10.nsys-rep", 101), ("old.nsys-rep", 101)):
        report(tmp_path, name, at_s)
    (tmp_path / "captures" / "c1" / "capture.json").write_text(
        (folders[0] / "capture.json").read_text().replace('"earlier": []', '"earlier": ["old.nsys-rep"]')
    )
    records = nsys_reports.fetch(folders)
    assert {name: record["files"][0]["file"] for name, record in records.items()} == {
        "c1": "k.1.sqlite",
        "c64": "k.10.sqlite",
    }
    assert json.loads((folders[1] / "capture.json").read_text()) == records["c64"]
    left = {path.name for path in (tmp_path / "traces").iterdir()} - {"nsys-calls"}
    assert left == {"k.2.nsys-rep", "k.2.sqlite", "old.nsys-rep"}


def test_clocks_may_be_a_little_apart(tmp_path):
    report(tmp_path, "k.nsys-rep", 11)
    assert nsys_reports.fetch([waiting(tmp_path, "c1", 0, 10)])["c1"]["ranks"] == [0, 1]


def test_a_report_of_another_time_is_nobodys(tmp_path):
    report(tmp_path, "k.nsys-rep", 500)
    with pytest.raises(K25Error, match=r"^none of k.nsys-rep in .* is of the time of capture c1 .*k25 breakdown"):
        nsys_reports.fetch([waiting(tmp_path, "c1", 0, 10)])
    assert (tmp_path / "traces" / "k.nsys-rep").is_file()


def test_no_report_yet(tmp_path):
    with pytest.raises(K25Error, match="^capture c1 has no report yet: nsys writes it to .* when the server ends"):
        nsys_reports.fetch([waiting(tmp_path, "c1", 0, 10)])


def test_a_damaged_report_is_told(tmp_path):
    report(tmp_path, "k.nsys-rep", 1)
    (tmp_path / "traces" / "k.nsys-rep").write_text("no report")
    with pytest.raises(K25Error, match="^nsys export of .*k.nsys-rep failed: Importer error"):
        nsys_reports.fetch([waiting(tmp_path, "c1", 0, 10)])


def test_without_nsys_the_commands_are_said(tmp_path, bin_folder):
    (bin_folder / "nsys").unlink()
    report(tmp_path, "k.nsys-rep", 1)
    with pytest.raises(K25Error, match=r"^nsys is not here: where it is, run `nsys export --type sqlite .*k.sqlite`$"):
        nsys_reports.fetch([waiting(tmp_path, "c1", 0, 10)])


def test_captures_of_other_profilers_wait_for_nothing(tmp_path):
    (tmp_path / "c1").mkdir()
    assert nsys_reports.fetch([tmp_path / "c1"]) == {}


def test_an_export_has_the_ranks_of_its_breakdown(tmp_path, monkeypatch):
    database, done = tmp_path / "k.sqlite", []
    monkeypatch.setattr(nsys_reports.subprocess, "run", lambda words, **_: done.append(words) or Done())
    columns = "start, end, deviceId, streamId, correlationId, globalPid, shortName"
    with closing(sqlite3.connect(database)) as into, into:
        into.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        into.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
    (tmp_path / "k.nsys-rep").write_text("")
    with pytest.raises(K25Error, match=r"k.sqlite has no GPU kernels \(0 rows"):
        nsys_reports._export(tmp_path / "k.nsys-rep", print)
    rows = [(n, n + 1, 0, 7, n, process << 24, 1) for process in (1, 2) for n in range(4)]  # both call their GPU 0
    with closing(sqlite3.connect(database)) as into, into:
        into.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    found = nsys_reports._export(tmp_path / "k.nsys-rep", print)
    assert [rank["rank"] for rank in found] == [rank["rank"] for rank in nsys.peek(database)] == [0, 1]
    assert done[0][:4] == ["nsys", "export", "--type", "sqlite"]


class Done:
    returncode, stdout, stderr = 0, "", ""
