"""nsys's SQLite export gives the numbers that the same events give as a Kineto trace, and its damages are told."""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import nsys_file
import pytest
from generate import BASE_NS, complete, load, rank_events, wrap, write_capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k25lib.errors import K25Error, UsageError
from k25lib.trace import kineto, nsys
from k25lib.trace.breakdown import breakdown
from k25lib.trace.slice import cut, lanes

SAME = ("per_step", "categories", "kernels", "unknown", "census", "collectives", "skew", "by_kind", "passes")
LAYOUT = {"decode": 6, "prefill": 1, "layers": 6, "allreduces": 13, "gpu_marks": False}


def close(value, other):
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(close(value[k], other[k]) for k in value if k != "file")
    if isinstance(value, list):
        return len(value) == len(other) and all(map(close, value, other))
    return value == pytest.approx(other) if isinstance(value, float) else value == other


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(folder of Kineto traces of two ranks, the same events in one SQLite file)."""
    folder = tmp_path_factory.mktemp("pair")
    paths, _ = write_capture(folder / "kineto", 2, delays_ns=(0, 1500), **LAYOUT)
    return folder / "kineto", nsys_file.write(folder / "host.sqlite", [load(p) for p in paths])


def losses(result):
    return {loss["kind"]: loss["count"] for loss in result["losses"]}


def test_the_same_numbers_as_kineto(pair):
    ours, theirs = breakdown([pair[1]]), breakdown([pair[0]])
    assert ours["capture"]["ranks"] == [0, 1]
    assert ours["capture"]["world_size"] == 2
    assert ours["capture"]["files"] == 1
    assert ours["capture"]["parallel"]["tp"] == 2
    assert ours["losses"] == []
    assert ours["steps"] == theirs["steps"]
    assert ours["steps"]["found_by"] == "annotations"
    assert ours["steps"]["decode"] == 6
    for key in SAME:
        assert close(ours[key], theirs[key]), key
    assert ours["capture"]["start_ns"] == theirs["capture"]["start_ns"]


def test_an_export_of_nsys_itself():
    """Nsight Systems 2025.3.2 on an H200: 20 replays of a CUDA graph of ten GEMMs and ten clamps, one NVTX range each;
    the figures are those of a query: 400 kernels, 5,587,161 ns."""
    result = breakdown([Path(__file__).with_name("nsys-2025.3.2.sqlite")])
    row = result["per_step"][0]
    assert (row["steps"], row["kernels"], row["kernel_sum_ms"]) == (20, 20.0, pytest.approx(5.587161 / 20))
    assert result["steps"]["found_by"] == "annotations" and result["losses"] == []
    calls = {each["category"]: (each["calls"], each["ms"]) for each in result["categories"] if each["batch"] == "all"}
    assert calls["gemm"] == (10.0, pytest.approx(0.2375, abs=1e-4))


def test_every_kernel_and_copy_as_it_stands(tmp_path):
    events, _ = rank_events(0, **LAYOUT)
    at = 5_000_000_000_000_000
    events += [
        complete("gpu_memcpy", "Memcpy", 0, 7, at + 3000, 700, '"stream": 7, "correlation": 3'),
        complete("gpu_memset", "Memset", 0, 7, at + 9001, 801, '"stream": 9, "correlation": 4'),
    ]
    (tmp_path / "t.json").write_text(wrap(events))
    ours = nsys.read(nsys_file.write(tmp_path / "a.sqlite", [load_plain(tmp_path / "t.json")]), (0, 4711 << 24), True)
    theirs = kineto.read(tmp_path / "t.json", launches=True)
    assert table(ours) == table(theirs)
    assert (ours.kind == 1).sum() == (ours.kind == 2).sum() == 1
    assert "Memcpy HtoD" in ours.names
    assert ours.launches == theirs.launches
    assert ours.cpu_marks == theirs.cpu_marks
    assert set(ours.graph_node.tolist()) == {-1, 7}
    assert (ours.graph_node == 7).sum() == 6 * (len(ours.kind) - 2 - 40) // 7


def load_plain(path):
    return json.loads(path.read_text())["traceEvents"]


def table(trace):
    names = [
        "Memcpy" if kind == 1 else "Memset" if kind == 2 else trace.names[n]
        for n, kind in zip(trace.name_id, trace.kind, strict=True)
    ]
    columns = (trace.start_ns + trace.origin_ns, trace.dur_ns, trace.stream, trace.correlation, trace.kind)
    return sorted(zip(names, *(c.tolist() for c in columns), strict=True))


@pytest.mark.parametrize("correlations", [True, False])
def test_steps_without_annotations(tmp_path, correlations):
    paths, _ = write_capture(
        tmp_path / "k", 1, **LAYOUT, cpu_marks=False, correlations=correlations, graph=correlations
    )
    ours = breakdown([nsys_file.write(tmp_path / "a.sqlite", [load(paths[0])])])
    theirs = breakdown(paths)
    assert ours["steps"] == theirs["steps"]
    assert ours["steps"]["found_by"] == ("graph launches" if correlations else "period")
    assert close(ours["per_step"], theirs["per_step"])


def test_the_command(pair):
    done = subprocess.run(
        [sys.executable, "-m", "k25lib", "breakdown", str(pair[1]), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["rank"] for row in result["per_step"] if row["batch"] == "all"] == [0, 1]
    assert done.stderr == ""


def test_lanes_and_no_slice(pair, tmp_path):
    ours, theirs = lanes([pair[1]], 2), lanes([pair[0]], 2)
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    with pytest.raises(UsageError, match="torch profiler"):
        cut([pair[1]], 0, tmp_path / "s.json.gz")
    assert not (tmp_path / "s.json.gz").exists()


def test_a_folder_with_both_kinds_breaks_one_session_down_and_tells_of_the_other(pair, tmp_path):
    write_capture(tmp_path, 2, base_ns=BASE_NS - 3600 * 10**9, **LAYOUT)
    shutil.copy(pair[1], tmp_path / "host.sqlite")
    (tmp_path / "notes.db").write_bytes(b"no database")
    result = breakdown([tmp_path])
    assert {row["file"] for row in result["per_step"]} == {"host.sqlite"}
    assert losses(result) == {"other sessions": 2, "unreadable file": 1}
    assert "file is not a database" in next(x["detail"] for x in result["losses"] if x["kind"] == "unreadable file")


def changed(pair, tmp_path, *statements):
    path = tmp_path / "c.sqlite"
    shutil.copy(pair[1], path)
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    return path


def test_two_processes_that_both_call_their_gpu_0(pair, tmp_path):
    path = changed(pair, tmp_path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 0")
    result = breakdown([path])
    assert result["capture"]["ranks"] == [0, 1]
    assert close(result["collectives"], breakdown([pair[1]])["collectives"])


def test_a_few_kernels_of_another_process_are_no_rank(pair, tmp_path):
    path = changed(pair, tmp_path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = 1 WHERE rowid = 3")
    result = breakdown([path])
    assert result["capture"]["ranks"] == [0, 1]
    assert losses(result) == {"other process": 1}


def placed(pair, tmp_path, *places):
    """The file with its two GPUs' kernels again at each pair of (device, process)."""
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    columns = [row[1] for row in sqlite3.connect(pair[1]).execute(f'PRAGMA table_info("{table}")')]
    statements = [f"CREATE TEMP TABLE two AS SELECT * FROM {table}", f"DELETE FROM {table}"]
    for source, (device, process) in enumerate(places):
        new = {"deviceId": str(device), "globalPid": str(process << 24)}
        values = ", ".join(new.get(name, f'"{name}"') for name in columns)
        statements.append(f"INSERT INTO {table} SELECT {values} FROM two WHERE globalPid = {(4711 + source % 2) << 24}")
    return breakdown([changed(pair, tmp_path, *statements)])["capture"]


@pytest.mark.parametrize(
    ("places", "devices", "tp", "dp"),
    [
        (((4, 11), (5, 12)), [(4, 11), (5, 12)], 2, 1),  # the server had GPUs 4 and 5
        (((10, 11), (2, 12)), [(2, 12), (10, 11)], 2, 1),
        (((0, 12), (1, 12), (0, 9), (1, 9)), [(0, 9), (1, 9), (0, 12), (1, 12)], 2, 2),  # a process a replica
        (((2, 9), (3, 9), (0, 12), (1, 12)), [(0, 12), (1, 12), (2, 9), (3, 9)], 2, 2),
        (((0, 11), (1, 12), (0, 13), (1, 14)), [(0, 11), (1, 12), (0, 13), (1, 14)], 2, 2),  # a process a GPU
    ],
)
def test_ranks_are_numbered_over_processes_and_devices(pair, tmp_path, places, devices, tp, dp):
    capture = placed(pair, tmp_path, *places)
    assert capture["ranks"] == list(range(len(places)))
    assert (capture["world_size"], capture["missing_ranks"], capture["clashes"]) == (len(places), [], [])
    assert [(row["device"], row["pid"]) for row in capture["devices"]] == devices
    assert [row["rank"] for row in capture["devices"]] == capture["ranks"]
    assert (capture["parallel"]["tp"], capture["parallel"]["dp"]) == (tp, dp)


def test_a_helper_process_with_a_twentieth_of_the_kernels_is_no_rank(pair, tmp_path):
    helper = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = 1 WHERE deviceId = 0 AND rowid % 20 = 3"
    result = breakdown([changed(pair, tmp_path, helper)])
    assert (result["capture"]["ranks"], result["capture"]["world_size"]) == ([0, 1], 2)
    assert result["capture"]["parallel"]["tp"] == 2
    assert losses(result)["other process"] > 5


@pytest.mark.parametrize(
    ("statement", "kind", "count"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 5", "no time", 1),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE rowid = 5", "negative duration", 1),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 0, end = 9 WHERE rowid = 5", "zero or negative time", 1),
        (
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid = 5",
            "duplicate",
            1,
        ),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 9999 WHERE rowid = 5", "no name", 1),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN colour INTEGER", "unknown columns", 1),
    ],
)
def test_odd_rows_are_counted(pair, tmp_path, statement, kind, count):
    result = breakdown([changed(pair, tmp_path, statement)])
    assert losses(result)[kind] == count
    assert result["steps"]["decode"] == 6


def test_missing_optional_tables_and_columns(pair, tmp_path):
    path = changed(
        pair,
        tmp_path,
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY",
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET",
        "DROP TABLE NVTX_EVENTS",
        "DROP TABLE TARGET_INFO_SESSION_START_TIME",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN demangledName",
    )
    result = breakdown([path])
    assert result["steps"]["found_by"] == "graph launches"
    assert result["steps"]["decode"] == 6
    assert result["capture"]["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"], "has no GPU kernels .*--trace=cuda"),
        (
            ["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO CUPTI_ACTIVITY_KIND_GRAPH_TRACE"],
            "--cuda-graph-trace=node",
        ),
        (["DROP TABLE StringIds"], "has no table StringIds"),
        (["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId"], "no column streamId"),
        (["DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"], "0 rows"),
    ],
)
def test_what_cannot_be_broken_down_says_why(pair, tmp_path, statements, message):
    with pytest.raises(K25Error, match=message) as caught:
        breakdown([changed(pair, tmp_path, *statements)])
    assert "\n" not in str(caught.value)


def test_files_that_are_no_nsys_export(pair, tmp_path):
    (tmp_path / "empty.sqlite").write_bytes(b"")
    (tmp_path / "text.sqlite").write_text("hello")
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("CREATE TABLE users (id INTEGER)")
    database.close()
    for name, message in [
        ("empty", "is empty"),
        ("text", "not a database"),
        ("other", "no nsys export .its tables: users"),
    ]:
        with pytest.raises(K25Error, match=message):
            breakdown([tmp_path / f"{name}.sqlite"])
    (tmp_path / "r.nsys-rep").write_bytes(b"x")
    with pytest.raises(UsageError, match="nsys export --type sqlite"):
        breakdown([tmp_path / "r.nsys-rep"])


def test_a_locked_database_is_read_all_the_same(pair, tmp_path):
    path = tmp_path / "locked # 1?.sqlite"
    shutil.copy(pair[1], path)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    assert breakdown([path])["steps"]["decode"] == 6
    other.close()


def test_an_unfinished_export_is_told(pair, tmp_path):
    path = tmp_path / "w.sqlite"
    shutil.copy(pair[1], path)
    (tmp_path / "w.sqlite-wal").write_bytes(b"x")
    assert losses(breakdown([path])) == {"unfinished export": 1}


def test_a_database_called_json_is_known_by_its_first_bytes(pair, tmp_path):
    shutil.copy(pair[1], tmp_path / "x.pt.trace.json")
    assert breakdown([tmp_path])["steps"]["decode"] == 6


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 0.999))
def test_a_file_cut_anywhere(pair, tmp_path_factory, share):
    """A one-line error, or rows that the whole file has and a loud loss."""
    whole = pair[1].read_bytes()
    path = tmp_path_factory.mktemp("cut") / "t.sqlite"
    path.write_bytes(whole[: int(len(whole) * share)])
    known = set(table(nsys.read(pair[1], (0, 4711 << 24))))
    try:
        result = breakdown([path])
        trace = nsys.read(path, (0, 4711 << 24))
    except K25Error as error:
        assert "\n" not in str(error)
        return
    assert "truncated" in losses(result)
    assert trace.truncated
    assert set(table(trace)) <= known


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**8), st.integers(1, 3)), min_size=1, max_size=30))
def test_rows_are_exact(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("r") / "t.sqlite"
    nsys_file.write(path, [])
    with sqlite3.connect(path) as database:
        for i in (1, 2, 3):
            nsys_file.insert(database, "StringIds", id=i, value=f"kernel {i}")
        for i, (start, dur, name) in enumerate(rows):
            nsys_file.kernel(database, start, start + dur, name, correlation=i)
    database.close()
    (known,) = nsys.peek(path)
    trace = nsys.read(path, known["device"])
    found = zip(trace.start_ns + trace.origin_ns - BASE_NS, trace.dur_ns, trace.name_id, strict=True)
    kept = sorted((int(s), int(d), int(trace.names[n][-1])) for s, d, n in found)
    lost = sum(x["count"] for x in trace.losses if x["kind"] != "zero duration")
    assert len(kept) + lost == len(rows)
    assert not set(kept) - set(rows)


EPOCH = 1_767_189_312_000_000_000
KERNEL, RUNTIME, NVTX = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
)


@pytest.mark.parametrize(
    ("statements", "told"),
    [
        ([f"UPDATE {RUNTIME} SET start = 'soon' WHERE rowid = 3"], {}),
        ([f"UPDATE {RUNTIME} SET correlationId = 'x' WHERE rowid = 3"], {}),
        ([f"UPDATE {KERNEL} SET globalPid = 'x'"], {"no process": 1}),
        ([f"UPDATE {KERNEL} SET globalPid = NULL"], {"no process": 1}),
        ([f"UPDATE {t} SET start = start + {EPOCH}, end = end + {EPOCH}" for t in (KERNEL, RUNTIME, NVTX)], {}),
    ],
)
def test_other_values_in_a_column_change_no_figure(pair, tmp_path, statements, told):
    """Nor do the NVTX ranges of another process, nor nanoseconds since 1970, which no double holds."""
    result = breakdown([changed(pair, tmp_path, *statements)])
    ours, theirs = ([r for r in x["per_step"] if r["batch"] == "all"] for x in (result, breakdown([pair[1]])))
    assert close(ours, theirs)
    assert losses(result) == told


def test_kernels_without_a_device_are_counted(pair, tmp_path):
    result = breakdown([changed(pair, tmp_path, f"UPDATE {KERNEL} SET deviceId = 'x' WHERE rowid IN (9, 10)")])
    assert losses(result)["no device"] == 2


def test_names_that_are_no_text_are_told(pair, tmp_path):
    result = breakdown([changed(pair, tmp_path, "UPDATE StringIds SET value = x'ff00' WHERE value LIKE '%ArgMax%'")])
    assert losses(result) == {"no name": 1}
    assert [row["name"].split()[0] for row in result["unknown"]] == ["name"]
