"""Kimi-K2.5's published dimensions, to the digit."""

from pathlib import Path

import pytest

from k25lib.model import load_model

CONFIG = Path(__file__).parents[2] / "data/reference/kimi-k2.5/config.json"

# name: N, K, matrices, calls a step, MB a call, MB a step, sharding (TP=8, M=1)
GEMMS = {
    "fused_qkv_a_proj": (2112, 7168, 1, 61, 30.278, 1846.9, "replicated"),
    "q_b_proj": (1536, 1536, 1, 61, 4.719, 287.8, "column"),
    "W_UK_T bmm": (512, 128, 8, 61, 1.049, 64.0, "heads"),
    "W_UV bmm": (128, 512, 8, 61, 1.049, 64.0, "heads"),
    "o_proj": (7168, 1024, 1, 61, 14.680, 895.5, "row"),
    "dense gate_up": (4608, 7168, 1, 1, 66.060, 66.1, "column"),
    "dense down": (7168, 2304, 1, 1, 33.030, 33.0, "row"),
    "router gate": (384, 7168, 1, 60, 5.505, 330.3, "replicated"),
    "shared gate_up": (512, 7168, 1, 60, 7.340, 440.4, "column"),
    "shared down": (7168, 256, 1, 60, 3.670, 220.2, "row"),
    "routed gate_up": (512, 7168, 8, 60, 16.515, 990.9, "column"),
    "routed down": (7168, 256, 8, 60, 8.258, 495.5, "row"),
    "lm_head": (20480, 7168, 1, 1, 293.601, 293.6, "vocab"),
}
# M: touched experts a layer, routed GB, total GB a rank, ideal ms at 1.792 and at 1.597 TB/s
BATCHES = {
    1: (8.0, 1.486, 6.030, 3.37, 3.78),
    2: (15.8, 2.942, 7.486, 4.18, 4.69),
    4: (31.0, 5.762, 10.306, 5.75, 6.45),
    8: (59.5, 11.059, 15.603, 8.71, 9.77),
    16: (109.8, 20.404, 24.948, 13.92, 15.62),
    32: (188.2, 34.972, 39.516, 22.05, 24.74),
    64: (284.2, 52.802, 57.346, 32.00, 35.91),
    128: (358.1, 66.526, 71.069, 39.66, 44.50),
    256: (382.2, 71.020, 75.563, 42.17, 47.32),
}


@pytest.fixture(scope="module")
def kimi():
    return load_model(CONFIG)


@pytest.mark.parametrize("name", GEMMS)
def test_gemm_of_one_rank(kimi, name):
    gemm = {g["name"]: g for g in kimi.step(tp=8).gemms}[name]
    n, k, matrices, calls, mb_call, mb_step, sharding = GEMMS[name]
    assert (gemm["n"], gemm["k"], gemm["matrices"], gemm["calls_per_step"]) == (n, k, matrices, calls)
    assert round(gemm["bytes_per_call"] / 1e6, 3) == mb_call
    assert round(gemm["bytes_per_step"] / 1e6, 1) == mb_step
    assert gemm["sharding"] == sharding
    routed = name.startswith("routed")
    assert (gemm["dtype"], gemm["group_size"]) == (("int4", 32) if routed else ("bf16", None))
    assert gemm["category"] == ("moe_gemm" if routed else "gemm")


def test_no_gemm_is_missing_and_the_sum_closes(kimi):
    step = kimi.step(tp=8)
    assert {g["name"] for g in step.gemms} == set(GEMMS)
    assert round(sum(g["bytes_per_step"] for g in step.gemms) / 1e6, 1) == 6028.1
    assert round(step.norm_bytes / 1e6, 1) == 2.0
    assert round(step.weight_bytes / 1e9, 3) == 6.030
    assert round(step.ideal_ms(1792), 3) == 3.365


@pytest.mark.parametrize("batch", BATCHES)
def test_batch_sweep(kimi, batch):
    step = kimi.step(tp=8, batch=batch)
    touched, routed_gb, total_gb, ideal, slower = BATCHES[batch]
    assert round(step.touched_experts, 1) == touched
    routed = sum(g["bytes_per_step"] for g in step.gemms if g["category"] == "moe_gemm")
    assert round(routed / 1e9, 3) == routed_gb
    assert round(step.weight_bytes / 1e9, 3) == total_gb
    assert (round(step.ideal_ms(1792), 2), round(step.ideal_ms(1597), 2)) == (ideal, slower)


@pytest.mark.parametrize(("tp", "rank_gb"), [(1, 32.99), (2, 17.58), (4, 9.88), (8, 6.03), (16, 4.10)])
def test_tensor_parallel_sweep(kimi, tp, rank_gb):
    assert round(kimi.step(tp=tp).weight_bytes / 1e9, 2) == rank_gb


def test_what_is_replicated(kimi):
    step = kimi.step(tp=8)
    replicated = {g["name"]: g["bytes_per_step"] for g in step.gemms if g["sharding"] == "replicated"}
    assert {name: round(size / 1e9, 3) for name, size in replicated.items()} == {
        "fused_qkv_a_proj": 1.847,
        "router gate": 0.330,
    }
    assert round(sum(replicated.values()) / step.weight_bytes, 2) == 0.36


def test_collectives(kimi):
    step = kimi.step(tp=8)
    rows = [(c["op"], c["bytes"], c["calls_per_step"], c["in_layer"]) for c in step.collectives]
    assert rows == [
        ("allreduce", 14336, 61, True),
        ("allreduce", 14336, 1, True),
        ("allreduce", 14336, 60, True),
        ("allreduce", 14336, 1, False),
        ("allgather", 320 * 1024, 1, False),
    ]
    assert step.burst_calls == 122
    assert [kimi.step(tp=8, batch=m).collectives[0]["bytes"] / 1024 for m in (4, 16, 64, 256)] == [56, 224, 896, 3584]


def test_census(kimi):
    assert kimi.step(tp=8).census() == {"allreduce": 123, "allgather": 1, "moe_gemm": 120, "kv_cache": 61}
    assert kimi.step(tp=1).census() == {"moe_gemm": 120, "kv_cache": 61}


def test_kv_cache(kimi):
    assert kimi.step(tp=8).kv_bytes_per_token == 70272
    assert kimi.step(tp=8, kv_dtype="fp8").kv_bytes_per_token == 70272 / 2
    step = kimi.step(tp=8, batch=2, context=1000)
    assert step.kv_bytes == 2 * 1000 * 70272
    assert step.ideal_ms(1792) == pytest.approx((step.weight_bytes + step.kv_bytes) / 1.792e9)


def test_parameters(kimi):
    parameters = {name: round(count / 1e9, 2) for name, count in kimi.parameters().items()}
    assert parameters == {"total": 1026.41, "active": 31.69, "active_with_embedding": 32.86}


def test_possible_tensor_parallel_sizes(kimi):
    assert kimi.possible_tp() == [1, 2, 4, 8, 16, 32]


def test_expert_parallel_keeps_the_allreduces_and_reads_whole_experts(kimi):
    plain, spread = kimi.step(tp=8), kimi.step(tp=8, ep=True)
    assert spread.census() == plain.census()
    routed = {g["name"]: g for g in spread.gemms if g["category"] == "moe_gemm"}
    assert (routed["routed gate_up"]["n"], routed["routed down"]["k"]) == (4096, 2048)
    assert routed["routed gate_up"]["matrices"] == 1
    assert spread.weight_bytes == plain.weight_bytes  # in the mean; the slowest rank reads more


def test_data_parallel_exchanges_by_allgather_and_reducescatter():
    model = load_model(CONFIG, {"num_hidden_layers": 21})
    census = model.step(tp=1, dp=2, ep=True).census()
    assert (census["allgather"], census["reducescatter"], census.get("allreduce")) == (20, 20, None)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_shapes_at_any_tensor_parallel_size(kimi, tp):
    found = {g["name"]: (g["n"], g["k"], g["matrices"]) for g in kimi.step(tp=tp).gemms}
    assert found == {
        "fused_qkv_a_proj": (2112, 7168, 1),
        "q_b_proj": (12288 // tp, 1536, 1),
        "W_UK_T bmm": (512, 128, 64 // tp),
        "W_UV bmm": (128, 512, 64 // tp),
        "o_proj": (7168, 8192 // tp, 1),
        "dense gate_up": (36864 // tp, 7168, 1),
        "dense down": (7168, 18432 // tp, 1),
        "router gate": (384, 7168, 1),
        "shared gate_up": (4096 // tp, 7168, 1),
        "shared down": (7168, 2048 // tp, 1),
        "routed gate_up": (4096 // tp, 7168, 8),
        "routed down": (7168, 2048 // tp, 8),
        "lm_head": (163840 // tp, 7168, 1),
    }


def test_one_expert_and_the_bytes_that_nobody_replicates(kimi):
    gate_up = next(g for g in kimi.step(tp=8).gemms if g["name"] == "routed gate_up")
    assert round(gate_up["bytes_per_call"] / 8 / 1e6, 3) == 2.064
    assert gate_up["bytes_per_call"] / 8 / (512 * 7168) == 0.5625
    whole = kimi.step(tp=1).weight_bytes
    assert round(100 * whole / 8 / 1.792e9 / 12.1, 1) == 19.0
