"""Write a tiny Kimi-K2.5 with random weights: config, byte-level BPE tokenizer, BF16 safetensors shards.

A program of its own (`python tiny_model.py FOLDER`), run by the interpreter that has vLLM: it needs torch, safetensors
and tokenizers alone. Everything in it is fixed by this file, so that two machines write the same model. It has no
vision tower: serve it with --language-model-only.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["[BOS]", "[EOS]", "[PAD]"] + [
    f"<|{name}|>"
    for name in ("im_end", "im_user", "im_assistant", "im_system", "im_middle")
    + ("media_begin", "media_content", "media_end", "media_pad")
]
CHAT = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
VOCABULARY = 2048
TEXT = {  # kv_lora_rank and qk_rope_head_dim are Kimi's own: vLLM's MLA on CPUs takes no others
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
VISION = {  # described, as the architecture demands; without weights
    "model_type": "kimi_k25",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vt_hidden_size": 128,
    "vt_intermediate_size": 256,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "mm_hidden_size": 128,
    "text_hidden_size": 256,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "video_attn_type": "spatial_temporal",
}
IMAGES = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "processor_class": "Kimi_K25Processor",
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}


def tokenizer():
    """A byte-level BPE of exactly VOCABULARY tokens: any text can be read, and any id that the model makes shown."""
    onsets, vowels, codas = [*"bdfghklmnprstvwz", "br", "st", "tr", "pl"], "aeiou", ["", *"lmnrst", "nd"]
    words = ["".join(syllable) for syllable in itertools.product(onsets, vowels, codas)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([" ".join(words), " ".join(w + v for w in words[::2] for v in words[::97])], trainer)
    assert made.get_vocab_size() == VOCABULARY, made.get_vocab_size()
    return made


def weights(c):
    """Name -> tensor of the text model, BF16, seeded."""
    torch.manual_seed(0)
    made = {}

    def linear(name, rows, columns, scale=0.05):
        made[f"{name}.weight"] = (torch.randn(rows, columns) * scale).to(torch.bfloat16)

    def norm(name, size):
        made[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    def mlp(name, inner):
        linear(f"{name}.gate_proj", inner, hidden)
        linear(f"{name}.up_proj", inner, hidden)
        linear(f"{name}.down_proj", hidden, inner)

    hidden, heads, lora = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    linear("model.embed_tokens", c["vocab_size"], hidden, 1.0)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{layer}.self_attn.q_a_proj", c["q_lora_rank"], hidden)
        norm(f"{layer}.self_attn.q_a_layernorm", c["q_lora_rank"])
        linear(f"{layer}.self_attn.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
        linear(f"{layer}.self_attn.kv_a_proj_with_mqa", lora + rope, hidden)
        norm(f"{layer}.self_attn.kv_a_layernorm", lora)
        linear(f"{layer}.self_attn.kv_b_proj", heads * (nope + value), lora)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * value)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if n < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        linear(f"{layer}.mlp.gate", c["n_routed_experts"], hidden)
        made[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(c["n_routed_experts"])
        for expert in range(c["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    norm("model.norm", hidden)
    linear("lm_head", c["vocab_size"], hidden)
    return {f"language_model.{name}": tensor for name, tensor in made.items()}


def save_shards(folder, tensors, shards):
    """Write `shards` safetensors files and their index."""
    names, where = list(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:06d}.safetensors"
        part = names[n * len(names) // shards : (n + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write(path, value):
    """Write one JSON file."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main(folder):
    """Write the whole model into `folder`, which must exist."""
    tokens = tokenizer()
    tokens.save(str(folder / "tokenizer.json"))
    ids = {
        "bos_token_id": tokens.token_to_id("[BOS]"),
        "eos_token_id": tokens.token_to_id("<|im_end|>"),
        "pad_token_id": tokens.token_to_id("[PAD]"),
    }
    pad = tokens.token_to_id("<|media_pad|>")
    names = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]"}
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **names,
            "additional_special_tokens": SPECIAL[3:],
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT,
        },
    )
    write(
        folder / "config.json",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            **ids,
            "media_placeholder_token_id": pad,
            "image_token_id": pad,
            "ignore_index": -100,
            "tie_word_embeddings": False,
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "text_config": {**TEXT, **ids},
            "vision_config": VISION,
        },
    )
    write(folder / "preprocessor_config.json", IMAGES)
    write(
        folder / "generation_config.json",
        {"bos_token_id": ids["bos_token_id"], "eos_token_id": ids["eos_token_id"], "max_length": 4096},
    )
    save_shards(folder, weights(TEXT), shards=4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
