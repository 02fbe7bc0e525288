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
STEPS = [
    {"step": step, "category": category, "ms": ms, "wall_ms": 12.0}
    for step in ("before", "now")
    for category, ms in {"idle": 9.0, "gemm<int>": 2.0, "allreduce": 5.0}.items()
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
    *ranges, numbers = figure.data
    assert [tuple(trace.x) for trace in ranges] == [(0.0, 0.0), (-0.24, 3.54)]
    assert list(numbers.text) == ["+0.00 to +0.00", "-0.24 to +3.54"]
    assert min(numbers.x) > 3.54
    low, high = figure.layout.xaxis.range
    assert low < -0.24
    assert high > 3.54


@pytest.mark.parametrize("found", [{}, {"closure": [], "whatif": []}, {"closure": [{"note": "none"}]}])
def test_nothing_to_show_is_no_figure(bare_run, found):
    assert first_page.figures(bare_run, found) == []


def test_steps_have_idle_last_and_their_wall_time():
    *bars, wall, text = summary.step_by_category(pd.DataFrame(STEPS)).data
    assert [bar.name for bar in bars] == ["allreduce", "gemm<int>", "idle"]
    assert list(bars[0].y) == ["before", "now"]
    assert (list(wall.x), list(text.x), list(text.text)) == ([12.0, 12.0], [16.0, 16.0], ["  12.00 ms"] * 2)


def test_lanes_are_of_the_lowest_rank_of_the_capture_that_the_findings_are_of(bare_run):
    at = {"stream": 7, "start_us": 0.0, "dur_us": 2.0, "name": "k", "category": "gemm"}
    bare_run.save("lanes", [{"capture": c, "rank": rank, **at} for c in ("c1", "c64") for rank in (0, 1)])
    (figure,) = first_page.figures(bare_run, {"capture": "c64"})
    assert figure["layout"]["title"]["text"] == "One decode step of c64, stream by stream"
    assert [trace["y"] for trace in figure["data"]] == [["rank 0, stream 7"]]


def test_a_table_that_cannot_be_drawn_is_told_and_the_others_are_drawn(bare_run, capsys):
    bare_run.save("lanes", [{"capture": "c1", "part": "gemm", "ms": 1.0}])
    made = first_page.figures(bare_run, {"closure": CLOSURE, "capture": "c1"})
    assert [figure["layout"]["title"]["text"] for figure in made] == [
        "Where the time of a token goes: from bandwidth bound to measured TPOT"
    ]
    assert "no lanes figure: KeyError: 'rank'" in capsys.readouterr().err


def test_history_without_intervals_has_no_bars():
    rows = pd.DataFrame(
        {"run": ["a", "b"], "value": [12.1, 11.9], "low": [None, 11.7], "high": [None, 12.2], "changed": ["", "x"]}
    )
    bars = summary.history(rows, "TPOT over the runs", "ms", band=(11.0, 13.0)).data[0].error_y
    assert [round(value, 3) for value in bars.array] == [0.0, 0.3]
