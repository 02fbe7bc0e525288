"""The figures of both tables show what the tables hold, and say so when they hold nothing."""

import json

import pandas as pd
import pytest

from k25lib.report.figures import collectives, gemm


def gemm_row(name, m, us, calls, category="gemm", **more):
    row = {
        "name": name,
        "m": m,
        "n": 512,
        "k": 7168,
        "dtype": "int4",
        "kernel": "marlin",
        "state": "cold",
        "batch": 8.0,
    }
    row |= {
        "status": "ok",
        "reason": "",
        "time_us_median": us,
        "time_us_iqr": us / 50,
        "bytes": 16.5e6,
        "gb_s": 16.5e3 / us,
    }
    row |= {"tflop_s": 0.1, "percent_of_peak": 50.0, "bound": "memory", "over_peak": False, "peak_gb_s": 4800.0}
    row |= {"peak_tflop_s": 989.4, "peak_source": "published", "calls_per_step": calls, "category": category}
    return row | {"ms_per_step": us * calls / 1e3, "noisy": False} | more


@pytest.fixture
def gemms():
    return pd.DataFrame(
        [
            gemm_row("routed gate_up", 1, 10.0, 60, "moe_gemm"),
            gemm_row("routed gate_up", 1, 5.0, 60, "moe_gemm", state="warm"),
            gemm_row("o_proj", 1, 5.0, 60),
            gemm_row("o_proj", 16, 6.0, 60),
            gemm_row("lm_head", 1, 1.0, 1, over_peak=True),
            {"name": "q_b_proj", "m": 1, "state": "cold", "status": "failed", "reason": "wrong result"},
        ]
    )


def test_table_shares_are_calls_times_time_of_cold_rows_below_the_peak(gemms):
    table = gemm.table(gemms, 1)
    assert table["name"].tolist() == ["routed gate_up", "o_proj"]
    assert table["ms_per_step"].tolist() == [0.6, 0.3]
    assert table["share_percent"].tolist() == pytest.approx([66.667, 33.333], abs=1e-3)


def test_a_row_above_its_peak_is_never_drawn(gemms):
    for figure in (gemm.shares(gemms, 1), gemm.roofline(gemms, 1)):
        assert "lm_head" not in json.dumps(figure.to_plotly_json(), default=str)


def test_failures_keep_their_reasons(gemms):
    assert gemm.failures(gemms)[["name", "reason"]].values.tolist() == [["q_b_proj", "wrong result"]]


def test_sum_over_the_step_stands_beside_the_trace(gemms):
    breakdown = pd.DataFrame(
        [
            {"batch": "1", "category": "moe_gemm", "ms": 1.0, "rank": 0},
            {"batch": "1", "category": "moe_gemm", "ms": 3.0, "rank": 1},
            {"batch": "all", "category": "moe_gemm", "ms": 9.0, "rank": 0},
            {"batch": "1", "category": "norm", "ms": 9.0, "rank": 0},
        ]
    )
    traced = gemm.traced(breakdown)
    assert traced.values.tolist() == [["1", "moe_gemm", 2.0]]
    routed = gemm.against_trace(gemms, traced).data[0]
    assert list(routed.y) == [0.6, 2.0]
    assert [list(part) for part in routed.x] == [["M=1", "M=1"], ["alone", "trace"]]


def call(op, size, us, **more):
    row = {"purpose": "sizes", "op": op, "bytes": size, "calls": 20, "world": 2, "backend": "nccl", "mode": "graph"}
    row |= {"status": "ok", "reason": "", "gemm": "", "environment": "{}", "comparable": True, "batch": None}
    row |= {"time_us_min": us, "time_us_median": us, "time_us_max": us, "time_us_iqr": 0.0, "skew_us": 0.0}
    return row | {"burst_ms": us * 20 / 1e3, "algbw_gb_s": 1.0, "busbw_gb_s": 1.0, "noisy": False} | more


def test_latency_has_the_fit_in_its_legend():
    figure = collectives.latency(pd.DataFrame([call("allreduce", 2**p, 7 + 2**p / 100e3) for p in range(10, 24)]))
    assert figure.data[-1].name == "AllReduce: 7.0 us + S/100 GB/s, within 0%"


def test_exchange_sets_two_all_to_alls_against_one_allreduce():
    rows = [
        call("allreduce", 14336, 8.0, batch=1.0),
        call("alltoall", 14336, 5.0, batch=1.0, purpose="expert parallel"),
        call("alltoall", 114688, 6.0, batch=1.0, purpose="expert parallel"),
        call("dispatch+combine", 114688, 12.0, batch=1.0, purpose="expert parallel"),
        call("allgather", 28672, 7.0, batch=1.0, purpose="expert parallel"),
        call("reducescatter", 28672, 9.0, batch=1.0, purpose="expert parallel"),
    ]
    (row,) = collectives.exchange(pd.DataFrame(rows)).to_dict("records")
    assert row["alltoall_us"] == 5.0
    assert row["allgather+reducescatter_us"] == 16.0
    assert row["dispatch+combine / allreduce"] == 1.5


def test_burst_stands_beside_trace_and_reference():
    frame = pd.DataFrame([call("allreduce", 14336, 7.0, purpose="burst", batch=1.0, burst_ms=0.854)])
    breakdown = pd.DataFrame(
        [{"capture": "c1", "category": "allreduce_nccl", "batch": "1", "ms": 0.962, "calls": 123.0, "rank": 0}]
    )
    known = collectives.reference({"a": {"campaign": {"name": "old"}, "burst": {"calls": 122, "ms": 6.81}}})
    figure = collectives.burst(frame, collectives.traced(breakdown), known)
    assert [list(bar.x) for bar in figure.data] == [[0.854], [0.962], [6.81]]
    assert [bar.text[0] for bar in figure.data] == ["7 us", "7.82 us", "55.8 us"]


def test_variants_are_ranked_and_named():
    rows = [
        call("allreduce", 14336, us, purpose="variant", environment=json.dumps(environment))
        for us, environment in (
            (7.0, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}),
            (20.0, {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"}),
            (7.5, {}),
            (6.5, {"NCCL_GRAPH_MIXING_SUPPORT": "0"}),
        )
    ]
    figure = collectives.variants(pd.DataFrame(rows))
    ranked = ["Tree/Simple", "default", "Ring/LL", "NCCL_GRAPH_MIXING_SUPPORT=0"]
    assert list(figure.layout.yaxis.categoryarray) == ranked


@pytest.mark.parametrize(
    "frame", [pd.DataFrame(), pd.DataFrame([{"status": "failed", "reason": "x", "op": "allreduce"}])]
)
def test_empty_tables_say_so(frame):
    for figure in (
        gemm.shares(frame, 1),
        gemm.roofline(frame, 1),
        gemm.experts(frame),
        collectives.latency(frame),
        collectives.burst(frame),
        collectives.variants(frame),
        collectives.skew(frame),
        collectives.exchange_figure(frame),
    ):
        assert len(figure.layout.annotations) == 1
    assert gemm.table(frame, 1).empty
    assert gemm.traced(pd.DataFrame()).empty
    assert collectives.traced(pd.DataFrame()) == {}
