"""The commands of other tools as settings: which script is which tool, its defaults, and the rules for its options.

`config/other_names.py` has the table of options; a rule here computes settings from several options of a command.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from textmill.config.keys import all_fields, section_types
from textmill.config.other_names import RULES, VALUES, is_reason, target_of
from textmill.config.sizes import FAMILY_BY_TYPE, SIZES
from textmill.errors import TextmillError

Settings = dict[str, Any]
SENTENCES = "corpus.sentences=split tokens.level=sentence tokens.append_end=false"
MEGATRON_BERT = f"model.family=bert model.size=megatron-345m train.layout=masked {SENTENCES}"
SCRIPTS = (
    (
        r"pretrain_bert(?=.*--(train-data|batch-size))",  # of 2019
        "megatron",
        f"{MEGATRON_BERT} train.masked.whole_words=false",
    ),
    (r"pretrain_bert", "megatron", MEGATRON_BERT),
    (r"pretrain_gpt2?", "megatron", "model.size=megatron-345m"),
    (r"run_gpt2_eval|evaluate_gpt2", "megatron-eval", ""),
    (r"generate_samples\w*", "megatron-generate", ""),
    (r"preprocess_data\w*", "megatron-data", "tokens.append_end=false"),
    (r"merge_preprocessed_data", "megatron-merge", ""),
    (r"ds_trainer", "dsgpt2", "train.layout=padded train.loss=sample_mean"),
    (r"api(?=.*--workspace)", "dsgpt2-serve", ""),
    (r"(custom_)?run_clm\w*", "hf", ""),
    (
        r"run_mlm\w*",
        "hf",
        "model.family=bert model.size=base train.layout=masked train.masked.pairs=none train.masked.whole_words=false "
        + SENTENCES,
    ),
    (r"jax_lm\.preprocess", "jax-lm-data", "tokens.kind=features"),
    (r"jax_lm\.train", "jax-lm", "engine.kind=jax train.layout=features"),
    (r"extract\w*", "extract", ""),
    (r"binarized_data", "binarize", "corpus.documents=line"),
    (r"token_counts", "counts", ""),
    (r"train(?=.*--(student|teacher))", "distil", "train.layout=padded"),
    (r"train\w*(?=.*--(student|teacher))", "distil", ""),
    (r"train", "nanogpt", ""),
    (r"sample", "nanogpt-sample", ""),
    (r"litgpt finetune(_lora)?\b", "litgpt-lora", "corpus.chat=auto tokenizer.chat=default train.layout=chat"),
    (r"litgpt finetune\w*", "litgpt-finetune", "corpus.chat=auto tokenizer.chat=default train.layout=chat"),
    (r"litgpt pretrain", "litgpt-pretrain", ""),
    (r"litgpt", "litgpt", ""),
)
"""Names of scripts (a look-ahead sees the options too), the tool, and settings that the script itself stands for."""

LITGPT = """--learning_rate 1e-3 --beta1 0.9 --beta2 0.999 --weight_decay 0.01 --log_interval 1 --save_interval 1000
    --eval_max_iters 100"""
LITGPT_FINETUNE = f"""{LITGPT} --global_batch_size 16 --micro_batch_size 1 --epochs 5 --lr_warmup_steps 100
    --max_norm 0 --eval_interval 100 --seed 1337"""

DSGPT2_FOLDERS = "--vocab_load_dir ./vocab --vocab_id_dir vocab_50257 --ckpt_dir ./checkpoints --workspace test0"
DEFAULTS = {
    "megatron": """--split 969,30,1 --lr-decay-style linear --warmup 0 --adam-beta1 0.9 --adam-beta2 0.999
        --weight-decay 0.01 --clip-grad 1.0 --log-interval 100 --eval-interval 1000 --eval-iters 100 --seed 1234
        --hidden-dropout 0.1 --attention-dropout 0.1""",
    "hf": """--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --num_train_epochs 3 --learning_rate 5e-5
        --lr_scheduler_type linear --warmup_steps 0 --weight_decay 0 --adam_beta1 0.9 --adam_beta2 0.999
        --max_grad_norm 1.0 --seed 42 --logging_steps 500 --save_steps 500 --per_device_eval_batch_size 8""",
    "distil": """--batch_size 5 --gradient_accumulation_steps 50 --n_epoch 3 --learning_rate 5e-4
        --lr_scheduler_type linear --warmup_prop 0.05 --weight_decay 0 --adam_epsilon 1e-6 --adam_beta1 0.9
        --adam_beta2 0.98 --max_grad_norm 5.0 --temperature 2.0 --alpha_ce 0.5 --alpha_clm 0.5 --seed 56
        --log_interval 500 --checkpoint_interval 4000""",
    "nanogpt": """--dataset openwebtext --out_dir out --batch_size 12 --gradient_accumulation_steps 40
        --block_size 1024 --learning_rate 6e-4
        --max_iters 600000 --weight_decay 0.1 --beta1 0.9 --beta2 0.95 --grad_clip 1.0 --warmup_iters 2000
        --lr_decay_iters 600000 --min_lr 6e-5 --eval_interval 2000 --eval_iters 200 --log_interval 1 --seed 1337
        --n_layer 12 --n_head 12 --n_embd 768 --dropout 0.0""",
    "nanogpt-sample": "--out_dir out --num_samples 10 --max_new_tokens 500 --temperature 0.8 --top_k 200 --seed 1337",
    "litgpt-lora": f"{LITGPT_FINETUNE} --lora_r 8 --lora_alpha 16 --lora_dropout 0.05",
    "litgpt-finetune": LITGPT_FINETUNE,
    "litgpt-pretrain": f"""{LITGPT} --global_batch_size 512 --micro_batch_size 4 --max_tokens 3000000000000
        --max_norm 1.0 --min_lr 4e-5 --lr_warmup_steps 2000 --eval_interval 1000 --seed 42""",
    "jax-lm": """--batch-size 16 --random-seed 0 --max-sequence-length 256 --num-epochs 5 --learning-rate 3e-5
        --lr_scheduler_type linear --warmup_steps 0 --weight-decay-rate 0.01 --adamw-beta1 0.9 --adamw-beta2 0.98
        --max_grad_norm 0 --logging-frequency 100 --eval-frequency 5000 --save-frequency 5000""",
    "dsgpt2": f"""{DSGPT2_FOLDERS} --enable_bos True --enable_eos True --truncated_len 128 --seed 123
        --train_iters 100000 --tr_ratio 0.99 --ckpt_save_steps 2000""",
    "dsgpt2-serve": DSGPT2_FOLDERS,
}
"""What a tool does when an option is not given, where it differs from our default."""
PUBLISHED: dict[str, Settings] = {
    "gpt2": {"model.size": "small"},
    "gpt2-medium": {"model.size": "medium"},
    "gpt2-large": {"model.size": "large"},
    "gpt2-xl": {"model.size": "xl"},
    "distilgpt2": {"model.size": "small", "model.shape.layers": 6},
    "bert-base": {"model.family": "bert", "model.size": "base"},
    "bert-large": {"model.family": "bert", "model.size": "large"},
}
"""Published models of which only the shape is used."""
PER_NODE = ("nproc_per_node", "num_gpus")
NODES = ("nnodes", "num_nodes", "nodes", "N")
TOTAL = ("num_processes", "ntasks", "np", "n")
"""Options of launchers: processes on a machine, machines, all processes."""
ACCELERATE = """mixed_precision gradient_accumulation_steps gradient_clipping use_deepspeed deepspeed_config_file
    zero_stage use_fsdp""".split()
"""Options of `accelerate launch` that are settings of the training."""
NOT_SCRIPTS = ("torch.distributed.launch", "torch.distributed.run", "accelerate.commands.launch", "pip", "venv")
JAX_LM_DATA = """tokenizer_model min_sequence_length max_sequence_length num_special_token_reserved ignore_label stride
    dataset_name dataset_sub_name dataset_split_type output_path""".split()
"""The options of jax_lm.preprocess itself."""
SPLIT_NAMES = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}


@dataclass
class Option:
    """An option of a command."""

    texts: list[str]
    """What is after it."""
    spelling: str
    """It and these texts, as they are written."""


@dataclass
class Pasted:
    """One command of another tool: its options by name."""

    script: str
    tool: str
    settings: str
    """What the script itself stands for."""
    gpus: int
    nodes: int
    given: dict[str, Option]
    defaults: dict[str, Option]
    unknown: str = ""
    """The launcher's option for a number of GPUs that only the launcher knows."""

    def texts(self, *names: str) -> list[str]:
        """The texts after the first of these options that is given, else of the first that has a default."""
        found = (options[name].texts for options in (self.given, self.defaults) for name in names if name in options)
        return next(found, [])

    def text(self, *names: str) -> str:
        """These texts as one."""
        return " ".join(self.texts(*names))

    def number(self, *names: str) -> float | None:
        """The first of these texts as a number; None if it is none."""
        try:
            return float((self.texts(*names) or [""])[0])
        except ValueError:
            return None

    def is_on(self, name: str) -> bool:
        """Whether a flag is given, and not as false."""
        return name in self.given and self.text(name).lower() not in ("false", "0", "no", "off")


def read_command(words: list[str], variables: dict[str, list[str]], gpus: int | None = None) -> Pasted | None:
    """The script that a command starts, with its options; None if it starts none."""
    place = next((number for number, word in enumerate(words) if _is_script(words, number)), None)
    if place is None:
        return None
    script = words[place]
    name = script if words[place - 1 : place] == ["-m"] else Path(script).name.removesuffix(".py")
    line = " ".join([name, *words[place + 1 :]])
    found = (row[1:] for row in SCRIPTS if re.match(rf"({row[0]})(?!\w)", line))
    tool, settings = next(found, ("", ""))
    given, positional = _read_options(words[place + 1 :])
    defaults, _ = _read_options(DEFAULTS.get(tool, "").split())
    pasted = Pasted(name, tool, settings, 1, 1, given, defaults)
    if name == "litgpt":
        for word in positional[1:2]:
            given["model_name" if tool == "litgpt-pretrain" else "checkpoint_dir"] = Option([word], word)
        positional = positional[2:]
        for file in given.pop("config", Option([], "")).texts:
            _read_options_file(pasted, Path(file))
    for word in positional:
        if word.endswith((".py", ".json")):
            _read_options_file(pasted, Path(word))
        elif word != "...":
            given[word] = Option([], word)
    if "accelerate" in words[:place]:
        launched, _ = _read_options(words[:place])
        for name in [one for one in ACCELERATE if one in launched and one not in given]:
            given[name] = launched[name]
    _count_gpus(pasted, words[:place], variables)
    if gpus:
        pasted.gpus, pasted.nodes, pasted.unknown = gpus, 1, ""
    return pasted


def _is_script(words: list[str], number: int) -> bool:
    word = words[number]
    module = words[number - 1] == "-m" if number else False
    if module:
        return word not in NOT_SCRIPTS
    return bool(re.fullmatch(r"[^-=][^=]*\.py", word)) or (word == "litgpt" and number < 2)


def _read_options(words: list[str]) -> tuple[dict[str, Option], list[str]]:
    """Options by name, and the words before the first one."""
    options: dict[str, Option] = {}
    positional: list[str] = []
    last: Option | None = None
    for word in words:
        if re.match(r"^--?[A-Za-z]", word):
            spelled, equals, text = word.partition("=")
            last = options[_plain_name(spelled)] = Option([text] if equals else [], word)
        elif last is None:
            positional.append(word)
        else:
            last.texts.append(word)
            last.spelling += f" {word}"
    return options, positional


def _plain_name(spelled: str) -> str:
    """The name of an option; those of litgpt have the names of its parts before a dot."""
    name = re.sub(r"^-*((train|data|optimizer)\.)?(init_args\.)?", "", spelled)
    return name.replace("-", "_").replace(".", "_")


def _read_options_file(pasted: Pasted, path: Path) -> None:
    """Options in a file: of nanogpt a Python file, which is read and not executed; of others JSON or YAML."""
    if not path.is_file():
        pasted.given["options_file"] = Option([str(path)], str(path))
        return
    try:
        text = path.read_text(encoding="utf-8")
        found = _python_settings(text) if path.suffix == ".py" else _flat_options(yaml.safe_load(text))
        options = dict(found)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        what = "a Python file with settings" if path.suffix == ".py" else "a file with options"
        raise TextmillError(f"{path}: is not {what} ({error}); correct it") from None
    pasted.given.update({name: option for name, option in options.items() if name not in pasted.given})


def _python_settings(text: str) -> Iterator[tuple[str, Option]]:
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = _constant(statement.value)
            if value is not None:
                name = statement.targets[0].id
                yield name, Option([str(value)], f"{name} = {ast.unparse(statement.value)}")


def _flat_options(tree: Any, prefix: str = "") -> Iterator[tuple[str, Option]]:
    if not isinstance(tree, dict):
        raise ValueError("there are no options in it")
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat_options(value, f"{prefix}{name}.")
        elif value is not None:
            texts = [str(one) for one in (value if isinstance(value, list) else [value])]
            yield _plain_name(prefix + name), Option(texts, f"{prefix}{name}: {' '.join(texts)}")


def _constant(node: ast.expr) -> Any:
    """The value of a literal, or of a product or quotient of numbers; None if it is something else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        left, right = _constant(node.left), _constant(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float) and right:
            return left * right if isinstance(node.op, ast.Mult) else left / right
    return None


def _count_gpus(pasted: Pasted, launcher: list[str], variables: dict[str, list[str]]) -> None:
    """How many GPUs a launcher uses, on how many machines; what only the launcher itself knows is noted."""
    launched, _ = _read_options(launcher)
    launched |= {name: pasted.given[name] for name in ("gpus", "n_gpu", "devices") if name in pasted.given}
    if "srun" in launcher:  # what sbatch was given
        batch = {name: variables.get(f"SLURM_{name.upper()}") for name in ("ntasks", "nnodes", "ntasks_per_node")}
        launched = {name: Option(texts, name) for name, texts in batch.items() if texts} | launched
    if included := launched.get("include"):  # deepspeed's host:0,1@host:0,1
        hosts = " ".join(included.texts).split("@")
        pasted.nodes, pasted.gpus = len(hosts), sum(host.count(",") + 1 for host in hosts)
        return

    def count(*names: str) -> int:
        for name in names:
            if (option := launched.get(name)) and option.texts:
                if option.texts[0].isdigit():
                    return int(option.texts[0])
                pasted.unknown = pasted.unknown or option.spelling
        return 0

    per_node = count(*PER_NODE)
    total = 0 if per_node else count(*TOTAL)
    visible = (variables.get("CUDA_VISIBLE_DEVICES") or [""])[0]
    if pasted.tool == "hf" and re.fullmatch(r"[\d,]+", visible) and not launcher[1:]:
        total = visible.count(",") + 1  # without a launcher the trainer uses all that it sees
    world = (variables.get("WORLD_SIZE") or [""])[0]
    pasted.nodes = count(*NODES) or 1
    per_node = per_node or count("ntasks_per_node", "gpus", "n_gpu", "devices")
    pasted.gpus = total or per_node * pasted.nodes or (int(world) if world.isdigit() else 1)


def translate_option(pasted: Pasted, name: str) -> Settings | str:
    """The settings that an option stands for, or why there are none."""
    target = target_of(name, pasted.tool)
    texts = pasted.texts(name)
    if _is_beams(pasted, name):
        target = "@beam"
    if target is None:
        leaves = [
            key for key, part in all_fields() if key.rpartition(".")[2] == name and not section_types(part.annotation)
        ]
        if not leaves:
            return f"textmill does not know this option of {pasted.script}; look for it in docs/reference.md"
        target = leaves[0]
    if is_reason(target):
        divides_nothing = name.endswith("parallel_size") and texts == ["1"]
        return "not needed: 1 divides nothing" if divides_nothing else target
    if target.startswith("@"):
        return RULE_FUNCTIONS[target[1:]](pasted, name)
    key, equals, value = target.partition("=")
    if equals:
        is_off = name in pasted.given and not pasted.is_on(name)
        return "is off: nothing to set" if is_off else {key: value}
    if key.endswith("_every") and 0 < (pasted.number(name) or 0) < 1:  # a fraction of the run, as the trainer has it
        steps = pasted.number("max_steps") or 0
        return (
            {key: max(1, int(float(texts[0]) * steps))} if steps > 0 else f"a fraction of the run: write steps in {key}"
        )
    values = [
        VALUES.get(key, {}).get(text.lower() if text in ("True", "False") else text, _as_integer(text))
        for text in texts
    ]
    return {key: values[0] if len(values) == 1 else ",".join(map(str, values)) if values else "true"}


def _as_integer(text: str) -> str:
    """3e9 and 10_000 as digits only."""
    if re.fullmatch(r"\d[\d_]*(\.\d+)?(e\+?\d+)?", text, re.IGNORECASE) and float(text).is_integer():
        return str(int(float(text))) if re.search("[e_]", text, re.IGNORECASE) else text
    return text


def _steps(pasted: Pasted, name: str) -> Settings | str:
    if (pasted.number(name) or 0) < 0:
        return "is off: the epochs set the length of the run"
    return {"train.steps": _as_integer(pasted.text(name))}


def _epochs(pasted: Pasted, name: str) -> Settings | str:
    if (pasted.number("max_steps", "max_train_steps") or 0) > 0:
        return "not needed: the steps that are given set the length of the run"
    return {"train.epochs": pasted.text(name)}


def _evaluated_batches(pasted: Pasted, name: str) -> Settings | str:
    """nanoGPT and litgpt evaluate batches of one pass, Megatron those of a step."""
    settings: Settings = {"train.evaluate_batches": pasted.text(name)}
    if pasted.tool.startswith(("nanogpt", "litgpt")):
        size = pasted.number("micro_batch_size", "batch_size") or 1
        settings["train.evaluate_batch"] = int(size) * (pasted.gpus if pasted.tool.startswith("litgpt") else 1)
    return settings


def _model_type(pasted: Pasted, name: str) -> Settings | str:
    if pasted.given.keys() & {"model_name_or_path", "config_name"}:
        return "not needed: the model or its config.json says what it is"
    family = FAMILY_BY_TYPE.get(pasted.text(name))
    return {"model.family": family} if family else f"not available: no family of textmill is {pasted.text(name)}"


def _shape_overrides(pasted: Pasted, name: str) -> Settings | str:
    """n_embd=256,n_layer=4."""
    settings: Settings = {}
    for part in pasted.text(name).split(","):
        option, _, value = part.partition("=")
        key = target_of(option.strip()) or ""
        if not key.startswith("model.shape."):
            return f"textmill has no {option.strip()}: set the others in model.shape"
        settings[key] = value.strip()
    return settings


def _tied(pasted: Pasted, name: str) -> Settings | str:
    return {"model.shape.untied": not pasted.is_on(name)}


def _batch(pasted: Pasted, name: str) -> Settings | str:
    total = pasted.number("global_batch_size", "train_batch_size")
    if total is None and (tokens := pasted.number("total_batch_size")):
        total = tokens / (pasted.number("max_seq_len") or 2048)
    if total is None:
        per_gpu = pasted.number(
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "micro_batch_size",
            "train_micro_batch_size_per_gpu",
            "device_batch_size",
            "batch_size",
        )
        if per_gpu is None:
            return "needs the batch per GPU: set train.batch to batch per GPU x accumulation x GPUs"
        # nanoGPT's accumulation is that of all GPUs, jax-lm-training's batch is divided over them.
        copies = 1 if pasted.tool in ("nanogpt", "jax-lm") else max(1, pasted.gpus // _model_parallel(pasted))
        total = per_gpu * (pasted.number("gradient_accumulation_steps", "accumulation") or 1) * copies
    return {"train.batch": int(total)}


def _evaluate_batch(pasted: Pasted, name: str) -> Settings | str:
    per_gpu = pasted.number(name)
    if per_gpu is None:
        return "needs a number: set train.evaluate_batch to it x GPUs"
    return {"train.evaluate_batch": int(per_gpu) * pasted.gpus, "evaluate.batch": int(per_gpu)}


def _betas(pasted: Pasted, name: str) -> Settings | str:
    if name == "betas":
        return {"train.betas": [float(one) for one in re.findall(r"\d*\.?\d+", pasted.text(name))]}
    first = pasted.number("beta1", "adam_beta1", "adamw_beta1")
    second = pasted.number("beta2", "adam_beta2", "adamw_beta2")
    return {"train.betas": [0.9 if first is None else first, 0.999 if second is None else second]}


def _decayed(pasted: Pasted, name: str) -> Settings | str:
    return {"train.schedule": "cosine"} if pasted.is_on(name) else {"train.schedule": "constant", "train.warmup": 0}


def _warmup(pasted: Pasted, name: str) -> Settings | str:
    """Megatron's fraction is of the decay, ours of the run."""
    value = pasted.number(name) or 0.0
    batch = _batch(pasted, "batch_size")
    samples = batch["train.batch"] if isinstance(batch, dict) else 1
    if name == "lr_warmup_samples":
        return {"train.warmup": int(value / samples)}
    decay = pasted.number("lr_decay_iters") or (pasted.number("lr_decay_samples") or 0) / samples
    return {"train.warmup": int(value * decay) if decay and value < 1 else value}


def _tfrecords(pasted: Pasted, name: str) -> Settings | str:
    return {"train.layout": "masked", "tokens.use": [pasted.text("train_data")]}


def _train_mode(pasted: Pasted, name: str) -> Settings | str:
    if pasted.text(name) != "finetune":
        return {"train.layout": "padded"}
    return {"corpus.chat": "auto", "tokenizer.chat": "dsgpt2", "train.layout": "chat", "train.chat.pack": False}


def _dsgpt2_folder(pasted: Pasted, name: str) -> Settings | str:
    """A finetuning starts from workspace_finetune and writes to workspace."""
    folder = "/".join(filter(None, (pasted.text("ckpt_dir"), pasted.text(name if name != "ckpt_dir" else "workspace"))))
    if name != "workspace_finetune":
        return {"train.folder": folder}
    if pasted.text("train_mode") != "finetune":
        return "not needed: --train_mode finetune starts from it"
    return {"model.init_from": folder}


def _counts(pasted: Pasted, name: str) -> Settings | str:
    if pasted.tool == "distil" and not pasted.is_on("mlm"):
        return "not needed: counts choose the masked tokens of train.layout=masked, so they have no effect here"
    return {"train.masked.counts": pasted.text(name)}


def _interval(pasted: Pasted, name: str) -> Settings | str:
    key = "train.save_every" if name.startswith("save") else "train.evaluate_every"
    if pasted.text(name) == "epoch":
        return {key: "epoch"}
    if pasted.text(name) == "steps":
        return f"not needed: {key} has the number of steps"
    return "not available: there is always a last checkpoint, and the valid split is always measured"


def _load(pasted: Pasted, name: str) -> Settings | str:
    if pasted.text(name) == pasted.text("save"):
        return "not needed: a run goes on from its newest checkpoint"
    return {"model.init_from": pasted.text(name)}


def _deep_init(pasted: Pasted, name: str) -> Settings | str:
    is_bert = "bert" in pasted.script
    return {"model.shape.deep_init": True} if is_bert else "not needed: gpt2's residual branches always start smaller"


def _weights(pasted: Pasted, name: str) -> Settings | str:
    """A model that brings its tokenizer along."""
    has_own = any(target_of(one, pasted.tool) == "tokenizer.use" for one in pasted.given)
    key = "train.distil.teachers" if name.startswith("teacher") else "model.init_from"
    value = pasted.texts(name) if name.startswith("teacher") else pasted.text(name)
    return {key: value, **({} if has_own else {"tokenizer.use": pasted.text(name)})}


def _rope(pasted: Pasted, name: str) -> Settings | str:
    text = pasted.text(name)
    if text in ("rope", "RMSNorm", ""):
        return {"model.family": "llama", "model.size": "small"}
    has_it = text in ("learned_absolute", "absolute", "LayerNorm")
    return (
        "not needed: it is what gpt2 has" if has_it else "not available: gpt2 has learned positions, llama rotary ones"
    )


def _zero(pasted: Pasted, name: str) -> Settings | str:
    needs_one = pasted.text(name) == "0" and pasted.is_on("fp16")
    return {"engine.zero": "1" if needs_one else pasted.text(name)}


def _published(pasted: Pasted, name: str) -> Settings | str:
    text = pasted.text(name)
    if "model_name_or_path" in pasted.given:
        return "not needed: the weights of model.init_from have their own shape"
    if text.endswith(".json"):
        return {"model.shape": text}
    short = text.rpartition("/")[2].lower()
    for start, sizes in PUBLISHED.items():
        if re.fullmatch(rf"{start}(-(un)?cased)?", short):
            return {**sizes, **({"model.shape.dropout": 0.1} if pasted.tool in ("hf", "jax-lm") else {})}
    named = next((size for size in SIZES["llama"] if size.replace("-", "") == short.replace("-", "")), None)
    if named and "-" in short:
        return {"model.family": "llama", "model.size": named}
    return f"no size of textmill is called {text}: download its config.json and name it in model.shape"


def _has_tokens(pasted: Pasted) -> bool:
    return bool(pasted.given.keys() & {"tokenized_datasets", "grouped_tokenized_datasets"})


def _sources(pasted: Pasted, name: str) -> Settings | str:
    """The files with text; those that are only evaluated are never in the train split."""
    if pasted.is_on("use_tfrecords"):
        keys = {"valid": "tokens.use_valid", "test": "tokens.use_test"}
        return {keys.get(EVALUATION_FILES.get(name, ""), "tokens.use"): [pasted.text(name)]}
    if _has_tokens(pasted):
        return "not needed: tokens.use has the tokens of this text"
    training = pasted.texts(
        "train_file", "train_data", "data_file", "input", "file_path", "train_data_path", "json_path"
    )
    splits: dict[str, str] = {}
    for option, split in EVALUATION_FILES.items():
        splits |= dict.fromkeys(pasted.texts(option), split)
    settings: Settings = {"corpus.sources": [*training, *splits]}
    if splits and pasted.tool != "megatron":  # Megatron divides its training text by --split even then
        splits = {**dict.fromkeys(training, "train"), **splits}
    if splits:
        settings["corpus.source_splits"] = splits
    return settings


def _dataset(pasted: Pasted, name: str) -> Settings | str:
    if _has_tokens(pasted):
        return "not needed: tokens.use has the tokens of this text"
    parts = [pasted.text("dataset_name"), pasted.text("dataset_sub_name", "dataset_config_name")]
    split = pasted.text("dataset_split_type")
    if not parts[0]:
        return "needs the name of the dataset: corpus.sources=hf:NAME:SUBSET"
    if not split or not parts[1]:
        return {"corpus.sources": ["hf:" + ":".join(filter(None, parts))]}
    source = "hf:" + ":".join([*parts, split])
    return {"corpus.sources": [source], "corpus.source_splits": {source: SPLIT_NAMES.get(split, "train")}}


def _mongo(pasted: Pasted, name: str) -> Settings | str:
    return {"corpus.sources": [f"mongo:{pasted.text(name)}"]}


def _tokens(pasted: Pasted, name: str) -> Settings | str:
    if name == "tokenized_datasets" and "grouped_tokenized_datasets" in pasted.given:
        return "not needed: the grouped dataset has the same tokens"
    used: list[Any] = pasted.texts(name)
    pairs = list(zip(used[::2], used[1::2], strict=False))
    if pairs and len(used) % 2 == 0 and all(re.fullmatch(r"[\d.]+(e-?\d+)?", weight) for weight, _ in pairs):
        used = [{"path": path, "weight": float(weight)} for weight, path in pairs]
    return {"tokens.use": used, **({"train.layout": "padded"} if name.startswith("grouped") else {})}


def _split(pasted: Pasted, name: str) -> Settings | str:
    text = pasted.text(name).strip("'\"")
    if not re.fullmatch(r"[\d.,/ ]+(e-\d+)?", text):
        return "give three numbers in corpus.split, such as 95,5,0"
    if name == "split":
        numbers = [float(part) for part in re.split(r"[,/ ]+", text) if part]
        return {"corpus.split": [int(one) if one.is_integer() else one for one in [*numbers, 0.0, 0.0][:3]]}
    value = pasted.number(name) or 0.0
    training = value * 100 if name == "tr_ratio" else 100 - value * (100 if name.endswith("fraction") else 1)
    return {"corpus.split": [round(training, 6), round(100 - training, 6), 0]}


def _is_beams(pasted: Pasted, name: str) -> bool:
    """Whether an option of jax_lm.preprocess is none of its own: it passes all others to Beam."""
    return pasted.tool == "jax-lm-data" and name not in JAX_LM_DATA


def _beam(pasted: Pasted, name: str) -> Settings | str:
    """All options that are Beam's."""
    options = [one for one in pasted.given if _is_beams(pasted, one)]
    return {"runner.kind": "beam", "runner.options": [f"--{one}={pasted.text(one)}".rstrip("=") for one in options]}


def _tokenizer_type(pasted: Pasted, name: str) -> Settings | str:
    kind = pasted.text(name)
    if any(target_of(one, pasted.tool) == "tokenizer.use" for one in pasted.given):
        return "not needed: tokenizer.use names the vocabulary, which says what it is"
    if kind.startswith("GPT2") or kind == "gpt2":
        return {"tokenizer.use": "gpt2"}
    if kind.lower().startswith("bert"):
        return {"tokenizer.use": "bert-large-uncased"}
    if kind == "SentencePieceTokenizer":
        return {"tokenizer.kind": "unigram"}
    return "name its files, or its name on the hub, in tokenizer.use"


def _dsgpt2_vocab(pasted: Pasted, name: str) -> Settings | str:
    return {"tokenizer.use": "/".join(filter(None, (pasted.text("vocab_load_dir"), pasted.text("vocab_id_dir"))))}


def _model_parallel(pasted: Pasted) -> float:
    """How many GPUs hold one copy of the net."""
    parts = pasted.number("tensor_model_parallel_size", "model_parallel_size") or 1
    return parts * (pasted.number("pipeline_model_parallel_size") or 1)


def _tensor(pasted: Pasted, name: str) -> Settings | str:
    value = pasted.text(name)
    return "not needed: one GPU holds each matrix" if value == "1" else {"engine.mesh.tensor": value}


def _fsdp(pasted: Pasted, name: str) -> Settings | str:
    copies = int(pasted.gpus // _model_parallel(pasted))
    if copies <= 1:
        return "not needed: one GPU, or one copy of the net; on N GPUs set engine.mesh.shard=N"
    return {"engine.mesh.shard": copies}


def _teacher_layers(pasted: Pasted, name: str) -> Settings | str:
    """The block of the teacher for each block of the student; only the loss of hidden states uses them."""
    layers = pasted.texts(name)
    if not pasted.number("beta_pkd"):
        return "not needed: only --beta_pkd, the loss of hidden states, uses them"
    return {"train.distil.teacher_layers": ",".join(layers)}


def _deepspeed(pasted: Pasted, name: str) -> Settings | str:
    is_file = pasted.text(name).lower() not in ("", "true", "1")
    return {"engine.kind": "deepspeed", **({"engine.deepspeed_config": pasted.text(name)} if is_file else {})}


def _gpu(pasted: Pasted, name: str) -> Settings | str:
    return {"engine.device": f"cuda:{pasted.text(name)}"}


def _timeout(pasted: Pasted, name: str) -> Settings | str:
    return {"engine.timeout": 60 * (pasted.number(name) or 10)}


def _labels(pasted: Pasted, name: str) -> Settings | str:
    given = {"alpha_clm", "alpha_mlm", "alpha_lm"} & pasted.given.keys() or {name}
    return {"train.distil.labels": sum(pasted.number(one) or 0.0 for one in given)}


def _do_sample(pasted: Pasted, name: str) -> Settings | str:
    return "not needed: text is sampled" if pasted.is_on(name) else {"sample.temperature": 0}


def _wandb(pasted: Pasted, name: str) -> Settings | str:
    needs_log = pasted.tool == "nanogpt" and not pasted.is_on("wandb_log")
    if needs_log or (name in ("wandb_log", "wandb") and not pasted.is_on(name)):
        return "is off: nothing to set"
    if name == "logger_name" and pasted.text(name) != "wandb":
        known = pasted.text(name) == "tensorboard"
        return {"track.kinds": ["tensorboard"]} if known else "not needed: metrics.jsonl has every measurement"
    if name.startswith("tensorboard"):
        return {"track.kinds": ["tensorboard"]}
    names_project = name in ("wandb_project", "wandb_dir")  # the second is dsGPT2's "for setting wandb project"
    return {"track.kinds": ["wandb"], **({"track.project": pasted.text(name)} if names_project else {})}


def _evaluation_task(pasted: Pasted, name: str) -> Settings | str:
    files = pasted.texts("data_path", "valid_data")
    if pasted.is_on("webtext_eval"):
        samples = (pasted.number("eval_iters") or 0) * (pasted.number("batch_size") or 1)
        return {"evaluate.text": files, **({"evaluate.sample": int(samples)} if samples else {})}
    if pasted.is_on("cloze_eval"):
        return {"evaluate.tasks": [f"lambada:{file}" for file in files]}
    return {"evaluate.tasks": [f"wikitext:{file}" for file in files], "evaluate.wikitext": "megatron"}


def _evaluated_model(pasted: Pasted, name: str) -> Settings | str:
    return {"model.init_from": pasted.text(name), "train.folder": pasted.text(name)}


def _distil_data(pasted: Pasted, name: str) -> Settings | str:
    if pasted.text(name).endswith(".pickle"):
        return {"tokens.use": pasted.texts(name)}
    return {"corpus.sources": pasted.texts(name)}


def _nanogpt_model(pasted: Pasted, name: str) -> Settings | str:
    if pasted.text(name) in ("scratch", "resume"):
        return "not needed: a run goes on from its newest checkpoint, else it starts from scratch"
    return {"model.init_from": pasted.text(name)}


def _nanogpt_data(pasted: Pasted, name: str) -> Settings | str:
    """What nanoGPT's data/NAME/prepare.py wrote or reads; its vocabulary is GPT-2's, or one of characters."""
    dataset = pasted.text(name)
    file = f"data/{dataset}/input.txt"
    source = file
    split: list[float] = [90, 10, 0]
    if dataset == "openwebtext":
        source = "hf:Skylion007/openwebtext"
        split = [99.95, 0.05, 0]
    elif dataset.startswith("shakespeare") and not Path(file).is_file():
        source = "tinyshakespeare"
    if Path(f"data/{dataset}/train.bin").is_file() and not dataset.endswith("_char"):
        tokens = {"tokens.use": [f"data/{dataset}/train.bin"], "tokens.use_valid": [f"data/{dataset}/val.bin"]}
        return {**tokens, "tokenizer.use": "gpt2"}
    own = {"tokenizer.vocab": 260} if dataset.endswith("_char") else {"tokenizer.use": "gpt2"}  # 260: nearly all bytes
    return {"corpus.sources": [source], "corpus.split": split, **own}


def _litgpt_data(pasted: Pasted, name: str) -> Settings | str:
    if pasted.text(name) in ("JSON", "TextFiles"):
        return "not needed: the format of corpus.sources is detected"
    return "name these data in corpus.sources, such as hf:OWNER/NAME"


EVALUATION_FILES = {
    "validation_file": "valid",
    "valid_data": "valid",
    "val_data_path": "valid",
    "test_data": "test",
    "test_file": "test",
}
"""Options with files that are never training data, and their split."""
_evaluation_files = _sources
RULE_FUNCTIONS: dict[str, Callable[[Pasted, str], Settings | str]] = {name: globals()[f"_{name}"] for name in RULES}
"""The rules of config/other_names.py."""
