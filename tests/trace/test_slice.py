"""One decode step of all ranks as a file for Perfetto, and as rows for the lanes."""

import gzip
import json
import re

import pytest
from generate import load, write_capture

from k25lib.cli import main
from k25lib.errors import K25Error, UsageError
from k25lib.trace.slice import cut, lanes

SMALL = {"decode": 8, "prefill": 2, "layers": 10, "allreduces": 21}


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    write_capture(folder, 2, (0, 1250), **SMALL)
    return folder


@pytest.fixture(scope="module")
def events(capture, tmp_path_factory):
    target = tmp_path_factory.mktemp("out") / "step.json.gz"
    written = cut([capture], 3, target)
    data = json.loads(gzip.decompress(target.read_bytes()))
    assert len(data["traceEvents"]) == written
    assert target.stat().st_size < 2e6
    return data["traceEvents"]


def test_the_kernels_of_one_step_of_every_rank(capture, events):
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len({e["pid"] for e in kernels}) == 2
    per_rank = [len([e for e in kernels if e["pid"] == pid]) for pid in sorted({e["pid"] for e in kernels})]
    marks = sorted({e["ts"] for e in load(sorted(capture.glob("*.gz"))[0]) if e.get("cat") == "gpu_user_annotation"})
    assert per_rank == [44, 44]
    assert len(marks) > 8
    assert min(e["ts"] for e in kernels) == 0.0
    assert all(e["dur"] > 0 for e in kernels)


def test_ranks_stand_on_one_clock(events):
    calls = [e for e in events if e.get("cat") == "kernel" and "Reduce_Sum" in e["name"]]
    starts = {pid: min(e["ts"] for e in calls if e["pid"] == pid) for pid in {e["pid"] for e in calls}}
    first, second = (starts[pid] for pid in sorted(starts))
    assert second - first == pytest.approx(1.25, abs=0.01)


def test_flows_are_whole(events):
    """Every arrow starts at a launch and ends at a kernel that are both in the file."""
    begun = {e["id"]: e for e in events if e["ph"] == "s"}
    ended = [e for e in events if e["ph"] == "f"]
    kernels = {(e["pid"], e["ts"]) for e in events if e.get("cat") == "kernel"}
    launches = {(e["pid"], e["ts"]) for e in events if e.get("cat") == "cuda_runtime"}
    assert len(begun) == 2
    assert len(ended) == 88
    assert {e["id"] for e in ended} == set(begun)
    assert all((e["pid"], e["ts"]) in launches for e in begun.values())
    assert all((e["pid"], e["ts"]) in kernels for e in ended)


def test_processes_are_named_after_their_rank(events):
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"rank 0: VLLM::Worker_TP0", "rank 1: VLLM::Worker_TP1"}


def test_a_slice_is_a_trace_again(capture, tmp_path):
    from k25lib.trace import kineto

    cut([capture], 0, tmp_path / "s.json")
    assert int((kineto.read(tmp_path / "s.json").kind == 0).sum()) == 88


def test_the_command(capture, tmp_path, capsys):
    target = tmp_path / "s.json.gz"
    assert main(["slice", str(capture), "--step", "7", "-o", str(target)]) == 0
    assert "perfetto" in capsys.readouterr().out
    before = target.read_bytes()
    assert main(["slice", str(capture), "--step", "7", "-o", str(target)]) == 2
    assert target.read_bytes() == before
    assert main(["slice", str(capture), "--step", "8", "-o", str(tmp_path / "t.json.gz")]) == 2
    assert "it has 8" in capsys.readouterr().err
    assert main(["slice", str(capture), "-o", str(tmp_path / "t.txt")]) == 2
    assert main(["slice", str(capture), "-o", str(tmp_path / "none" / "t.json.gz")]) == 1
    assert not (tmp_path / "t.json.gz").exists()


def test_lanes(c1, cpu, dp):
    rows = lanes([c1], 5)
    assert {row["rank"] for row in rows} == {0, 1}
    assert len({row["stream"] for row in rows if row["rank"] == 0}) > 100
    assert min(row["start_us"] for row in rows) == 0
    assert sum(row["name"].startswith("ncclDevKernel_AllReduce") for row in rows) == 246
    assert {row["category"] for row in lanes([cpu], 1)} >= {"attention", "allreduce_custom", "gemm"}
    both = lanes([dp], 3)  # the idle rank's lane shows its dummy pass at that moment
    spans = [[r["start_us"] for r in both if r["rank"] == rank] for rank in (0, 1)]
    assert max(spans[0]) > min(spans[1])
    assert min(spans[0]) < max(spans[1])
    with pytest.raises(UsageError, match="it has 20"):
        lanes([c1], 20)


def test_a_cpu_step(cpu, tmp_path):
    cut([cpu], 1, tmp_path / "s.json.gz")
    events = load(tmp_path / "s.json.gz")
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    assert sum(e["name"] == "_C::shm_allreduce" for e in operators) == 18


def made(tmp_path, change, **settings):
    """A capture of two ranks whose second file is another's: what the slice of step 3 holds, and what it tells."""
    paths, _ = write_capture(tmp_path / "c", 2, (0, 1250), **(SMALL | settings))
    data = json.loads(gzip.decompress(paths[1].read_bytes()))
    change(data["traceEvents"])
    paths[1].write_bytes(gzip.compress(json.dumps(data).encode(), 1))
    losses = []
    cut([tmp_path / "c"], 3, tmp_path / "s.json", losses)
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    per_rank = [sum(e["pid"] == pid for e in kernels) for pid in sorted({e["pid"] for e in kernels})]
    return per_rank, {loss["kind"]: loss["detail"] for loss in losses}, kernels


def odd_members(events):
    for e in events[::5]:
        e["args"] = [None, [1, 2], "x"][len(e["name"]) % 3] if e.get("cat") == "cuda_runtime" else e.get("args")
    for e in [e for e in events if e["ph"] in "sf"][::3]:
        e["id"] = {"a": 1}
    events += [
        {"ph": "X", "cat": "cpu_op", "name": "a", "pid": [], "tid": {}, "ts": ts} for ts in (True, [], "x", None)
    ]


def twice(events):
    events += [dict(e) for e in events]


@pytest.mark.parametrize("change", [odd_members, twice, lambda events: events.reverse()])
def test_odd_events_cost_no_kernel_and_give_none_twice(tmp_path, change):
    per_rank, told, _ = made(tmp_path, change)
    assert per_rank == [44, 44]
    assert told == {}


@pytest.mark.parametrize("seconds", [5, -5])
def test_a_rank_on_another_clock_is_in_the_slice(tmp_path, seconds):
    def later(events):
        for e in events:
            e["ts"] = round(e["ts"] + seconds * 1e6, 3)

    per_rank, told, kernels = made(tmp_path, later)
    assert per_rank == [44, 44]
    assert f"{seconds * 1000}.000 ms ahead" in told["clock"]
    first, second = (min(e["ts"] for e in kernels if (e["pid"] > 1000) == other) for other in (False, True))
    assert abs(second - first) < 10


def test_a_rank_without_such_a_step_is_told(tmp_path):
    def prefill(events):
        for e in events:
            e["name"] = e["name"].replace("context_0(0)_generation_1(1)", "context_1(9)_generation_0(0)")
            e["ts"] = e["ts"] + 5e6

    per_rank, told, _ = made(tmp_path, prefill)
    assert per_rank == [44]
    assert "rank 1 has no pass at the time" in told["missing ranks"]


def test_an_unreadable_file_beside_a_good_one_is_told(capture, tmp_path):
    (tmp_path / "bad.pt.trace.json").write_bytes(b"")
    losses = []
    cut([*sorted(capture.glob("*.gz")), tmp_path / "bad.pt.trace.json"], 3, tmp_path / "s.json", losses)
    assert [loss["kind"] for loss in losses] == ["unreadable file"]
    with pytest.raises(K25Error, match="is empty"):
        cut([tmp_path / "bad.pt.trace.json"], 3, tmp_path / "t.json")


def test_two_files_of_one_rank_are_two_processes(damaged, tmp_path):
    cut(sorted(damaged.glob("h19*")), 1, tmp_path / "s.json")
    kernels = [e for e in load_plain(tmp_path / "s.json") if e.get("cat") == "kernel"]
    assert len({e["pid"] for e in kernels}) == 2


def load_plain(path):
    return json.loads(path.read_text())["traceEvents"]


def test_absolute_times_keep_their_nanoseconds(tmp_path):
    """Without a base time a double tells 250 ns: no kernel of the step is lost, none moves."""
    (path,), _ = write_capture(tmp_path / "c", 1, **SMALL)
    cut([path], 3, tmp_path / "a.json")
    text = gzip.decompress(path.read_bytes()).replace(b"baseTimeNanoseconds", b"other")
    text = re.sub(rb'"ts": (\d+)\.', lambda m: b'"ts": %d.' % (int(m[1]) + 1_762_000_000_000_000), text)
    (tmp_path / "b.pt.trace.json").write_bytes(text)
    cut([tmp_path / "b.pt.trace.json"], 3, tmp_path / "b.json")
    times = [[e["ts"] for e in load_plain(tmp_path / f"{n}.json") if e.get("cat") == "kernel"] for n in "ab"]
    assert len(times[0]) == 44
    assert times[0] == times[1]
