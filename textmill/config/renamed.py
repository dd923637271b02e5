"""Old names of settings: the one table that reads old YAML, old folders and old habits under today's names."""

from __future__ import annotations

from typing import Any

from textmill.errors import TextmillError

Tree = dict[str, Any]

ADDED = {
    "corpus.encoding": "auto",
    "corpus.delimiter": "auto",
    "corpus.quoting": "auto",
    "corpus.header": "auto",
    "corpus.keep_dropped": False,
}
"""Keys of `corpus` that were added after the first version, with their defaults."""
RENAMED = {
    "corpus.corpora": "corpus.corpora_file",
    "corpus.join": "corpus.join_with",
    "corpus.section": "corpus.section_chars",
    "corpus.markers": "corpus.newline_markers",
    "corpus.dedup_n": "corpus.dedup_shingle_size",
    "corpus.sides": "corpus.source_splits",
    "corpus.stop_at": "corpus.max_unreadable",
    "tokenizer.sample": "tokenizer.fit_sample",
    "tokenizer.coverage": "tokenizer.character_coverage",
    "tokenizer.end": "tokenizer.end_token",
    "tokenizer.turns": "tokenizer.chat_turns",
    "tokenizer.digits": "tokenizer.split_digits",
    "tokenizer.cjk": "tokenizer.split_cjk",
    "tokens.format": "tokens.index_format",
    "tokens.features.max": "tokens.features.max_length",
    "tokens.features.min": "tokens.features.min_length",
    "tokens.features.reserved": "tokens.features.reserved_tokens",
    "tokens.features.ignore": "tokens.features.ignore_label",
    "runner.folder": "runner.shared_folder",
    "train.apart": "train.packed.isolate_documents",
    "train.tail": "train.packed.last_window",
    "train.long": "train.padded.long_documents",
    "train.close": "train.padded.end_truncated",
    "train.pack": "train.chat.pack",
    "train.cut": "train.chat.truncate",
    "train.ramp": "train.batch_rampup",
    "train.decay_share": "train.stable.decay_fraction",
    "train.range_steps": "train.range_test.steps",
    "train.range_rate": "train.range_test.rate",
    "train.range_stairs": "train.range_test.staircase",
    "train.rest_rate": "train.muon.adamw_rate_factor",
    "train.momentum": "train.muon.momentum",
    "train.decayed": "train.weight_decay_only",
    "train.undecayed": "train.no_weight_decay",
    "train.spike": "train.spikes.threshold",
    "train.spike_window": "train.spikes.window",
    "train.keep": "train.checkpoints.keep",
    "train.keep_every": "train.checkpoints.keep_every",
    "train.file_gb": "train.checkpoints.max_file_gb",
    "train.prompts": "train.sample_prompts",
    "engine.check_every": "engine.check_replicas_every",
    "engine.mesh.keep": "engine.mesh.keep_gathered",
    "engine.mesh.sequence": "engine.mesh.sequence_parallel",
    "engine.nvme": "engine.nvme_folder",
    "engine.config": "engine.deepspeed_config",
    "engine.extra": "engine.deepspeed_overrides",
    "sample.prompts": "sample.prompts_file",
    "sample.slide": "sample.slide_context",
    "serve.name": "serve.model_name",
    "serve.connections": "serve.max_connections",
    "serve.reading": "serve.read_timeout",
    "serve.seconds": "serve.request_timeout",
    "serve.grace": "serve.shutdown_grace",
    "serve.patience": "serve.step_timeout",
    "serve.origins": "serve.allowed_origins",
    "serve.hosts": "serve.allowed_hosts",
    "track.project": "track.wandb.project",
    "track.name": "track.wandb.name",
    "track.offline": "track.wandb.offline",
}
"""Old key -> new key. A row is never removed: folders of that time must open."""
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "train.padded.long_documents": {"cut": "truncate"},
    "serve.adapter": {"apart": "separate"},
}
"""New key -> old value -> new value."""
_GROUPS = ("tokens.features",)
"""Sub-sections that manifests used to record as one value."""


def rename_value(key: str, value: Any) -> Any:
    """A value of a (new) key under its new name."""
    names = RENAMED_VALUES.get(key)
    return names.get(value, value) if names and isinstance(value, str) else value


def rename_tree(tree: Tree) -> tuple[Tree, dict[str, str]]:
    """A config tree with all keys and values under their new names, and the renamed keys that were found: old ->
    new."""
    found: dict[str, str] = {}
    result = _copied(tree)
    for old, new in RENAMED.items():
        holder = _holder(result, old)
        leaf = old.rpartition(".")[2]
        if holder is None or leaf not in holder:
            continue
        value = holder.pop(leaf)
        target = _holder(result, new, create=True)
        if target is None or new.rpartition(".")[2] in target:
            raise TextmillError(f"{old}: is now {new}, and both are set; remove {old}")
        target[new.rpartition(".")[2]] = value
        found[old] = new
    for key in RENAMED_VALUES:
        holder = _holder(result, key)
        leaf = key.rpartition(".")[2]
        if holder is not None and leaf in holder:
            holder[leaf] = rename_value(key, holder[leaf])
    return result, found


def rename_settings(settings: Tree) -> Tree:
    """Recorded settings, flat ('train.batch' -> 32), under their new names."""
    flat: Tree = {}
    for key, value in settings.items():
        if key in _GROUPS and isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    renamed = {RENAMED.get(key, key): value for key, value in flat.items()}
    return {key: rename_value(key, value) for key, value in renamed.items()}


def original_settings(settings: Tree) -> Tree:
    """Flat settings under the first name each key and value had, for hashes that must not change with a name.

    A key that was added later is left out while it has its default.
    """
    first = {new: old for old, new in RENAMED.items()}
    values = {key: {new: old for old, new in names.items()} for key, names in RENAMED_VALUES.items()}
    return {
        first.get(key, key): values[key].get(value, value) if key in values else value
        for key, value in settings.items()
        if key not in ADDED or value != ADDED[key]
    }


def _copied(tree: Tree) -> Tree:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _holder(tree: Tree, key: str, *, create: bool = False) -> Tree | None:
    """The sub-tree that holds a key's last part; none where a part above it is missing or not a sub-tree."""
    for part in key.split(".")[:-1]:
        below = tree.setdefault(part, {}) if create else tree.get(part)
        if not isinstance(below, dict):
            return None
        tree = below
    return tree
