"""Folders as others publish them: import, export and import again change nothing, and transformers sees no difference.

Configs, tokenizers and settings are those of published models, with small sizes and random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conversion.test_gguf import CHATML
from tests.support.model_folders import TEXT
from tests.support.weights import noisy_weights
from textmill.cli import main
from textmill.conversion.compare import TEXTS
from textmill.conversion.readers import model_class
from textmill.models import open_family
from textmill.models.pooling import Pooling, pooling_files
from textmill.storage.tensor_files import encode_safetensors
from textmill.tokens.vocabulary import foreign_files

CORPUS = [*TEXT, *TEXTS] * 3
LLAMA_3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 24}
GPT2 |= {"n_positions": 64, "n_ctx": 64, "task_specific_params": {"text-generation": {"max_length": 50}}}
BERT = {**SIZES, "model_type": "bert", "architectures": ["BertForMaskedLM"], "type_vocab_size": 2, "pad_token_id": 0}
BERT |= {"num_attention_heads": 4, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
QWEN2 |= {"sliding_window": 32768, "max_window_layers": 21, "rope_theta": 1e6}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6}
MISTRAL_7B = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 48}
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
LABELS = {"id2label": {"0": "sad", "1": "glad", "2": "mad"}, "label2id": {"sad": 0, "glad": 1, "mad": 2}}

Folder = tuple[str, dict[str, Any], dict[str, Any]]
"""The kind of tokenizer, config.json, and other files: generation, settings (of the tokenizer), template, pooling."""
FOLDERS: dict[str, Folder] = {
    "gpt2": ("gpt2", GPT2, {}),
    "gpt2-untied": ("gpt2", {**GPT2, "tie_word_embeddings": False}, {}),
    "gpt2-gelu": ("gpt2", {**GPT2, "activation_function": "gelu", "n_inner": 40}, {}),
    "gpt2-generation": ("gpt2", GPT2, {"generation": {"bos_token_id": 0, "eos_token_id": 0, "max_length": 30}}),
    "gpt2-pad": ("gpt2", {**GPT2, "pad_token_id": 2}, {"settings": {"padding_side": "left"}}),
    "distilgpt2": ("gpt2", {**GPT2, "n_layer": 1, "resid_pdrop": 0.2, "summary_type": "cls_index"}, {}),
    "llama-2": ("spm", {**LLAMA, "tie_word_embeddings": False}, {"settings": {"add_bos_token": True}}),
    "llama-2-chat": ("spm", LLAMA, {"generation": {**SAMPLING, "eos_token_id": 2}, "template": MISTRAL}),
    "llama-3": ("llama-3", {**LLAMA, "rope_theta": 5e5}, {}),
    "llama-3-instruct": (
        "llama-3",
        {**LLAMA, "eos_token_id": 2},
        {"generation": {**SAMPLING, "bos_token_id": 0, "eos_token_id": [1, 2, 3]}, "template": LLAMA_3},
    ),
    "llama-3.1": (
        "llama-3",
        {**LLAMA, "rope_scaling": SCALING, "bos_token_id": 0, "eos_token_id": [1, 2, 3]},
        {"template": LLAMA_3},
    ),
    "llama-3.2": ("llama-3", {**LLAMA, "tie_word_embeddings": True, "rope_scaling": SCALING}, {}),
    "llama-attention-bias": ("llama-3", {**LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "tinyllama": ("spm", {**LLAMA, "num_key_value_heads": 1}, {"settings": {"padding_side": "right"}}),
    "smollm2": ("smollm", {**LLAMA, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}, {}),
    "smollm2-instruct": (
        "smollm",
        {**LLAMA, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        {"template": CHATML, "settings": {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}},
    ),
    "qwen2": ("qwen", {**QWEN2, "bos_token_id": 0, "eos_token_id": 0}, {}),
    "qwen2.5-instruct": (
        "qwen",
        {**QWEN2, "bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": True},
        {
            "generation": {**SAMPLING, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": [2, 0]},
            "template": CHATML,
            "settings": {"add_bos_token": False, "split_special_tokens": False, "model_max_length": 131072},
        },
    ),
    "qwen2-fitted": ("gpt2", {**QWEN2, "bos_token_id": 0, "eos_token_id": 0}, {}),
    "qwen3": ("qwen", QWEN3, {"template": CHATML, "generation": {**SAMPLING, "eos_token_id": [2, 0]}}),
    "qwen3-fitted": ("gpt2", QWEN3, {}),
    "mistral": ("spm", MISTRAL_7B, {"template": MISTRAL}),
    "mistral-long-window": ("spm", {**MISTRAL_7B, "sliding_window": 4096}, {}),
    "gemma-template": ("spm", LLAMA, {"template": GEMMA, "generation": {"eos_token_id": [2, 1]}}),
    "bert-uncased": ("bert", BERT, {}),
    "bert-cased": ("bert-cased", {**BERT, "architectures": ["BertForPreTraining"]}, {}),
    "bert-classifier": (
        "bert",
        {**BERT, **LABELS, "architectures": ["BertForSequenceClassification"]},
        {"settings": {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}},
    ),
    "bert-ner": ("bert-cased", {**BERT, **LABELS, "architectures": ["BertForTokenClassification"]}, {}),
    "bert-qa": ("bert", {**BERT, "architectures": ["BertForQuestionAnswering"]}, {}),
    "minilm": ("bert", {**BERT, "architectures": ["BertModel"]}, {"pooling": Pooling("mean", True, 64)}),
}
SHORT = ("llama-3-instruct", "qwen2-fitted", "minilm")
SPECIAL = {
    "gpt2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama-3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
    "spm": ["<unk>", "<s>", "</s>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
}
ROLES = {
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "smollm": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "spm": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "bert": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
}


def build_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer as the published one is built, with a vocabulary of a few hundred tokens."""
    family = kind.removesuffix("-cased")
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": SPECIAL[family], "show_progress": False}
    if family == "bert":
        inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.normalizer = normalizers.BertNormalizer(lowercase=kind == family)
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        inner.train_from_iterator(CORPUS, trainers.WordPieceTrainer(**options))
        ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
        return inner
    if kind == "spm":
        inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(undo)
        tokens = [*SPECIAL["spm"], *(f"<0x{byte:02X}>" for byte in range(256))]
        inner.train_from_iterator(CORPUS, trainers.BpeTrainer(**{**options, "special_tokens": tokens}))
        tree = json.loads(inner.to_str())
        tree["added_tokens"] = tree["added_tokens"][:3]
        inner = Tokenizer.from_str(json.dumps(tree))
        inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)])
        return inner
    inner = Tokenizer(models.BPE())
    pattern = {"llama-3": foreign_files.LLAMA_3, "qwen": foreign_files.QWEN}.get(kind)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_]) if steps else bytes_
    inner.normalizer = normalizers.NFC() if kind == "qwen" else None
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(**options, initial_alphabet=alphabet))
    if kind == "llama-3":
        foreign_files.add_special_around(inner, "<|begin_of_text|>", None)
        tree = json.loads(inner.to_str())
        tree["model"]["ignore_merges"] = True
        inner = Tokenizer.from_str(json.dumps(tree))
    return inner


def write(folder: Path, name: str) -> Any:
    """Write a folder; return its shape."""
    kind, config, more = FOLDERS[name]
    inner = build_tokenizer(kind)
    family = open_family({"gpt2": "gpt2", "bert": "bert"}.get(config["model_type"], "llama"))
    config = {**config, "vocab_size": inner.get_vocab_size(), "transformers_version": "4.44.0"}
    shape: Any = family.shape_of_hf(config, "config.json")
    folder.mkdir()
    roles = ROLES[kind.removesuffix("-cased")]
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": json.loads(inner.to_str()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **roles, **more.get("settings", {})},
        "special_tokens_map.json": roles,
    }
    if "template" in more:
        files["tokenizer_config.json"]["chat_template"] = more["template"]
    if "generation" in more:
        files["generation_config.json"] = more["generation"]
    for file, tree in files.items():
        (folder / file).write_text(json.dumps(tree, ensure_ascii=False))
    for file, text in pooling_files(more["pooling"], shape.width).items() if "pooling" in more else ():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(list(noisy_weights(shape)))))
    (folder / "README.md").write_text(
        f"---\nlicense: mit\nlanguage:\n- ko\nbase_model: mills/{name}\n---\n\n# {name}\n"
    )
    return shape


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FOLDERS]
)
def test_import_export_import_changes_nothing(tmp_path: Path, name: str) -> None:
    source, first, out, back = (tmp_path / part for part in ("source", "first", "out", "back"))
    shape = write(source, name)
    assert main(["import", str(source), str(first)]) == 0
    assert main(["export", str(first), f"export.folder={out}"]) == 0
    assert main(["import", str(out), str(back)]) == 0
    files = {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()} - {"manifest.json"}
    for file in files - {"README.md"}:
        before, after = ((folder / file).read_bytes() for folder in (first, back))
        assert before == after or json.loads(before) == json.loads(after), file
    assert (back / "README.md").read_text().endswith(f"base_model: mills/{name}\n---\n\n# {name}\n")

    # AutoTokenizer would replace the tokenizer of a qwen2 that is not Qwen's.
    classes = (transformers.PreTrainedTokenizerFast, transformers.AutoTokenizer)
    theirs, ours = (open_.from_pretrained(folder) for open_, folder in zip(classes, (source, back), strict=True))
    for text in (*TEXTS, "<s> </s> <|im_end|> [SEP]", "  two  spaces "):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(theirs(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template", "padding_side", "all_special_tokens"):
        assert getattr(ours, role) == getattr(theirs, role), role
    load = getattr(transformers, model_class(shape)).from_pretrained
    nets = [load(folder).eval() for folder in (source, back)]
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values = [getattr(net.config, role, None) for net in nets]
        if role in FOLDERS[name][1]:
            assert values[0] == values[1], role
    if FOLDERS[name][2].get("generation"):
        settings = [net.generation_config.to_dict() for net in nets]
        assert settings[0] == settings[1]
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, shape.vocab, (2, 20)))
    with torch.no_grad():
        wanted, found = (net(ids)[0] for net in nets)
    assert torch.allclose(wanted, found, atol=1e-5 * max(1.0, float(wanted.abs().max())))
