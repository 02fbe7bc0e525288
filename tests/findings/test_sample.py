"""Findings of the sample capture: the tables as the trace engine makes them."""

from pathlib import Path

import pytest

from k25lib.findings.summary import summarise
from k25lib.run import Run
from k25lib.trace.breakdown import breakdown, expected_calls, tables

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "data/reference/kimi-k2.5/config.json")
# One rank of TP=8 on each of two H200s
OVERRIDES = {"num_attention_heads": 16, "moe_intermediate_size": 512, "intermediate_size": 4608}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    run = Run.create(
        "sample",
        tmp_path_factory.mktemp("runs"),
        server={"kind": "external", "model": "kimi-k2.5-int4", "tp": 2, "config": CONFIG},
        environment={"gpus": [{"name": "NVIDIA H200"}] * 2, "flags": {"hf_overrides": OVERRIDES}},
        macro={"settings": {"input_tokens": 128, "output_tokens": 64}},
        captures={"c1": {"concurrency": 1}},
    )
    result = breakdown([ROOT / "data/sample/captures/h200x2-tp2-c1-20steps"])
    result["census"] = [
        {**row, "expected": expected_calls(result, CONFIG, 2, OVERRIDES).get(row["operation"])}
        for row in result["census"]
    ]
    for name, rows in tables(result, "c1").items():
        run.save(name, rows)
    run.save("levels", [{"concurrency": 1, "tpot_ms_mean": 8.64, "output_tok_s": 112.7}])
    return summarise(run)


def test_the_step_closes_from_the_bound_to_tpot(found):
    parts = {row["part"]: row["ms"] for row in found["closure"]}
    assert sum(row["ms"] for row in found["closure"][:-1]) == pytest.approx(8.64)
    assert parts["bandwidth bound"] == pytest.approx(1.442, abs=1e-3)
    assert parts["GEMMs above reading the weights"] == pytest.approx(2.96, rel=0.03)
    assert parts["communication: transfer"] == pytest.approx(0.86, rel=0.1)
    assert abs(parts["not in the trace (profiler, other steps)"]) < 0.05 * 8.64


def test_nothing_contradicts_and_the_census_holds(found):
    assert found["contradictions"] == []


def test_what_dominates(found):
    assert found["sentences"][1].startswith("GEMM dominates the decode step: 2.9")
    assert "DRAM efficiency is 16.7 %" in found["basis"]
    assert [row["category"] for row in found["next"]][:3] == ["gemm", "moe_gemm", "allreduce_nccl"]


@pytest.fixture(scope="module")
def campaign():
    return summarise(Run.find(ROOT / "data/sample/run-h200x2"))


def test_client_trace_and_microbenchmarks_of_the_sample_campaign_agree(campaign):
    parts = {row["part"]: row["ms"] for row in campaign["closure"]}
    assert parts["measured TPOT"] == pytest.approx(8.525, abs=1e-3)
    assert parts["the profiler's own cost"] == pytest.approx(-0.253, abs=1e-3)
    assert abs(parts["not in the trace (other steps)"]) < 0.01 * 8.525
    gemms, allreduces = campaign["micro"][:2]
    assert gemms["micro_ms"] == pytest.approx(gemms["trace_ms"], rel=0.03)
    assert allreduces["micro_ms"] == pytest.approx(allreduces["trace_ms"], rel=0.08)
    assert campaign["contradictions"] == []


def test_the_sample_campaign_says_which_allreduce_would_help(campaign):
    best = next(row for row in campaign["whatif"] if row["change"].startswith("AllReduce by"))
    assert "custom" in best["change"]
    assert (best["low_ms"], best["high_ms"]) == (pytest.approx(0.354, abs=2e-3), pytest.approx(0.452, abs=2e-3))
    assert any("NCCL_GRAPH_MIXING_SUPPORT=0" in row["change"] for row in campaign["whatif"])
