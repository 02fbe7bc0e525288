"""The grouped GEMM, with the server's Marlin operators played by plain torch under their real schemas."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k25lib.micro import gemm, kernels, workloads

TASK = {
    "name": "routed gate_up", "m": 5, "n": 128, "k": 256, "batch": 8, "dtype": "int4", "group_size": 32,
    "state": "cold", "experts": 12, "top_k": 3, "role": "gate_up",
}  # fmt: skip
SCHEMA = (
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales,"
    " Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none,"
    " Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded,"
    " Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m,"
    " int size_n, int size_k, bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float,"
    " int thread_k, int thread_n, int blocks_per_sm) -> Tensor"
)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.sampled_from([8, 16]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_align_gives_every_token_slot_once_in_a_block_of_its_expert(m, experts, top_k, block, seed):
    torch.manual_seed(seed)
    ids = torch.rand(m, experts).topk(min(top_k, experts)).indices
    slots, blocks, length = workloads.align(ids, block, experts)
    used = slots[: length.item()]
    assert length.item() % block == 0
    assert sorted(used[used < ids.numel()].tolist()) == list(range(ids.numel()))
    assert (slots[length.item() :] == ids.numel()).all()
    flat = ids.flatten()
    for position, slot in enumerate(used.tolist()):
        if slot < ids.numel():
            assert flat[slot] == blocks[position // block]


@given(st.integers(1, 64), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_routing_keeps_top_k_distinct_experts_a_token(m, seed):
    torch.manual_seed(seed)
    for ids in workloads.route(m, 16, 4, 3, distinct=True):
        assert ids.shape == (m, 4)
        assert all(len(set(row)) == 4 for row in ids.tolist())


def test_cold_launches_take_other_experts_until_all_are_used():
    routings = workloads.route(1, 384, 8, 48, distinct=True)
    assert len(torch.cat(routings).unique()) == 384
    warm = workloads.route(1, 384, 8, 5, distinct=False)
    assert all((ids == warm[0]).all() for ids in warm)


def played(a, c, q, bias, s, a_s, g_s, z, g, p, work, slots, blocks, length, shares, block, top_k, multiply, kind, m, n,
           k, *rest):  # fmt: skip
    """What the grouped Marlin kernel computes, slot by slot, from GPTQ-packed weights."""
    assert (m, n, k) == (a.shape[0], c.shape[1], a.shape[1])
    assert rest == (True, False, True, False, -1, -1, -1)
    for position, slot in enumerate(slots[: length.item()].tolist()):
        if slot < c.shape[0]:
            dense = kernels.dequantize(q[blocks[position // block]], s[blocks[position // block]])
            row = a[slot // top_k].float() @ dense
            c[slot] = (row * shares.flatten()[slot] if multiply else row).bfloat16()
    return c


@pytest.fixture
def server(monkeypatch):
    """A vLLM whose layout functions change nothing and whose grouped kernel is `played`."""
    library = torch.library.Library("k25moe", "DEF")
    library.define(SCHEMA)
    library.impl("moe_wna16_marlin_gemm", played, "CompositeExplicitAutograd")
    library.define("gptq_marlin_repack(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits,"
                   " bool is_a_8bit) -> Tensor")  # fmt: skip
    library.impl("gptq_marlin_repack", lambda q, *rest: q.clone(), "CompositeExplicitAutograd")
    utils = types.SimpleNamespace(
        marlin_permute_scales=lambda s, size_k, size_n, group_size: s,
        marlin_make_workspace_new=lambda device, most: torch.zeros(4, dtype=torch.int32),
    )
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.quantization")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package = types.ModuleType("vllm.model_executor.layers.quantization.utils")
    package.marlin_utils = utils
    scalars = types.ModuleType("vllm.scalar_type")
    scalars.scalar_types = types.SimpleNamespace(uint4b8=types.SimpleNamespace(id=1125899906909960))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "vllm.scalar_type", scalars)
    monkeypatch.setattr(kernels, "vllm_ops", lambda: (torch.ops.k25moe, torch.ops.k25moe))
    monkeypatch.setattr(workloads, "vllm_ops", lambda: (torch.ops.k25moe, torch.ops.k25moe))
    yield
    library._destroy()


@pytest.mark.parametrize("role", ["gate_up", "down"])
@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("cache_bytes", [1000, 200_000])  # the latter needs the experts of more than one layer
def test_the_grouped_call_is_right_against_float32(server, monkeypatch, role, state, cache_bytes):
    monkeypatch.setattr(workloads, "grouped_kernel", workloads.marlin_grouped)
    torch.manual_seed(0)
    task = TASK | {"role": role, "state": state}
    work = workloads.grouped_workload(task, "cpu", cache_bytes, 2**30)
    assert work.kernel.name == "moe_wna16_marlin_gemm"
    mean, largest = work.check()
    assert mean < gemm.MEAN_BOUND
    assert largest < gemm.MAX_BOUND
    if state == "cold":
        assert work.distinct_bytes >= 2 * cache_bytes


@pytest.mark.parametrize("dtype", ["int4", "bf16", "fp16"])
@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_one_call_an_expert_is_right_too(dtype, role):
    torch.manual_seed(0)
    work = workloads.grouped_workload(TASK | {"role": role, "dtype": dtype}, "cpu", 1000, 2**30)
    mean, largest = work.check()
    assert "one call an expert" in work.kernel.name
    assert mean < gemm.MEAN_BOUND
    assert largest < gemm.MAX_BOUND


def test_bytes_are_those_of_the_touched_experts():
    work = workloads.grouped_workload(TASK | {"m": 1}, "cpu", 1000, 2**30)
    weights = 128 * 256 / 2 + 128 * 256 / 32 * 2
    assert work.batch == 3
    assert work.bytes == 3 * weights + (1 * 256 + 3 * 128) * 2
    assert work.flops == 2 * 3 * 128 * 256


def test_too_little_memory_is_said():
    with pytest.raises(kernels.NotRun, match="the limit is 0.00 GB"):
        workloads.grouped_workload(TASK, "cpu", 1000, 1000)
    dense = {"name": "x", "m": 1, "n": 64, "k": 64, "batch": 1, "dtype": "bf16", "state": "cold"}
    with pytest.raises(kernels.NotRun, match="cold needs"):
        workloads.dense_workload(dense, "cpu", 10**9, 10**6)
