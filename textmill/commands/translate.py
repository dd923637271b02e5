"""The command from: a command line, shell script or DeepSpeed JSON of another tool as one YAML file, with comments.

Nothing of the text is executed. The config loader checks the result: a value that it refuses is listed with its reason
and left out, so that the file loads.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from textmill.commands.other_tools import Pasted, Settings, read_command, translate_option
from textmill.commands.shell_commands import Script
from textmill.config.deepspeed_json import check_types, explain_json, flatten, read_json_settings, without_auto
from textmill.config.keys import all_fields
from textmill.config.load import Tree, build_config, merge_trees, parse_settings, resolve_paths
from textmill.config.other_names import target_of
from textmill.config.training import UNITS
from textmill.config.yaml_text import format_yaml_value
from textmill.errors import TextmillError
from textmill.storage.files import write_text

PREPARES = ("megatron-data", "jax-lm-data", "binarize")
"""Tools whose commands turn texts into tokens."""


@dataclass
class Translation:
    """The settings of a text, the old options of each, and what has no equivalent."""

    settings: Settings = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why, by option."""
    scripts: list[Pasted] = field(default_factory=list)
    written: dict[str, list[str]] = field(default_factory=dict)
    """The tokens that commands write, and those of which they are merged."""

    def set(self, settings: Settings, comment: str, override: bool = True) -> None:
        """Add settings; without `override`, only those that are not set in any unit."""
        units = {f"train.{unit}" for unit in UNITS}
        for key, value in settings.items():
            if not override and key in units and units & self.settings.keys():
                continue
            notes = self.comments.setdefault(key, [])
            if key == "track.kinds" and isinstance(value, list):
                value = list(dict.fromkeys([*self.settings.get(key, []), *value]))
            elif self.settings.get(key, value) != value:
                if not override:
                    continue
                nobodys = {"default of " + one.script for one in self.scripts} | {one.script for one in self.scripts}
                self.left.update({note: f"replaced by {comment}" for note in notes if note not in nobodys})
                notes.clear()
            self.settings[key] = value
            if comment not in notes:
                notes.append(comment)


def translate(text: str, to: str | None = None, gpus: int | None = None) -> None:
    """Print or write the YAML of a command, of a file with commands, or of `-`, the standard input."""
    if to is not None and Path(to).exists():
        raise TextmillError(f"--to {to}: exists; choose another name, or remove it")
    if to is not None and Path(to).resolve().parent != Path.cwd():
        raise TextmillError(
            f"--to {to}: is in another folder, but a command's paths are relative to the current folder and those of a "
            f"YAML file to its own; write --to {Path(to).name}"
        )
    translation = read_translation(text, gpus)
    _drop_refused(translation)
    page = format_translation(translation, to or "FILE")
    if to is None:
        print(page, end="")
    else:
        write_text(Path(to), page)
        print(f"wrote {to}; next: {_next_step(translation, to)}")
    for line in _left_lines(translation):
        print(f"textmill: {line}", file=sys.stderr)


def read_translation(text: str, gpus: int | None = None) -> Translation:
    """The settings of a command, of a file, or of the standard input."""
    translation = Translation()
    path = Path(text) if os.path.isfile(text) else None  # pathlib's is_file fails for a command longer than a name
    if path is not None:
        content = path.read_text(encoding="utf-8", errors="replace")
    else:
        content = sys.stdin.read() if text == "-" else text
        if text.endswith((".json", ".sh")) and " " not in text:
            raise TextmillError(f"{text}: no such file; name a shell script or a JSON file, or put a command in quotes")
    if content.lstrip().startswith("{"):
        _add_json(translation, content, str(path) if path is not None else None, gpus or 1)
        return translation
    script = Script()
    script.read(content)
    for words in script.commands:
        _add_command(translation, script, words, gpus)
    if not translation.scripts:
        missing = [name for name in translation.left if name.endswith(".sh")]
        advice = "put the whole command in quotes, or name a shell script or a DeepSpeed JSON"
        if missing:
            advice = f"{missing[0]} is not here, so translate it where it is"
        raise TextmillError(f"from: found no command that trains, such as 'python pretrain_gpt.py --lr 1e-4'; {advice}")
    _join_stages(translation)
    return translation


def _add_json(translation: Translation, content: str, file: str | None, gpus: int) -> None:
    """The settings of a DeepSpeed JSON; DeepSpeed still reads what only concerns itself from the file."""
    try:
        tree = json.loads(content)
    except ValueError as error:
        raise TextmillError(f"from: not readable as JSON ({error}); correct it") from None
    translation.set({"engine.kind": "deepspeed"}, "a DeepSpeed JSON")
    tree = without_auto(tree)
    check_types(tree, file or "the JSON")
    written = dict(flatten(tree))
    for name, (key, value) in read_json_settings(tree).items():
        note = ", with fp16 at least 1" if key == "engine.zero" and value != written[name] else ""
        translation.set({key: value}, f"{name}: {json.dumps(written.get(name, value))}{note}")
    micro = tree.get("train_micro_batch_size_per_gpu")
    passes = tree.get("gradient_accumulation_steps", 1)
    if isinstance(micro, int) and isinstance(passes, int):
        translation.set({"train.batch": micro * passes * gpus}, f"{micro} x {passes} x GPUs: {gpus}", override=False)
    own, ignored, refused = explain_json(tree)
    own = [name for name in own if name != "gradient_accumulation_steps"]  # part of train.batch
    if own and file and not refused:
        translation.set({"engine.deepspeed_config": file}, "read by DeepSpeed itself: " + ", ".join(own))
    elif own:
        reason = "only DeepSpeed knows it: name the file in engine.deepspeed_config"
        reason += ", without what is refused" if refused else ""
        translation.left.update(dict.fromkeys(own, reason))
    translation.left.update({name: f"ignored, because {reason}" for name, reason in ignored.items()})
    translation.left.update(refused)


def _add_command(translation: Translation, script: Script, words: list[str], gpus: int | None) -> None:
    pasted = read_command(words, script.variables, gpus)
    if pasted is None:
        after = [name for shell, name in pairwise(words) if shell in ("bash", "sh") and name.endswith(".sh")]
        if after and after[0] in script.files:
            return  # it starts itself
        if after and Path(after[0]).is_file():
            script.files.add(after[0])
            script.read(Path(after[0]).read_text(encoding="utf-8"))  # its commands follow in the same loop
        elif after:
            translation.left[after[0]] = "is not in this folder: translate it where it is"
        else:
            translation.left[" ".join(words[:3])] = "no command that trains or prepares data"
        return
    _note_written(translation, pasted)
    translation.scripts.append(pasted)
    fixed = []
    for name, option in pasted.given.items():
        found = translate_option(pasted, name)
        if isinstance(found, str):
            translation.left[option.spelling] = found
            continue
        _join_sources(translation, pasted, found)
        if "=" in (target_of(name, pasted.tool) or ""):
            fixed.append((found, option.spelling))
        else:
            translation.set(found, option.spelling)
    for found, spelling in fixed:
        translation.set(found, spelling, override=False)
        for key in found:
            if spelling not in translation.comments[key]:
                translation.left[spelling] = f"not needed: {translation.comments[key][0]} sets {key}"
    if pasted.unknown:
        translation.left[pasted.unknown] = "how many GPUs these are is not known here: give all of them in --gpus N"
    for setting in pasted.settings.split():
        key, _, value = setting.partition("=")
        if key not in translation.settings:
            translation.set({key: value}, pasted.script)
    for name in pasted.defaults:
        found = translate_option(pasted, name)
        if name not in pasted.given and isinstance(found, dict):
            decay = ("train.decay_steps", "train.min_learning_rate")  # which a constant rate has not
            skipped = decay if translation.settings.get("train.schedule") == "constant" else ()
            new = {key: value for key, value in found.items() if key not in (*translation.settings, *skipped)}
            translation.set(new, f"default of {pasted.script}", override=False)


def _note_written(translation: Translation, pasted: Pasted) -> None:
    """Keep what a command names its tokens, and of which others they are merged."""
    if pasted.tool in (*PREPARES, "megatron-merge") and (
        output := pasted.text("output_path", "output_prefix", "dump_file")
    ):
        translation.written[output] = pasted.texts("datasets")


def _join_sources(translation: Translation, pasted: Pasted, found: Settings) -> None:
    """The sources of a script's second command that prepares data come after those of its first."""
    if pasted.tool not in PREPARES or not any(one.tool == pasted.tool for one in translation.scripts[:-1]):
        return
    earlier = translation.settings
    if "corpus.sources" in found and "corpus.sources" in earlier:
        found["corpus.sources"] = list(dict.fromkeys([*earlier["corpus.sources"], *found["corpus.sources"]]))
    if "corpus.source_splits" in found:
        found["corpus.source_splits"] = {**earlier.get("corpus.source_splits", {}), **found["corpus.source_splits"]}
    for key in ("corpus.sources", "corpus.source_splits", "tokens.folder"):
        if key in found and key in earlier:
            earlier[key] = found[key]  # set() takes it for the same value, with one more option


def _join_stages(translation: Translation) -> None:
    """Tokens that a script writes and then trains on are the tokens stage of the run, not existing tokens."""
    written = translation.written
    own = [name for name, parts in written.items() if not parts]
    for key in ("tokens.use", "tokens.use_valid", "tokens.use_test"):
        used = translation.settings.get(key, [])
        if isinstance(used, str):
            used = used.split(",")
        paths = [one["path"] if isinstance(one, dict) else one for one in used]
        paths = [part for path in paths for part in written.get(path) or [path]]
        if paths and all(path.startswith(tuple(own)) for path in paths):
            del translation.settings[key]
            reason = "not needed: they are the tokens that the same script writes"
            translation.left.update(dict.fromkeys(translation.comments.pop(key), reason))
        elif paths != used and all(isinstance(one, str) for one in used):
            translation.settings[key] = paths
    if len(own) > 1 and "tokens.folder" in translation.settings:
        del translation.settings["tokens.folder"]
        reason = "not needed: the tokens of all sources are in the run's folder"
        translation.left.update(dict.fromkeys(translation.comments.pop("tokens.folder"), reason))


def _tree_of(settings: Settings) -> Tree:
    """Settings as a tree in the order of the config's keys; texts are read as on the command line."""
    tree: Tree = {}
    places: dict[str, float] = {key: place for place, (key, _) in enumerate(all_fields())}
    for section in ("engine", "runner"):  # another kind would drop the settings before it
        places[f"{section}.kind"] = min(places[key] for key in places if key.startswith(f"{section}.")) - 0.5
    for key, value in sorted(settings.items(), key=lambda setting: places[setting[0]]):
        setting = [f"{key}={value}"] if isinstance(value, str) else {key: value}
        tree = merge_trees(tree, parse_settings(setting))
    return tree


def _drop_refused(translation: Translation) -> None:
    """Move settings that the config loader refuses to what is left, until the rest loads; unset variables may stay."""
    for variable in re.findall(r"\$\{?\w+\}?", json.dumps([*translation.settings.values()])):
        translation.left[variable] = "the script does not set it: write its value, or set it when you run textmill"
    while True:
        tree = json.loads(json.dumps(_tree_of(translation.settings)).replace("$", ""))
        try:
            build_config(resolve_paths(tree, Path.cwd()))
        except TextmillError as error:
            key = str(error).partition(":")[0]
            section = key.rpartition(".")[0]
            starts = (f"{key}.", f"{section}." if section else key)  # or of the same section, such as what it needs
            for start in starts:
                if refused := [name for name in translation.settings if name == key or name.startswith(start)]:
                    break
            else:
                raise
            for name in refused:
                spelling = ", ".join(translation.comments.get(name, [name]))
                if not spelling.startswith("default of"):
                    translation.left[spelling] = f"refused: {error}"
                del translation.settings[name]
        else:
            return


def format_translation(translation: Translation, file: str = "FILE") -> str:
    """The YAML file, to be saved as `file`."""
    names = " and ".join(dict.fromkeys(pasted.script for pasted in translation.scripts)) or "a DeepSpeed JSON"
    lines = [f"# From {names}. Next: {_next_step(translation, file)}"]
    lines += _yaml_lines(_tree_of(translation.settings), "", translation)
    left = _left_lines(translation)
    return "\n".join([*lines, *(["#"] if left else []), *(f"# {line}" for line in left)]) + "\n"


def _yaml_lines(tree: Tree, prefix: str, translation: Translation) -> list[str]:
    lines = []
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key not in translation.settings:
            lines += [f"{indent}{name}:", *_yaml_lines(value, f"{key}.", translation)]
            continue
        setting = f"{indent}{name}: {format_yaml_value(value)}"
        comment = " ".join(", ".join(translation.comments.get(key, [])).split())
        if key == "train.batch" and translation.scripts and (gpus := translation.scripts[-1].gpus) > 1:
            comment += f", on {gpus} GPUs"
        lines.append(f"{setting:<40} # {comment}")
    return lines


def _next_step(translation: Translation, file: str) -> str:
    """The command that uses the file."""
    tools = {pasted.tool for pasted in translation.scripts}
    if tools == {"megatron-eval"}:
        return f"textmill evaluate {file}"
    if tools and tools <= {"megatron-generate", "nanogpt-sample"}:
        return f"textmill generate {file}"
    if tools == {"dsgpt2-serve"}:
        return f"textmill serve {file}"
    if tools and tools <= {*PREPARES, "counts"}:
        return f"textmill prepare {file}, fit-tokenizer, tokenize"
    gpus, nodes = max(((pasted.gpus, pasted.nodes) for pasted in translation.scripts), default=(1, 1))
    machines = f"--nnodes {nodes} " if nodes > 1 else ""
    launch = f"torchrun {machines}--nproc-per-node {max(1, gpus // nodes)} -m textmill train {file}"
    return f"textmill run {file}" + (f"; the training on {gpus} GPUs: {launch}" if gpus > 1 else "")


def _left_lines(translation: Translation) -> list[str]:
    """What has no equivalent, all together."""
    if not translation.left:
        return []
    return ["not in this file:", *(f"  {option}: {reason}" for option, reason in translation.left.items())]
