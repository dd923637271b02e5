"""ONNX files in onnxruntime: token by token with past key values, and with padding on the left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conversion.test_gguf_llama import CONFIG, KINDS, write_model
from tests.conversion.test_readers import BERTS
from tests.support.bert_models import write_bert
from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.conversion.formats.onnx import read
from textmill.conversion.model import Hints
from textmill.errors import TextmillError

pytest.importorskip("onnx", reason="needs the extra export")
LAYERS, HEADS, WIDTH = 2, 2, 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("onnx")
    source = write_folder(
        root / "source", korean_tokenizer(), layers=LAYERS, heads=HEADS, width=WIDTH, activation="gelu"
    )
    assert main(["export", str(source), f"export.folder={root / 'out'}", "export.kind=onnx"]) == 0
    return source, root / "out"


def session(out: Path) -> Any:
    return pytest.importorskip("onnxruntime", reason="needs the extra dev").InferenceSession(
        out / "model.onnx", providers=["CPUExecutionProvider"]
    )


def empty_past(samples: int, heads: int = HEADS, width: int = WIDTH // HEADS) -> dict[str, Any]:
    names = [f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    return {name: np.zeros((samples, heads, 0, width), np.float32) for name in names}


def test_greedy_tokens_with_past_key_values_equal_transformers(folders: tuple[Path, Path]) -> None:
    source, out = folders
    run, past, ids, new = session(out), empty_past(1), np.array([[5, 17, 40]]), []
    net = AutoModelForCausalLM.from_pretrained(source)
    for step in range(20):
        total = 3 + step
        positions = np.arange(total - ids.shape[1], total)[None]
        mask = np.ones((1, total), np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        logits, *present = run.run(None, inputs)
        past = dict(zip(past, present, strict=True))
        ids = logits[:, -1:].argmax(-1)
        new.append(int(ids[0, 0]))
    start = torch.tensor([[5, 17, 40]])
    wanted = net.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert new == wanted[0, 3:].tolist()


def test_padding_on_the_left_changes_nothing(folders: tuple[Path, Path]) -> None:
    run, row = session(folders[1]), [5, 17, 40, 9]
    mask = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    ids = np.array([[3, 8, *row], [0, 0, *row]])
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]])
    logits = run.run(["logits"], {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **empty_past(2)})
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folders[0])(torch.tensor([row])).logits.numpy()
    assert np.abs(logits[0][1, 2:] - wanted[0]).max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "biases", "yarn", "qwen3"])
def test_a_llama_token_by_token_has_transformers_logits(kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", KINDS[kind])
    assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=onnx"]) == 0
    net = AutoModelForCausalLM.from_pretrained(source)
    ids = np.random.default_rng(3).integers(0, net.config.vocab_size, (2, 40))
    with torch.no_grad():
        wanted = net(torch.tensor(ids)).logits.numpy()
    heads, width = net.config.num_key_value_heads, KINDS[kind].get("head_dim", CONFIG["head_dim"])
    run, past, found = session(tmp_path / "out"), empty_past(2, heads, width), []
    for start, stop in ((0, 38), (38, 39), (39, 40)):
        inputs = {"input_ids": ids[:, start:stop], "attention_mask": np.ones((2, stop), np.int64), **past}
        logits, *present = run.run(None, inputs | {"position_ids": np.tile(np.arange(start, stop), (2, 1))})
        past = dict(zip(past, present, strict=True))
        found.append(logits)
    assert np.abs(np.concatenate(found, 1) - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
def test_other_activations(activation: str, tmp_path: Path) -> None:
    sizes = {"layers": LAYERS, "heads": HEADS, "width": WIDTH}
    source = write_folder(tmp_path / "source", korean_tokenizer(), **sizes, activation=activation)
    assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=onnx"]) == 0
    ids = np.arange(12)[None]
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": ids, **empty_past(1)}
    logits = session(tmp_path / "out").run(["logits"], inputs)[0]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source)(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits - wanted).max() < 1e-5 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(
    "kind",
    ["BertForMaskedLM", "MegatronBertForPreTraining"]
    + [pytest.param(kind, marks=pytest.mark.long) for kind in BERTS if kind != "BertForMaskedLM"],
)
def test_a_bert_has_transformers_outputs(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    write_bert(tmp_path / "source", kind)
    assert main(["export", str(tmp_path / "source"), f"export.folder={out}", "export.kind=onnx"]) == 0
    net = getattr(transformers, kind).from_pretrained(tmp_path / "source").eval()
    ids = np.random.default_rng(3).integers(0, net.config.vocab_size, (2, 20))
    mask, types = np.ones_like(ids), np.zeros_like(ids)
    mask[1, 13:] = 0
    types[:, 9:] = 1
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    with torch.no_grad():
        wanted = net(**{name: torch.from_numpy(values) for name, values in given.items()}, output_hidden_states=True)
    run = session(out)
    outputs = {one.name: values for one, values in zip(run.get_outputs(), run.run(None, given), strict=True)}
    states = wanted.hidden_states[-1] if kind.startswith("Bert") else wanted.get("last_hidden_state")
    expected = {**wanted, "last_hidden_state": states, "logits": wanted.get("prediction_logits", wanted.get("logits"))}
    compared = [name for name in outputs if expected.get(name) is not None]
    assert len(compared) >= 1 + (kind != "BertModel")
    for name in compared:
        # Padding attends, but nothing attends to it.
        shown = mask.astype(bool) if outputs[name].shape[:2] == mask.shape else np.ones(2, bool)
        values = expected[name].numpy()
        assert np.abs(outputs[name] - values)[shown].max() < 1e-5 * max(1.0, np.abs(values).max()), name
    assert main(["import", str(out), str(tmp_path / "back")]) == 0


def test_it_comes_back_and_damage_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = folders
    assert main(["import", str(out), str(tmp_path / "back")]) == 0
    one, two = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "back"))
    assert all(torch.equal(values, two[name]) for name, values in one.items())
    assert (
        main(["export", str(source), f"export.folder={tmp_path / 'half'}", "export.kind=onnx", "export.precision=fp16"])
        == 0
    )
    assert (tmp_path / "half/model.onnx").stat().st_size < 0.6 * (out / "model.onnx").stat().st_size
    data = (tmp_path / "half/model.onnx").read_bytes()
    (tmp_path / "half/model.onnx").write_bytes(data[: len(data) // 2])
    with pytest.raises(TextmillError, match=r"model\.onnx: "):
        read(tmp_path / "half", Hints())
