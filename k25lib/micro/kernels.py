"""The kernels of the GEMM worker: vLLM's own where it is importable, torch's otherwise, each with its weights.

Weights are random and come with their float32 values, so that every kernel can be checked against a reference.
"""

import importlib.metadata
import math
from dataclasses import dataclass

import torch

from k25lib.micro import timing
from k25lib.micro.timing import NotRun

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SPREAD = 4.6  # standard deviation of uniform 4-bit integers: scales are divided by it, so that outputs are of order 1


@dataclass
class Kernel:
    """One kernel: `call(x, weights[i])`, and `dense(i)`, the same weights [k, n] in float32."""

    name: str
    backend: str
    weights: object
    call: object
    dense: object
    note: str = ""


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


def plain(task, device, matrices):
    weights = torch.randn(matrices, task["n"], task["k"], device=device, dtype=DTYPES[task["dtype"]])
    weights /= math.sqrt(task["k"])
    return Kernel(
        "linear", torch_backend(device), list(weights), torch.nn.functional.linear, lambda i: weights[i].float().t()
    )


def plain_batched(task, device, matrices):
    shape = (matrices, task["batch"], task["k"], task["n"])
    weights = torch.randn(shape, device=device, dtype=DTYPES[task["dtype"]]) / math.sqrt(task["k"])
    return Kernel("bmm", torch_backend(device), list(weights), torch.bmm, lambda i: weights[i].float())


def plain_server(task, device, matrices):
    """The small-batch kernels that vLLM uses for two of DeepSeek-V3's projections; NotRun where it would not."""
    names = {"fused_qkv_a_proj": ("_C", "dsv3_fused_a_gemm"), "router gate": ("_moe_C", "dsv3_router_gemm")}
    namespace, name = names.get(task["name"], (None, None))
    major = torch.cuda.get_device_capability()[0] if device == "cuda" else 0
    most = 8 if name == "dsv3_router_gemm" and major == 10 else 16
    if name is None or task["dtype"] != "bf16" or task["m"] > most or major not in (9, 10):
        raise NotRun("no special kernel for this shape")
    vllm_ops()
    operator = getattr(getattr(torch.ops, namespace), name, None)
    supported = {"dsv3_fused_a_gemm": [(2112, 7168)], "dsv3_router_gemm": [(256, 7168), (384, 7168)]}[name]
    if operator is None or (task["n"], task["k"]) not in supported:
        raise NotRun("no special kernel for this shape")
    kernel = plain(task, device, matrices)
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

    n, k, group = task["n"], task["k"], task["group_size"] or task["k"]
    if not ((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)):
        raise NotRun(f"Marlin needs N%64 and K%128, or N%128 and K%64: not N={n}, K={k}")
    repack = vllm_ops()[0].gptq_marlin_repack
    packed, scales = random_int4(n, k, group, device, matrices)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    values = {"perm": empty, "size_k": k, "size_n": n, "num_bits": 4, "is_a_8bit": False}
    q = torch.stack([repack(*bind(repack, values | {"b_q_weight": matrix})) for matrix in packed])
    s = torch.stack([marlin_utils.marlin_permute_scales(scale, k, n, group) for scale in scales])
    workspace = marlin_utils.marlin_make_workspace_new(packed.device, 4)
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
    n, k, group = task["n"], task["k"], task["group_size"] or task["k"]
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
    if task["dtype"] in DTYPES:
        candidates = [plain_batched] if task["batch"] > 1 and not task.get("experts") else [plain_server, plain]
    else:
        candidates = [marlin, torch_int4] if device == "cuda" else [torch_int4]
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
    """Bytes of one weight matrix: 2 a parameter in BF16; half a byte and a BF16 scale a group in INT4.

    Raises NotRun for a format that no kernel here takes.
    """
    parameters = task["n"] * task["k"]
    if task["dtype"] == "int4":
        return parameters / 2 + parameters / (task["group_size"] or task["k"]) * 2
    if task["dtype"] in DTYPES:
        return parameters * 2
    raise NotRun(f"no kernel for {task['dtype']} weights here")
