"""A model family in the user's own file: logits of an independent implementation, decoding, weights, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.weights import noisy_weights
from textmill.config import LoraConfig, ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.models import open_family, read_shape
from textmill.models.family_files import find_family_file, load_family_file
from textmill.models.lora import target_weights
from textmill.models.nets_torch import fill, new_net

MYNET = str(Path(__file__).parents[2] / "examples" / "mynet.py")
CPU = torch.device("cpu")
NUMBERS = {"layers": 3, "heads": 6, "width": 48, "inner": 80, "positions": 32, "extra": {"kv_heads": 2}}


def shape_of() -> Any:
    return open_family(MYNET).shape_of(ModelConfig(family=MYNET, shape=ShapeConfig(**NUMBERS)), vocab=100, eos_id=0)


def filled(shape: Any, named: Any) -> Any:
    net = new_net(shape, CPU)
    fill(net, named, "test")
    return net


def test_logits_equal_transformers_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape_of()
    named = noisy_weights(shape)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=32,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            tie_word_embeddings=False,
        )
    ).eval()
    theirs.load_state_dict(dict(llama_weights(named)))
    ids = torch.randint(0, 100, (3, 32), generator=torch.Generator().manual_seed(1))
    net = filled(shape, named)
    with torch.no_grad():
        wanted, got = theirs(ids).logits, net.logits(net(ids))
    assert (got - wanted).abs().max() < 1e-5
    assert shape.parameters == sum(parameter.numel() for parameter in theirs.parameters())


def llama_weights(named: Any) -> Any:
    """The weights under Llama's names, with separate queries, keys and values."""
    names = {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "unembed": "lm_head",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for name, values in named:
        words, tensor = name.split("."), torch.from_numpy(values)
        block = f"model.layers.{words[1]}." if words[0] == "layers" else ""
        if words[-2] == "qkv":
            for part, rows in zip("qkv", tensor.split([48, 16, 16]), strict=True):
                yield f"{block}self_attn.{part}_proj.weight", rows
        else:
            yield f"{block}{names[words[-2]]}.weight", tensor


def test_a_slice_of_a_grouped_matrix_has_complete_heads() -> None:
    """Half of the rows in memory are the weights of a net with half the heads."""
    shape = shape_of()
    (qkv,) = (weight for weight in shape.weights() if weight.name == "layers.0.attention.qkv.weight")
    assert qkv.memory_shape == (80, 48)
    assert qkv.part_rows == [slice(0, 24), slice(24, 32), slice(32, 40)]


def test_all_matrices_of_blocks_are_the_default_targets() -> None:
    shape = shape_of()
    ends = {weight.stem.rpartition(".")[2] for weight in target_weights(shape, LoraConfig())}
    assert ends == {"qkv", "out", "gate", "up", "down"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NAME = 'x'", "does not define Net, shape_of"),
        ("1 / 0", "fails when it is loaded: ZeroDivisionError"),
        ("def", "fails when it is loaded: SyntaxError"),
    ],
)
def test_a_file_that_is_no_family_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(TextmillError, match=message):
        open_family(str(tmp_path / "bad.py"))
    with pytest.raises(TextmillError, match="not readable"):
        open_family(str(tmp_path / "none.py"))


def test_a_family_may_not_take_the_name_of_another(tmp_path: Path) -> None:
    (tmp_path / "copy.py").write_text(Path(MYNET).read_text().replace('NAME = "mynet"', 'NAME = "gpt2"'))
    with pytest.raises(TextmillError, match="has NAME = 'gpt2', a family of textmill"):
        open_family(str(tmp_path / "copy.py"))


def test_a_model_folder_names_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "theirnet"}')
    with pytest.raises(TextmillError, match=r"name its file: model\.family=\./theirnet\.py"):
        read_shape(tmp_path)


def test_a_changed_file_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(Path(MYNET).read_text().replace('NAME = "mynet"', 'NAME = "othernet"'))
    first = load_family_file(str(file))
    assert load_family_file(str(file)) is first
    file.write_text(file.read_text() + "\n# changed\n")
    second = load_family_file(str(file))
    assert second.sha256 != first.sha256
    assert find_family_file("othernet") is second
