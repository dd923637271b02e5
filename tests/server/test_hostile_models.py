"""Model folders with false data or code: refused in one sentence, or served without the code; the code never runs."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import in_process
from tests.support.small_models import TEXT, write_model
from textmill.config import RunConfig, TokenizerConfig
from textmill.errors import TextmillError
from textmill.models.gpt2 import family as gpt2
from textmill.server.lifecycle import open_service
from textmill.tokens.vocabulary.tokenizer import fit

DEEP = "[" * 100_000
GIVEN = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid model folder without a manifest, as from another program."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=1, heads=2, width=32, inner=64, positions=64, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    made = write_model(tmp_path_factory.mktemp("hostile") / "run", tokenizer, shape).folder
    folder = tmp_path_factory.mktemp("good") / "model"
    folder.mkdir()
    for name in GIVEN:
        shutil.copy(made / name, folder / name)
    return folder


def change(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of a JSON file."""
    tree = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**tree, **fields}))


def change_header(folder: Path, bend: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the safetensors file."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    tree = json.loads(data[8 : 8 + length])
    bend(tree)
    text = json.dumps(tree).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def claim(**fields: Any) -> Callable[[Path, Path], None]:
    """Return a function that changes the embedding's entry in the header."""
    return lambda folder, _: change_header(folder, lambda tree: tree["transformer.wte.weight"].update(fields))


def pickled(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))


def indexed(name: Any) -> Callable[[Path, Path], None]:
    def bend(folder: Path, _: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(name))

    return bend


def starting(data: bytes) -> Callable[[Path, Path], None]:
    def bend(folder: Path, _: Path) -> None:
        (folder / "model.safetensors").write_bytes(data + bytes(40_000 if data else 0))

    return bend


def holding(name: str, text: str) -> Callable[[Path, Path], None]:
    def bend(folder: Path, _: Path) -> None:
        (folder / name).write_text(text)

    return bend


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a pickle": (pickled, "can run code when opened"),
    "a shard outside": (indexed({"weight_map": {"a": "../outside.safetensors"}}), "outside the folder"),
    "an index without a map": (indexed({"weights": {}}), "weight_map"),
    "an index of numbers": (indexed({"weight_map": {"a": 7}}), "weight_map"),
    "a header longer than the file": (starting((10**17).to_bytes(8, "little") + b"{}"), "header too large"),
    "a header that is no JSON": (starting((6).to_bytes(8, "little") + b"\xff\xfe{{{{"), "header"),
    "a header too deep": (starting(len(DEEP).to_bytes(8, "little") + DEEP.encode()), "header"),
    "an empty file": (starting(b""), "not readable"),
    "offsets that overlap": (claim(data_offsets=[4, 38404]), "not readable as safetensors"),
    "offsets beyond the end": (claim(data_offsets=[10**12, 10**12 + 38400]), "not readable as safetensors"),
    "a shape that is huge": (claim(shape=[2**40, 2**40]), "not readable as safetensors"),
    "a shape below zero": (claim(shape=[-300, -32]), "not readable as safetensors"),
    "a shape of fractions": (claim(shape=[600.0, 16]), "header"),
    "a type that there is not": (claim(dtype="PICKLE"), "not readable as safetensors"),
    "settings too deep": (holding("config.json", DEEP), "config.json"),
    "settings that are a list": (holding("config.json", "[]"), "config.json"),
    "a net of a million layers": (
        lambda folder, _: change(folder, "config.json", n_layer=10**6),
        "config.json describes",
    ),
    "a vocabulary of a billion": (
        lambda folder, _: change(folder, "config.json", vocab_size=10**9),
        "config.json describes",
    ),
    "a billion layers": (lambda folder, _: change(folder, "config.json", n_layer=10**9), "config.json describes"),
    "a billion positions": (
        lambda folder, _: change(folder, "config.json", n_positions=10**9),
        "config.json describes",
    ),
    "a vocabulary of a trillion": (
        lambda folder, _: change(folder, "config.json", vocab_size=10**12),
        "config.json describes",
    ),
    "a tokenizer too deep": (holding("tokenizer.json", DEEP), "tokenizer.json"),
    "a tokenizer of another kind": (holding("tokenizer.json", '{"model": {"type": "Exec"}}'), "tokenizer.json"),
    "a tokenizer's settings too deep": (holding("tokenizer_config.json", DEEP), "tokenizer_config.json"),
}


@pytest.fixture(autouse=True)
def model_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.server.lifecycle.new_model_process", in_process)


def open_model(folder: Path, root: Path) -> Any:
    """Open the model as the server does."""
    tree = {"folder": str(root), "model": {"init_from": str(folder)}, "engine": {"device": "cpu", "precision": "fp32"}}
    return open_service(RunConfig.model_validate(tree))


@pytest.mark.parametrize("kind", REFUSED)
def test_false_data_is_refused(good: Path, tmp_path: Path, kind: str) -> None:
    bend, message = REFUSED[kind]
    folder, canary = shutil.copytree(good, tmp_path / "model"), tmp_path / "canary"
    bend(folder, canary)
    with pytest.raises(TextmillError) as caught:
        asyncio.run(open_model(folder, tmp_path).model.close(0))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not canary.exists()


def test_code_in_a_model_folder_never_runs(good: Path, tmp_path: Path) -> None:
    """Python named in config.json and a pickle next to the weights are ignored; a chat template cannot reach Python."""
    folder, canary = shutil.copytree(good, tmp_path / "model"), tmp_path / "canary"
    (folder / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))
    change(
        folder,
        "config.json",
        auto_map={"AutoModelForCausalLM": "modeling_evil.Model", "AutoTokenizer": "modeling_evil.Tokens"},
    )
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Tokens", None]})
    (folder / "chat_template.jinja").write_text(f"{{{{ cycler.__init__.__globals__.os.mkdir({str(canary)!r}) }}}}")
    service = open_model(folder, tmp_path)
    asyncio.run(service.model.close(0))
    assert service.template is not None
    with pytest.raises(TextmillError, match=r"access to attribute '__init__' .* is unsafe"):
        service.template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert not canary.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert canary.exists(), "the bomb itself works"
