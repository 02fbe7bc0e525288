"""The first page's figures: what they draw is what the tables say."""

import pandas as pd
import pytest

from k25lib.report import first_page
from k25lib.report.figures import summary

CLOSURE = [
    {"part": "bandwidth bound", "ms": 3.365, "kind": "total", "from": "model"},
    {"part": "communication: waiting for other ranks", "ms": 6.0, "kind": "part", "from": "trace"},
    {"part": "kernels that overlap", "ms": -1.0, "kind": "part", "from": "trace"},
    {"part": "not in the trace", "ms": 3.735, "kind": "remainder", "from": "client less trace"},
    {"part": "measured TPOT", "ms": 12.1, "kind": "total", "from": "client"},
]
WHATIF = [
    {"change": "expert parallelism", "low_ms": -0.24, "high_ms": 3.54},
    {"change": "no dtype casts", "low_ms": 0.0, "high_ms": 0.0},
]
BREAKDOWN = [
    {"capture": capture, "rank": rank, "batch": batch, "group": group, "category": category, "ms": ms}
    for capture in ("c1", "c64")
    for rank in (0, 1)
    for batch in ("1", "all")
    for group, parts in (("fine", {"gemm<int>": 2.0, "allreduce": 5.0}), ("role", {"AllReduce": 7.0}))
    for category, ms in parts.items()
]


def test_waterfall_starts_at_the_bound_and_ends_at_the_measurement():
    bars = summary.waterfall(pd.DataFrame(CLOSURE)).data[0]
    assert list(bars.measure) == ["absolute", "relative", "relative", "relative", "total"]
    assert list(bars.text) == ["3.37", "+6.00", "-1.00", "+3.73", "12.10"]
    assert bars.y[1] == "communication: waiting for<br>other ranks"


def test_waterfall_without_a_bound_starts_at_zero():
    bars = summary.waterfall(pd.DataFrame(CLOSURE[1:])).data[0]
    assert list(bars.measure) == ["relative", "relative", "relative", "total"]


def test_whatif_has_zero_in_view_and_the_best_on_top():
    figure = summary.whatif(pd.DataFrame(WHATIF))
    assert [tuple(trace.x) for trace in figure.data] == [(0.0, 0.0), (-0.24, 3.54)]
    low, high = figure.layout.xaxis.range
    assert low < -0.24
    assert high > 3.54


def test_step_by_category_takes_one_rank_one_grouping_and_all_batches(bare_run):
    bare_run.save("breakdown", BREAKDOWN)
    (figure,) = first_page.figures(bare_run, {})
    bars = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    assert list(bars) == ["allreduce", "gemm<int>"]
    assert bars["allreduce"]["y"] == ["c1", "c64"]
    assert [trace["text"] for trace in figure["data"] if trace["type"] == "scatter"] == [[" 7.00 ms", " 7.00 ms"]]


@pytest.mark.parametrize("found", [{}, {"closure": [], "whatif": []}, {"closure": [{"note": "none"}]}])
def test_nothing_to_show_is_no_figure(bare_run, found):
    assert first_page.figures(bare_run, found) == []


def test_runs_beside_each_other_have_idle_last(bare_run):
    found = {
        "steps_by_run": [
            {"step": run, "category": category, "ms": ms}
            for run in ("before", "now")
            for category, ms in {"idle": 9.0, "gemm": 2.0, "allreduce": 5.0}.items()
        ]
    }
    bare_run.save("breakdown", BREAKDOWN)
    (figure,) = first_page.figures(bare_run, found)
    assert [trace["name"] for trace in figure["data"] if trace["type"] == "bar"] == ["allreduce", "gemm", "idle"]
    assert figure["data"][0]["y"] == ["before", "now"]


def test_a_table_that_cannot_be_drawn_is_told_and_the_others_are_drawn(bare_run, capsys):
    bare_run.save("breakdown", [{"capture": "c1", "part": "gemm", "ms": 1.0}])
    made = first_page.figures(bare_run, {"closure": CLOSURE})
    assert [figure["layout"]["title"]["text"][:15] for figure in made] == ["Where TPOT goes"]
    assert "no steps figure: KeyError: 'category'" in capsys.readouterr().err


def test_history_without_intervals_has_no_bars():
    rows = pd.DataFrame(
        {"run": ["a", "b"], "value": [12.1, 11.9], "low": [None, 11.7], "high": [None, 12.2], "changed": ["", "x"]}
    )
    bars = summary.history(rows, "TPOT over the runs", "ms", band=(11.0, 13.0)).data[0].error_y
    assert [round(value, 3) for value in bars.array] == [0.0, 0.3]
