"""What one row of the GEMM benchmark times: its launches, the bytes and operations of one, and its check.

A GEMM whose weights are all read, or one layer's routed experts in one grouped launch. Cold: the distinct bytes that
one pass reads are at least twice the last-level cache.
"""

import math
import statistics
from dataclasses import dataclass, field

import torch

from k25lib.micro import timing
from k25lib.micro.kernels import (
    DTYPES,
    Kernel,
    NotRun,
    bind,
    marlin_values,
    marlin_weights,
    pick,
    version,
    vllm_ops,
    weight_bytes,
)


@dataclass
class Workload:
    """One row's work; `bytes` and `flops` are what one launch reads and computes."""

    kernel: Kernel
    launches: list  # functions without arguments; a pass calls each once
    check: object  # () -> (mean, largest) error against the float32 reference, of its size
    bytes: float
    flops: float
    distinct_bytes: float  # that a whole pass reads: cold, if they are at least twice the cache
    copies: int  # of the weights
    batch: float  # matrices in a launch; of routed experts the mean number touched
    extra: dict = field(default_factory=dict)  # more columns of the row


def copies_for(task, one_bytes, cache_bytes, limit_bytes):
    """How many copies of the weights make a pass cold. Raises NotRun where the memory allowed does not hold them."""
    if task["state"] == "warm":
        return 1
    copies = max(2, math.ceil(2 * cache_bytes / one_bytes))
    if copies * one_bytes > limit_bytes:
        needed = copies * one_bytes / 1e9
        raise NotRun(f"cold needs {needed:.2f} GB of weights against a cache of {cache_bytes / 1e6:.0f} MB; "
                     f"the limit is {limit_bytes / 1e9:.2f} GB")  # fmt: skip
    return copies


def dense_workload(task, device, cache_bytes, limit_bytes):
    """A GEMM whose weights are all read: one matrix, or a batch of them (MLA's absorbed projections)."""
    m, n, k, batch = task["m"], task["n"], task["k"], task["batch"]
    size = weight_bytes(task) * batch
    copies = copies_for(task, size, cache_bytes, limit_bytes)
    distinct = min(copies, 4)  # the others are clones: other addresses, the same values
    kernel = pick(task, device, distinct)
    shape = (m, k) if batch == 1 else (batch, m, k)
    x = torch.randn(shape, device=device, dtype=DTYPES.get(task["dtype"], torch.bfloat16))
    weights = [kernel.weights[i] if i < distinct else clone(kernel.weights[i % distinct]) for i in range(copies)]
    launches = max(copies, 16 if device == "cuda" else 1)

    return Workload(
        kernel=kernel,
        launches=[lambda w=weights[i % copies]: kernel.call(x, w) for i in range(launches)],
        check=lambda: timing.relative_errors(kernel.call(x, kernel.weights[0]), x.float() @ kernel.dense(0)),
        bytes=size + batch * m * (n + k) * 2,
        flops=2.0 * batch * m * n * k,
        distinct_bytes=size * copies,
        copies=copies,
        batch=batch,
    )


def clone(weights):
    return tuple(part.clone() for part in weights) if isinstance(weights, tuple) else weights.clone()


def route(m, experts, top_k, passes, distinct):
    """Sampled routing of `passes` launches: uniform top-k, [m, top_k] each.

    With `distinct`, each launch keeps its sampled counts per expert but takes the experts used longest ago, so that
    none is read again before all others have been; without, every launch is the same.
    """
    order, used, routings = torch.randperm(experts), 0, []
    for _ in range(passes):
        touched, positions = torch.rand(m, experts).topk(top_k).indices.unique(return_inverse=True)
        routings.append(order[(used + positions) % experts])
        used += len(touched)
    return routings if distinct else routings[:1] * passes


def align(ids, block, experts):
    """Token slots sorted by expert, each expert's padded to whole blocks: what vLLM's moe_align_block_size returns.

    Returns (slots, expert of each block, [padded length]) as int32; an empty slot holds ids.numel().
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + block - 1) // block * block
    place = (padded.cumsum(0) - padded)[flat[order]]
    place = place + torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat[order]]
    most = min(len(flat) * block, len(flat) + experts * (block - 1))
    slots = torch.full((-(-most // block) * block,), len(flat))
    slots[place] = order
    of_block = torch.repeat_interleave(torch.arange(experts), padded // block)
    blocks = torch.zeros(len(slots) // block, dtype=torch.int64)
    blocks[: len(of_block)] = of_block
    return slots.int(), blocks.int(), padded.sum().reshape(1).int()


def grouped_workload(task, device, cache_bytes, limit_bytes):
    """One layer's routed experts, gate_up or down: M tokens, each to top_k experts, in one grouped launch if there is
    a kernel for it, else one launch a touched expert (and the kernel's name says so)."""
    m, experts, top_k = task["m"], task["experts"], task["top_k"]
    size, cold = weight_bytes(task), task["state"] == "cold"
    layers = 1 + int(2 * cache_bytes / (experts * size)) if cold else 1  # each with experts of its own, as in the model
    if layers * experts * size > limit_bytes:
        needed = layers * experts * size / 1e9
        raise NotRun(f"{layers} x {experts} experts take {needed:.2f} GB; the limit is {limit_bytes / 1e9:.2f} GB")
    passes, distinct = 4 if device == "cuda" else 1, 0
    while not distinct or (cold and distinct < 2 * cache_bytes):
        passes *= 2
        routings = route(m, experts, top_k, passes, cold)
        routings = [ids + i % layers * experts for i, ids in enumerate(routings)]
        touched = [ids.unique() for ids in routings]
        distinct = len(torch.cat(touched).unique()) * size
    rows = m if task["role"] == "gate_up" else m * top_k
    x = torch.randn(rows, task["k"], device=device, dtype=DTYPES.get(task["dtype"], torch.bfloat16))
    shares = torch.softmax(torch.randn(m, top_k, device=device), -1)
    if task["role"] == "gate_up":
        shares = torch.ones_like(shares)
    try:
        kernel, launches = grouped_kernel(task, device, layers, x, shares, routings)
    except NotRun as reason:
        kernel, launches = one_by_one(task, device, x, shares, routings)
        kernel.note = "; ".join(filter(None, {str(reason), kernel.note}))

    def check():
        out = launches[0]().view(m * top_k, task["n"])
        flat, reference = routings[0].flatten().to(device), torch.zeros(m * top_k, task["n"], device=device)
        for expert in touched[0].tolist():
            slots = (flat == expert).nonzero().flatten()
            source = slots // top_k if task["role"] == "gate_up" else slots
            reference[slots] = x[source].float() @ kernel.dense(expert) * shares.flatten()[slots, None]
        return timing.relative_errors(out, reference)

    mean_touched = statistics.fmean(len(ids) for ids in touched)
    busiest = max(torch.bincount(ids.flatten()).max().item() for ids in routings)
    return Workload(
        kernel=kernel,
        launches=launches,
        check=check,
        bytes=mean_touched * size + (rows * task["k"] + m * top_k * task["n"]) * 2,
        flops=2.0 * m * top_k * task["n"] * task["k"],
        distinct_bytes=distinct,
        copies=passes if cold else 1,
        batch=mean_touched,
        extra={"experts_touched": mean_touched, "busiest_expert_tokens": busiest},
    )


def grouped_kernel(task, device, *rest):
    """The server's grouped kernel of these weights. Raises NotRun, without a word where none is known here."""
    if task["dtype"] != "int4" or device != "cuda":
        raise NotRun("")
    return marlin_grouped(task, device, *rest)


def marlin_grouped(task, device, layers, x, shares, routings):
    """vLLM's grouped Marlin kernel over all experts, as its fused MoE layer calls it."""
    _, from_moe = vllm_ops()
    (q, s), quant_id, workspace, dense = marlin_weights(task, device, layers * task["experts"])
    down, (m, top_k) = task["role"] == "down", shares.shape
    # vLLM's choice of the block: the first that an expert's expected rows do not fill.
    block = next((b for b in (8, 16, 32, 48, 64) if m * top_k / task["experts"] / b < 0.9), 64)
    operator = from_moe.moe_wna16_marlin_gemm

    def launch(ids):
        first = ids.min().item() // task["experts"] * task["experts"]
        mine = slice(first, first + task["experts"])
        slots, blocks, length = (part.to(device) for part in align(ids - first, block, task["experts"]))
        out = torch.zeros(m * top_k, task["n"], device=device, dtype=torch.bfloat16)
        values = {
            **dict.fromkeys(("a", "input"), x),
            **dict.fromkeys(("c", "output"), out),
            **dict.fromkeys(("b_q_weight", "b_qweight"), q[mine]),
            "b_scales": s[mine],
            "sorted_token_ids": slots,
            "expert_ids": blocks,
            "num_tokens_past_padded": length,
            "topk_weights": shares,
            "moe_block_size": block,
            "top_k": 1 if down else top_k,
            "mul_topk_weights": down,
            "size_m": x.shape[0],
            "size_n": task["n"],
            "size_k": task["k"],
        }
        arguments = bind(operator, values | marlin_values(quant_id, workspace))
        return lambda: operator(*arguments)

    kernel = Kernel("moe_wna16_marlin_gemm", f"vllm {version('vllm')}", None, None, dense)
    return kernel, [launch(ids) for ids in routings]


def one_by_one(task, device, x, shares, routings):
    """The grouped GEMM as one call of a dense kernel for each touched expert; only those have weights."""
    place = {expert: i for i, expert in enumerate(torch.cat(routings).unique().tolist())}
    kernel = pick(task, device, len(place))
    top_k, down = shares.shape[1], task["role"] == "down"
    scale = shares.flatten()[:, None].to(x.dtype)

    def launch(ids):
        flat = ids.flatten()
        jobs = []
        for expert in flat.unique().tolist():
            slots = (flat == expert).nonzero().flatten().to(device)
            jobs.append((slots, slots if down else slots // top_k, kernel.weights[place[expert]]))
        out = torch.zeros(len(flat), task["n"], device=device, dtype=x.dtype)

        def run():
            for slots, source, weights in jobs:
                rows = kernel.call(x[source], weights)
                out[slots] = rows * scale[slots] if down else rows
            return out

        return run

    name = f"{kernel.name}, one call an expert"
    named = Kernel(name, kernel.backend, None, None, lambda expert: kernel.dense(place[expert]), kernel.note)
    return named, [launch(ids) for ids in routings]
