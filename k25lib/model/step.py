"""One decode step of one rank: its GEMMs, collectives and bytes, from the model's shape."""

from dataclasses import dataclass

from k25lib.errors import K25Error, UsageError

from .families import BUILDERS
from .weights import format_of, plain

MAX_TP = 1024


def touched_experts(experts, per_token, tokens):
    """Expected number of distinct experts that `tokens` tokens reach under uniform routing: E(1-(1-k/E)^M)."""
    return round(experts * (1 - (1 - per_token / experts) ** tokens), 9) if experts else 0.0


@dataclass(frozen=True)
class Step:
    """What one rank reads, multiplies and exchanges in one decode step.

    `gemms` and `collectives` are lists of dicts (bytes are of one rank; a collective's `bytes` is the whole message:
    for an AllGather what a rank has afterwards). `weight_bytes` counts matrices and norms; embeddings (a row a
    token), biases and activations are left out.
    """

    tp: int
    dp: int
    batch: int
    context: int
    gemms: list
    collectives: list
    norm_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int  # of KV cache that one rank reads: `context` tokens for each request, or what a window leaves of them
    touched_experts: float
    layers: int
    moe_layers: int

    @property
    def weight_bytes(self):
        """Bytes of weights and norms that one rank reads in the step."""
        return sum(gemm["bytes_per_step"] for gemm in self.gemms) + self.norm_bytes

    def ideal_ms(self, dram_gb_s):
        """Time in ms that reading weights and KV cache takes at `dram_gb_s` (10^9 bytes/s): the bandwidth bound."""
        return (self.weight_bytes + self.kv_bytes) / dram_gb_s / 1e6

    @property
    def burst_calls(self):
        """AllReduces inside the layers: the length of the burst that the collectives benchmark repeats."""
        return sum(c["calls_per_step"] for c in self.collectives if c["op"] == "allreduce" and c["in_layer"])

    def census(self, platform="gpu"):
        """Expected calls a decode step on one rank, by operation, for what can be counted in a trace.

        Collectives, KV cache writes (one a layer) and MoE GEMMs: two grouped launches a layer on a GPU. In a trace of
        CPU operators (`platform="cpu"`) the fused MoE is one call a layer, and GEMMs can be counted too.
        """
        counts = {}
        for collective in self.collectives:
            counts[collective["op"]] = counts.get(collective["op"], 0) + collective["calls_per_step"]
        counts |= {"moe_gemm": (1 if platform == "cpu" else 2) * self.moe_layers, "kv_cache": self.layers}
        if platform == "cpu":
            counts["gemm"] = sum(gemm["calls_per_step"] for gemm in self.gemms if gemm["category"] == "gemm")
        return {operation: calls for operation, calls in counts.items() if calls}


class Model:
    """A model's shape, ready to be cut for any tensor parallelism and batch."""

    def __init__(self, config):
        self.config = config
        self.architecture = config.architecture
        self.dtype = plain(config.dtype)
        self.shape = BUILDERS[config.family()](config)
        if self.shape.experts_per_token > self.shape.experts:
            raise K25Error(f"config.json routes to {self.shape.experts_per_token} of {self.shape.experts} experts")
        self._formats = {}

    def format_of(self, matrix):
        """Weight format of a matrix of this model."""
        if not matrix.quantizable:
            return self.dtype
        if matrix.modules not in self._formats:
            quantization = self.config.quantization
            # A compressed-tensors target "Linear" is no head: only GPTQ, when it says so, quantizes that one.
            if matrix.sharding == "vocab" and not (isinstance(quantization, dict) and quantization.get("lm_head")):
                quantization = None
            self._formats[matrix.modules] = format_of(matrix.modules, quantization, self.dtype)
        return self._formats[matrix.modules]

    def matrices(self):
        """Every matrix of the decode step, layer by layer, the head last."""
        return [matrix for layer in self.shape.layers for matrix in layer] + [self.shape.head]

    def parameters(self):
        """Parameters of the text model (biases left out): `total`, `active` for one token, `active_with_embedding`."""
        total = active = self.shape.norm_elements
        for m in self.matrices():
            size = sum(p.units * p.width for p in m.parts) * m.k * m.heads
            total += size * (self.shape.experts if m.routed else 1)
            active += size * (self.shape.experts_per_token if m.routed else 1)
        embedding = self.shape.embedding_parameters
        return {"total": total + embedding, "active": active, "active_with_embedding": active + embedding}

    def refusal(self, tp, ep=False, ranks=None):
        """Why tensor parallelism `tp` is impossible; empty if it is possible."""
        ranks = ranks or tp
        for m in self.matrices():
            if m.routed and ep:
                continue
            split = ranks if m.routed else tp
            if split == 1 or m.sharding == "replicated":
                continue
            for part in m.parts if m.sharding in ("column", "vocab") else ():
                if part.units % split and not (part.copied and split % part.units == 0):
                    return f"{part.units} {part.what or m.what} do not divide by {split}"
            if m.sharding == "row" and m.k % split:
                return f"{m.k} ({m.what}) does not divide by {split}"
            if m.sharding == "heads" and m.heads % split:
                return f"{m.heads} attention heads do not divide by {split}"
            n, k, parts = self._cut(m, split)
            why = self.format_of(m).refuses(n, k, parts, m.routed)
            if why:
                return f"{m.name}: {why}"
        if ep and self.shape.experts % ranks:
            return f"{self.shape.experts} experts do not divide by {ranks} ranks"
        return ""

    def possible_tp(self):
        """The tensor parallel sizes that the model can be cut into."""
        return [tp for tp in range(1, MAX_TP + 1) if not self.refusal(tp)]

    @staticmethod
    def _cut(matrix, tp):
        parts = [p.on_rank(tp) if matrix.sharding in ("column", "vocab") else p.units for p in matrix.parts]
        return sum(parts), matrix.k // tp if matrix.sharding == "row" else matrix.k, parts

    def step(self, tp=1, batch=1, context=0, ep=False, dp=1, kv_dtype="auto"):
        """The decode step of one rank.

        tp: tensor parallel size. batch: requests of one data parallel rank. context: tokens in each request's KV
        cache. ep: whole experts spread over the tp x dp ranks. kv_dtype: `auto` (the model's) or `fp8`.
        Raises UsageError for a size that cannot be, saying which can.
        """
        for name, value, least in (("tp", tp, 1), ("batch", batch, 1), ("context", context, 0), ("dp", dp, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r} must be a whole number of at least {least}")
        ranks = tp * dp
        why = self.refusal(tp, ep, ranks)
        if why:
            possible = ", ".join(map(str, self.possible_tp()))
            raise UsageError(f"tp={tp} cannot be: {why}; tp may be {possible}")
        if self.config.quantization and all(self.format_of(m) == self.dtype for m in self.matrices()):
            raise K25Error("quantization_config of config.json names no matrix of this model: are its targets others'?")
        shape = self.shape
        tokens = batch * dp
        touched = touched_experts(shape.experts, shape.experts_per_token, tokens)
        spread = ranks if ep else 1  # ranks that whole experts are spread over
        rows = {}
        for m in self.matrices():
            n, k, _ = self._cut(m, ranks // spread if m.routed else tp)
            fmt = self.format_of(m)
            if (m.name, n, k, fmt) in rows:
                rows[m.name, n, k, fmt]["calls_per_step"] += 1
                continue
            matrices = touched / spread if m.routed else max(1, m.heads // tp)
            products = tokens * shape.experts_per_token / spread if m.routed else batch * matrices
            rows[m.name, n, k, fmt] = {
                "name": m.name,
                "n": n,
                "k": k,
                "matrices": matrices,
                "dtype": fmt.name,
                "group_size": fmt.group or None,
                "sharding": "experts" if m.routed and ep else m.sharding,
                "category": m.category,
                "calls_per_step": 1,
                "bytes_per_call": round(fmt.matrix_bytes(n, k) * matrices),
                "flop_per_call": round(2 * n * k * products),
            }
        for row in rows.values():
            row["bytes_per_step"] = row["bytes_per_call"] * row["calls_per_step"]
        layer_bytes = shape.kv_heads.on_rank(tp) * (1 if kv_dtype == "fp8" else self.dtype.bits // 8)
        beyond = shape.windowed_layers * max(0, context - shape.window)  # tokens outside of sliding windows
        return Step(
            tp=tp,
            dp=dp,
            batch=batch,
            context=context,
            gemms=list(rows.values()),
            collectives=self._collectives(tp, dp, batch),
            norm_bytes=shape.norm_elements * self.dtype.bits // 8,
            kv_bytes_per_token=layer_bytes * len(shape.layers),
            kv_bytes=layer_bytes * batch * (len(shape.layers) * context - beyond),
            touched_experts=touched,
            layers=len(shape.layers),
            moe_layers=shape.moe_layers,
        )

    def _collectives(self, tp, dp, batch):
        """Collectives of the step: AllReduces in the layers, one for the embedding, and the AllGather of the logits.

        With data parallelism, MoE layers exchange by AllGather and ReduceScatter instead (vLLM's default all-to-all
        backend; seen on vLLM 0.26 with tp=1); with expert parallelism alone the AllReduces stay.
        """
        shape, two = self.shape, self.dtype.bits // 8
        message = batch * shape.hidden * two
        rows = []

        def add(op, size, calls, where, in_layer=True):
            if calls:
                row = {"op": op, "bytes": size, "calls_per_step": calls, "where": where, "in_layer": in_layer}
                rows.append(row)

        layers = len(shape.layers)
        if tp > 1:
            add("allreduce", message, layers, "after o_proj")
            add("allreduce", message, layers - shape.moe_layers, "after the dense MLP")
            add("allreduce", message, shape.moe_layers if dp == 1 else 0, "after the MoE (routed and shared summed)")
            add("allreduce", message, 1, "after the embedding", in_layer=False)
            vocab = sum(part.units for part in shape.head.parts)
            add("allgather", batch * vocab * two, 1, "logits", in_layer=False)
        if dp > 1:
            add("allgather", message * dp, shape.moe_layers, "before the routed experts")
            add("reducescatter", message * dp, shape.moe_layers, "after the routed experts")
        return rows
