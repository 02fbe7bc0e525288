"""What-if: the reference's figures, and that every change is an honest range."""

import itertools
from pathlib import Path

import pytest

from k25lib.findings import whatif
from k25lib.model import load_model

KIMI = load_model(Path(__file__).parents[2] / "data/reference/kimi-k2.5")
PRICES = {"in place": 78, "in a burst": 6810 / 122}


@pytest.fixture(scope="module")
def experts():
    return whatif.expert_parallel(KIMI, 8, 1, PRICES, 19, 1792, 12.1)


def test_expert_parallelism_of_the_reference(experts):
    savings = [round(case["saving_ms"], 2) for case in experts["cases"]]
    plain, uneven, replicated = savings[0:12:3], savings[1:12:3], savings[2:12:3]
    assert plain == [3.54, 2.40, 2.21, 1.07]
    assert uneven == [2.23, 1.09, 0.90, -0.24]
    assert all(saving < 0 for saving in replicated)
    assert savings[12] == -1.31
    assert "as vLLM runs it without data parallelism" in experts["cases"][12]["assumes"]


def test_the_range_holds_every_case_and_its_share_of_tpot(experts):
    assert experts["high_ms"] == pytest.approx(3.54)
    assert round(experts["high_percent"], 0) == 29
    assert experts["low_ms"] == min(case["saving_ms"] for case in experts["cases"])
    assert experts["assumes"].startswith("at best: AllReduce priced in place (78 us), one all-to-all")


def test_replicated_attention_costs_five_milliseconds():
    assert round(whatif.replicated_attention_ms(KIMI, 8, 1, 1792), 1) == 5.1


# Exact at M=1; the others against a simulation that was good to 1-2 %.
@pytest.mark.parametrize(
    ("tokens", "slowest", "extra_ms"),
    [(1, 2.575, 1.31), (2, 4.12, 1.78), (4, 6.72, 2.36), (8, 11.14, 3.07), (16, 18.31, 3.80), (64, 39.63, 3.45)],
)
def test_experts_of_the_slowest_rank(tokens, slowest, extra_ms):
    assert whatif.slowest_rank_experts(384, 8, tokens, 8) == pytest.approx(slowest, rel=1e-4 if tokens == 1 else 0.01)
    assert whatif.imbalance_ms(KIMI, 8, tokens, 1792) == pytest.approx(extra_ms, abs=0.05)


def test_slowest_rank_against_every_possible_draw():
    experts, per_token, ranks = 6, 2, 3
    picks = list(itertools.combinations(range(experts), per_token))
    total = 0
    for draws in itertools.product(picks, repeat=2):
        touched = set().union(*draws)
        total += max(sum(e // 2 == rank for e in touched) for rank in range(ranks))
    assert whatif.slowest_rank_experts(experts, per_token, 2, ranks) == pytest.approx(total / len(picks) ** 2)


def test_touched_experts_have_the_expected_mean():
    probability = whatif.distinct_experts(384, 8, 16)
    assert probability.sum() == pytest.approx(1)
    mean = sum(u * p for u, p in enumerate(probability))
    assert mean == pytest.approx(KIMI.step(tp=8, batch=16).touched_experts)


def test_another_allreduce_saves_transfer_at_least_and_waiting_at_most():
    prices = {"tree": {"burst": 12.0}, "custom": {"burst": 4.0}}
    found = whatif.other_allreduces(122, 7.82, prices, 8.64, transfer_us=5.0)
    assert [row["change"] for row in found] == ["AllReduce by custom", "AllReduce by tree"]
    assert (found[0]["low_ms"], found[0]["high_ms"]) == pytest.approx((0.122, 0.46604))
    assert found[1]["high_ms"] < 0


def test_all_measurements_of_one_way_make_its_range_and_are_named():
    prices = {"nccl graph": {"burst, nccl graph, 122 calls": 16.6, "sizes, nccl graph, 20 calls": 7.7}}
    (found,) = whatif.other_allreduces(123, 7.9, prices, 8.55)
    assert (found["low_ms"], found["high_ms"]) == pytest.approx((123 * -8.7e-3, 123 * 0.2e-3))
    assert found["assumes"] == (
        "at best: 7.7 us (sizes, nccl graph, 20 calls) against the whole call of the trace (7.9 us); "
        "at worst: 16.6 us (burst, nccl graph, 122 calls) against the whole call of the trace (7.9 us)"
    )


def test_a_faster_link_leaves_the_latency():
    found = whatif.faster_link(122, 50, 10, 2, 12.1)
    assert (found["low_ms"], found["high_ms"]) == pytest.approx((0.61, 3.05))


def test_casts_save_between_exposed_and_all():
    found = whatif.no_casts(6.9, 5.0, 10.0)
    assert (found["low_percent"], found["high_percent"]) == pytest.approx((50, 69))


def test_speculation_without_acceptance_only_costs():
    found = whatif.speculative(KIMI, 8, 1, 0, 1792, 12.1, drafts=3, acceptance=(0.0,), draft_share=(0.0,))
    extra = KIMI.step(tp=8, batch=4).weight_bytes - KIMI.step(tp=8).weight_bytes
    assert found["high_ms"] == pytest.approx(-extra / 1.792e9)


def test_speculation_with_full_acceptance_divides_the_verified_step():
    found = whatif.speculative(KIMI, 8, 1, 0, 1792, 12.1, drafts=1, acceptance=(1.0,), draft_share=(0.0,))
    extra = (KIMI.step(tp=8, batch=2).weight_bytes - KIMI.step(tp=8).weight_bytes) / 1.792e9
    assert found["high_ms"] == pytest.approx(12.1 - (12.1 + extra) / 2)


def test_other_tensor_parallel_sizes():
    found = {row["change"]: row for row in whatif.other_tp(KIMI, 8, 1, 0, 1792, 12.1, 55.8)}
    assert list(found) == [
        "tensor parallel 1 (1 GPU a replica)",
        *(f"tensor parallel {t} ({t} GPUs a replica)" for t in (2, 4, 16, 32)),
    ]
    assert found["tensor parallel 16 (16 GPUs a replica)"]["low_ms"] == pytest.approx(
        (6.0301 - 4.1047) / 1.792, abs=1e-3
    )
    assert found["tensor parallel 4 (4 GPUs a replica)"]["high_ms"] < 0


def test_the_masked_bottleneck():
    rows = whatif.next_bottlenecks({"dtype_cast": 69.0, "allreduce": 16.0, "gemm": 15.0})
    assert [row["category"] for row in rows] == ["dtype_cast", "allreduce", "gemm"]
    assert rows[1]["percent"] == 16
    assert rows[1]["percent_without_those_before"] == pytest.approx(51.6, abs=0.1)
