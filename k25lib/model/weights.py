"""How many bytes a weight matrix takes in its stored format, and which format a module of a model has."""

import re
from dataclasses import dataclass
from math import ceil

from k25lib.errors import K25Error

DTYPE_BITS = {"bfloat16": ("bf16", 16), "float16": ("fp16", 16), "float32": ("fp32", 32)}
STRATEGIES = ("none", "tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Format:
    """A weight format: bits a parameter, and what its scales (and zero points) take beside it."""

    name: str
    bits: int
    group: int = 0  # parameters along K that share a scale; 0: none
    block: tuple = ()  # (N, K) of a block that shares a scale
    strategy: str = "none"  # none, tensor, channel, group, block
    scale_bytes: int = 0
    zero_bits: int = 0

    def __post_init__(self):
        numbers = (self.bits, self.group, *self.block, self.scale_bytes, self.zero_bits)
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or not self.bits:
            raise ValueError(f"bits, group and block must be whole numbers, not {numbers}")
        if self.strategy not in STRATEGIES or (
            self.strategy == "block" and not (len(self.block) == 2 and all(self.block))
        ):
            raise ValueError(f"strategy {self.strategy!r} with block {self.block}")
        if self.strategy == "group" and not self.group:
            raise ValueError("strategy 'group' without a group_size")

    def matrix_bytes(self, n, k):
        """Bytes of one [n, k] matrix, scales and zero points included."""
        scales = {
            "none": 0,
            "tensor": 1,
            "channel": n,
            "group": n * ceil(k / self.group) if self.group else 0,
            "block": ceil(n / self.block[0]) * ceil(k / self.block[1]) if self.block else 0,
        }[self.strategy]
        return (n * k * self.bits + scales * (self.scale_bytes * 8 + self.zero_bits)) // 8

    def refuses(self, n, k, parts, grouped=False):
        """Why a shard of [n, k] made of rows `parts` cannot be stored or multiplied so; empty if it can.

        Grouped (expert) GEMMs in INT4 need a shape that Marlin takes; a dense one finds another kernel.
        """
        if self.strategy == "group" and k % self.group:
            return f"K={k} is no multiple of the group of {self.group}"
        if grouped and self.name == "int4" and not ((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)):
            return f"Marlin takes N%64, K%128 or N%128, K%64, not N={n}, K={k}"
        if self.strategy == "block" and (k % self.block[1] or any(part % self.block[0] for part in parts)):
            return f"N={n}, K={k} is cut inside a block of {self.block[0]}x{self.block[1]}"
        return ""


def plain(dtype):
    """The unquantized format of a torch dtype name, e.g. `bfloat16`."""
    if dtype not in DTYPE_BITS:
        raise K25Error(f"dtype {dtype!r} of config.json is not known; known: {', '.join(DTYPE_BITS)}")
    return Format(*DTYPE_BITS[dtype])


def _compressed_tensors(config, module):
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense" or config.get("format") == "marlin-24":
        raise ValueError("sparse weights are not known")
    if any(_named(pattern, module) for pattern in _listed(config.get("ignore"))):
        return None
    groups = [(_listed(group.get("targets")), group.get("weights")) for group in config["config_groups"].values()]
    own = [weights for targets, weights in groups if any(_named(target, module) for target in targets)]
    by_class = [weights for targets, weights in groups if "Linear" in targets]
    weights = next(iter(own + by_class), None)  # a name goes before a class
    return _compressed_format(weights) if weights else None


def _compressed_format(weights):
    bits, kind = weights["num_bits"], weights.get("type", "int")
    if kind not in ("int", "float"):
        raise ValueError(f"type {kind!r} of the weights is not known")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "tensor_group":  # NVFP4: FP8 scales by group under one FP32 scale
        strategy = "group"
    group = (weights.get("group_size") or 0) if strategy == "group" else 0
    narrow = kind == "float" and bits == 4
    return Format(
        name=f"{'fp' if kind == 'float' else 'int'}{bits}",
        bits=bits,
        group=group,
        block=tuple(weights.get("block_structure") or (128, 128)) if strategy == "block" else (),
        strategy=strategy,
        scale_bytes=1 if narrow else 4 if kind == "float" and strategy != "channel" else 2,
        zero_bits=0 if weights.get("symmetric", True) else bits,
    )


def _gptq(config, module):
    if module.endswith("lm_head") and not config.get("lm_head"):
        return None
    chosen = [name for block in _listed(config.get("modules_in_block_to_quantize")) for name in _listed(block)]
    if chosen and not any(name in module for name in chosen):
        return None
    for pattern, change in (config.get("dynamic") or {}).items():  # GPTQModel's: -: leaves a module as it is
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
            if pattern.startswith("-:"):
                return None
            config = config | change
            break
    bits, group = config["bits"], config.get("group_size", -1)
    grouped = group and group > 0
    zeros = 0 if config.get("sym", True) else bits
    return Format(f"int{bits}", bits, group if grouped else 0, (), "group" if grouped else "channel", 2, zeros)


def _awq(config, module):
    place = re.sub(r"(\.experts)\..*", r"\1", module)  # the server asks for a layer's experts as one
    if any(part in place for part in _listed(config.get("modules_to_not_convert"))):
        return None
    bits, group = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size", 128))
    grouped = group and group > 0
    zeros = bits if config.get("zero_point", True) else 0
    return Format(f"int{bits}", bits, group if grouped else 0, (), "group" if grouped else "channel", 2, zeros)


def _fp8(config, module):
    ignored = config.get("ignored_layers") or config.get("modules_to_not_convert") or ()
    if any(_named(pattern, module) for pattern in _listed(ignored)):
        return None
    block = config.get("weight_block_size")
    return Format("fp8", 8, 0, tuple(block or ()), "block" if block else "tensor", 4)


METHODS = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "awq": _awq,
    "awq_marlin": _awq,
    "fp8": _fp8,
}


def _listed(names):
    """A list of names that may be absent, or one name alone."""
    if not isinstance(names or [], list | tuple | str):
        raise ValueError(f"{names!r} is no list of modules")
    return [names] if isinstance(names, str) else names or []


def _named(pattern, module):
    """Whether a quantization list's entry names this module: `re:...`, the whole path, its end, or a part above it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith("." + pattern) or f".{module}".find(f".{pattern}.") >= 0


def format_of(modules, quantization, default):
    """The format of the fused `modules` (checkpoint paths) under a quantization_config.

    Raises K25Error for an unknown method, and where modules that the server fuses have different formats.
    """
    if not quantization:
        return default
    if not isinstance(quantization, dict):
        raise K25Error("quantization_config of config.json must be a JSON object")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise K25Error(f"quantization method {method!r} is not known; known: {', '.join(METHODS)}")
    try:
        formats = {METHODS[method](quantization, module) or default for module in modules}
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise K25Error(f"quantization_config of config.json cannot be read for {modules[0]}: {error!r}") from None
    if len(formats) > 1:
        raise K25Error(
            f"{' and '.join(modules)} are one matrix in the server, but quantized differently in config.json"
        )
    return formats.pop()
