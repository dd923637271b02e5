"""`textmill from`: the commands of other tools become configs that load and train, and no option is lost."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.support.model_folders import write_folder
from textmill.cli import main
from textmill.commands.other_tools import DEFAULTS, RULE_FUNCTIONS, read_command, translate_option
from textmill.commands.shell_commands import Script
from textmill.commands.translate import read_translation
from textmill.config import RunConfig, TokenizerConfig
from textmill.config.deepspeed_json import explain_json, read_json_settings
from textmill.config.other_names import BY_TOOL, RULES, TARGETS
from textmill.tokens.vocabulary.tokenizer import fit
from textmill.where import open_where

PAGE = (Path(__file__).parent / "readme_commands.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([\w-]+)\n\n```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
EXPECTED: dict[str, dict[str, Any]] = {
    "dsgpt2-train": {
        "corpus.split": [95.0, 5.0, 0.0],
        "tokens.prepend_begin": True,
        "tokenizer.use": "./vocab/vocab_35000",
        "model.size": "dsgpt2-112m",
        "train.layout": "padded",
        "train.loss": "sample_mean",
        "train.folder": "checkpoints/pretrain",
        "engine.kind": "deepspeed",
        "track.project": "dsgpt2",
        "sample.min_tokens": 100,
    },
    "megatron-deepspeed-preprocess": {
        "tokens.append_end": True,
        "tokenizer.use": "gpt2-vocab.json",
        "runner.workers": 8,
    },
    "megatron-deepspeed-pretrain": {
        "corpus.split": [969, 30, 1],
        "train.batch": 8,
        "train.warmup": 3200,
        "train.decay_steps": 320000,
        "train.betas": [0.9, 0.999],
        "engine.kind": "torch",
        "engine.precision": "fp16",
        "engine.activation_checkpointing": 1,
        "model.shape.layers": 24,
    },
    "megatron-deepspeed-srun": {"train.batch": 8, "train.steps": 500000},
    "huggingface-clm": {
        "corpus.source_splits": {"train.txt": "train", "validation.txt": "valid"},
        "model.init_from": "gpt2",
        "train.batch": 256,
        "train.learning_rate": 5e-5,
        "train.evaluate_every": "epoch",
        "train.best.metric": "valid_loss",
    },
    "huggingface-custom-clm": {"corpus.sources": [], "train.batch": 128, "train.layout": "padded"},
    "huggingface-binarize": {"corpus.documents": "line"},
    "huggingface-distil": {
        "train.distil.kl": 5.0,
        "train.distil.labels": 2.0,
        "train.distil.cosine": 1.0,
        "train.freeze": ["wpe"],
        "train.batch": 250,
        "tokenizer.use": "gpt2",
        "train.layout": "padded",
    },
    "huggingface-distil-distributed": {"train.distil.labels": 0.33, "train.batch": 1000},
    "huggingface-extract": {"model.init_layers": [0, 2, 4, 7, 9, 10], "model.init_from": "gpt2"},
    "megatron-2019-bert": {
        "model.family": "bert",
        "train.layout": "masked",
        "tokenizer.use": "bert-large-uncased",
        "corpus.sentences": "lines",
        "train.batch": 4,
        "train.warmup": 9900,
        "train.masked.max_predictions": 80,
    },
    "megatron-2019-gpt2": {"tokenizer.use": "gpt2", "train.batch": 8, "train.warmup": 0.01, "train.clip": 1.0},
    "megatron-2019-webtext": {"evaluate.sample": 80000, "evaluate.batch": 16, "train.batch": 32},
    "jax-lm-preprocess": {
        "corpus.source_splits": {"hf:wikitext:wikitext-103-v1:train": "train"},
        "runner.kind": "beam",
        "runner.options": ["--direct_running_mode=multi_processing", "--direct_num_workers=0"],
        "tokens.features.stride": 128,
    },
    "jax-lm-train": {
        "track.kinds": ["wandb"],
        "tokens.use_valid": ["dataset/wikitext.test**"],
        "model.size": "small",
        "model.shape.dropout": 0.1,
        "train.schedule": "linear",
        "engine.kind": "jax",
        "train.length": 256,
        "train.betas": [0.9, 0.98],
    },
    "nanogpt": {"tokenizer.vocab": 260, "train.batch": 480, "train.evaluate_batch": 12, "track.kinds": []},
    "litgpt-lora": {"model.lora.rank": 16, "train.learning_rate": 2e-4, "train.evaluate_batch": 2, "train.epochs": 5},
    "huggingface-mlm": {
        "corpus.documents": "line",
        "model.size": "base",
        "model.shape.dropout": 0.1,
        "train.batch": 16,
        "train.evaluate_every": 10000,
        "train.masked.probability": 0.2,
        "train.masked.whole_words": False,
    },
    "megatron-today": {
        "model.family": "llama",
        "model.shape.kv_heads": 8,
        "model.shape.untied": True,
        "train.batch": 8,
        "train.warmup": 1250,
        "train.decay_samples": 950000,
        "engine.mesh.tensor": 2,
        "engine.mesh.shard": 8,
        "track.kinds": ["tensorboard"],
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(text: str, *flags: str) -> tuple[str, RunConfig]:
    """The file that `textmill from` writes, and the config that it loads as."""
    assert main(["from", text, "--to", "new.yaml", *flags]) == 0
    return Path("new.yaml").read_text(encoding="utf-8"), open_where("new.yaml", []).config


def test_the_file_stands_where_the_paths_of_the_command_are_true(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs").mkdir()
    assert main(["from", "run_clm.py --train_file a.txt", "--to", "configs/new.yaml"]) == 2
    assert "write --to new.yaml" in capsys.readouterr().err
    assert not any((here / "configs").iterdir())


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", BLOCKS)
def test_the_commands_of_a_readme(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is either the comment of a setting or in the list of what is not in the file, which is printed."""
    text, config = translated(BLOCKS[name])
    script = Script()
    script.read(BLOCKS[name])
    options = [
        pasted.given[option].spelling
        for words in script.commands
        if (pasted := read_command(words, script.variables))
        for option in pasted.given
    ]
    assert options or name == "megatron-deepspeed-emulate"
    for option in options:
        assert re.search(rf"# .*{re.escape(option)}", text), option
    assert "does not know" not in text
    assert "refused" not in text
    left = [line for line in text.splitlines() if line.startswith("# ")][1:]
    errors = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("textmill: ") for line in errors] == [line.removeprefix("# ") for line in left]
    for key, expected in EXPECTED.get(name, {}).items():
        found = value_of(config, key)
        found = json.loads(json.dumps(found).replace(f"{here}/", ""))
        assert found == expected, key


def test_files_to_evaluate_are_never_training_data(here: Path) -> None:
    """Under every name that the tools have for them."""
    targets = ("@evaluation_files", "tokens.use_valid", "tokens.use_test")
    names = " ".join(TARGETS[target] for target in targets).split()
    assert {"validation_file", "valid_data", "test_data", "eval_dataset_paths"} <= set(names)
    for name in names:
        for script in ("run_clm.py", "pretrain_gpt2.py --use-tfrecords", "jax_lm.py"):
            command = f"python {script} --train_data a.txt --{name} held-out.txt"
            pasted = read_command(command.split(), {})
            assert pasted is not None
            found = translate_option(pasted, name)
            assert isinstance(found, dict)
            assert found.get("tokens.use") != ["held-out.txt"]
            if "corpus.sources" in found:
                assert found["corpus.source_splits"]["held-out.txt"] in ("valid", "test")
                assert "held-out.txt" in found["corpus.sources"], "source_splits only names sources"
            else:
                assert found.keys() <= {"tokens.use_valid", "tokens.use_test"}


@pytest.mark.parametrize(
    ("command", "batch"),
    [
        ("python pretrain_gpt2.py --batch-size 4", 4),
        ("torchrun --nproc_per_node=8 pretrain_gpt2.py --batch-size 4", 32),
        ("torchrun --nproc_per_node=8 --nnodes 2 pretrain_gpt2.py --batch-size 4 --model-parallel-size 2", 32),
        ("deepspeed --num_gpus 8 pretrain_gpt.py --micro-batch-size 4 --global-batch-size 96", 96),
        ("deepspeed --num_gpus 8 pretrain_gpt.py --micro-batch-size 4", 32),
        ("accelerate launch --num_processes 2 run_clm.py --gradient_accumulation_steps 3", 48),
        ("torchrun --nproc_per_node=8 train.py --batch_size=6 --gradient_accumulation_steps=40", 240),
        ("python train.py", 480),
        ("python -m jax_lm.train --batch-size 16 --gpus 4", 16),
        ("litgpt pretrain gpt2 --train.global_batch_size 64 --train.micro_batch_size 4 --devices 4", 64),
        ("deepspeed --include worker-0:0,1@worker-1:0,1 run_clm.py --per_device_train_batch_size 2", 8),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python run_clm.py --per_device_train_batch_size 2", 6),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python pretrain_gpt2.py --batch-size 2", 2),
        ("srun -N 4 -n 32 python pretrain_gpt2.py --batch-size 2", 64),
        ("srun -n 2 torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt2.py --batch-size 2", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node 4\nsrun python pretrain_gpt2.py --batch-size 2", 16),
        ("#SBATCH --nodes=2\ntorchrun --nproc_per_node 4 --nnodes $SLURM_NNODES pretrain_gpt2.py --batch-size 2", 16),
    ],
)
def test_the_batch_of_a_step(command: str, batch: int, here: Path) -> None:
    assert translated(command)[1].train.batch == batch


def test_a_number_of_gpus_that_only_the_launcher_knows(here: Path) -> None:
    text = translated("torchrun --nproc_per_node=gpu --nnodes $NODES run_clm.py --train_file a.txt")[0]
    assert "--nproc_per_node=gpu: how many GPUs these are is not known here" in text
    again = translated_again("torchrun --nproc_per_node=gpu run_clm.py --train_file a.txt", "--gpus", "4")
    assert "not known here" not in again


NANOGPT = "python train.py --wandb_project=p --batch_size=8"
LITGPT_LORA = "litgpt finetune_lora some/model --train.micro_batch_size 2 --data JSON --data.json_path a.json"
QUANTITIES: list[tuple[str, dict[str, Any]]] = [
    (NANOGPT, {"track.kinds": [], "train.evaluate_batches": 200, "train.evaluate_batch": 8, "train.warmup": 2000}),
    (f"{NANOGPT} --wandb_log=True", {"track.kinds": ["wandb"], "track.project": "p"}),
    (
        f"{NANOGPT} --decay_lr=False",
        {"train.schedule": "constant", "train.warmup": 0, "train.decay_steps": None, "train.min_learning_rate": 0},
    ),
    (f"{NANOGPT} --dataset=shakespeare_char", {"corpus.sources": ["tinyshakespeare"], "tokenizer.vocab": 260}),
    (NANOGPT, {"corpus.sources": ["hf:Skylion007/openwebtext"], "corpus.split": [99.95, 0.05, 0]}),
    (
        "python sample.py --init_from=gpt2-xl --start=x --num_samples=5",
        {"sample.prompt": "x", "sample.count": 5, "sample.max_tokens": 500, "sample.top_k": 200, "train.steps": 1000},
    ),
    (
        "run_clm.py --max_steps 1000 --num_train_epochs 3 --eval_steps 0.1 --save_steps 0.25 --train_file a.txt",
        {"train.steps": 1000, "train.epochs": None, "train.evaluate_every": 100, "train.save_every": 250},
    ),
    (
        "python api.py --workspace chat --temperature 0.9 --port 4001",
        {"train.folder": "checkpoints/chat", "sample.temperature": 0.9, "serve.port": 4001},
    ),
    ("run_clm.py --max_steps -1 --train_file a.txt", {"train.epochs": 3.0}),
    (
        "run_clm.py --model_type gpt2 --config_overrides n_embd=32,n_layer=4,n_head=2 --train_file a.txt",
        {"model.family": "gpt2", "model.shape.width": 32, "model.shape.layers": 4, "model.shape.heads": 2},
    ),
    (
        "accelerate launch --num_processes 2 --mixed_precision bf16 --gradient_accumulation_steps 3 "
        "run_clm_no_trainer.py --per_device_train_batch_size 4 --lr_scheduler_type cosine_with_restarts "
        "--train_file a.txt",
        {"train.batch": 24, "engine.precision": "bf16", "train.schedule": "cosine"},
    ),
    (
        "accelerate launch --num_processes 2 --use_deepspeed --zero_stage 3 run_clm.py --train_file a.txt",
        {"engine.kind": "deepspeed", "engine.zero": 3},
    ),
    ("run_clm.py --config_name some/gpt2-medium", {"model.size": "medium", "model.shape.dropout": 0.1}),
    (
        "run_mlm.py --train_file a.txt --mlm_probability 0.2",
        {"train.masked.whole_words": False, "train.masked.probability": 0.2, "train.masked.pairs": "none"},
    ),
    ("pretrain_bert.py --train-data a.json --batch-size 4", {"train.masked.whole_words": False}),
    ("pretrain_bert.py --data-path a --micro-batch-size 4", {"train.masked.whole_words": True}),
    ("pretrain_gpt.py --deepspeed --zero-stage 0 --fp16", {"engine.zero": 1, "engine.precision": "fp16"}),
    ("pretrain_gpt.py --deepspeed --zero-stage 0 --bf16", {"engine.zero": 0, "engine.precision": "bf16"}),
    ("pretrain_gpt.py --position-embedding-type alibi", {"model.family": "gpt2"}),
    ("pretrain_gpt.py --tensorboard-dir t --wandb-project p", {"track.kinds": ["tensorboard", "wandb"]}),
    (
        LITGPT_LORA,
        {
            "model.init_from": "some/model",
            "tokenizer.use": "some/model",
            "model.lora.rank": 8,
            "model.lora.dropout": 0.05,
            "train.layout": "chat",
            "train.batch": 16,
            "train.evaluate_batch": 2,
            "train.learning_rate": 1e-3,
            "train.epochs": 5,
        },
    ),
    (f"{LITGPT_LORA} --data.val_split_fraction 0.1", {"corpus.split": [90, 10, 0]}),
    (
        "litgpt pretrain tiny-llama-1.1b --train.max_tokens 3e9 --optimizer.init_args.lr 4e-4 --data.data_path d "
        "--optimizer.init_args.betas [0.9,0.95] --train.tie_embeddings true",
        {
            "model.size": "tinyllama-1.1b",
            "model.shape.untied": False,
            "train.tokens": 3_000_000_000,
            "train.learning_rate": 4e-4,
            "train.betas": [0.9, 0.95],
            "train.batch": 512,
        },
    ),
]


@pytest.mark.parametrize(("command", "expected"), QUANTITIES)
def test_the_quantities_of_a_command(command: str, expected: dict[str, Any], here: Path) -> None:
    config = translated(command)[1]
    found = json.loads(json.dumps({key: value_of(config, key) for key in expected}).replace(f"{here}/", ""))
    assert found == expected


def test_the_tokens_that_nanogpt_prepared(here: Path) -> None:
    Path("data/owt").mkdir(parents=True)
    Path("data/owt/train.bin").write_bytes(b"1234")
    config = translated("python train.py --dataset=owt")[1]
    assert config.tokens.use_valid == [str(here / "data/owt/val.bin")]
    assert [used.path for used in config.tokens.use] == [str(here / "data/owt/train.bin")]
    assert config.corpus.sources == []


def test_options_in_a_file(here: Path) -> None:
    """The YAML of litgpt's --config, and the JSON that the trainer's scripts take instead of options."""
    Path("own.yaml").write_text(
        "data: {init_args: {json_path: a.json}}\ntrain: {epochs: 2, max_steps: null}\nseed: 7\n"
    )
    config = translated("litgpt finetune_full some/model --config own.yaml --seed 8")[1]
    assert (config.train.epochs, config.train.seed, config.corpus.sources) == (2, 8, [str(here / "a.json")])
    Path("own.json").write_text(json.dumps({"train_file": "a.txt", "max_steps": 9, "fp16": True}))
    Path("new.yaml").unlink()
    config = translated("python run_clm.py own.json")[1]
    assert (config.train.steps, value_of(config, "engine.precision")) == (9, "fp16")
    assert "other.json: is not in this folder" in translated_again("python run_clm.py other.json --seed 2")


def test_the_number_of_gpus_may_be_given(here: Path) -> None:
    assert translated("python pretrain_gpt2.py --batch-size 4", "--gpus", "64")[1].train.batch == 256


def test_a_config_of_nanogpt_is_read_and_not_executed(here: Path) -> None:
    Path("shakespeare.py").write_text(
        "# small\nimport os\nopen('executed', 'w')\nout_dir = 'out-x'\ndataset = 'shakespeare_char'\n"
        "gradient_accumulation_steps = 5 * 8\nbatch_size = 2\nlearning_rate = 1e-3 # high\nn_layer = 6\ndropout = 0.2\n"
    )
    text, config = translated("python train.py shakespeare.py --batch_size=3 --compile=False")
    assert not Path("executed").exists()
    assert (config.train.batch, config.train.learning_rate, config.train.steps) == (120, 1e-3, 600000)
    assert config.corpus.sources == ["tinyshakespeare"]
    assert "gradient_accumulation_steps = 5 * 8" in text
    assert value_of(config, "engine.compile") is False


def test_nothing_is_executed(here: Path) -> None:
    translated("touch a; $(touch b) `touch c`; python run_clm.py --train_file $(touch d).txt; rm new.yaml")
    assert {path.name for path in here.iterdir()} == {"new.yaml"}


def test_a_value_that_the_loader_refuses_is_listed(here: Path) -> None:
    text, config = translated("python pretrain_gpt.py --lr-decay-style exponential --num-layers many --train-iters 7")
    assert "--lr-decay-style exponential: refused: train.schedule" in text
    assert "--num-layers many: refused: model.shape.layers: found 'many'" in text
    assert config.train.steps == 7


def test_an_unknown_option_is_listed(here: Path) -> None:
    assert "#   --frobnicate 3: textmill does not know this option" in translated("python x.py --frobnicate 3")[0]


def test_a_variable_that_is_not_set_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "/elsewhere")
    text, config = translated("python pretrain_gpt.py --save $RUNS/a")
    assert config.train.folder == "/elsewhere/a", "as in the shell"
    assert "#   $RUNS: the script does not set it" in text


def test_a_config_of_nanogpt_that_is_no_python(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("x = (")
    assert main(["from", "python train.py bad.py"]) == 2
    assert "bad.py: is not a Python file with settings" in capsys.readouterr().err


def test_blended_tokens_keep_their_weights(here: Path) -> None:
    _, config = translated("python pretrain_gpt.py --data-path 0.3 a_text_document 0.7 b_text_document")
    assert [(Path(used.path).name, used.weight) for used in config.tokens.use] == [
        ("a_text_document", 0.3),
        ("b_text_document", 0.7),
    ]


def test_a_script_that_tokenizes_and_trains_uses_its_own_tokens(here: Path) -> None:
    Path("all.sh").write_text(BLOCKS["megatron-deepspeed-oscar"] + BLOCKS["megatron-deepspeed-pretrain"])
    text, config = translated("all.sh")
    assert config.tokens.use == []
    assert config.tokens.folder == str(here / "my-gpt2")
    assert "--data-path my-gpt2_text_document: not needed" in text


def test_several_files_that_a_script_tokenizes_are_the_sources_of_one_run(here: Path) -> None:
    words = "python -m jax_lm.preprocess --dataset-name wiki --dataset-sub-name raw"
    lines = [f"{words} --dataset-split-type {split} --output-path data/wiki.{split}" for split in ("train", "test")]
    lines.append('python -m jax_lm.train --train-dataset-paths "data/wiki.train**" --eval-dataset-paths data/wiki.test')
    text, config = translated("\n".join(lines))
    assert config.corpus.source_splits == {"hf:wiki:raw:train": "train", "hf:wiki:raw:test": "test"}
    assert config.corpus.sources == [*config.corpus.source_splits]
    assert (config.tokens.use, config.tokens.use_valid, config.tokens.folder) == ([], [], None)
    assert "refused" not in text


def test_merged_tokens_are_their_parts(here: Path) -> None:
    merge = "python merge_preprocessed_data.py --datasets p1_text_document p2_text_document --output-prefix all"
    train = "python pretrain_gpt.py --data-path all"
    assert [Path(used.path).name for used in translated(f"{merge}\n{train}")[1].tokens.use] == [
        "p1_text_document",
        "p2_text_document",
    ]
    parts = "".join(f"python preprocess_data.py --input {one}.jsonl --output-prefix {one}\n" for one in ("p1", "p2"))
    Path("new.yaml").unlink()
    config = translated(f"{parts}{merge}\n{train}")[1]
    assert [Path(source).name for source in config.corpus.sources] == ["p1.jsonl", "p2.jsonl"]
    assert config.tokens.use == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ls -l"], "found no command that trains"),
        (["missing.sh"], "no such file"),
        (["{"], "not readable as JSON"),
        (["python x.py --lr 1", "--to", "taken.yaml"], "--to taken.yaml: exists"),
        (["python", "x.py", "--lr", "1"], "--lr: unknown flag; put the whole command in quotes"),
    ],
)
def test_wrong_input_ends_in_one_line(
    arguments: list[str], part: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken.yaml").write_text("mine")
    assert main(["from", *arguments]) == 2
    assert part in capsys.readouterr().err
    assert Path("taken.yaml").read_text() == "mine"


def test_the_standard_input(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("MASTER_ADDR=localhost python pretrain_gpt.py --lr 0.5"))
    assert main(["from", "-"]) == 0
    assert "learning_rate: 0.5" in capsys.readouterr().out


SHELL = [
    *(BLOCKS[name] for name in ("megatron-deepspeed-pretrain", "huggingface-distil-distributed", "dsgpt2-train")),
    'A=(--x 1 # no\n --y "a b")\nB="--z 3"\nN=\npython x.py "${A[@]}" $B ${N:-4} ${M:-5} "$@" "" > log 2>&1\n',
    'export V=\'a  b\' W=c\nX=1 python y.py $V "$V" \'$V\' "\\$V" a\\ b "a\\\nb" ${W}d "${W}"e # end\n',
    'if true; then python z.py --a="b c" ; fi && python w.py --k 1 | python v.py || python u.py\n',
    "A=(1)\nA+=(2 3)\nB=x\nB+=y\npython a.py ${A[@]} $B\n",
    'A=("--x 1" "--y")\nD=${1:-"a b"}\npython b.py ${A[@]} "$D" ${E:-"c"} ${F:-${D}/d}\n',
    "#python old.py --lost 1 \\\npython c.py --k 2\nset -u\nif [ ! -f d.py ]; then echo d.py; fi\nset +u\n",
    'cat <<EOT > /dev/null\n{"a": 1}\npython no.py\nEOT\nR="python e.py --m 3"\neval ${R}\n',
    "for T in 1; do python f.py --n 4; done\ncase $1 in\n  -z) shift; python g.py;;\nesac\n",
]


@pytest.mark.parametrize("text", SHELL, ids=range(len(SHELL)))
def test_words_are_those_of_bash(text: str) -> None:
    """bash itself says which words a command gets; python and deepspeed are functions that print them."""
    bash = shutil.which("bash")
    assert bash is not None
    text = re.sub(r"<([\w.]+)>", r"\1", text).replace("> log 2>&1", "").replace("pkill", ": pkill").replace("|| ", "\n")
    text = text.replace(" | ", "\n")
    function = '() { printf "%s\\0" "$0" "$@" >&2; printf "\\n" >&2; }\n'.replace('"$0" ', "NAME ")
    stubs = "".join(name + function.replace("NAME", name) for name in ("python", "deepspeed"))
    done = subprocess.run([bash, "-c", stubs + text], capture_output=True, text=True, check=True)
    expected = [line.removesuffix("\0").split("\0") for line in done.stderr.splitlines()]
    script = Script()
    script.read(text)
    found = [words for words in script.commands if words[0] in ("python", "deepspeed")]
    assert [[word for word in words if word] for words in found] == [
        [word for word in words if word] for words in expected
    ]


def test_every_rule_has_a_function() -> None:
    assert set(RULE_FUNCTIONS) == set(RULES)


SAMPLES = ["1", "true", "steps", "a/b.json"]


@pytest.mark.parametrize("text", SAMPLES)
def test_every_option_of_the_table_has_an_effect_or_a_reason(text: str) -> None:
    for tool, targets in {"": TARGETS, **BY_TOOL}.items():
        for name in " ".join(targets.values()).split():
            pasted = read_command(["python", "x.py", f"--{name}={text}"], {})
            assert pasted is not None
            found = translate_option(dataclasses.replace(pasted, tool=tool), name)
            assert found, name
            if isinstance(found, str):
                assert len(found) > 10, name


MEGATRON = """
DDP-impl abort-on-unmet-fused-kernel-constraints accumulate-allreduce-grads-in-fp32 adam-beta1 adam-beta2 adam-eps
adlr-autoresume adlr-autoresume-interval apply-residual-connection-post-layernorm attention-dropout
attention-softmax-in-fp32 batch-size bert-load bert-no-binary-head bf16 biencoder-projection-dim
biencoder-shared-query-context-model block-data-path checkpoint-activations checkpoint-in-cpu checkpoint-num-layers
clip-grad codecarbon-dir contigious-checkpointing cpu-optimizer cpu_torch_adam data-impl data-path dataloader-type
decoder-seq-length deepspeed-activation-checkpointing distribute-checkpointed-activations distributed-backend
embed-layernorm embedding-path encoder-seq-length eod-mask-loss eval-interval eval-iters eval-only
evidence-data-path exit-duration-in-mins exit-interval ffn-hidden-size finetune fp16 fp16-lm-cross-entropy
fp32-residual-connection global-batch-size glu-activation hidden-dropout hidden-size hysteresis ict-head-size
ict-load img-dim indexer-batch-size indexer-log-interval inference init-method-std init-method-xavier-uniform
initial-loss-scale kill-switch-path kv-channels layernorm-epsilon lazy-mpu-init load local_rank
log-batch-size-to-tensorboard log-interval log-level log-level-replica log-num-zeros-in-grad log-params-norm
log-path log-timers-to-tensorboard log-validation-ppl-to-tensorboard loss-on-targets-only loss-scale
loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style lr-decay-tokens lr-warmup-fraction
lr-warmup-iters lr-warmup-samples make-vocab-size-divisible-by mask-prob max-position-embeddings merge-file
micro-batch-size min-loss-scale min-lr mmap-warmup model-parallel-size no-bias-dropout-fusion no-bias-gelu-fusion
no-load-optim no-load-rng no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard
no-masked-softmax-fusion no-query-key-layer-scaling no-save-optim no-save-rng no-scatter-gather-tensors-in-pipeline
num-attention-heads num-channels num-classes num-layers num-layers-per-virtual-pipeline-stage num-workers onnx-safe
openai-gelu optimizer override-lr-scheduler pad-vocab-size-to partition-activations patch-dim
pipeline-model-parallel-size position-embedding-type pp-partition-method profile-backward query-in-block-prob
rampup-batch-size remote-device reset-attention-mask reset-position-ids retriever-report-topk-accuracies
retriever-score-scaling retriever-seq-length reweight-loss-based-on-position-frequency sample-rate save
save-interval seed seq-length sgd-momentum short-seq-prob skip-train-iteration-range split
sync-tp-duplicated-parameters synchronize-each-layer tensor-model-parallel-size tensorboard-dir
tensorboard-log-interval tensorboard-queue-size test-weighted-split-paths test-weighted-split-paths-path
titles-data-path tokenizer-type train-iters train-samples train-tokens train-weighted-split-paths
train-weighted-split-paths-path universal-checkpoint use-bnb-optimizer use-checkpoint-lr-scheduler
use-contiguous-buffers-in-ddp use-cpu-initialization use-one-sent-docs use-pin-memory valid-num-workers
valid-weighted-split-paths valid-weighted-split-paths-path vocab-extra-ids vocab-file warmup weight-decay
zero-contigious-gradients zero-reduce-scatter
""".split()
"""Every option in the arguments.py of Megatron-DeepSpeed, as its help lists them."""

MEGATRON_2019 = """
cache-dir cloze-eval data-epochs data-loader deep-init delim eval-batch-size eval-hf eval-max-preds-per-seq
eval-seq-length eval-text-key fp32-allreduce fp32-embedding fp32-layernorm fp32-tokentypes genfile greedy
input-data-sizes-file intermediate-size load-openai loose-json max-num-samples max-preds-per-seq min-scale num-samples
out-seq-length overlapping-eval presplit-sentences pretrained-bert recompute resume-dataloader sample-input-file
sample-output-file shuffle skip-mmap-warmup strict-lambada temperature test-data text-key tokenizer-model-type
tokenizer-path top_k top_p train-data valid-data vocab vocab-size
""".split()
"""Those of Megatron-LM in 2019 that are not among them."""


def trainer_options() -> list[str]:
    from transformers import TrainingArguments

    return [field.name for field in dataclasses.fields(TrainingArguments)]


@pytest.mark.parametrize(("script", "least"), [("pretrain_gpt.py", 220), ("run_clm.py", 90)])
def test_every_option_of_a_tool_is_answered(script: str, least: int, here: Path) -> None:
    """All options at once: each becomes a setting, is refused with a message, or is listed with the reason."""
    names = [*MEGATRON, *MEGATRON_2019] if script == "pretrain_gpt.py" else trainer_options()
    assert len(set(names)) > least
    text, _ = translated(f"python {script} " + " ".join(f"--{name} 1" for name in names))
    for name in names:
        lines = [line for line in text.splitlines() if re.search(rf"# .*--{name} 1\b", line)]
        assert lines, name
        assert not any("does not know" in line for line in lines), name


@pytest.mark.long
def test_every_option_of_beam_reaches_beam() -> None:
    """jax-lm-training passes on what it does not know; Beam's own parser finds all of it in runner.options."""
    from apache_beam.options import pipeline_options

    checked = 0
    for options in pipeline_options.PipelineOptions.__subclasses__():
        parser = pipeline_options._BeamArgumentParser()
        options._add_argparse_args(parser)
        for action in parser._actions[1:]:
            name = action.option_strings[0].lstrip("-")
            known = {"int": "7", "float": "7.5"}.get(getattr(action.type, "__name__", ""), "some")
            value = next(iter(action.choices or [known]))
            word = f"--{name}" if action.nargs == 0 else f"--{name}={value}"
            pasted = read_command(["python", "-m", "jax_lm.preprocess", word], {})
            assert pasted is not None
            found = translate_option(pasted, name)
            assert isinstance(found, dict), name
            assert found == {"runner.kind": "beam", "runner.options": [word]}
            checked += 1
    assert checked > 100


def test_finetuning_of_dsgpt2(here: Path) -> None:
    """Its trainer loads from workspace_finetune and saves to workspace; the folders and the split are its defaults."""
    words = "--train_mode finetune --workspace chat --workspace_finetune pretrain --ckpt_id_finetune epoch1-step142000"
    text, config = translated(f"deepspeed ds_trainer.py {words}")
    assert (config.train.layout, config.train.chat.pack, config.tokenizer.chat) == ("chat", False, "dsgpt2")
    assert config.train.folder == str(here / "checkpoints/chat")
    assert config.model.init_from is not None
    assert Path(config.model.init_from).resolve() == here / "checkpoints/pretrain"
    assert config.corpus.split == [99, 1, 0]
    assert "--ckpt_id_finetune epoch1-step142000: name the checkpoint's folder" in text


def test_a_script_as_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run_clm.py", "--train_file", "a b.txt", "--fp16"]) == 0
    assert "precision: fp16" in (out := capsys.readouterr().out)
    assert "sources: [a b.txt]" in out


def test_a_script_that_starts_in_a_container(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "docker run -d --gpus='\"device=0,1\"' IMAGE bash scripts/ds_trainer.sh"
    assert main(["from", command]) == 2
    assert "scripts/ds_trainer.sh is not here, so translate it where it is" in capsys.readouterr().err
    (here / "scripts").mkdir()
    launch = "python -m torch.distributed.launch --nproc_per_node 2 ds_trainer.py --seed 9"
    Path("scripts/ds_trainer.sh").write_text(f"{launch}\nbash scripts/ds_trainer.sh  # again")
    assert translated(command)[1].train.seed == 9


def test_settings_that_stand_for_several_gpus(here: Path) -> None:
    """A copy of the net on two GPUs: FSDP divides it over the four copies, and one GPU per matrix needs no setting."""
    words = "torchrun --nproc_per_node=8 pretrain_gpt.py --use-distributed-optimizer --num-workers 7"
    text, config = translated(f"{words} --tensor-model-parallel-size 2 --bf16 --fp8-format hybrid")
    assert (value_of(config, "engine.mesh.tensor"), value_of(config, "engine.mesh.shard")) == (2, 4)
    assert value_of(config, "engine.precision") == "fp8"
    assert "#   --num-workers 7: not needed: batches" in text
    assert "tensor-model-parallel-size 1: not needed" in translated_again(f"{words} --tensor-model-parallel-size 1")


def translated_again(text: str, *flags: str) -> str:
    Path("new.yaml").unlink()
    return translated(text, *flags)[0]


def test_layers_of_the_hidden_loss(here: Path) -> None:
    words = "python train_pkd.py --student_type gpt2 --teacher_name gpt2 --teacher_layers 0 2 4"
    _, config = translated(f"{words} --beta_pkd 0.5")
    assert config.train.distil.teacher_layers == [0, 2, 4]
    assert "--teacher_layers 0 2 4: not needed" in translated_again(words)


def test_a_readme_without_a_training_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that install, build images or download say so in one line."""
    for block in (
        "docker build -t IMAGE_TAG -f Dockerfile-dev .",
        'git clone https://example.org/apex\ncd apex\npip install --global-option="--cpp_ext" -v . | tee b.log',
    ):
        assert main(["from", block]) == 2
        assert "found no command that trains" in capsys.readouterr().err


def test_the_trainers_defaults_are_those_that_are_translated() -> None:
    from transformers import TrainingArguments

    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    pairs = re.findall(r"--(\w+) (\S+)", DEFAULTS["hf"])
    assert len(pairs) == 14
    for name, text in pairs:
        value = getattr(fields[name], "value", fields[name])
        assert (text == value) if isinstance(value, str) else (float(text) == value), name


DSGPT2 = {
    "train_batch_size": 650,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.25,
    "optimizer": {"type": "AdamW", "params": {"lr": 3.5e-4, "betas": [0.95, 0.999], "eps": 1e-8, "weight_decay": 1e-5}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 900, "warmup_min_lr": 3.5e-5, "warmup_max_lr": 3.5e-4, "warmup_num_steps": 100},
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5},
}


def test_a_deepspeed_json_is_translated(here: Path) -> None:
    Path("ds.json").write_text(json.dumps(DSGPT2))
    text, config = translated("ds.json")
    assert config.train.batch == 650
    assert config.train.betas == [0.95, 0.999]
    assert (config.train.schedule, config.train.warmup_shape, config.train.decay_steps) == ("linear", "log", 900)
    assert value_of(config, "engine.zero") == 1
    assert value_of(config, "engine.deepspeed_config") == str(here / "ds.json")
    assert "activation_checkpointing: ignored, because" in text


def test_fp16_without_zero_becomes_stage_1(here: Path) -> None:
    """Here fp16 needs ZeRO; stage 1 computes the same updates."""
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}})
    )
    text, config = translated("ds.json")
    assert value_of(config, "engine.zero") == 1
    assert "refused" not in text


def test_settings_that_nobody_gave_come_from_the_json(here: Path) -> None:
    Path("ds.json").write_text(json.dumps(DSGPT2))
    Path("mine.yaml").write_text("engine: {kind: deepspeed, deepspeed_config: ds.json}\ntrain: {clip: 2.0}\n")
    config = open_where("mine.yaml", ["train.batch=64"]).config
    assert (config.train.batch, config.train.clip, config.train.learning_rate) == (64, 2.0, 3.5e-4)
    assert (config.train.warmup, config.train.min_learning_rate) == (100, 3.5e-5)


def deepspeed_keys() -> list[str]:
    """The keys of DeepSpeed's own config: of its classes, and those that its config module reads."""
    from deepspeed.runtime import config, constants, lr_schedules
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    source = Path(config.__file__).read_text(encoding="utf-8")
    read = re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)|([A-Z_]+) in param_dict", source)
    tops = [value for one in read if isinstance(value := getattr(config, one[0] or one[1], None), str)]
    sections: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig.model_fields,
        "fp16": DeepSpeedFP16Config.model_fields,
        "bf16": DeepSpeedBF16Config.model_fields,
        "activation_checkpointing": ACT_CHKPT_DEFAULT,
    }
    assert constants.TRAIN_BATCH_SIZE in tops
    inner = {"dtype", "lower_precision_safe_modules", "type", "params", "legacy_fusion"}  # of sections among them
    tops = [name for name in tops if name not in inner]
    params = [
        value for name, value in vars(lr_schedules).items() if name.startswith(("WARMUP_M", "CYCLE_", "LR_RANGE_TEST_"))
    ]
    nested = [f"{section}.{name}" for section, names in sections.items() for name in names]
    return [*tops, *nested, *(f"scheduler.params.{name}" for name in params)]


def test_every_key_of_deepspeed_has_an_effect_or_a_reason() -> None:
    keys = deepspeed_keys()
    assert len(keys) > 90
    for key in keys:
        tree: dict[str, Any] = {}
        inner = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = "some value"
        own, ignored, refused = explain_json(tree)
        known = key in own or key in refused or key in read_json_settings(tree) or key.partition(".")[0] in ignored
        assert known or leaf in ("optimizer", "scheduler"), key
        assert "neither" not in ignored.get(key, ""), key


def test_a_command_longer_than_a_file_name_is_a_command() -> None:
    words = " ".join(f"--data-path folder{number}_text_document" for number in range(20))
    found = read_translation(f"python pretrain_gpt.py --num-layers 3 {words}")
    assert found.settings["model.shape.layers"] == "3"


SMALL = """tokenizer.use=null tokenizer.vocab=300 model.init_from=null model.shape.layers=1 model.shape.heads=1
    model.shape.width=8 train.length=16 train.batch=4 train.steps=2 train.decay_steps=null train.warmup=0
    train.evaluate_batches=1 train.evaluate_every=2 train.log_every=1 engine.device=cpu engine.precision=fp32
    runner.workers=1 corpus.section_chars=200 sample.max_tokens=3 sample.min_tokens=0 track.kinds=[] corpus.split=8,1,1
    """.split()
"""What makes a config of these tools small; the texts are in a folder."""
TEACHER = "train.distil.teachers=[teacher] tokenizer.use=teacher train.freeze=[wpe]"
TRAINED: dict[str, tuple[str, str]] = {
    "dsgpt2": ("dsgpt2-train", "tokenizer.chat=null model.shape.positions=16"),
    "megatron-deepspeed": ("megatron-deepspeed-oscar megatron-deepspeed-pretrain", "model.shape.positions=16"),
    "megatron-deepspeed-srun": ("megatron-deepspeed-oscar megatron-deepspeed-srun", "model.shape.positions=16"),
    "huggingface": ("huggingface-clm", ""),
    "tokenized": ("huggingface-custom-clm", "tokens.use=[saved] tokenizer.use=teacher"),
    "distil": ("huggingface-distil", TEACHER),
    "distil-distributed": ("huggingface-distil-distributed", TEACHER),
    "student": ("huggingface-extract", "model.init_from=teacher model.init_layers=[0,1] tokenizer.use=teacher"),
    "megatron-2019": ("megatron-2019-gpt2", "model.shape.positions=16"),
    "bert": ("megatron-2019-bert", "tokenizer.kind=wordpiece corpus.sentences=split train.masked.max_predictions=null"),
    "jax-lm": (
        "jax-lm-preprocess jax-lm-train",
        """tokens.features.max_length=16
        tokens.features.min_length=4 tokens.features.stride=8 runner.options=[--direct_num_workers=1]""",
    ),
    "nanogpt": ("nanogpt", "model.shape.positions=16"),
    "litgpt": ("litgpt-lora", "model.init_from=teacher tokenizer.use=teacher model.lora.rank=2 train.length=32"),
    "mlm": ("huggingface-mlm", "tokenizer.kind=wordpiece train.save_every=2 model.shape.positions=16"),
    "megatron-today": (
        "megatron-today",
        "tokenizer.use=teacher tokens.use=[saved] train.decay_samples=null "
        "model.shape.kv_heads=1 model.shape.inner=16 model.shape.positions=16 engine.mesh.tensor=1 engine.mesh.shard=1",
    ),
}


def write_teacher(folder: Path) -> None:
    """A small GPT-2 with its tokenizer, and tokens of it in the files that the scripts write."""
    tokenizer = fit(iter([[PAGE]]), TokenizerConfig(vocab=300))
    write_folder(folder, tokenizer, width=8, heads=1)
    Path("training_configs").mkdir()
    shutil.copy(folder / "config.json", "training_configs/distilgpt2.json")
    rows = [tokenizer.encode(line) for line in PAGE.splitlines() if line] * 2
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk("saved")
    Path("data").mkdir()
    Path("data/binarized_text.pickle").write_bytes(pickle.dumps([np.array(row, np.uint16) for row in rows]))


@pytest.mark.long
@pytest.mark.parametrize("tool", TRAINED)
def test_a_translated_config_trains(tool: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps at a small size, with all stages before and after."""
    monkeypatch.chdir(tiny_texts.parent)
    names, own = TRAINED[tool]
    smaller = {**DSGPT2, "train_batch_size": 4, "scheduler": None}
    Path("ds_config.json").write_text(json.dumps({name: value for name, value in smaller.items() if value}))
    text, _ = translated("".join(BLOCKS[name] for name in names.split()))
    for file in ("train.txt", "validation.txt"):
        shutil.copy(tiny_texts / "english.txt", file)
    if "teacher" in own:
        write_teacher(Path("teacher"))
    given = {setting.partition("=")[0] for setting in own.split()}
    shape = ("model.shape.", "model.init_from") if given & {"model.init_from", "train.distil.teachers"} else ()
    small = [one for one in SMALL if not one.startswith(tuple(shape))]
    own_settings = [*small, *own.split(), "folder=out", "train.folder=out/run"]
    if tool == "dsgpt2":
        own_settings.remove("engine.precision=fp32")  # the JSON has bf16
    if tool == "jax-lm":
        own_settings.remove("runner.workers=1")
        Path("new.yaml").write_text(text.replace("hf:wikitext:wikitext-103-v1:train", "train.txt"))
    elif tool == "litgpt":
        rows = [{"instruction": f"What is {number}?", "output": "The mill stands."} for number in range(20)]
        Path("questions.json").write_text(json.dumps(rows))
    elif tool not in ("huggingface", "mlm", "tokenized", "distil", "distil-distributed", "megatron-today"):
        own_settings.append(f"corpus.sources={tiny_texts}/*.txt")
    assert main(["run", "new.yaml", *own_settings]) == 0
    rows = [json.loads(line) for line in Path("out/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(row["step"] for row in rows) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["megatron-2019-wikitext", "megatron-2019-lambada", "megatron-2019-webtext"])
def test_a_translated_evaluation_runs(
    name: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    write_teacher(Path("teacher"))
    lines = [{"text": "The mill stands by the river and the wheel turns"}] * 3
    Path("lambada.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("wiki.tokens").write_text(" = Mill = \n \n The mill stands by the river . \n")
    text, _ = translated(BLOCKS[name])
    text = text.replace("<gpt2_345_path>", "teacher").replace("<wikitext_tokens_test_path>", "wiki.tokens")
    text = re.sub("<(lambada|webtext)_test_path>", "lambada.jsonl", text)
    Path("new.yaml").write_text(text)
    assert main(["evaluate", "new.yaml", "engine.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search("accuracy" if "lambada" in name else "word(_| )(perplexity|ppl)", out), out
