"""docs/systems.md: the commands of each system run one after the other as printed, only with smaller settings."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.live_server import served
from tests.support.mongo_process import open_database
from tests.support.small_recipes import SMALLER as SMALL_RECIPES
from tests.support.small_recipes import SYSTEMS, write_inputs
from tests.support.together import run_together
from tests.support.web import get
from textmill.cli import main
from textmill.tokens.store import open_store
from textmill.where import recipe_names, recipes_folder

PAGE = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
SHORT = ["train.length=32", "train.batch=4", "train.steps=2", "train.warmup=0", "train.evaluate_batches=1"]
SHORT += ["train.log_every=1", "engine.device=cpu"]
SMALLER = {
    "prepare": [],
    "fit-tokenizer": [],
    "tokenize": [],
    "train": SHORT,
    "run": [*SHORT, "sample.max_tokens=3"],
    "evaluate": ["engine.device=cpu"],
    "fill": ["engine.device=cpu"],
    "generate": ["sample.max_tokens=3", "engine.device=cpu"],
    "serve": ["sample.max_tokens=3", "serve.port=0", "engine.device=cpu"],
}
"""What is appended to a command. `plan` sees the net of the recipe itself, with the size of Yuan's vocabulary."""
USES_A_RUN = ("evaluate", "fill", "generate", "serve")
VALID = ["corpus.split=8,1,1", "corpus.section_chars=300"]
SPLITS = {"distilgpt2": VALID, "jax-wikitext": VALID}
"""Systems that measure the valid split, which would be empty here."""
LARGE = ["tokenizer.use=null", "tokenizer.vocab=53228"]
LONGER = ["train.steps=4"]
"""Instead of more steps or epochs in a line that continues a run."""


def blocks_of(page: str) -> list[list[str]]:
    """The commands of each block of a page."""
    return [block.splitlines() for block in re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]


BLOCKS = {next(re.findall(r"([a-z0-9.-]+)\.yaml", line)[0] for line in block): block for block in blocks_of(PAGE)}
"""By the first recipe that a block names."""


def small(words: list[str]) -> list[str]:
    """A command with settings that make it small: those of the command and those of the recipe that it names."""
    if words[0] == "plan":
        return [*words, *LARGE]
    recipe = next((word.removesuffix(".yaml") for word in words if word.endswith(".yaml")), None)
    longer = LONGER if any(re.match(r"train\.(steps|epochs)=", word) for word in words) else []
    words = [word for word in words if not word.startswith("train.epochs=")]
    own = {word.partition("=")[0] for word in words}
    settings = [*SMALL_RECIPES[recipe], *SPLITS.get(recipe, []), *SMALLER[words[0]]] if recipe else []
    settings += SMALLER[words[0]] if words[0] in USES_A_RUN else []
    if "engine.kind=torch" in words:
        settings = [one for one in settings if not one.startswith("engine.offload")]
    return [*words, *(one for one in settings if one.partition("=")[0] not in own - {"train.steps"}), *longer]


def run_block(block: list[str]) -> None:
    """Run the commands of a block in this folder; `curl` must get an answer from the server before it."""
    with ExitStack() as servers:
        address = ""
        for line in block:
            words = shlex.split(line, comments=True)
            if words[0] == "curl":
                option, url, encoded, data = words[1:]
                assert (option, encoded) == ("-G", "--data-urlencode")  # curl refuses a URL with spaces
                reply = get(url.replace("http://127.0.0.1:8000", address), params=dict([data.split("=", 1)]))
                assert reply.status_code == 200, reply.text
            elif words[0] == "torchrun":
                arguments = small(words[words.index("textmill") + 1 :])
                processes = int(words[words.index("--nproc-per-node") + 1])
                assert run_together([sys.executable, "-m", "textmill", *arguments], processes) == "ok"
            elif words[1] == "serve":
                address = servers.enter_context(served(small(words[1:])[1:]))
            else:
                assert main(words[1:] if words[1] == "merge" else small(words[1:])) == 0, line


def losses_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture
def place(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the inputs of all recipes, and the recipes."""
    folder = tiny_texts.parent
    write_inputs(folder)
    for name in recipe_names():
        shutil.copy(recipes_folder() / f"{name}.yaml", folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def test_a_block_for_each_system() -> None:
    assert set(BLOCKS) == {"distilgpt2", *SYSTEMS}


def test_every_row_names_a_test_that_exists() -> None:
    """systems_rows.md: a yes has a test or a command, and the test is there."""
    page = Path(__file__).with_name("systems_rows.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "README"]
    assert len(rows) == 105
    for _, answer, why in rows:
        assert answer in ("yes", "partly", "no")
        assert why
        if answer == "yes":
            assert "from" in why or "`" in why or ".md" in why or why == "the same test"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name


@pytest.mark.long
def test_korean(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_database(tmp_path_factory.mktemp("mongo")) as mongo:
        forms = (place / "texts" / "korean.txt").read_text(encoding="utf-8").split("\n\n")
        mongo.fill("web", [f"{form} {number}" for number, form in enumerate(forms)])
        shutil.copy(mongo.write_config("korean.json", COLLECTIONS=["web"]), place / "db_config.json")
        run_block(BLOCKS["ko-gpt2"])
    assert len(losses_of(Path("runs/ko-gpt2/run"))) == 4, "two steps with torch, two with DeepSpeed"
    config = Path("runs/chat-ko/run/step-0000002/run.yaml").read_text(encoding="utf-8")
    assert "init_from:" in config
    assert "dsgpt2" in config


@pytest.mark.long
def test_turkish(place: Path) -> None:
    lines = (place / "texts" / "turkish.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for path in (place / "texts").glob("*.jsonl"):
        path.unlink()
    for part in range(3):
        (place / "texts" / f"p{part + 1}.jsonl").write_text("".join(lines[part::3]), encoding="utf-8")
    run_block(BLOCKS["tr-gpt2"])
    assert len(losses_of(Path("runs/tr-gpt2/run"))) == 2
    for command in ("prepare", "tokenize"):
        assert main(small([command, "tr-gpt2.yaml"])) == 0
    for split in ("train", "valid"):
        whole, merged = Path(f"runs/tr-gpt2/tokens/{split}"), Path(f"runs/tr-merged/{split}")
        for ending in (".bin", ".idx"):
            assert merged.with_suffix(ending).read_bytes() == whole.with_suffix(ending).read_bytes()
    documents = [len(open_store(Path(f"runs/tr-merged/{split}"))) for split in ("train", "valid", "test")]
    assert sum(documents) == len(lines)


@pytest.mark.long
def test_distillation(place: Path) -> None:
    run_block(BLOCKS["distilgpt2"])


@pytest.mark.long
def test_megatron_gpt2(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The mill stands by the river and every morning the wheel begins to turn"
    (place / "wiki.test.tokens").write_text(f" = Mill = \n \n {text} . \n", encoding="utf-8")
    (place / "lambada_test.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    shutil.copy(place / "texts" / "english.jsonl", place / "webtext.jsonl")
    run_block(BLOCKS["megatron-gpt2"])
    parallel = losses_of(Path("runs/megatron-gpt2/run"))
    assert main(small(["train", "megatron-gpt2.yaml", "train.folder=runs/alone"])) == 0
    assert parallel == pytest.approx(losses_of(Path("runs/alone")), rel=1e-6)


@pytest.mark.long
def test_megatron_bert(place: Path) -> None:
    run_block(BLOCKS["megatron-bert"])
    assert list(Path("runs/megatron-bert/tokens").rglob("*.tfrecord*"))


@pytest.mark.long
def test_yuan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_block(BLOCKS["yuan-4.7b"])
    out = capsys.readouterr().out
    assert out.count("4,701,259,776") == 2, "40 layers of width 3,072 with Yuan's vocabulary"
    assert out.count("  fits into the") == 2
    rows = [json.loads(line) for line in Path("runs/yuan-rates/metrics.jsonl").open()]
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert len(rates) == 2
    assert rates == sorted(rates)


@pytest.mark.long
def test_yuan_with_zero_2_and_tensor_parallelism(place: Path) -> None:
    """docs/coming-from/yuan.md: four processes have the losses of one."""
    (block,) = blocks_of((ROOT / "docs" / "coming-from" / "yuan.md").read_text(encoding="utf-8"))
    run_block(block)
    parallel = losses_of(Path("runs/yuan-4.7b/run"))
    assert main(small(["train", "yuan-4.7b.yaml", "engine.kind=torch", "train.folder=runs/alone"])) == 0
    assert len(parallel) == 2
    assert parallel == pytest.approx(losses_of(Path("runs/alone")), rel=1e-6)


@pytest.mark.long
def test_jax(place: Path) -> None:
    from datasets import Dataset

    run_block(BLOCKS["jax-wikitext"])
    rows = Dataset.from_parquet("runs/jax-wikitext/tokens/features/train-*.parquet", cache_dir=str(place / "cache"))
    assert set(rows.column_names) == {"input_ids", "attention_mask", "labels"}
    assert len(rows[0]["input_ids"]) == 32
    assert len(losses_of(Path("runs/jax-wikitext/run"))) == 4, "two steps with JAX, two with torch"
