"""Every command in README.md and docs/ runs as printed; only settings that make it smaller are appended."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.conftest import ROOT
from tests.support.waiting import LONGEST
from tests.support.web import get
from textmill.cli import main
from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import fit

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "commands"),
]
"""The pages of commands repeat lines of these (tests/project/test_generated_pages.py)."""
PROGRAM = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())"]
NOT_RUN = {
    "--dropped near_duplicate": "the small text of the test has no near-duplicates",
    "runs/tale": "needs several models; tests/server/test_several_models.py has them",
    "./examples/": "tests/models/test_examples.py runs these examples",
    "./my_loss.py": "a file of the reader's own; tests/models/test_examples.py has one",
    "./my_filter.py": "a file of the reader's own; tests/training/test_own_parts.py has one",
    "./my_task.py": "a file of the reader's own; tests/training/test_own_parts.py has one",
    "textmill evaluate A": "a run of the reader's own; tests/reports/test_report.py compares some",
    "textmill evaluate B": "another one",
    "textmill compare A B": "both",
    "--text papers/": "documents of the reader's own; tests/corpus/test_documents.py has some",
    "import nano/ckpt.pt": "needs a checkpoint of nanoGPT; tests/conversion/test_formats.py has one",
    "import megatron": "needs a checkpoint of Megatron; tests/conversion/test_megatron.py has some",
    "export.kind=dataset": "needs a prepared corpus; tests/conversion/test_dataset_folder.py has one",
    "corpus.sources=mongo:db_config.json": "needs a MongoDB server; tests/corpus/test_mongo_server.py has one",
}
SHORT = ["train.steps=2", "train.warmup=0", "train.batch=2", "train.length=32", "train.evaluate_batches=1"]
SMALLER = {
    "run": [*SHORT, "sample.max_tokens=5"],
    "train": SHORT,
    "generate": ["sample.max_tokens=5"],
    "chat": ["sample.max_tokens=5"],
    "serve": ["sample.max_tokens=5", "serve.port=0"],
    "fit-tokenizer": ["tokenizer.vocab=300"],
    "tune": [*SHORT, "--minutes", "0.6"],
    "plan": ["plan.probe_steps=2", "train.batch=8"],
}
"""What is appended to each command. A server takes any free port, because another one may use the printed port."""
SMALLER_LINES = {
    "evaluate.tasks=pseudo_perplexity": ["evaluate.split=train"],  # the small text has no valid split
    "textmill train quickstart  # from": [
        *("train.batch=1", "train.length=8", "train.evaluate_batches=1"),
        *("model.shape.layers=1", "model.shape.heads=1", "model.shape.width=8"),
    ],
    "textmill train runs/quickstart --step": ["train.evaluate_batches=1"],
    "textmill train runs/quickstart train.steps=4000": ["train.steps=2002"],
    "textmill train runs/quickstart --force": ["train.steps=2"],
    "textmill train runs/quickstart --change": ["train.steps=4", "train.batch=2", "train.evaluate_batches=1"],
    "tokens.kind=features": [
        "tokens.features.max_length=32",
        "tokens.features.min_length=4",
        "tokens.features.stride=16",
    ],
    "textmill train my.yaml train.layout=packed": ["train.batch=2", "train.length=32", "train.steps=120"],
    "textmill train runs/mine train.steps=1000": ["train.steps=3"],
    "textmill train runs/mine train.steps=3000": ["train.steps=4"],
    "textmill train runs/mine train.steps=4000": ["train.steps=5"],
}
"""Lines whose steps matter: --step 1600 needs a checkpoint of step 1600, `show --step 120` a run of 120 steps."""
TOKENIZE_QUICKSTART = ["prepare quickstart", "fit-tokenizer quickstart", "tokenize quickstart"]
MINE = ["new mine --text texts/*.txt", "prepare mine", "fit-tokenizer mine"]
SETUP = {
    "batches": ["prepare my.yaml", "fit-tokenizer my.yaml", "tokenize my.yaml"],
    "bert": ["run bert.yaml folder=runs/bert-base", "prepare bert.yaml", "fit-tokenizer bert.yaml"],
    "bert-finetune": ["run bert.yaml folder=runs/bert-base"],
    "chat": ["run ko.yaml"],
    "engines": ["run mine.yaml", "prepare run.yaml", "fit-tokenizer run.yaml", "tokenize run.yaml"],
    "evaluate": ["run quickstart"],
    "export": ["run quickstart", "run mine.yaml"],
    "faults": TOKENIZE_QUICKSTART,
    "features": MINE,
    "finetune": ["run base.yaml"],
    "generate": ["run quickstart", "run chat-ko.yaml folder=runs/answers"],
    "lora": [
        *MINE,
        "tokenize mine",
        "run base.yaml",
        "run adapted.yaml model.init_from=runs/base tokenizer.use=runs/base/tokenizer model.lora.rank=2",
    ],
    "serve": ["run quickstart", "run bert.yaml folder=runs/bert-base"],
    "tokenizers": ["prepare my.yaml"],
    "tokens": ["prepare my.yaml", "fit-tokenizer my.yaml"],
    "train": [*TOKENIZE_QUICKSTART, *MINE, "tokenize mine"],
}
"""What a page takes as given."""


def commands_of(page: Path) -> list[str]:
    """Return the lines of a page's code blocks that call textmill."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    shells = [block for language, block in blocks if language in ("", "sh", "console")]
    lines = [line.strip().removeprefix("$ ") for block in shells for line in block.splitlines()]
    return [re.sub(r"\s+#", "  #", line) for line in lines if re.match(r"textmill [a-z-]", line)]


WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


def test_tasks_that_read_a_file_are_written_with_one() -> None:
    """In tables too, whose commands do not run here."""
    with_file = set(re.findall(r"^\| `(\w+):FILE", (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8"), re.M))
    assert {"wikitext", "hellaswag", "arc"} <= with_file
    for page in PAGES:
        for tasks in re.findall(r"evaluate\.tasks=\[?([^\s`\]']+)", page.read_text(encoding="utf-8")):
            assert not with_file & set(tasks.split(",")), f"{page.name}: evaluate.tasks={tasks}"


def test_the_tables_name_lines_and_pages_that_exist() -> None:
    lines = [line for page in PAGES for line in commands_of(page)]
    assert len(lines) > 50
    for part in (*NOT_RUN, *SMALLER_LINES):
        assert any(part in line for line in lines), part
    assert set(SETUP) <= {page.stem for page in WITH_COMMANDS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages name: texts, configs, a model of transformers, prompts, a key, a model family."""
    folder = tmp_path_factory.mktemp("documented") / "files"
    (folder / "texts").mkdir(parents=True)
    sentences = [f"The mill number {number} stands by the river and turns." for number in range(300)]
    for part in range(3):
        (folder / "texts" / f"{part}.txt").write_text("\n\n".join(sentences[part::3]), encoding="utf-8")
    rows = [json.dumps({"text": f"Another text, number {number}, about a wheel."}) for number in range(100)]
    (folder / "more.jsonl").write_text("\n".join(rows), encoding="utf-8")
    config = "corpus: {sources: ['texts/*.txt'], section_chars: 200}\ntokenizer: {vocab: 300}\nmodel: {size: nano}\n"
    (folder / "pretrain.sh").write_text("ARGS='--num-layers 2'\npython pretrain_gpt.py $ARGS\n", encoding="utf-8")
    (folder / "ds_config.json").write_text('{"train_batch_size": 8}', encoding="utf-8")
    for name in ("my", "mine", "base", "ko", "adapted", "run"):
        (folder / f"{name}.yaml").write_text(config, encoding="utf-8")
    masked = "corpus: {sources: ['texts/*.txt'], sentences: split}\ntokenizer: {kind: wordpiece, vocab: 300}\n"
    masked += "tokens: {level: sentence, append_end: false}\ntrain: {layout: masked, length: 32}\n"
    masked += "model: {family: bert, size: tiny}\n"
    (folder / "bert.yaml").write_text(masked, encoding="utf-8")
    _write_labelled(folder)
    pairs = [f"{number}시에 뭐 해?,{number}시에는 자요.,0\n" for number in range(60)]
    (folder / "ChatbotData.csv").write_text("Q,A,label\n" + "".join(pairs), encoding="utf-8")
    shutil.copy(folder / "ChatbotData.csv", folder / "pairs.csv")
    for name in ("chat-ko.yaml", "finetune.yaml", "bert-classify.yaml"):
        shutil.copy(ROOT / "recipes" / name, folder)
    shutil.copy(ROOT / "examples" / "mynet.py", folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n', encoding="utf-8")
    (folder / "city.json").write_text('{"type": "object", "properties": {"year": {"type": "boolean"}}}')
    (folder / "key.txt").write_text("a-long-secret\n", encoding="utf-8")
    (folder / "other.txt").write_text(" ".join(sentences), encoding="utf-8")
    (folder / "lambada_test.jsonl").write_text(json.dumps({"text": sentences[0][:-1]}) + "\n", encoding="utf-8")
    question = {
        "activity_label": "Mill",
        "ctx_a": "The mill",
        "ctx_b": "",
        "endings": ["turns.", "sings.", "reads.", "flies."],
    }
    for split, count in (("test", 2), ("dev", 5)):
        (folder / "data" / split).mkdir(parents=True, exist_ok=True)
        questions = ["What turns?,a wheel,a wall,a hill,a well,A\n"] * count
        (folder / "data" / split / f"mills_{split}.csv").write_text("".join(questions))
    (folder / "hellaswag_val.jsonl").write_text(json.dumps(question | {"label": 0}) + "\n", encoding="utf-8")
    tokenizer = fit(iter([sentences]), TokenizerConfig(vocab=300))
    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, vocab_size=tokenizer.vocab))
    llama = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            intermediate_size=64,
            max_position_embeddings=64,
            vocab_size=tokenizer.vocab,
            bos_token_id=tokenizer.eos_id,
            eos_token_id=tokenizer.eos_id,
        )
    )
    for name in ("pretrained", "gpt2", "some/gpt2-folder", "SmolLM2-135M"):
        (folder / name).mkdir(parents=True)
        tokenizer.save(folder / name)
        (llama if name == "SmolLM2-135M" else net).save_pretrained(folder / name)
    return folder


def _write_labelled(folder: Path) -> None:
    """Write the examples with labels and the configs of docs/bert-finetune.md."""
    texts = [f"the mill {number} turns" for number in range(60)]
    rows = [f"{text},{number % 2}\n" for number, text in enumerate(texts)]
    (folder / "reviews.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    (folder / "new-reviews.csv").write_text("text,stars\n" + "".join(rows[:3]), encoding="utf-8")
    answer = {"text": "mill", "answer_start": 4}
    for number, (names, count) in enumerate(((("ner-train", "train-v2.0"), 40), (("ner-dev", "dev-v2.0"), 20))):
        words = "".join(f"the O\nmill B-LOC\n{text} O\n\n" for text in range(count))
        (folder / f"{names[0]}.conll").write_text(words, encoding="utf-8")
        paragraphs = [
            {"context": text, "qas": [{"id": f"{number}-{text}", "question": "What?", "answers": [answer]}]}
            for text in texts[:count]
        ]
        data = {"version": "v2.0", "data": [{"title": "mills", "paragraphs": paragraphs}]}
        (folder / f"{names[1]}.json").write_text(json.dumps(data), encoding="utf-8")
    page = (ROOT / "docs" / "bert-finetune.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for name, task in (("ner", "token-classification"), ("squad", "question-answering")):
        (text,) = [block for block in blocks if task in block]
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


class Workspace:
    """A copy of the files, in which the commands of a page run one after the other."""

    def __init__(self, files: Path, folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.folder, self.page, self.monkeypatch = files, folder, page, monkeypatch
        self.renewals = 0
        self.renew()

    def renew(self) -> None:
        """Start again with what the page takes as given."""
        self.renewals += 1
        root = shutil.copytree(self.files, self.folder / str(self.renewals))
        self.monkeypatch.chdir(root)
        for line in SETUP.get(self.page, []):
            words = line.split()
            assert main([*words, *(SMALLER["run"] if words[0] == "run" else [])]) == 0, line
        if self.page == "lora":
            (checkpoint,) = Path("runs/adapted/run").glob("step-*")
            shutil.copytree(checkpoint, "folder-of-peft")

    def run(self, line: str) -> int:
        """Run a command as printed, with settings that make it smaller; return its exit code."""
        words = shlex.split(line, comments=True)[1:]
        smaller = next((more for part, more in SMALLER_LINES.items() if part in line), SMALLER.get(words[0], []))
        smaller = [] if "--help" in words else smaller
        if words[0] == "serve":
            return serve([*words, *smaller])
        if ">" in words or words[0] == "chat":
            words, target = (words[:-2], words[-1]) if ">" in words else (words, "/dev/null")
            command = [*PROGRAM, *words, *smaller]
            with open(target, "w") as output:
                return subprocess.run(command, input="안녕?\n", stdout=output, text=True, timeout=LONGEST).returncode
        return main([*words, *smaller])


def serve(arguments: list[str]) -> int:
    """Start a server, wait until it is ready, interrupt it; return its exit code."""
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+:(\d+)/", process.stdout.readline())
    if found:
        assert get(f"http://127.0.0.1:{found[1]}/ready").status_code == 200
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=LONGEST)
    return process.returncode if found else 2


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(
    page: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = Workspace(files, tmp_path, page.stem, monkeypatch)
    for line in commands_of(page):
        if any(part in line for part in NOT_RUN):
            continue
        capsys.readouterr()
        code, message = workspace.run(line), capsys.readouterr().err
        if code and "--force" in message:  # an alternative to an earlier line of the page
            workspace.renew()
            code, message = workspace.run(line), capsys.readouterr().err
        assert code == 0, f"{line}: {message}"
