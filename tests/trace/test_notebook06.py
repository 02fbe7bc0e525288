"""Notebook 06 on any capture, without a server; its figures show the numbers of the tables."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from k25lib.errors import UsageError
from k25lib.report.figures import breakdown as figures
from k25lib.run import Run
from k25lib.trace.breakdown import breakdown
from k25lib.trace.slice import lanes

PROJECT = Path(__file__).parents[2]
CELLS = json.loads((PROJECT / "notebooks" / "06_breakdown.ipynb").read_text())["cells"]


def execute(**parameters):
    """Run the code cells as the notebook would, with parameters; returns the names that it leaves."""
    names = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert set(parameters) <= set(names)
                names |= parameters
    return names


@pytest.fixture
def run(places):
    made = Run.create("test")
    made.update(server={"config": str(PROJECT / "data/reference/kimi-k2.5/config.json"), "tp": 2})
    return made


def test_all_captures_of_a_run(run, c1, c64):
    for name, source in (("c1", c1), ("c64", c64)):
        shutil.copytree(source, run.path / "captures" / name)
    execute(run=str(run.path))
    assert set(run.tables()) == {"steps", "breakdown", "kernels", "census", "waits", "lanes"}
    steps, table, census = run.table("steps"), run.table("breakdown"), run.table("census")
    assert len(steps[(steps["capture"] == "c1") & (steps["kind"] == "decode") & (steps["rank"] == 0)]) == 20
    chosen = table[(table["capture"] == "c1") & (table["rank"] == 0) & (table["batch"] == "all")]
    assert chosen["ms"].sum() == pytest.approx(8.163, abs=0.001)
    known = census[census["expected"].notna()]
    assert (known["expected"] == known["counted"]).all()
    assert len(known) == 8


def test_one_capture_again_keeps_the_tables_of_the_others(run, dp, cpu):
    for name, source in (("dp", dp), ("cpu", cpu)):
        shutil.copytree(source, run.path / "captures" / name)
    execute(run=str(run.path), capture="dp", config="none")
    execute(run=str(run.path), capture="cpu", config="none")
    before = run.table("steps")
    execute(run=str(run.path), capture="cpu", config="none")
    assert set(before["capture"]) == {"dp", "cpu"}
    assert len(run.table("steps")) == len(before)


def test_cpu_operators_by_path(run, cpu):
    names = execute(run=str(run.path), capture=str(cpu), config="none")
    assert names["results"]["cpu-tp2"]["capture"]["note"] == "CPU operators, self time"
    assert set(run.table("kernels")["name"].str.split("::").str[0]) == {"aten", "vllm", "_C"}


def test_a_path_and_no_run_leaves_the_newest_run_as_it_was(run, cpu, tmp_path):
    run.save("steps", [{"capture": "c1", "rank": 0}])
    shutil.copytree(cpu, tmp_path / "other" / "c1")
    names = execute(capture=str(tmp_path / "other" / "c1"))
    assert run.tables() == ["steps"]
    assert run.table("steps").to_dict("records") == [{"capture": "c1", "rank": 0}]
    made = names["chosen"].run
    assert set(made.table("steps")["capture"]) == {"c1"}
    assert made.table("census")["expected"].isna().all()  # not by the newest run's config.json and tp


def test_text_tables_only(run, c64, tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    shutil.copy(c64 / "profiler_out_0.txt", folder)
    execute(run=str(run.path), capture=str(folder))
    assert len(run.table("steps")) == 0


def test_no_capture_says_what_to_do(run):
    with pytest.raises(UsageError, match="05_profiler_capture"):
        execute(run=str(run.path))


@pytest.fixture(scope="module")
def result(c64):
    return breakdown([c64])


def frame(result, key):
    rows = pd.DataFrame(result[key]).assign(capture="c64")
    return rows[rows["batch"] == "all"] if "batch" in rows else rows


def test_the_step_figure_shows_kernels_and_wall_time(result):
    steps, categories = frame(result, "per_step"), frame(result, "categories")
    figure = figures.step(categories, steps)
    total = {}
    for bar in figure.data:
        for name, ms in zip(bar.y, bar.x, strict=True):
            total[name] = total.get(name, 0) + ms
    row = steps[steps["rank"] == 0].iloc[0]
    assert total["c64, rank 0: kernels"] == pytest.approx(row["kernel_sum_ms"])
    wall = row["busy_ms"] + row["idle_in_graph_ms"] + row["idle_in_step_ms"] + row["idle_between_ms"]
    assert total["c64, rank 0: wall"] == pytest.approx(wall)


def test_the_lanes_hold_every_kernel(c1):
    rows = pd.DataFrame(lanes([c1], 5)).assign(capture="c1")
    figure = figures.lanes(rows)
    assert sum(len(bar.x) for bar in figure.data) == len(rows)
    assert sum(sum(bar.x) for bar in figure.data) == pytest.approx(rows["dur_us"].sum())
    names = list(dict.fromkeys(name for bar in figure.data for name in bar.y))
    assert len(names) == 10
    assert "rank 0, 116 other streams" in names


def test_kernels_and_skew_figures(result):
    kernels = frame(result, "kernels").query("rank == 0")
    bars = figures.kernels(kernels, 12).data
    assert sum(len(bar.x) for bar in bars) == 12
    assert max(max(bar.x) for bar in bars) == kernels["ms"].max()
    skew = frame(result, "skew")
    bars = {bar.name: sum(bar.x) for bar in figures.skew(skew).data}
    assert bars["transfer"] + bars["waiting for other ranks"] == pytest.approx(skew["ms"].sum())


def test_eight_ranks_stay_on_one_screen():
    at = [{"capture": c, "rank": rank} for c in ("c1", "c64") for rank in range(8)]
    idle = dict.fromkeys(("idle_in_graph_ms", "idle_in_step_ms", "idle_between_ms"), 0.1)
    steps = pd.DataFrame([row | idle | {"kernel_sum_ms": 9.0 - abs(row["rank"] - 3), "busy_ms": 8.0} for row in at])
    categories = pd.DataFrame([row | {"category": "gemm", "ms": 3.0} for row in at])
    step = figures.step(categories, steps)
    assert set(step.data[0].y) == {f"{c}, rank {rank}: kernels" for c in ("c1", "c64") for rank in (0, 3, 7)}
    kernel = {"start_us": 0.0, "dur_us": 1.0, "name": "k", "category": "gemm"}
    streams = pd.DataFrame([row | kernel | {"stream": s} for row in at for s in range(20)])
    lanes_of = figures.lanes(streams)
    assert len({name for bar in lanes_of.data for name in bar.y}) == 16
    waits = pd.DataFrame(
        [
            row | {"op": op, "ms": ms, "transfer_ms": ms, "wait_ms": 0.0}
            for row in at
            for op, ms in (("allreduce", 1.0), ("allgather", 0.01))
        ]
    )
    skew = figures.skew(waits)
    assert len(skew.data[0].y) == 16
    assert max(figure.layout.height for figure in (step, lanes_of, skew)) < 800


def test_figures_of_nothing_say_so():
    empty = pd.DataFrame()
    for figure in (
        figures.step(empty, empty),
        figures.groupings(empty, {}),
        figures.lanes(empty),
        figures.kernels(empty),
        figures.skew(empty),
    ):
        assert "nothing to show" in figure.layout.annotations[0].text
