"""Figures of notebook 02: what they show of known tables, and that empty tables give empty figures."""

import pandas as pd
import pytest

from k25lib.report.figures import macro

LEVELS = pd.DataFrame(
    {
        "concurrency": [4, 1, 8],
        "rate": [None] * 3,
        "output_tok_s": [300.0, 100.0, None],
        "output_tok_s_low": [290.0, None, None],
        "output_tok_s_high": [320.0, None, None],
        "tpot_ms_mean": [12.0, 10.0, None],
        "tpot_ms_low": [11.0, 9.5, None],
        "tpot_ms_high": [14.0, 10.5, None],
        "tok_s_per_user": [83.3, 100.0, None],
        "tok_s_per_gpu": [150.0, 50.0, None],
        "in_flight_mean": [3.0, 1.0, None],
        "client_cpu_share": [0.02, 0.01, None],
        "client_lag_ms_p99": [0.2, 0.1, None],
        "client_limited": [True, False, False],
        "void": [False] * 3,
    }
)


def test_throughput_is_in_order_and_marks_what_is_not_usable():
    rate, tpot = macro.throughput(LEVELS).data
    assert (list(rate.x), list(rate.y)) == (["C=1", "C=4"], [100, 300])  # the level without a figure is left out
    assert list(rate.marker.symbol) == ["circle", "circle-open"]
    assert rate.error_y.array[1] == 20 and rate.error_y.arrayminus[1] == 10
    assert list(tpot.error_y.array) == [0.5, 2] and list(tpot.error_y.arrayminus) == [0.5, 1]
    assert "not usable" in macro.throughput(LEVELS).layout.title.text


def test_pareto_is_per_gpu_where_their_number_is_known():
    figure = macro.pareto(LEVELS)
    assert list(figure.data[0].text) == ["C=1", "C=4"] and list(figure.data[0].y) == [50, 150]
    assert "per GPU" in figure.layout.yaxis.title.text
    unknown = macro.pareto(LEVELS.assign(tok_s_per_gpu=None))
    assert list(unknown.data[0].y) == [100, 300] and "of the server" in unknown.layout.yaxis.title.text


def test_client_state_is_a_share_of_what_was_asked():
    assert list(macro.client_state(LEVELS).data[0].y) == [100, 75]


def test_distributions_hold_measured_requests_only():
    rows = [("measured", True, 10.0), ("measured", True, 20.0), ("warmup", True, 900.0), ("measured", False, None)]
    requests = pd.DataFrame(rows, columns=["phase", "ok", "ttft_ms"]).assign(concurrency=2, rate=None)
    (line,) = macro.ttft_distribution(requests).data
    assert (line.name, line.x[0], line.x[-1]) == ("C=2", 10, 20)


def test_itl_is_per_token():
    rows = [("a", 0, 50.0, 1.0), ("a", 1, 98.0, 4.0), ("b", 0, 500.0, 1.0), ("b", 1, 510.0, 1.0)]
    chunks = pd.DataFrame(rows, columns=["request", "chunk", "time_ms", "tokens"])
    (line,) = macro.itl_distribution(chunks.assign(concurrency=1, rate=None, repeat=0, phase="measured")).data
    assert (line.x[0], line.x[-1]) == (10, 12)
    assert line.x[len(line.x) // 4] == 12  # four of five tokens came every 12 ms


@pytest.mark.parametrize("name", ["throughput", "pareto", "ttft_distribution", "itl_distribution", "client_state"])
def test_an_empty_table_is_an_empty_figure(name):
    assert len(getattr(macro, name)(pd.DataFrame()).data) == 0
