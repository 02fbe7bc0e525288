"""The numbers of a decode step: right, adding up, and told apart."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generate import load, write_capture
from hypothesis import given, settings
from hypothesis import strategies as st

from k25lib.errors import K25Error, UsageError
from k25lib.trace import text_table
from k25lib.trace.breakdown import breakdown, census, fold, tables
from k25lib.trace.operators import own_time

PROJECT = Path(__file__).parents[2]


def k25(*args):
    return subprocess.run(
        [sys.executable, "-m", "k25lib", *map(str, args)], capture_output=True, text=True, cwd=PROJECT
    )


def pooled(result, rank=0):
    return next(row for row in result["per_step"] if row["rank"] == rank and row["batch"] == "all")


def of_rank(result, key, rank=0, batch="all"):
    return [row for row in result[key] if row["rank"] == rank and row.get("batch", "all") == batch]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """The published campaign's shape: 8 ranks, 155 decode and 5 prefill passes, 123 AllReduces in each."""
    folder = tmp_path_factory.mktemp("campaign")
    paths, truths = write_capture(folder, 8, decode=155, prefill=5, layers=3, allreduces=123, alike=True)
    return folder, paths, truths


@pytest.fixture(scope="module")
def campaign_result(campaign):
    return breakdown([campaign[0]])


def test_decode_alone_has_123_calls(campaign, campaign_result):
    _, _, truths = campaign
    assert campaign_result["capture"]["ranks"] == list(range(8))
    assert campaign_result["steps"]["decode"] == 155
    assert campaign_result["steps"]["prefill"] == 5
    for rank in range(8):
        row = next(r for r in of_rank(campaign_result, "categories", rank) if r["category"] == "allreduce_nccl")
        assert row["calls"] == 123.0
        assert pooled(campaign_result, rank)["kernel_sum_ms"] == pytest.approx(truths[rank]["decode_sum_ns"] / 155e6)
    assert {r["operation"]: r["counted"] for r in campaign_result["census"]}["allreduce"] == 123.0


def test_dividing_all_kernels_by_the_decode_steps_gives_the_published_127(campaign):
    """The published 127 calls: those of all 160 passes, divided by 155."""
    calls = sum(e.get("cat") == "kernel" and "AllReduce" in e["name"] for e in load(campaign[1][0]))
    assert calls == 160 * 123 == 19680
    assert round(calls / 155, 2) == 126.97


def test_prefill_stands_beside_the_decode_steps(campaign_result):
    rows = {row["kind"]: row for row in of_rank(campaign_result, "by_kind")}
    assert (rows["decode"]["passes"], rows["prefill"]["passes"]) == (155, 5)
    assert rows["prefill"]["kernel_sum_ms"] > 2 * rows["decode"]["kernel_sum_ms"]
    assert rows["decode"]["graph_launches"] == 1
    assert pooled(campaign_result)["kernel_sum_ms"] == rows["decode"]["kernel_sum_ms"]


def test_operator_rows_are_never_added_to_kernels(tmp_path):
    """`vllm::all_reduce` is an operator: with its event in the trace, the breakdown stays the same."""
    (path,), _ = write_capture(tmp_path, 1, decode=5, prefill=0, layers=4, allreduces=9)
    before = breakdown([path])
    data = {"traceEvents": load(path)}
    starts = [e["ts"] for e in data["traceEvents"] if e.get("cat") == "kernel"]
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "vllm::all_reduce",
        "pid": 400,
        "tid": 400,
        "dur": 1125.0,
        "args": {},
    }
    data["traceEvents"] += [operator | {"ts": ts} for ts in starts[:10]]
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / path.name.removesuffix(".gz")
    other.write_text(json.dumps(data))
    after = breakdown([other])
    assert after["categories"] == before["categories"]
    assert after["kernels"] == before["kernels"]


def test_categories_add_up_in_every_grouping(c1, c64, dp, cpu):
    for capture, group in ((c1, "fine"), (c64, "operation"), (c64, "role"), (dp, "fine"), (cpu, "role")):
        result = breakdown([capture], group=group)
        for step in result["per_step"]:
            rows = of_rank(result, "categories", step["rank"], step["batch"])
            assert sum(row["ms"] for row in rows) == pytest.approx(step["kernel_sum_ms"], rel=1e-9)
            assert sum(row["percent"] for row in rows) == pytest.approx(100)
            assert sum(row["calls"] for row in rows) == pytest.approx(step["kernels"])
            assert all(-1e-9 <= row["exposed_ms"] <= row["ms"] + 1e-9 for row in rows)
            assert sum(row["exposed_ms"] for row in rows) <= step["busy_ms"] + 1e-9
            assert step["busy_ms"] <= min(step["kernel_sum_ms"], step["span_ms"]) + 1e-9
            idle = step["idle_in_graph_ms"] + step["idle_in_step_ms"]
            assert step["span_ms"] == pytest.approx(step["busy_ms"] + idle)
        assert result["unknown"] == []


def test_the_real_capture_at_c1(c1):
    """Figures of the full capture, found by two other scripts, hold for its first 20 steps to a few percent."""
    result = breakdown([c1])
    step = pooled(result)
    assert step["steps"] == 20
    assert step["kernels"] == 1843
    assert step["kernel_sum_ms"] == pytest.approx(8.105, rel=0.02)
    assert step["busy_ms"] == pytest.approx(7.411, rel=0.02)
    assert step["span_ms"] == pytest.approx(8.68, rel=0.03)
    rows = {row["category"]: row for row in of_rank(result, "categories")}
    assert rows["allreduce_nccl"]["calls"] == 123
    assert rows["allreduce_nccl"]["ms"] == pytest.approx(0.962, rel=0.03)
    assert rows["moe_gemm"]["calls"] == 120
    assert rows["moe_gemm"]["percent"] == pytest.approx(17.4, abs=0.5)
    assert step["copies_ms"] == pytest.approx(0.0235, rel=0.05)


def test_the_real_capture_at_c64(c64):
    result = breakdown([c64])
    assert pooled(result)["kernel_sum_ms"] == pytest.approx(21.03, rel=0.02)
    assert pooled(result)["busy_ms"] == pytest.approx(20.06, rel=0.02)
    rows = {row["category"]: row for row in of_rank(result, "categories")}
    assert rows["moe_gemm"]["percent"] == pytest.approx(57, abs=1)
    assert rows["allreduce_nccl"]["ms"] == pytest.approx(1.97, rel=0.01)
    assert {row["batch"] for row in result["per_step"]} == {"all", 5, 44, 62, 63, 64}
    assert [check["agree"] == check["rows"] for check in result["cross_check"]] == [True, True]


def test_pooled_rows_are_the_weighted_means_of_batches(c64):
    result = breakdown([c64])
    batches = [row for row in result["per_step"] if row["rank"] == 0 and row["batch"] != "all"]
    for key in ("kernels", "kernel_sum_ms", "busy_ms", "span_ms", "copies_ms"):
        mean = sum(row[key] * row["steps"] for row in batches) / sum(row["steps"] for row in batches)
        assert pooled(result)[key] == pytest.approx(mean)


def test_cpu_operators_by_self_time(cpu):
    result = breakdown([cpu])
    assert result["capture"]["kind"] == "cpu"
    assert result["capture"]["note"] == "CPU operators, self time"
    step = pooled(result)
    assert step["kernel_sum_ms"] == pytest.approx(step["busy_ms"])  # one thread: self times never overlap
    calls = {row["name"]: row["calls"] for row in result["kernels"] if row["rank"] == 0}
    assert calls["_C::shm_allreduce"] == 9
    assert calls["vllm::unified_mla_attention_with_output"] == 4
    assert calls["_C::cpu_fused_moe"] == 3
    assert calls["_C::onednn_mm"] == 24
    rows = {row["operation"]: row for row in census(result, {"allreduce": 9, "moe_gemm": 3, "gemm": 24})}
    assert "difference" not in rows["allreduce"]
    assert rows["gemm"]["difference"] == 8  # aten::bmm


def brute_exposed(rows):
    """Exposed time of each category by a walk over every boundary: slow and plain."""
    edges = sorted({t for _, s, e in rows for t in (s, e)})
    out, busy = {}, 0
    for a, b in zip(edges, edges[1:], strict=False):
        running = {c for c, s, e in rows if s <= a and e >= b}
        busy += (b - a) * bool(running)
        if len(running) == 1:
            category = running.pop()
            out[category] = out.get(category, 0) + b - a
    return out, busy


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=25))
def test_busy_and_exposed_time_against_a_plain_walk(intervals):
    from k25lib.trace import decode
    from k25lib.trace.steps import Pass, Steps
    from k25lib.trace.table import Trace

    intervals.sort(key=lambda row: row[1])
    category, start, length = (np.array(column, np.int64) for column in zip(*intervals, strict=True))
    trace = Trace("x", name_id=category, start_ns=start, dur_ns=length)
    found = Steps("annotations", [Pass("decode", 1)], np.zeros(len(start), np.int64), np.full(len(start), -1))
    made = decode._sweep(trace, found, np.arange(len(start)), None, np.arange(4), np.zeros(1, np.int64), 1, 4)
    exposed, busy = brute_exposed([(c, s, s + d) for c, s, d in intervals])
    assert made["busy"][0] == busy
    assert made["exposed"][0].tolist() == [exposed.get(c, 0) for c in range(4)]
    assert made["idle"][0] == max(start + length) - min(start) - busy


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 200), st.integers(0, 1)), min_size=1, max_size=20))
def test_self_time_never_counts_an_instant_twice(operators):
    start, length, thread = (np.array(column, np.int64) for column in zip(*operators, strict=True))
    own, (row, begin, end) = own_time(start, length, thread)
    assert (own >= 0).all()
    for each in (0, 1):
        covered = {t for s, d, th in operators if th == each for t in range(s, s + d)}
        assert own[thread == each].sum() == len(covered)
    assert own.sum() == (end - begin).sum()
    assert (begin >= start[row]).all()


def test_idle_is_split_in_three(tmp_path):
    """In the generated step all gaps are inside the graph; steps are 50 us apart."""
    (path,), _ = write_capture(tmp_path, 1, decode=6, prefill=0, layers=4, allreduces=9)
    step = pooled(breakdown([path]))
    assert step["idle_in_step_ms"] == 0
    assert step["idle_in_graph_ms"] == pytest.approx(0.5e-3 * (step["kernels"] - 1))
    assert step["idle_between_ms"] == pytest.approx(0.0505)
    assert step["interval_ms"] == pytest.approx(step["span_ms"] + step["idle_between_ms"], rel=1e-3)


def test_interval_needs_two_steps_with_nothing_between(tmp_path):
    (path,), _ = write_capture(tmp_path, 1, decode=4, prefill=4, layers=4, allreduces=9)
    step = pooled(breakdown([path]))
    assert step["steps"] == 4
    assert step["interval_ms"] is None
    assert step["idle_between_ms"] is None


def test_census_names_the_differences(c1):
    expected = {"allreduce": 123, "allgather": 1, "moe_gemm": 120, "kv_cache": 60, "alltoall": 2}
    rows = {row["operation"]: row for row in census(breakdown([c1]), expected)}
    assert rows["allreduce"] == {"operation": "allreduce", "expected": 123, "counted": 123.0}
    assert rows["moe_gemm"]["counted"] == 120.0
    assert rows["kv_cache"]["difference"] == 1.0
    assert rows["alltoall"] == {"operation": "alltoall", "expected": 2, "counted": 0.0, "difference": -2.0}


def test_unknown_kernels_are_shown_by_name(tmp_path):
    (path,), _ = write_capture(tmp_path, 1, decode=4, prefill=0, layers=4, allreduces=9)
    plain = gzip.decompress(path.read_bytes()).replace(b"ncclDevKernel_AllGather_RING_LL", b"frobnicate")
    (tmp_path / "t.json").write_bytes(plain)
    result = breakdown([tmp_path / "t.json"])
    assert [row["name"] for row in result["unknown"]] == ["frobnicate(ncclDevKernelArgsStorage<4096ul>)"]
    assert result["unknown"][0]["calls"] == 1
    for group in ("operation", "role"):
        assert "unknown" in {row["category"] for row in fold(result, group)}


def test_fold_agrees_with_the_grouping(c64):
    fine = breakdown([c64])
    for group in ("operation", "role"):
        direct = {(r["rank"], r["batch"], r["category"]): r["ms"] for r in breakdown([c64], group=group)["categories"]}
        folded = {(r["rank"], r["batch"], r["category"]): r["ms"] for r in fold(fine, group)}
        assert folded == pytest.approx(direct)


def test_tables_of_a_run(c64):
    made = tables(breakdown([c64]), "c64")
    assert set(made) == {"steps", "breakdown", "kernels", "census", "waits"}
    assert all(row["capture"] == "c64" for rows in made.values() for row in rows)
    assert {row["kind"] for row in made["steps"]} == {"decode", "prefill", "mixed", "empty"}
    assert len(made["steps"]) == 28
    assert {row["group"] for row in made["breakdown"]} == {"fine"}
    assert {"all", "64"} <= {row["batch"] for row in made["breakdown"]}


def test_text_tables_alone_give_totals_and_no_step(c64):
    result = breakdown(sorted(c64.glob("*.txt")))
    assert result["capture"]["kind"] == "table"
    assert "no figure per decode step" in result["capture"]["note"]
    assert result["per_step"] == result["categories"] == result["kernels"] == []
    rows = {(row["rank"], row["name"]): row for row in result["session_totals"]}
    assert rows[0, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKern..."]["calls"] == 12 * 123
    names = {row["name"] for row in result["session_totals"]}
    assert not any(name.startswith(("aten::", "execute_context", "cuda")) for name in names)
    assert not any("Memcpy" in name for name in names)


def test_a_table_tells_that_a_trace_lost_kernels(tmp_path, c64):
    trace = sorted(c64.glob("*rank0*.gz"))[0]
    data = trace.read_bytes()
    (tmp_path / trace.name).write_bytes(data[: len(data) // 2])
    (tmp_path / "profiler_out_0.txt").write_bytes((c64 / "profiler_out_0.txt").read_bytes())
    result = breakdown([tmp_path])
    kinds = {loss["kind"] for loss in result["losses"]}
    assert {"truncated", "table differs"} <= kinds
    worst = result["cross_check"][0]["differ"][0]
    assert worst["table_calls"] > worst["trace_calls"]


def test_a_truncated_table(tmp_path, c64):
    text = (c64 / "profiler_out_0.txt").read_text()
    for cut in (0, 50, 3000, 12000):
        path = tmp_path / f"profiler_out_{cut}.txt"
        path.write_text(text[:cut])
        try:
            rows = text_table.read(path)
        except K25Error as error:
            assert "no profiler table" in str(error)
        else:
            assert {row["kind"] for row in rows} <= {"kernel", "copy", "operator", "annotation"}


def test_one_bad_file_among_good_ones(tmp_path):
    paths, _ = write_capture(tmp_path, 2, decode=4, prefill=0, layers=4, allreduces=9)
    (tmp_path / "bad.trace.json").write_text("<html>")
    result = breakdown([tmp_path])
    assert result["capture"]["ranks"] == [0, 1]
    assert [loss["kind"] for loss in result["losses"]] == ["unreadable file"]


def test_bad_arguments(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        breakdown([tmp_path / "none"])
    with pytest.raises(K25Error, match="no traces"):
        breakdown([tmp_path])
    with pytest.raises(UsageError, match="no grouping"):
        breakdown([tmp_path], group="all")
    (tmp_path / "x.nsys-rep").write_text("")
    with pytest.raises(UsageError, match="nsys export"):
        breakdown([tmp_path / "x.nsys-rep"])


def test_the_command_prints_the_schema(c64):
    done = k25("breakdown", c64, "--json", "--config", PROJECT / "data/reference/kimi-k2.5/config.json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "k25.breakdown/1"
    assert set(result) >= {
        "capture",
        "losses",
        "steps",
        "per_step",
        "categories",
        "kernels",
        "unknown",
        "census",
        "collectives",
    }
    assert result["capture"]["ranks"] == [0, 1]
    assert {row["operation"]: row["expected"] for row in result["census"]}["allreduce"] == 123
    assert not any("difference" in row for row in result["census"])


def test_the_command_in_words(c64):
    done = k25("breakdown", sorted(c64.glob("*rank0*.gz"))[0], "--group", "role")
    assert done.returncode == 0
    assert "moe_gemm" in done.stdout
    assert "123.00 calls" in done.stdout


@pytest.mark.parametrize("file", ["h28_empty.pt.trace.json.gz", "LIST.tsv"])
def test_the_command_tells_a_bad_file_in_one_line(damaged, file):
    done = k25("breakdown", damaged / file, "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("k25: ")
    assert done.stderr.count("\n") == 1


def test_the_command_is_loud_about_a_cut_file(damaged):
    done = k25("breakdown", damaged / "h02_truncated_gz.pt.trace.json.gz", "--json")
    assert done.returncode == 0
    assert "truncated" in done.stderr
    result = json.loads(done.stdout)
    assert result["steps"]["decode"] == 2
    assert result["steps"]["partial"] == 2


def test_the_command_imports_nothing_heavy(damaged):
    code = (
        "import sys\nfrom k25lib.cli import main\n"
        f"main(['breakdown', {str(damaged / 'h00_base.pt.trace.json.gz')!r}, '--json'])\n"
        "heavy = {'pandas', 'scipy', 'plotly', 'torch', 'joblib', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
