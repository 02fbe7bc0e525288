"""Families of models: config.json -> the weight matrices of each layer, unsharded, with their checkpoint names."""

from dataclasses import dataclass

from k25lib.errors import K25Error


@dataclass(frozen=True)
class Part:
    """Rows of a fused matrix that are cut into `units` of `width`; `copied` units may be fewer than the ranks."""

    units: int
    width: int = 1
    what: str = ""
    copied: bool = False

    def on_rank(self, tp):
        """Rows on one of `tp` ranks."""
        return max(1, self.units // tp) * self.width


@dataclass(frozen=True)
class Matrix:
    """One GEMM of a decode step, unsharded: [sum of parts, k], and how tensor parallelism cuts it."""

    name: str
    modules: tuple  # checkpoint paths that are fused into it
    parts: tuple
    k: int
    sharding: str  # column, row, heads (a batch of matrices), vocab, replicated
    what: str = ""  # the dimension that is cut, for the error message
    category: str = "gemm"
    quantizable: bool = True
    heads: int = 1  # matrices in one batched call, before sharding
    routed: bool = False


@dataclass
class Shape:
    """A model as the decode step sees it: matrices by layer, and the numbers that the rest follows from."""

    hidden: int
    vocab: int
    layers: list
    head: Matrix
    norm_elements: int
    kv_heads: Part  # what one layer keeps for a token
    window: int = 0  # tokens that a layer with a sliding window reads at most
    windowed_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_layers: int = 0
    embedding_parameters: int = 0  # 0 where the head shares them


def _column(name, modules, widths, k, what, **more):
    return Matrix(name, modules, tuple(Part(w, 1, what) for w in widths), k, "column", what, **more)


def _row(name, module, n, k, what, **more):
    return Matrix(name, (module,), (Part(n),), k, "row", what, **more)


def _copied(name, modules, n, k, **more):
    return Matrix(name, modules, (Part(n),), k, "replicated", **more)


def _mlp(prefix, hidden, width, label, what):
    """A gated MLP: fused gate and up, then down, which an AllReduce follows."""
    return [
        _column(f"{label} gate_up", (f"{prefix}.gate_proj", f"{prefix}.up_proj"), (width, width), hidden, what),
        _row(f"{label} down", f"{prefix}.down_proj", hidden, width, what),
    ]


def _moe(prefix, hidden, experts, width, names, shared_width, what):
    """Router, shared expert (if any) and routed experts; one AllReduce follows their sum.

    The router is never quantized, whatever the lists say: the server passes it no quantization config.
    """
    gate, up, down = (f"{prefix}.experts.0.{name}" for name in names)
    matrices = [_copied("router gate", (f"{prefix}.gate",), experts, hidden, category="gemm", quantizable=False)]
    if shared_width:
        name = f"{prefix}.shared_experts"
        shared = f"{what} of the shared expert"
        matrices.append(
            _column(
                "shared gate_up", (f"{name}.gate_proj", f"{name}.up_proj"), (shared_width, shared_width), hidden, shared
            )
        )
        matrices.append(_row("shared down", f"{name}.down_proj", hidden, shared_width, shared))
    more = {"category": "moe_gemm", "routed": True}
    matrices.append(_column("routed gate_up", (gate, up), (width, width), hidden, what, **more))
    matrices.append(_row("routed down", down, hidden, width, what, **more))
    return matrices


def _head(config):
    vocab = -(-config.need("vocab_size") // 64) * 64  # the server pads the vocabulary to a multiple of 64
    return Matrix("lm_head", ("lm_head",), (Part(vocab, 1, "padded vocabulary"),), config.need("hidden_size"), "vocab")


def _embedding(config):
    return 0 if config.get("tie_word_embeddings") else config.need("vocab_size") * config.need("hidden_size")


def mla(config):
    """DeepSeek-V2/V3 and Kimi-K2: latent attention, dense first layers, a shared expert beside routed ones.

    In decode, kv_b_proj is absorbed: two batched multiplications by BF16 copies of its halves.
    """
    need, prefix = config.need, config.prefix
    hidden, heads = need("hidden_size"), need("num_attention_heads")
    nope, rope, value = need("qk_nope_head_dim"), need("qk_rope_head_dim"), need("v_head_dim")
    latent, q_rank = need("kv_lora_rank"), config.stated("q_lora_rank")
    count, dense = need("num_hidden_layers"), config.stated("first_k_dense_replace")
    every, experts = config.number("moe_layer_freq", 1, least=1), config.stated("n_routed_experts")
    layers, sparse = [], 0
    for index in range(count):
        at = f"{prefix}model.layers.{index}"
        attention = f"{at}.self_attn"
        kv_a = f"{attention}.kv_a_proj_with_mqa"
        q = Part(heads, nope + rope, "attention heads")
        if q_rank:
            projections = [
                _copied("fused_qkv_a_proj", (f"{attention}.q_a_proj", kv_a), q_rank + latent + rope, hidden),
                Matrix("q_b_proj", (f"{attention}.q_b_proj",), (q,), q_rank, "column", "attention heads"),
            ]
        else:
            projections = [
                Matrix("q_proj", (f"{attention}.q_proj",), (q,), hidden, "column", "attention heads"),
                _copied("kv_a_proj", (kv_a,), latent + rope, hidden),
            ]
        absorbed = {"sharding": "heads", "what": "attention heads", "quantizable": False, "heads": heads}
        kv_b = (f"{attention}.kv_b_proj",)
        matrices = [
            *projections,
            Matrix("W_UK_T bmm", kv_b, (Part(latent),), nope, **absorbed),
            Matrix("W_UV bmm", kv_b, (Part(value),), latent, **absorbed),
            _row("o_proj", f"{attention}.o_proj", hidden, heads * value, "attention heads"),
        ]
        if experts and index >= dense and index % every == 0:
            sparse += 1
            width = need("moe_intermediate_size")
            shared = config.stated("n_shared_experts") * width
            names = ("gate_proj", "up_proj", "down_proj")
            matrices += _moe(f"{at}.mlp", hidden, experts, width, names, shared, "moe_intermediate_size")
        else:
            matrices += _mlp(f"{at}.mlp", hidden, need("intermediate_size"), "dense", "intermediate_size")
        layers.append(matrices)
    return Shape(
        hidden=hidden,
        vocab=need("vocab_size"),
        layers=layers,
        head=_head(config),
        norm_elements=count * (2 * hidden + q_rank + latent) + hidden,
        kv_heads=Part(1, latent + rope, "latent", copied=True),
        experts=experts,
        experts_per_token=need("num_experts_per_tok") if sparse else 0,
        moe_layers=sparse,
        embedding_parameters=_embedding(config),
    )


def gqa(config):
    """Llama, Mistral, Qwen2 and Qwen3: grouped-query attention and a gated MLP."""
    return _grouped_query(config, lambda index: False)


def gqa_moe(config):
    """Mixtral, Qwen2-MoE and Qwen3-MoE: grouped-query attention and routed experts."""
    dense, every = set(config.numbers("mlp_only_layers")), config.number("decoder_sparse_step", 1, least=1)
    return _grouped_query(config, lambda index: index not in dense and (index + 1) % every == 0)


def _windowed(config, count):
    """Layers whose attention is bounded by `sliding_window`."""
    types = config.get("layer_types")
    if not config.number("sliding_window"):
        return 0
    if isinstance(types, list):
        return types.count("sliding_attention")
    if config.says("qwen"):  # off unless switched on, and then from one layer on
        return max(0, count - config.number("max_window_layers", count)) if config.get("use_sliding_window") else 0
    return count if config.says("mistral", "mixtral") else 0


def _grouped_query(config, is_sparse):
    need, prefix = config.need, config.prefix
    hidden, heads, count = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
    kv_heads = (config.number if config.says("llama") else config.stated)("num_key_value_heads") or heads
    size = need("head_dim") if config.says("qwen3") else config.number("head_dim", hidden // heads, least=1)
    if heads % kv_heads or (config.get("head_dim") is None and hidden % heads):
        raise K25Error(f"config.json has {heads} attention heads, which do not fit its hidden_size and key-value heads")
    mixtral = config.says("mixtral")
    layers, sparse, experts = [], 0, 0
    for index in range(count):
        at = f"{prefix}model.layers.{index}"
        attention = f"{at}.self_attn"
        kv = Part(kv_heads, size, "key-value heads", copied=True)
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        matrices = [
            Matrix("qkv_proj", qkv, (Part(heads, size, "attention heads"), kv, kv), hidden, "column"),
            _row("o_proj", f"{attention}.o_proj", hidden, heads * size, "attention heads"),
        ]
        if is_sparse(index):
            sparse += 1
            experts = need("num_local_experts" if mixtral else "num_experts")
            width = need("intermediate_size" if mixtral else "moe_intermediate_size")
            names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            block = "block_sparse_moe" if mixtral else "mlp"
            shared = (config.stated if config.says("qwen2") else config.number)("shared_expert_intermediate_size")
            matrices += _moe(f"{at}.{block}", hidden, experts, width, names, shared, "expert width")
            if shared:
                matrices.append(_copied("shared gate", (f"{at}.mlp.shared_expert_gate",), 1, hidden, quantizable=False))
        else:
            matrices += _mlp(f"{at}.mlp", hidden, need("intermediate_size"), "dense", "intermediate_size")
        layers.append(matrices)
    head_norms = 2 * size if config.says("qwen3") else 0
    return Shape(
        hidden=hidden,
        vocab=need("vocab_size"),
        layers=layers,
        head=_head(config),
        norm_elements=count * (2 * hidden + head_norms) + hidden,
        kv_heads=Part(kv_heads, 2 * size, "key-value heads", copied=True),
        window=config.number("sliding_window"),
        windowed_layers=_windowed(config, count),
        experts=experts,
        experts_per_token=need("num_experts_per_tok") if sparse else 0,
        moe_layers=sparse,
        embedding_parameters=_embedding(config),
    )


BUILDERS = {"mla": mla, "gqa": gqa, "gqa_moe": gqa_moe}
