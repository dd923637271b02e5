"""All keys of the config, the nearest one to a mistyped key, and what other tools call our keys."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from textmill.config import RunConfig, Section
from textmill.config.renamed import RENAMED

# The names that nanoGPT, Hugging Face, Megatron (both generations), DeepSpeed and dsGPT2 have for our keys.
OTHER_NAMES = {
    "batch_size": "train.batch", "global_batch_size": "train.batch", "train_batch_size": "train.batch",
    "per_device_train_batch_size": "engine.micro_batch", "micro_batch_size": "engine.micro_batch",
    "train_micro_batch_size_per_gpu": "engine.micro_batch", "device_batch_size": "engine.micro_batch",
    "gradient_accumulation_steps": "engine.micro_batch", "accumulation": "engine.micro_batch",
    "lr": "train.learning_rate", "max_lr": "train.learning_rate", "min_lr": "train.min_learning_rate",
    "lr_decay_style": "train.schedule", "lr_scheduler_type": "train.schedule", "scheduler": "train.schedule",
    "warmup_steps": "train.warmup", "warmup_iters": "train.warmup", "lr_warmup_iters": "train.warmup",
    "lr_decay_iters": "train.decay_steps", "lr_decay_steps": "train.decay_steps", "warmup_type": "train.warmup_shape",
    "lr_warmup_fraction": "train.warmup", "warmup_ratio": "train.warmup", "warmup_num_steps": "train.warmup",
    "max_steps": "train.steps", "max_iters": "train.steps", "train_iters": "train.steps", "iterations": "train.steps",
    "num_train_steps": "train.steps", "block_size": "train.length", "seq_length": "train.length",
    "seq_len": "train.length", "max_seq_length": "train.length", "context_length": "train.length",
    "sequence_length": "train.length", "grad_clip": "train.clip", "clip_grad": "train.clip",
    "max_grad_norm": "train.clip", "gradient_clipping": "train.clip", "eps": "train.epsilon",
    "adam_eps": "train.epsilon", "adam_epsilon": "train.epsilon", "wd": "train.weight_decay",
    "no_decay": "train.no_weight_decay", "layerwise_lr_decay": "train.layer_decay",
    "lr_layer_decay": "train.layer_decay", "lora_r": "model.lora.rank", "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha", "target_modules": "model.lora.targets", "lora_dropout": "model.lora.dropout",
    "freeze_layers": "train.freeze", "frozen": "train.freeze", "rampup_batch_size": "train.batch_rampup",
    "num_train_epochs": "train.epochs", "max_epochs": "train.epochs", "train_samples": "train.samples",
    "train_tokens": "train.tokens", "max_train_steps": "train.steps", "validation_split_percentage": "corpus.split",
    "eval_strategy": "train.evaluate_every", "evaluation_strategy": "train.evaluate_every",
    "save_strategy": "train.save_every", "save_interval": "train.save_every", "save_steps": "train.save_every",
    "ckpt_save_steps": "train.save_every", "eval_interval": "train.evaluate_every",
    "eval_steps": "train.evaluate_every", "eval_iters": "train.evaluate_batches", "log_interval": "train.log_every",
    "logging_steps": "train.log_every", "save_total_limit": "train.checkpoints.keep", "out_dir": "folder",
    "output_dir": "folder", "save_dir": "folder", "ckpt_dir": "train.folder", "n_layer": "model.shape.layers",
    "num_layers": "model.shape.layers", "num_hidden_layers": "model.shape.layers", "n_head": "model.shape.heads",
    "num_heads": "model.shape.heads", "num_attention_heads": "model.shape.heads", "n_embd": "model.shape.width",
    "hidden_size": "model.shape.width", "d_model": "model.shape.width", "n_inner": "model.shape.inner",
    "ffn_hidden_size": "model.shape.inner", "activation_function": "model.shape.activation",
    "n_positions": "model.shape.positions", "n_ctx": "model.shape.positions",
    "max_position_embeddings": "model.shape.positions", "vocab_size": "tokenizer.vocab", "nvocab": "tokenizer.vocab",
    "tokenizer_name_or_path": "tokenizer.use", "tokenizer_name": "tokenizer.use", "vocab_file": "tokenizer.use",
    "model_name_or_path": "model.init_from", "init_checkpoint": "model.init_from", "load": "model.init_from",
    "train_file": "corpus.sources", "train_data": "corpus.sources", "data_path": "corpus.sources",
    "input": "corpus.sources", "dataset": "corpus.sources", "json_keys": "corpus.text_key",
    "json_key": "corpus.text_key", "keep_linebreaks": "corpus.rules", "workers": "runner.workers",
    "num_workers": "runner.workers", "num_proc": "runner.workers", "num_process": "runner.workers",
    "dtype": "engine.precision", "fp16": "engine.precision", "bf16": "engine.precision",
    "mixed_precision": "engine.precision", "torch_compile": "engine.compile",
    "tensor_model_parallel_size": "engine.mesh.tensor", "model_parallel_size": "engine.mesh.tensor",
    "tensor_parallel_size": "engine.mesh.tensor", "data_parallel_size": "engine.mesh.replicate",
    "fsdp": "engine.mesh.shard", "sequence_parallel": "engine.mesh.sequence_parallel", "zero_stage": "engine.zero",
    "stage": "engine.zero", "deepspeed_config": "engine.deepspeed_config", "deepspeed": "engine.kind",
    "offload_param": "engine.offload_weights", "cpu_offload": "engine.offload_optimizer",
    "nvme_path": "engine.nvme_folder", "max_new_tokens": "sample.max_tokens", "out_seq_length": "sample.max_tokens",
    "max_length": "sample.max_tokens", "min_length": "sample.min_tokens", "num_samples": "sample.count",
    "num_return_sequences": "sample.count", "do_sample": "sample.temperature", "report_to": "track.kinds",
    "wandb": "track.kinds", "wandb_project": "track.wandb.project", "max_sequence_length": "tokens.features.max_length",
    "min_sequence_length": "tokens.features.min_length",
    "num_special_token_reserved": "tokens.features.reserved_tokens", "ignore_label": "tokens.features.ignore_label",
    "tokenized_datasets": "tokens.use", "grouped_tokenized_datasets": "tokens.use", "chat_template": "tokenizer.chat",
    "packing": "train.chat.pack", "sample_packing": "train.chat.pack", "train_on_inputs": "train.layout",
    "assistant_only_loss": "train.layout", "seed": "train.seed", "prompt": "sample.prompt",
    "per_device_eval_batch_size": "evaluate.batch",
}  # fmt: skip


def section_types(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation admits."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [section for part in get_args(annotation) for section in section_types(part)]
    return []


def kinds_of(name: str) -> list[type[Section]]:
    """The sections among which `NAME.kind` chooses; none for a section without kinds."""
    field = RunConfig.model_fields.get(name)
    return section_types(field.annotation) if field is not None and field.discriminator else []


def all_fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the config with its field: 'train.batch', FieldInfo."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for inner in section_types(field.annotation):
            yield from all_fields(inner, f"{prefix}{name}.")


def suggest_key(key: str) -> str:
    """What to write instead of a key that does not exist."""
    keys = [name for name, field in all_fields() if not section_types(field.annotation) or name == "model.shape"]
    leaf = key.rpartition(".")[2].replace("-", "_")
    if leaf in OTHER_NAMES:
        return f"textmill calls it '{OTHER_NAMES[leaf]}'"
    if old := [name for name in RENAMED if name == key or name.rpartition(".")[2] == key]:
        return f"{old[0]} is now '{RENAMED[old[0]]}'"
    same_leaf = [name for name in keys if name.rpartition(".")[2] == leaf]
    inside = [name for name in keys if name.startswith(key.partition(".")[0] + ".")]
    typing_error = difflib.get_close_matches(key, inside, n=1, cutoff=0.92)  # likelier than a wrong section
    near = typing_error or same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        by_leaf = {name.rpartition(".")[2]: name for name in reversed(keys)}
        near = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    if near:
        return f"did you mean '{near[0]}'?"
    section = key.partition(".")[0]
    choices = [name.rpartition(".")[2] for name in inside] or sorted(RunConfig.model_fields)
    return f"the keys of '{section}' are {', '.join(choices)}" if inside else f"the sections are {', '.join(choices)}"
