"""Waterfall, impossible sums, and the review of the reference campaign."""

import tomllib
from pathlib import Path

import pytest

from k25lib import hardware
from k25lib.findings.closure import contradictions, prefill_counted, review, waterfall
from k25lib.findings.efficiency import dram_efficiency, inputs_for
from k25lib.model import load_model

REFERENCE = Path(__file__).parents[2] / "data/reference"
STEP = {"kernel_sum_ms": 8.1, "busy_ms": 7.4, "span_ms": 8.68, "interval_ms": 8.72}
CATEGORIES = {"allreduce_nccl": 0.96, "gemm": 2.6, "moe_gemm": 1.4, "attention": 0.9, "norm": 2.24}


@pytest.fixture(scope="module")
def kimi():
    return load_model(REFERENCE / "kimi-k2.5")


@pytest.fixture(scope="module")
def published():
    return tomllib.loads((REFERENCE / "rtx-pro-6000-kimi-k2.5.toml").read_text())


def test_the_reference_campaign_is_reviewed_in_order(kimi, published):
    rows = review(published, kimi, 1792)
    assert [row["finding"] for row in rows] == [
        "prefill counted as decode",
        "an operator row added to its kernels",
        "parts that do not sum",
        "communication leaves no room for the weights",
    ]
    prefill, operator, parts, room = rows
    assert "127 calls a step = 123 x 160 / 155 (126.97)" in prefill["detail"]
    assert (
        "at the burst price of 55.8 us for a decode call, prefill calls of 766 us explain 78 us" in prefill["follows"]
    )
    assert "vllm::all_reduce (1.16 ms)" in operator["detail"]
    assert "between 9.88 and 11.17 ms" in operator["follows"]
    assert "9.88 + 1.16 = 11.04 (calls x us: 11.03), published as 11.17 ms" in parts["detail"]
    assert "by operation sums to 21.68, not 21.7" in parts["detail"]
    assert "122 x 78 us = 9.52 ms of 12.1 ms leaves 2.58 ms, less than the 3.37 ms" in room["detail"]
    assert "the other 5.29 ms run at 64 % of the peak bandwidth" in room["follows"]


def test_a_campaign_that_closes_has_nothing_to_review(kimi, published):
    sound = {
        "campaign": published["campaign"],
        "headline": {"tpot_ms": 12.1},
        "capture": {"decode_steps": 155, "prefill_steps": 5},
        "allreduce": [{"name": "nccl", "kind": "kernel", "calls_per_step": 123, "us": 40, "ms": 4.92}],
    }
    assert review(sound, kimi, 1792) == []


@pytest.mark.parametrize(("counted", "found"), [(127, True), (126.97, True), (123, False), (140, False)])
def test_prefill_gives_itself_away(counted, found):
    assert bool(prefill_counted(counted, 123, 155, 5)) == found


@pytest.mark.parametrize("bound", [None, 1.26])
@pytest.mark.parametrize("waiting", [None, 0.7])
@pytest.mark.parametrize("interval", [None, 8.72])
def test_the_waterfall_adds_up_to_the_tpot(bound, waiting, interval):
    rows = waterfall(8.64, {**STEP, "interval_ms": interval}, CATEGORIES, bound, 0.01, waiting)
    assert rows[-1] == {"part": "measured TPOT", "ms": 8.64, "kind": "total", "from": "client"}
    assert sum(row["ms"] for row in rows[:-1]) == pytest.approx(8.64)
    assert rows[-2]["kind"] == "remainder"
    assert rows[-2]["ms"] == pytest.approx(8.64 - (interval or 8.68))
    assert (rows[0]["part"] == "bandwidth bound") == (bound is not None)


def test_the_profilers_cost_is_a_part_of_its_own():
    rows = {row["part"]: row["ms"] for row in waterfall(8.64, STEP, CATEGORIES, 1.26, profiler_ms=0.25)}
    assert rows["the profiler's own cost"] == -0.25
    assert rows["not in the trace (other steps)"] == pytest.approx(8.64 - 8.72 + 0.25)


def test_a_sound_run_has_no_contradiction():
    assert contradictions(8.64, STEP, CATEGORIES, 1.26, 0.0) == []


@pytest.mark.parametrize(
    ("tpot_ms", "step", "categories", "bound", "finding"),
    [
        (8.64, {}, {"gemm": 4.0}, 1.26, "parts that do not sum"),
        (8.64, {"busy_ms": 9.0}, {}, 1.26, "busy longer than the step"),
        (7.0, {}, {}, 1.26, "the profiler slows the step"),
        (8.64, {}, {}, 9.0, "faster than its memory"),
        (8.64, {"kernel_sum_ms": 14.64}, {"allreduce_nccl": 7.5}, 1.26, "communication leaves no room for the weights"),
        (8.64, {}, {}, 4.5, "GEMMs below their bound"),
    ],
)
def test_impossible_sums_are_flagged(tpot_ms, step, categories, bound, finding):
    found = contradictions(tpot_ms, {**STEP, **step}, {**CATEGORIES, **categories}, bound)
    assert finding in [row["finding"] for row in found]


def test_dram_efficiency_of_the_reference_campaign_says_its_inputs(kimi):
    found = dram_efficiency(kimi.step(tp=8), 12.1, hardware.find("RTX PRO 6000"))
    assert round(found["percent"], 1) == 27.8
    assert "6.030 GB a step and rank (0 tokens of context) at 1.792 TB/s" in found["text"]
    assert found["percent_of_achievable"] is None


def test_which_inputs_give_the_published_efficiency(kimi):
    rows = inputs_for(31.8, 12.1, kimi.step(tp=8), [1597, 1792], {"the embedding shard": 163840 // 8 * 7168 * 2})
    assert [round(row["dram_gb_s"]) for row in rows] == [1567, 1597, 1792, 1792]
    assert [round(row["context_bf16"]) for row in rows] == [0, 1634, 12311, 8133]
    assert [round(row["context_fp8"], -2) for row in rows[2:]] == [24600, 16300]
    for row in rows:  # each does give it
        assert row["bytes"] / row["dram_gb_s"] / 1e6 / 12.1 == pytest.approx(0.318)


def test_beside_an_achievable_bandwidth(kimi):
    found = dram_efficiency(kimi.step(tp=8), 12.1, hardware.find("RTX PRO 6000"), achievable_gb_s=1567)
    assert round(found["percent_of_achievable"], 1) == 31.8
