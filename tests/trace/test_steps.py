"""Steps are found by the best mark that is there, told apart by kind, and counted once."""

import gzip
import json

import numpy as np
import pytest
from generate import load, write_capture

from k25lib.trace import annotations, kineto, steps
from k25lib.trace.breakdown import breakdown
from k25lib.trace.categories import Categories

CATEGORY = Categories().category


def find(path):
    trace = kineto.read(path)
    return trace, steps.find(trace, CATEGORY, lambda: kineto.read(path, launches=True).launches)


def passes(found, *kinds):
    return {kind: n for kind, n in found.counts().items() if n}


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("execute_context_0(0)_generation_1(1)", ("vllm", "decode", 1)),
        ("execute_context_0(0)_generation_64(64)", ("vllm", "decode", 64)),
        ("execute_context_1(128)_generation_0(0)", ("vllm", "prefill", 1)),
        ("execute_context_18(2304)_generation_2(2)", ("vllm", "mixed", 20)),
        ("execute_context_0(0)_generation_0(0)", ("vllm", "empty", 0)),
        ("execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk71sqsq4sqsk71)", ("vllm", "decode", 4)),
        ("execute_context_0(0)_generation_1(4)", ("vllm", "decode", 1)),
        ("execute_context_1(888_788544)_generation_0(0)", ("vllm", "prefill", 1)),
        ("execute_new_1_cached_0", ("vllm", "prefill", 1)),
        ("execute_new_0_cached_7", ("vllm", "decode", 7)),
        ("step[DECODE bs=32]", ("sglang", "decode", 32)),
        ("step[EXTEND bs=2 toks=512]", ("sglang", "prefill", 2)),
        ("decode[bs=8]", ("sglang", "decode", 8)),
        ("step[IDLE bs=0]", ("sglang", "dummy", 0)),
        ("step[MIXED bs=3]", ("sglang", "mixed", 3)),
        ("gloo:all_reduce", None),
        ("ProfilerStep#101", None),
        ("decode", None),
        ("decoder.forward", None),
        ("", None),
    ],
)
def test_names_of_steps(name, meaning):
    assert annotations.parse(name) == meaning


CAMPAIGN = {"ranks": 1, "decode": 155, "prefill": 5, "layers": 20, "allreduces": 41}


@pytest.mark.parametrize(
    ("lacking", "found_by"),
    [
        ({}, "annotations"),
        ({"cpu_marks": False}, "annotations"),
        ({"gpu_marks": False}, "annotations"),
        ({"gpu_marks": False, "cpu_marks": False}, "graph launches"),
        ({"gpu_marks": False, "launches": False}, "graph launches"),
        ({"gpu_marks": False, "cpu_marks": False, "launches": False}, "graph launches"),
        ({"gpu_marks": False, "cpu_marks": False, "correlations": False}, "period"),
        ({"gpu_marks": False, "cpu_marks": False, "launches": False, "correlations": False}, "period"),
        ({"gpu_marks": False, "cpu_marks": False, "graph": False}, "period"),
    ],
)
def test_155_steps_by_whatever_mark_is_left(tmp_path, lacking, found_by):
    (path,), (truth,) = write_capture(tmp_path, **CAMPAIGN, **lacking)
    result = breakdown([path])
    counts, step = result["steps"], result["per_step"][0]
    measured = counts["measured"]
    assert counts["found_by"] == found_by
    assert counts[measured] == 155
    assert counts["prefill"] == 5
    assert step["steps"] == 155
    census = {row["operation"]: row["counted"] for row in result["census"]}
    assert census["allreduce"] == pytest.approx(41.0)
    assert step["kernel_sum_ms"] == pytest.approx(truth["decode_sum_ns"] / 155e6, rel=1e-9)


@pytest.mark.parametrize("lacking", ["marks", "marks and launches"])
def test_the_real_capture_by_lesser_marks(c1, lacking):
    """20 steps with the same kernel sum as by annotations, to the 0.1 %."""
    path = sorted(c1.glob("*rank0*.gz"))[0]
    trace = kineto.read(path)
    trace.marks = trace.cpu_marks = []
    if "launches" in lacking:
        trace.correlation = np.full_like(trace.correlation, -1)
    found = steps.find(trace, CATEGORY)
    assert found.counts()["decode"] == 20
    assert found.counts()["prefill"] == 1
    _, by_marks = find(path)
    decode = [np.isin(f.of, [i for i, p in enumerate(f.passes) if p.kind == "decode"]) for f in (found, by_marks)]
    kernels = trace.kind == 0
    sums = [trace.dur_ns[d & kernels].sum() for d in decode]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3)


def test_once_a_step_not_once_a_stream(c1):
    path = sorted(c1.glob("*rank0*.gz"))[0]
    pieces = sum(
        e.get("cat") == "gpu_user_annotation" for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    )
    _, found = find(path)
    assert pieces > 2000
    assert passes(found) == {"decode": 20, "prefill": 1}
    assert {(p.kernels, p.launches) for p in found.passes if p.kind == "decode"} == {(1843, 1)}
    assert [(p.kernels, p.launches) for p in found.passes if p.kind == "prefill"] == [(1963, 62)]


def test_batch_sizes_and_mixed_steps_are_kept_apart(c64):
    path = sorted(c64.glob("*rank0*.gz"))[0]
    _, found = find(path)
    assert passes(found) == {"decode": 7, "prefill": 1, "mixed": 4, "empty": 2}
    assert sorted(p.batch for p in found.passes if p.kind == "decode") == [5, 44, 62, 63, 64, 64, 64]
    assert found.outside == 0


def test_an_idle_rank_runs_dummy_passes(dp):
    """18 graph passes and a dummy prefill on each rank, outside every annotation."""
    for path in sorted(dp.glob("*.gz")):
        trace, found = find(path)
        counts = found.counts()
        assert (counts["decode"], counts["prefill"], counts["dummy"]) == (15, 1, 19)
        dummy = [p for p in found.passes if p.kind == "dummy"]
        assert sum(p.launches == 1 for p in dummy) == 18
        inside = np.isin(found.of, [i for i, p in enumerate(found.passes) if p.kind == "dummy"])
        assert (inside & (trace.kind == 0)).sum() / (trace.kind == 0).sum() == pytest.approx(0.54, abs=0.02)


def test_cpu_steps(cpu):
    for path in sorted(cpu.glob("*.gz")):
        trace, found = find(path)
        assert trace.is_cpu
        assert found.found_by == "annotations"
        assert passes(found) == {"decode": 4, "prefill": 1}


def edited(source, target, edit):
    data = json.loads(gzip.decompress(source.read_bytes()))
    data["traceEvents"] = [e for e in map(edit, data["traceEvents"]) if e]
    target.write_bytes(gzip.compress(json.dumps(data).encode(), 1))
    return target


def test_a_step_cut_at_the_end_is_partial(tmp_path):
    (path,), _ = write_capture(tmp_path, **CAMPAIGN | {"decode": 20, "prefill": 0})
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ends = sorted(e["ts"] for e in events if e.get("cat") == "kernel")
    limit = ends[-40]  # the last step loses 40 of its kernels
    edited(path, path, lambda e: e if e.get("cat") != "kernel" or e["ts"] < limit else None)
    result = breakdown([path])
    assert (result["steps"]["decode"], result["steps"]["partial"]) == (19, 1)
    assert result["per_step"][0]["steps"] == 19


def test_a_step_cut_at_the_start_is_partial(tmp_path):
    """The profiler starts in the middle of a step: its kernels are there, its annotation is not."""
    (path,), _ = write_capture(tmp_path, **CAMPAIGN | {"decode": 20, "prefill": 0})
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    start = sorted(e["ts"] for e in events if e.get("cat") == "kernel")[40]
    first = min(e["ts"] for e in events if e.get("cat") == "gpu_user_annotation")

    def edit(e):
        if e.get("cat") == "kernel" and e["ts"] < start:
            return None
        return None if e.get("cat") == "gpu_user_annotation" and e["ts"] < first + 100 else e

    edited(path, path, edit)
    result = breakdown([path])
    assert (result["steps"]["decode"], result["steps"]["partial"]) == (19, 1)


def test_eager_decode_is_kept_apart_from_graphs(tmp_path):
    (path,), _ = write_capture(tmp_path, **CAMPAIGN | {"decode": 12, "prefill": 0})
    number = iter(range(10**6, 10**7))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = sorted({(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "gpu_user_annotation"})
    begin, end = marks[8][0], marks[9][1]

    def edit(e):
        if e.get("cat") == "kernel" and begin <= e["ts"] <= end:
            e["args"]["correlation"] = next(number)
        return e

    edited(path, path, edit)
    result = breakdown([path])
    assert (result["steps"]["decode"], result["steps"]["decode_eager"]) == (11, 1)
    assert result["per_step"][0]["steps"] == 11
    assert {row["kind"]: row["passes"] for row in result["by_kind"]} == {"decode": 11, "decode_eager": 1}


def test_sampling_after_the_annotation_belongs_to_the_step_before(tmp_path):
    """Some versions sample outside the annotated part of a step: those kernels are not lost."""
    (path,), (truth,) = write_capture(tmp_path, **CAMPAIGN | {"decode": 12, "prefill": 2})

    def edit(e):
        if e.get("cat") == "gpu_user_annotation":
            e["dur"] -= 25.0  # ends before the AllGather and the sampling kernel
        return e

    edited(path, path, edit)
    result = breakdown([path])
    assert result["steps"]["decode"] == 12
    assert result["steps"]["dummy"] == result["steps"]["partial"] == 0
    assert result["per_step"][0]["kernel_sum_ms"] == pytest.approx(truth["decode_sum_ns"] / 12e6, rel=1e-9)


def test_one_annotation_and_kernels_before_it(tmp_path):
    """What a cut file may leave: nothing fails, and the kernels before the only mark are no decode step."""
    (path,), _ = write_capture(tmp_path, **CAMPAIGN | {"decode": 3, "prefill": 0})
    marks = {e["ts"] for e in load(path) if e.get("cat") == "gpu_user_annotation"}
    last = sorted(marks)[-2]
    edited(path, path, lambda e: e if e.get("cat") != "gpu_user_annotation" or e["ts"] >= last else None)
    result = breakdown([path])
    assert result["steps"]["decode"] == 1
    assert result["steps"]["dummy"] == 2


def test_no_steps_at_all(tmp_path):
    """Kernels that nothing groups: no figure per step, and the result says so."""
    (path,), _ = write_capture(
        tmp_path, ranks=1, decode=1, prefill=0, layers=3, allreduces=3, gpu_marks=False, cpu_marks=False
    )
    edited(path, path, lambda e: e if "ArgMax" not in e.get("name", "") else None)
    result = breakdown([path])
    assert result["steps"]["decode"] == 0
    assert result["per_step"] == result["categories"] == []
    assert "no decode steps" in {loss["kind"] for loss in result["losses"]}


def test_what_prepares_the_next_pass_does_not_stretch_the_step_before(dp):
    """Three small kernels run 3 ms after the last decode step, just before an idle rank's dummy pass: they are its."""
    _, found = find(sorted(dp.glob("*.gz"))[0])
    decode = [p for p in found.passes if p.kind == "decode"]
    assert {p.kernels for p in decode} == {639}
    assert max(p.end_ns - p.start_ns for p in decode) < 9.2e6
