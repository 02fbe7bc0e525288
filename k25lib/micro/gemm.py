"""Times GEMMs with the kernels that the server launches; a worker that needs torch alone, and vLLM where it is there.

    python -m k25lib.micro.gemm < settings.json

Settings: {"device": "cuda"|"cpu", "seconds": time per row, "seed", "threads" (CPU), "max_bytes": memory for weights,
"tasks": [...]}.
A task is one row: {"id", "name", "m", "n", "k", "batch" (matrices), "dtype": "bf16"|"int4", "group_size", "state":
"cold"|"warm", and for experts "experts", "top_k", "role": "gate_up"|"down"}. Every kernel is compared with a float32
reference before it is timed. Cold: the distinct bytes that one pass reads are at least twice the last-level cache.
"""

import importlib.metadata
import math
import statistics
import sys
from dataclasses import dataclass, field

import torch

from k25lib.micro import timing

MEAN_BOUND, MAX_BOUND = 5e-3, 1e-2  # of |reference|; a looser mean alone passes a wrong last scale group
SPREAD = 4.6  # standard deviation of uniform 4-bit integers: scales are divided by it, so that outputs are of order 1


class NotRun(Exception):
    """This row can't be had here; the message says why."""


@dataclass
class Kernel:
    """One kernel: `pack(copies)` -> weights per copy, `call(x, weights)`, `dense()` -> the same weights in float32."""

    name: str
    backend: str
    weights: object
    call: object
    dense: object
    note: str = ""


@dataclass
class Workload:
    """What one row times: launches, what one launch reads and computes, and the check against the reference."""

    kernel: Kernel
    launches: list
    check: object
    bytes: float
    flops: float
    distinct_bytes: float
    copies: int
    batch: float
    extra: dict = field(default_factory=dict)


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_ops():
    """The namespaces `_C` and `_moe_C` of the installed vLLM. Raises NotRun with the reason where there are none."""
    try:
        import vllm._custom_ops  # noqa: F401 (registers the operators)
    except Exception as error:  # a broken installation raises anything
        raise NotRun(f"vLLM not usable here: {timing.one_line(error)}") from error
    if not hasattr(torch.ops._C, "marlin_gemm"):
        raise NotRun(f"vLLM {version('vllm')} has no marlin_gemm for this device")
    return torch.ops._C, torch.ops._moe_C


def bind(operator, values):
    """The arguments of a torch operator in its own order, from values by name.

    An argument without a value takes its default, or None where it is optional; any other is a NotRun that names it:
    this vLLM has an argument that is unknown here.
    """
    arguments = []
    for argument in operator.default._schema.arguments:
        name = argument.name.removesuffix("_or_none")
        if name in values:
            arguments.append(values[name])
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        elif isinstance(argument.type, torch.OptionalType):
            arguments.append(None)
        else:
            raise NotRun(f"{operator} of this vLLM wants an argument unknown here: {argument.name}")
    return arguments


# Weights: random 4-bit integers are the packed format itself, eight along K in an int32, least significant first.


def random_int4(n, k, group, device, matrices=1):
    """Packed [matrices, k/8, n] int32 and scales [matrices, k/group, n] bf16 of random W4A16 weights."""
    if k % group or k % 8:
        raise NotRun(f"K={k} is not a multiple of the group of {group}")
    packed = torch.randint(-(2**31), 2**31, (matrices, k // 8, n), dtype=torch.int32, device=device)
    scales = (torch.rand(matrices, k // group, n, device=device) + 0.5) / (SPREAD * math.sqrt(k))
    return packed, scales.bfloat16()


def unpack_int4(packed):
    """[k/8, n] int32 -> [k, n] integers 0..15."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return ((packed[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, packed.shape[1])


def dequantize(packed, scales):
    """The float32 weights [k, n] of packed uint4b8 integers: (q - 8) times the scale of its group."""
    q = unpack_int4(packed)
    return (q.float() - 8) * scales.float().repeat_interleave(q.shape[0] // scales.shape[0], 0)


# Kernels. Each takes the task and the device and returns a Kernel of `matrices` independent weights.


def bf16(task, device, matrices):
    weights = torch.randn(matrices, task["n"], task["k"], device=device, dtype=torch.bfloat16) / math.sqrt(task["k"])
    return Kernel(
        "linear", torch_backend(device), list(weights), torch.nn.functional.linear, lambda i: weights[i].float().t()
    )


def bf16_batched(task, device, matrices):
    shape = (matrices, task["batch"], task["k"], task["n"])
    weights = torch.randn(shape, device=device, dtype=torch.bfloat16) / math.sqrt(task["k"])
    return Kernel("bmm", torch_backend(device), list(weights), torch.bmm, lambda i: weights[i].float())


def bf16_server(task, device, matrices):
    """The small-batch kernels that vLLM uses for two of DeepSeek-V3's projections; NotRun where it would not."""
    names = {"fused_qkv_a_proj": ("_C", "dsv3_fused_a_gemm"), "router gate": ("_moe_C", "dsv3_router_gemm")}
    namespace, name = names.get(task["name"], (None, None))
    if name is None or task["m"] > 16 or device != "cuda" or torch.cuda.get_device_capability()[0] not in (9, 10):
        raise NotRun("no special kernel for this shape")
    vllm_ops()
    operator = getattr(getattr(torch.ops, namespace), name, None)
    supported = {"dsv3_fused_a_gemm": [(2112, 7168)], "dsv3_router_gemm": [(256, 7168), (384, 7168)]}[name]
    if operator is None or (task["n"], task["k"]) not in supported:
        raise NotRun("no special kernel for this shape")
    kernel = bf16(task, device, matrices)
    router = name == "dsv3_router_gemm"

    def call(x, w):
        out = torch.empty(x.shape[0], task["n"], device=device, dtype=torch.float32 if router else torch.bfloat16)
        operator(out, x, w if router else w.t())
        return out

    return Kernel(name, f"vllm {version('vllm')}", kernel.weights, call, kernel.dense)


def marlin(task, device, matrices):
    from_c, _ = vllm_ops()
    weights, quant_id, workspace, dense = marlin_weights(task, device, matrices)
    n, k = task["n"], task["k"]

    def call(x, w):
        values = {"a": x, "b_q_weight": w[0], "b_scales": w[1], "size_m": x.shape[0], "size_n": n, "size_k": k}
        return from_c.marlin_gemm(*bind(from_c.marlin_gemm, values | marlin_values(quant_id, workspace)))

    return Kernel("marlin_gemm", f"vllm {version('vllm')}", [(w[0], w[1]) for w in zip(*weights)], call, dense)  # noqa: B905


def marlin_weights(task, device, matrices):
    """Marlin's own layout [matrices, ...] of random weights, made by the server's functions, and the reference."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    n, k, group = task["n"], task["k"], task["group_size"]
    if not ((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)):
        raise NotRun(f"Marlin needs N%64 and K%128, or N%128 and K%64: not N={n}, K={k}")
    repack = torch.ops._C.gptq_marlin_repack
    packed, scales = random_int4(n, k, group, device, matrices)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    values = {"perm": empty, "size_k": k, "size_n": n, "num_bits": 4, "is_a_8bit": False}
    q = torch.stack([repack(*bind(repack, values | {"b_q_weight": matrix})) for matrix in packed])
    s = torch.stack([marlin_utils.marlin_permute_scales(scale, k, n, group) for scale in scales])
    workspace = marlin_utils.marlin_make_workspace_new(torch.device(device), 4)
    return (q, s), scalar_types.uint4b8.id, workspace, lambda i: dequantize(packed[i], scales[i])


def marlin_values(quant_id, workspace):
    """The arguments that every Marlin call of the server has in common, under the names of all its versions."""
    return {
        **dict.fromkeys(("b_type_id", "b_q_type_id", "b_q_type"), quant_id),
        **dict.fromkeys(("is_k_full", "is_full_k"), True),
        **dict.fromkeys(("thread_k", "thread_n", "blocks_per_sm"), -1),
        "workspace": workspace,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
    }


def torch_int4(task, device, matrices):
    """torch's own INT4: tinygemm on a GPU, its CPU kernel without one."""
    n, k, group = task["n"], task["k"], task["group_size"]
    if n % 16 or (device == "cuda" and k % 128):
        raise NotRun(f"torch's INT4 kernel does not take N={n}, K={k}")
    packed, scales = random_int4(n, k, group, device, matrices)
    weights = []
    for matrix, scale in zip(packed, scales):  # noqa: B905
        q = unpack_int4(matrix).t().contiguous()
        if device == "cuda":
            pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
            layout = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        else:
            layout = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        weights.append((layout, torch.stack([scale, torch.zeros_like(scale)], -1)))
    operator = getattr(torch.ops.aten, "_weight_int4pack_mm" if device == "cuda" else "_weight_int4pack_mm_for_cpu")

    return Kernel(
        operator.__name__.split(".")[-1],
        torch_backend(device),
        weights,
        lambda x, w: operator(x, w[0], group, w[1]),
        lambda i: dequantize(packed[i], scales[i]),
    )


def torch_backend(device):
    return f"torch {torch.__version__} {'cuBLAS' if device == 'cuda' else 'CPU'}"


def pick(task, device, matrices):
    """The kernel that the server would launch, or torch's own with a note that says why."""
    if task["dtype"] == "bf16":
        candidates = [bf16_batched] if task["batch"] > 1 and not task.get("experts") else [bf16_server, bf16]
    elif task["dtype"] == "int4":
        candidates = [marlin, torch_int4] if device == "cuda" else [torch_int4]
    else:
        raise NotRun(f"no kernel for {task['dtype']} weights here")
    reasons = []
    for build in candidates:
        try:
            kernel = build(task, device, matrices)
        except NotRun as reason:
            reasons.append(str(reason))
            continue
        kernel.note = "; ".join(reason for reason in reasons if reason != "no special kernel for this shape")
        return kernel
    raise NotRun("; ".join(reasons))


def weight_bytes(task):
    """Bytes of one weight matrix: 2 a parameter in BF16; half a byte and a BF16 scale a group in INT4."""
    parameters = task["n"] * task["k"]
    return parameters * 2 if task["dtype"] == "bf16" else parameters / 2 + parameters / task["group_size"] * 2


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
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    weights = [kernel.weights[i] if i < distinct else clone(kernel.weights[i % distinct]) for i in range(copies)]
    launches = max(copies, 16 if device == "cuda" else 1)

    return Workload(
        kernel,
        [lambda w=weights[i % copies]: kernel.call(x, w) for i in range(launches)],
        lambda: timing.relative_errors(kernel.call(x, kernel.weights[0]), x.float() @ kernel.dense(0)),
        size + batch * m * (n + k) * 2,
        2.0 * batch * m * n * k,
        size * copies,
        copies,
        batch,
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
    x = torch.randn(rows, task["k"], device=device, dtype=torch.bfloat16)
    shares = torch.softmax(torch.randn(m, top_k, device=device), -1)
    if task["role"] == "gate_up":
        shares = torch.ones_like(shares)
    try:
        kernel, launches = marlin_grouped(task, device, layers, x, shares, routings)
    except NotRun as reason:
        kernel, launches = one_by_one(task, device, layers, x, shares, routings)
        kernel.note = "; ".join(filter(None, [str(reason), kernel.note]))

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
        kernel,
        launches,
        check,
        mean_touched * size + (rows * task["k"] + m * top_k * task["n"]) * 2,
        2.0 * m * top_k * task["n"] * task["k"],
        distinct,
        passes if task["state"] == "cold" else 1,
        mean_touched,
        {"experts_touched": mean_touched, "busiest_expert_tokens": busiest},
    )


def marlin_grouped(task, device, layers, x, shares, routings):
    """vLLM's grouped Marlin kernel over all experts, as its fused MoE layer calls it."""
    if task["dtype"] != "int4" or device != "cuda":
        raise NotRun("")
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


def one_by_one(task, device, layers, x, shares, routings):
    """The grouped GEMM as one call of a dense kernel for each touched expert."""
    kernel = pick(task, device, layers * task["experts"])
    top_k = shares.shape[1]

    def launch(ids):
        flat = ids.flatten()
        jobs = []
        for expert in flat.unique().tolist():
            slots = (flat == expert).nonzero().flatten()
            source = slots // top_k if task["role"] == "gate_up" else slots
            jobs.append((slots.to(device), source.to(device), kernel.weights[expert]))
        out = torch.zeros(len(flat), task["n"], device=device, dtype=torch.bfloat16)
        scale = shares.flatten()[:, None].bfloat16()

        def run():
            for slots, source, weights in jobs:
                rows = kernel.call(x[source], weights)
                out[slots] = rows * scale[slots] if task["role"] == "down" else rows
            return out

        return run

    kernel.name += ", one call an expert"
    return kernel, [launch(ids) for ids in routings]


def measure(task, settings, device, cache_bytes, limit_bytes):
    """One row: build, check, time. Raises NotRun, or whatever the kernel raises."""
    torch.manual_seed(settings.get("seed", 0))
    build = grouped_workload if task.get("experts") else dense_workload
    work = build(task, device, cache_bytes, limit_bytes)
    mean, largest = work.check()
    row = {
        "kernel": work.kernel.name, "backend": work.kernel.backend, "reason": work.kernel.note, "batch": work.batch,
        "copies": work.copies, "distinct_bytes": work.distinct_bytes, "cache_bytes": cache_bytes, "bytes": work.bytes,
        "error": mean if math.isfinite(mean) else None, "error_max": largest if math.isfinite(largest) else None,
        **work.extra,
    }  # fmt: skip
    if not (mean < MEAN_BOUND and largest < MAX_BOUND):
        found = f"mean {mean:.2e} (bound {MEAN_BOUND:.0e}), max {largest:.2e} (bound {MAX_BOUND:.0e})"
        return row | {"status": "failed", "reason": f"wrong result against float32: {found}; not timed"}
    row["clocks_before"] = timing.gpu_state() if device == "cuda" else ""
    sample = timing.sample_cuda if device == "cuda" else timing.sample_cpu
    samples, row["timer"] = sample(work.launches, settings.get("seconds", 0.3))
    row["clocks_after"] = timing.gpu_state() if device == "cuda" else ""
    row |= timing.summary(samples) | {"status": "ok", "launches": len(work.launches)}
    row["gb_s"] = work.bytes / row["time_us_median"] / 1e3
    row["tflop_s"] = work.flops / row["time_us_median"] / 1e6
    if device == "cuda" and settings.get("kernel_times", True):
        row |= kernel_times(work.launches)
    return row


def kernel_times(launches):
    """Mean time (us) of the kernels alone, from the profiler: the graph's time per launch less the gaps between."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for launch in launches:
                launch()
            torch.cuda.synchronize()
        kernels = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
        total = sum(e.time_range.elapsed_us() for e in kernels)
        names = sorted({e.name[:120] for e in kernels})
    except Exception as error:  # the profiler may be taken or absent: the row stands without it
        return {"cuda_kernels": timing.one_line(error)}
    return {"kernel_us": total / len(launches) or None, "cuda_kernels": "; ".join(names)}


def device_facts(device):
    """Name, cache, and what this device achieves: GB/s of a copy and of a read, TFLOP/s of a BF16 GEMM."""
    cuda = device == "cuda"
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        name, cache = properties.name, getattr(properties, "L2_cache_size", 0) or 64 * 2**20
    else:
        name, cache = f"{timing.cpu_name()}, {torch.get_num_threads()} thread(s)", timing.last_cache_bytes()
    sample = timing.sample_cuda if cuda else timing.sample_cpu
    # Larger than the cache where that costs little; a CPU's share of a large shared cache is not known anyway.
    copied, read, size = _bandwidth(sample, device, max(4 * cache, 2**30) // 4 if cuda else 2**26)
    n = 8192 if cuda else 1024
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    product = min(sample([lambda: a @ a], 0.2)[0])
    return {
        "device": name, "cache_bytes": cache, "copy_gb_s": 2 * size / copied / 1e3, "read_gb_s": size / read / 1e3,
        "gemm_tflop_s": 2 * n**3 / product / 1e6, "torch": torch.__version__, "cuda": torch.version.cuda,
        "vllm": version("vllm"), "python": sys.version.split()[0], "method": timing.METHOD,
    }  # fmt: skip


def _bandwidth(sample, device, elements):
    """Best times (us) of a copy and of a read of `elements` floats, and their bytes."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return min(sample([lambda: target.copy_(source)], 0.1)[0]), min(sample([source.sum], 0.1)[0]), elements * 4


def main():
    output = timing.Output()
    settings = timing.read_settings()
    device = settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        output.event("abort", reason="no CUDA device that torch can use")
        return 1
    torch.set_grad_enabled(False)
    torch.manual_seed(settings.get("seed", 0))
    if device == "cpu":
        torch.set_num_threads(settings.get("threads", 1))  # two threads on a busy machine wait for each other
    facts = device_facts(device) if settings["tasks"] else {}
    output.event("device", kind=device, **facts)
    limit = settings.get("max_bytes") or (torch.cuda.mem_get_info()[0] // 2 if device == "cuda" else 2**30)
    for task in settings["tasks"]:
        output.event("start", id=task["id"])
        timing.mark(f"{task['name']} m={task['m']} {task['state']}")
        fatal = False
        try:
            row = measure(task, settings, device, facts["cache_bytes"], limit)
        except NotRun as reason:
            row = {"status": "not run", "reason": str(reason)}
        except Exception as error:  # one row's failure is that row's
            row, fatal = {"status": "failed", "reason": timing.one_line(error)}, timing.is_fatal(error)
        output.event("row", id=task["id"], **row)
        if fatal:
            return 3
        if device == "cuda":
            torch.cuda.empty_cache()
    output.event("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
