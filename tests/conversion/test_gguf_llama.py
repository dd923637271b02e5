"""GGUF files of Llama, Qwen2 and Qwen3 in a real llama.cpp: our greedy tokens, beyond the original context too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conversion.test_gguf import ask_llama_cpp, greedy
from tests.support.model_folders import TEXT, korean_tokenizer
from tests.support.weights import noisy_weights
from textmill.cli import main
from textmill.conversion import gguf_models
from textmill.conversion.formats.gguf import read
from textmill.conversion.model import Hints
from textmill.errors import TextmillError
from textmill.models import open_family, read_shape
from textmill.models.nets_torch import open_net
from textmill.storage.tensor_files import encode_safetensors

gguf = pytest.importorskip("gguf", reason="needs the extra export")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "num_key_value_heads": 4},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}
SOME = [pytest.param(kind, marks=() if kind in ("llama", "qwen3") else pytest.mark.long) for kind in KINDS]


def write_model(folder: Path, changes: dict[str, Any], loud: float = 5.0) -> Path:
    """A folder with random weights that are large enough to write more than one word again and again."""
    tokenizer, family = korean_tokenizer(vocab=420), open_family("llama")
    hf = {**CONFIG, "vocab_size": tokenizer.vocab, "eos_token_id": tokenizer.eos_id, **changes}
    shape = family.shape_of_hf(hf, "config.json")
    weights = [(name, values * np.float32(loud if values.ndim == 2 else 1)) for name, values in noisy_weights(shape)]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.hf_config_of(shape)))
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(weights)))
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("kind", SOME)
def test_llama_cpp_continues_as_we_do(tmp_path: Path, kind: str) -> None:
    folder, out = write_model(tmp_path / "model", KINDS[kind]), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    tokenizer = korean_tokenizer(vocab=420)
    prompts = [tokenizer.encode(line)[:20] for line in TEXT]
    found = ask_llama_cpp(out / "out.gguf", prompts=prompts, tokens=64)
    for prompt, new in zip(prompts, found["new"], strict=True):
        wanted = greedy(folder, prompt, 64)
        assert len(set(wanted)) > 5, "a model that repeats one token proves nothing"
        assert [id_ for id_ in new if id_ != tokenizer.eos_id] == [id_ for id_ in wanted if id_ != tokenizer.eos_id]


@pytest.mark.parametrize("kind", SOME)
def test_a_file_is_imported_again(tmp_path: Path, kind: str) -> None:
    folder, out, back = write_model(tmp_path / "model", KINDS[kind]), tmp_path / "out", tmp_path / "back"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    assert main(["import", str(out / "out.gguf"), str(back)]) == 0
    before, after = read_shape(folder), read_shape(back)
    assert after == before
    ours, theirs = (dict(open_net(one, torch.device("cpu")).state_dict()) for one in (folder, back))
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


def test_factors_of_published_llama_3_models_are_recognised(tmp_path: Path) -> None:
    """Their files have no key for the scaling, only what every rate is divided by."""
    scaling = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
    changes = {"rope_scaling": scaling, "rope_theta": 5e5, "head_dim": 64, "max_position_embeddings": 131072}
    folder, out = write_model(tmp_path / "model", changes), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    file, whole = tmp_path / "theirs.gguf", (out / "out.gguf").read_bytes()
    file.write_bytes(whole.replace(gguf_models.SCALING.encode(), b"x" * len(gguf_models.SCALING)))
    assert read(file, Hints()).shape == read_shape(folder)
    other = gguf.GGUFReader(file).tensors
    start = next(tensor.data_offset for tensor in other if tensor.name == gguf_models.FACTORS)
    damaged = bytearray(file.read_bytes())
    damaged[start : start + 4] = np.float32(7).tobytes()
    file.write_bytes(damaged)
    with pytest.raises(TextmillError, match="is no scaling of a published Llama 3"):
        read(file, Hints())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "llama.cpp computes a llama with silu, this model has relu2"),
        ({"model_type": "qwen3", "attention_bias": True}, "llama.cpp's qwen3 has no biases"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}}, "no place for yarn's beta_fast"),
    ],
)
def test_what_llama_cpp_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path / "model", changes)
    assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}", "export.kind=gguf"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.head_count": [4, 2], "attention.key_length": None}, r"num_attention_heads is \[4, 2\]"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8; textmill turns all 16"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 0.5},
            "yarn_attn_factor is 0.5",
        ),
    ],
)
def test_keys_of_other_files_are_refused(keys: dict[str, Any], message: str) -> None:
    given = {
        "block_count": 2,
        "context_length": 96,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        **keys,
    }
    named = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in given.items()}}
    with pytest.raises(TextmillError, match=message):
        gguf_models.shape_of(named, {"token_embd.weight": np.empty((64, 420))}, Path("their.gguf"))


def test_yarns_options_of_other_files_are_read() -> None:
    names = {theirs: CONFIG[ours] for theirs, ours in gguf_models.NUMBERS["llama"].items() if ours in CONFIG}
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 24, "yarn_beta_fast": 16.0}
    given = {**names, **{f"rope.scaling.{key}": value for key, value in scaling.items()}}
    named = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in given.items()}}
    shape = gguf_models.shape_of(named, {"token_embd.weight": np.empty((64, 420))}, Path("their.gguf"))
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 16.0}
    assert json.loads(shape.rotary_scaling) == wanted
