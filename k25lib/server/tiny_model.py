"""Write a tiny Kimi-K2.5 with random weights: config, byte-level BPE tokenizer, BF16 safetensors shards.

A program of its own (`python tiny_model.py FOLDER`), run by the interpreter that has vLLM: it needs torch, safetensors
and tokenizers alone. It and tiny_model.json fix everything, so that two machines write the same model. There is no
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
SPEC = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))  # dimensions, names, templates


def tokenizer():
    """A byte-level BPE of exactly `vocab_size` tokens: any text can be read, and any id that the model makes shown."""
    onsets, vowels, codas = [*"bdfghklmnprstvwz", "br", "st", "tr", "pl"], "aeiou", ["", *"lmnrst", "nd"]
    words = ["".join(syllable) for syllable in itertools.product(onsets, vowels, codas)]
    size = SPEC["text_config"]["vocab_size"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([" ".join(words), " ".join(w + v for w in words[::2] for v in words[::97])], trainer)
    assert made.get_vocab_size() == size, made.get_vocab_size()
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
    media = dict.fromkeys(("media_placeholder_token_id", "image_token_id"), tokens.token_to_id("<|media_pad|>"))
    text = {**SPEC["text_config"], **ids}
    config = {**SPEC["wrapper"], **ids, **media, "text_config": text, "vision_config": SPEC["vision_config"]}
    write(folder / "config.json", config)
    write(folder / "tokenizer_config.json", {**SPEC["tokenizer"], "additional_special_tokens": SPECIAL[3:]})
    write(folder / "preprocessor_config.json", SPEC["preprocessor"])
    write(folder / "generation_config.json", {**ids, "max_length": text["max_position_embeddings"]})
    save_shards(folder, weights(text), shards=4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
