"""Other families, weight formats, and configs that cannot be."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k25lib.errors import K25Error, UsageError
from k25lib.model import Model, load_model, touched_experts
from k25lib.model.config import Config

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}
TINY_KIMI = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "q_lora_rank": 256,
    "vocab_size": 2048,
    "quantization_config": None,
}


@pytest.fixture
def load(tmp_path):
    def _load(config, **more):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        return load_model(tmp_path)

    return _load


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 200))
def test_touched_experts_are_between_one_token_and_all(experts, per_token, tokens):
    per_token = min(per_token, experts)
    touched = touched_experts(experts, per_token, tokens)
    assert per_token - 1e-6 <= touched <= min(experts, tokens * per_token) + 1e-6


def gemms(step):
    return {g["name"]: g for g in step.gemms}


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_1B, 1_235_814_400),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_30B, 30_532_122_624),
    ],
    ids=["llama-8b", "llama-1b-tied", "mixtral", "qwen3-30b-a3b"],
)
def test_parameters_are_those_of_the_published_checkpoints(load, config, total):
    assert load(config).parameters()["total"] == total


def test_deepseek_v3_has_671_billion_parameters_and_37_active(load):
    parameters = load(DEEPSEEK_V3).parameters()
    assert round(parameters["total"] / 1e9) == 671
    assert round(parameters["active_with_embedding"] / 1e9, 1) == 37.6


def test_llama_reads_half_its_bytes_on_each_of_two_ranks(load):
    model = load(LLAMA_8B)
    one, two = model.step(tp=1), model.step(tp=2)
    assert one.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096)  # the embedding is not read
    assert two.weight_bytes - two.norm_bytes == (one.weight_bytes - one.norm_bytes) / 2
    qkv = gemms(two)["qkv_proj"]
    assert (qkv["n"], qkv["k"], qkv["calls_per_step"]) == ((32 + 8 + 8) * 128 // 2, 4096, 32)
    assert two.kv_bytes_per_token == 2 * 8 // 2 * 128 * 2 * 32
    assert two.census() == {"allreduce": 65, "allgather": 1, "kv_cache": 32}


def test_key_value_heads_are_copied_beyond_their_number(load):
    step = load(LLAMA_8B).step(tp=16)
    assert gemms(step)["qkv_proj"]["n"] == (2 + 1 + 1) * 128
    assert step.kv_bytes_per_token == 2 * 128 * 2 * 32


def test_mixtral_routes(load):
    step = load(MIXTRAL).step(tp=2, batch=1)
    routed = gemms(step)["routed gate_up"]
    assert (routed["n"], routed["k"], routed["matrices"], routed["dtype"]) == (14336, 4096, 2, "bf16")
    assert step.census()["moe_gemm"] == 64


def test_dense_layers_of_qwen3_moe_are_kept_apart(load):
    step = load(QWEN3_30B, mlp_only_layers=[0, 5]).step()
    assert gemms(step)["dense down"]["calls_per_step"] == 2
    assert gemms(step)["routed down"]["calls_per_step"] == 46


def test_tiny_kimi_on_a_cpu_has_the_calls_that_its_trace_shows(load):
    census = load(TINY_KIMI).step(tp=2).census("cpu")
    # 24 linear layers and, of the absorbed kv_b_proj, 8 batched multiplications
    assert census == {"allreduce": 9, "allgather": 1, "moe_gemm": 3, "kv_cache": 4, "gemm": 24 + 8}


def test_fp8_blocks(load):
    model = load(DEEPSEEK_V3)
    step = gemms(model.step(tp=8))
    assert step["fused_qkv_a_proj"]["bytes_per_call"] == 2112 * 7168 + 17 * 56 * 4
    assert (step["fused_qkv_a_proj"]["dtype"], step["W_UV bmm"]["dtype"], step["lm_head"]["dtype"]) == (
        "fp8",
        "bf16",  # the absorbed copies are BF16
        "bf16",
    )
    with pytest.raises(UsageError, match=r"cut inside a block of 128x128; tp may be 1, 2, 4, 8, 16"):
        model.step(tp=32)


@pytest.mark.parametrize(
    ("quantization", "dtype", "group", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4", 128, 0.5 + 2 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 128, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", None, 1 + 2 / 4096),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", None, 1 + 4 / 4096**2),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
                },
                "ignore": ["lm_head"],
            },
            "int4",
            32,
            0.5625,
        ),
    ],
    ids=["gptq", "awq", "gptq-channel", "fp8-tensor", "w4a16"],
)
def test_byte_widths(load, quantization, dtype, group, size):
    step = gemms(load(LLAMA_8B, quantization_config=quantization).step())
    assert (step["o_proj"]["dtype"], step["o_proj"]["group_size"]) == (dtype, group)
    assert step["o_proj"]["bytes_per_call"] == pytest.approx(4096 * 4096 * size, abs=1)
    assert step["lm_head"]["dtype"] == "bf16"


def test_an_ignored_layer_is_a_row_of_its_own(load):
    quantization = {"quant_method": "fp8", "ignored_layers": ["model.layers.3.mlp.down_proj"]}
    rows = [g for g in load(LLAMA_8B, quantization_config=quantization).step().gemms if g["name"] == "dense down"]
    assert sorted((g["dtype"], g["calls_per_step"]) for g in rows) == [("bf16", 1), ("fp8", 31)]


def test_parts_of_one_fused_matrix_must_agree(load):
    quantization = {"quant_method": "fp8", "ignored_layers": ["model.layers.3.mlp.up_proj"]}
    with pytest.raises(K25Error, match="up_proj are one matrix"):
        load(LLAMA_8B, quantization_config=quantization).step()


def test_quantization_at_the_top_level_of_a_nested_config_counts(load):
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": TINY_KIMI}
    step = load(nested, quantization_config={"quant_method": "fp8"}).step()
    assert gemms(step)["o_proj"]["dtype"] == "fp8"


def test_groups_bound_the_tensor_parallel_size(load):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    model = load(QWEN3_30B, quantization_config=quantization)
    assert model.possible_tp() == [1, 2]
    with pytest.raises(UsageError, match="routed down: K=192 is no multiple of the group of 128; tp may be 1, 2$"):
        model.step(tp=4)


def test_latent_attention_without_a_compressed_query(load):
    step = gemms(load(DEEPSEEK_V3, q_lora_rank=None, quantization_config=None).step(tp=2))
    assert (step["q_proj"]["n"], step["q_proj"]["k"]) == (64 * 192, 7168)
    assert (step["kv_a_proj"]["n"], step["kv_a_proj"]["sharding"]) == (576, "replicated")


@pytest.mark.parametrize("tp", [3, 5, 6, 64])
def test_a_tp_that_cannot_be_says_what_may_be(load, tp):
    with pytest.raises(UsageError, match=rf"tp={tp} cannot be: .* tp may be 1, 2, 4, 8, 16, 32$"):
        load(LLAMA_8B).step(tp=tp)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"tp": 2.0}, {"batch": 0}, {"context": -1}, {"dp": True}])
def test_sizes_must_be_whole_numbers(load, sizes):
    with pytest.raises(UsageError, match="must be a whole number"):
        load(LLAMA_8B).step(**sizes)


def test_an_unknown_architecture_is_named(load):
    with pytest.raises(K25Error, match="architecture MambaForCausalLM .model_type mamba. is not of a known family"):
        load({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})


def test_a_wrapper_round_a_known_text_model(load):
    model = load({"architectures": ["SomeWrapper"], "text_config": LLAMA_8B})
    assert (model.architecture, model.parameters()["total"]) == ("SomeWrapper", 8_030_261_248)


def test_an_unknown_quantization_is_named(load):
    with pytest.raises(K25Error, match="'bitsandbytes' is not known; known: compressed-tensors, gptq"):
        load(LLAMA_8B, quantization_config={"quant_method": "bitsandbytes"}).step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_attention_heads": "32"}, "num_attention_heads='32'; it must be a positive whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"torch_dtype": "bogus"}, "dtype 'bogus'"),
        ({"head_dim": [64]}, r"head_dim=\[64\]; it must be a positive whole number"),
        ({"quantization_config": [1]}, "must be a JSON object"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "is not known; known: compressed"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "whole numbers"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "strategy 'block' with block"),
        ({"architectures": True, "model_type": 3}, "architecture none named .model_type 3. is not of a known family"),
        ({"quantization_config": {"quant_method": "gptq"}}, "cannot be read for .*q_proj: KeyError"),
    ],
)
def test_a_broken_config_is_one_line(load, change, message):
    with pytest.raises(K25Error, match=message):
        load(LLAMA_8B, **change).step()


def test_a_broken_list_of_dense_layers(load):
    with pytest.raises(K25Error, match="mlp_only_layers='x'; it must be a list of whole numbers"):
        load(QWEN3_30B, mlp_only_layers="x")


def test_more_experts_a_token_than_there_are(load):
    with pytest.raises(K25Error, match="routes to 200 of 128 experts"):
        load(QWEN3_30B, num_experts_per_tok=200)


@given(st.data())
def test_a_config_with_one_strange_value_is_right_or_refused(data):
    raw = copy.deepcopy(data.draw(st.sampled_from([LLAMA_8B, MIXTRAL, QWEN3_30B, DEEPSEEK_V3]))) | {
        "num_hidden_layers": 2
    }
    place = raw["quantization_config"] if "quantization_config" in raw and data.draw(st.booleans()) else raw
    strange = st.sampled_from([None, 0, -1, 1, 1.5, True, "x", [], [1], ["q_proj"], {}, {"a": 1}])
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(strange)
    try:
        step = Model(Config(raw)).step(tp=data.draw(st.sampled_from([1, 2, 3])))
    except K25Error as error:
        assert "\n" not in str(error)
    else:
        assert step.weight_bytes > 0


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *(
            (DEEPSEEK_V3, key)
            for key in ("q_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace")
        ),
        (QWEN3_30B, "num_key_value_heads"),
        (QWEN3_30B, "head_dim"),
        (QWEN3_30B, "num_experts"),
        (MIXTRAL, "num_key_value_heads"),
        (MIXTRAL, "num_local_experts"),
        (
            QWEN3_30B | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
            "shared_expert_intermediate_size",
        ),
    ],
)
def test_a_key_whose_absence_means_another_number_is_asked_for(load, config, key):
    """The families' own defaults are neither 0 nor those of Llama: 256 experts, 128 a head, 8 key-value heads ..."""
    with pytest.raises(K25Error, match=f"lacks '{key}'"):
        load({name: value for name, value in config.items() if name != key})


def test_llama_without_key_value_heads_has_as_many_as_heads(load):
    config = {name: value for name, value in LLAMA_8B.items() if name != "num_key_value_heads"}
    assert gemms(load(config).step())["qkv_proj"]["n"] == 3 * 32 * 128


@pytest.mark.parametrize("change", [{"num_attention_heads": 33}, {"num_key_value_heads": 5}])
def test_heads_that_do_not_fit(load, change):
    with pytest.raises(K25Error, match="do not fit its hidden_size and key-value heads"):
        load(LLAMA_8B, **change)


MISTRAL = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
QWEN2 = LLAMA_8B | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (MISTRAL, 32),
        (MISTRAL | {"sliding_window": None}, 0),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 16}, 16),
        (QWEN2 | {"use_sliding_window": False, "max_window_layers": 28}, 0),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 28}, 4),
        (LLAMA_8B, 0),
    ],
)
def test_a_sliding_window_bounds_what_is_read_of_the_cache(load, config, windowed):
    model = load(config)
    a_layer = 8 * 2 * 128 * 2
    assert model.step(batch=3, context=100).kv_bytes == 3 * 100 * 32 * a_layer
    read = (32 - windowed) * 10_000 + windowed * 4096
    assert model.step(batch=3, context=10_000).kv_bytes == 3 * read * a_layer
    assert model.step().kv_bytes_per_token == 32 * a_layer


W4 = {"num_bits": 4, "type": "int", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def test_a_target_by_name_goes_before_one_by_class(load):
    groups = {"a": {"targets": ["Linear"], "weights": W4}, "b": {"targets": ["re:.*down_proj"], "weights": W8}}
    step = gemms(
        load(LLAMA_8B, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups}).step()
    )
    assert (step["dense down"]["dtype"], step["dense gate_up"]["dtype"]) == ("int8", "int4")
    assert step["dense down"]["bytes_per_call"] == 4096 * 14336 + 2 * 4096


def test_one_name_alone_is_a_list_of_one(load):
    groups = {"a": {"targets": "Linear", "weights": W4}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": "re:.*self_attn.*"}
    step = gemms(load(LLAMA_8B, quantization_config=config).step())
    assert (step["o_proj"]["dtype"], step["dense down"]["dtype"]) == ("bf16", "int4")


def test_compression_config_is_the_older_name(load):
    groups = {"a": {"targets": ["Linear"], "weights": W4}}
    step = load(LLAMA_8B, compression_config={"quant_method": "compressed-tensors", "config_groups": groups}).step()
    assert gemms(step)["o_proj"]["dtype"] == "int4"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": W4 | {"type": "nf"}}}}, "type 'nf'"),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group"}}}},
            "without a group_size",
        ),
        (
            {
                "config_groups": {"a": {"targets": ["Linear"], "weights": W4}},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparse weights",
        ),
        ({}, "KeyError"),
        ({"config_groups": {}}, "names no matrix"),
        ({"config_groups": {"a": {"targets": ["Conv2d"], "weights": W4}}}, "names no matrix"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": W4}}, "ignore": {"a": 1}}, "no list of modules"),
    ],
)
def test_compressed_weights_that_are_not_known(load, more, message):
    with pytest.raises(K25Error, match=message):
        load(LLAMA_8B, quantization_config={"quant_method": "compressed-tensors", **more}).step()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def test_gptq_of_some_modules_only(load):
    chosen = GPTQ | {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]}
    step = gemms(load(LLAMA_8B, quantization_config=chosen).step())
    assert (step["qkv_proj"]["dtype"], step["dense gate_up"]["dtype"]) == ("bf16", "int4")
    dynamic = GPTQ | {"dynamic": {"-:.*self_attn.*": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64}}}
    step = gemms(load(LLAMA_8B, quantization_config=dynamic).step())
    assert [step[name]["dtype"] for name in ("qkv_proj", "dense gate_up", "dense down")] == ["bf16", "int4", "int8"]
    assert step["dense down"]["bytes_per_call"] == 4096 * 14336 * (1 + 2 / 64)


def test_gptq_without_symmetry_keeps_zero_points(load):
    step = gemms(load(LLAMA_8B, quantization_config=GPTQ | {"sym": False}).step())
    assert step["o_proj"]["bytes_per_call"] == 4096 * 4096 * (0.5 + 2.5 / 128)


def test_awq_with_the_router_left_out(load):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"]}
    step = gemms(load(QWEN3_30B, quantization_config=awq).step())
    assert (step["routed gate_up"]["dtype"], step["router gate"]["dtype"]) == ("int4", "bf16")


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_weights_that_a_file_beside_describes_are_not_taken_for_bf16(load, tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(K25Error, match=f"{name} beside it may"):
        load(LLAMA_8B)
    assert load(LLAMA_8B, quantization_config=GPTQ)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForCausalLMEagle3", "DeepSeekMTPModel"])
def test_another_architecture_of_a_known_type_is_refused(load, name):
    with pytest.raises(K25Error, match=f"architecture {name} .* is not of a known family"):
        load(LLAMA_8B, architectures=[name])


def test_a_nested_type_without_an_architecture_is_known(load):
    text = {name: value for name, value in LLAMA_8B.items() if name != "architectures"}
    assert load({"architectures": ["SomeWrapper"], "text_config": text}).parameters()["total"] == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no valid JSON"), ("[1]", "must hold a JSON object"), ("[" * 100_000, "nested too deeply")],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*config.json: No such file"):
        load_model(tmp_path)
