"""The contract check passes every family of textmill and finds planted mistakes in a family of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_runs import MYNET
from textmill.cli import main
from textmill.config import ModelConfig
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.contract_torch import CHECKS, check_family

ATTEND = "attention(q, k, v, context, self.layer)"
NORM_1 = "self.norm_1(x)"
DOWN = "linear(inner, self.down, context)"
PLACES = "places = token_positions(ids, context.cache, documents)\n"
MISTAKES: dict[str, tuple[str, str, str]] = {
    "no mask": ("causality", ATTEND, "attention(q, k, v, context, self.layer, causal=False)"),
    "sees the next token": ("causality", NORM_1, "self.norm_1(x.roll(-1, 1))"),
    "subtracts the mean over time": ("causality", NORM_1, "self.norm_1(x - x.mean(1, keepdim=True))"),
    "subtracts the mean over samples": ("samples", NORM_1, "self.norm_1(x - x.mean(0, keepdim=True))"),
    "forgets the documents": ("documents", "self.mask(documents, context)", "None"),
    "positions go on in the next document": (
        "documents",
        "return self.embed(ids), Context",
        "return self.embed(ids) * (1 + torch.arange(ids.shape[1])[:, None] / 10), Context",
    ),
    "ignores the cache": ("generation", ATTEND, "attention(q, k, v, context._replace(cache=None), self.layer)"),
    "one cache for all layers": ("generation", ATTEND, "attention(q, k, v, context, 0)"),
    "decodes at the next position": (
        "generation",
        PLACES,
        PLACES + "        places = places + int(getattr(context.cache, 'positions_NT', None) is not None)\n",
    ),
    "a cache for the heads of queries": (
        "generation",
        "lambda self: (self.shape.kv_heads",
        "lambda self: (self.shape.heads",
    ),
    "dropout in evaluation": ("repeated passes", DOWN, f"F.dropout({DOWN}, 0.1, True)"),
    "keeps something of the last pass": (
        "repeated passes",
        NORM_1,
        "self.norm_1(x + (self.__dict__.get('last', 0), self.__dict__.update(last=x.detach().mean()))[0])",
    ),
    "dropout that is not applied": (
        "dropout",
        "Dropout(shape.dropout, site=2), Dropout(shape.dropout, site=3)",
        "Dropout(0.0, site=2), Dropout(0.0, site=3)",
    ),
    "a head that the weights lack": ("weights", 'Weight("unembed.weight", decay=True, split=0, **table),', ""),
    "inputs and outputs swapped": ("weights", "(outputs, inputs), 0.02", "(inputs, outputs), 0.02"),
    "a head without padding": (
        "weights",
        "nn.Linear(shape.width, shape.padded_vocab",
        "nn.Linear(shape.width, shape.vocab",
    ),
    "a buffer with values": (
        "weights",
        "self.norm = RMSNorm(shape.width)",
        "self.norm = RMSNorm(shape.width); self.register_buffer('scale', torch.ones(1))",
    ),
    "a tied head beside an own one": ("gradients", '"layers", "embed", "unembed"', '"layers", "embed", ""'),
    "a matrix that is not used": ("gradients", " * linear(x, self.up, context)", ""),
    "a detached branch": ("gradients", "self.norm_2(x)", "self.norm_2(x).detach()"),
    "a matrix around its adapter": ("adapters", DOWN, "F.linear(inner, self.down.weight)"),
    "a number that is not saved": (
        "config",
        "for name, value in asdict(shape).items()",
        "for name, value in asdict(replace(shape, inner=8)).items()",
    ),
    "initial weights too large": ("initial loss", '"std": 0.02', '"std": 2.0'),
}


def check(family: str, size: str) -> None:
    config = ModelConfig(family=family, size=size)
    check_family(config, open_family(family).shape_of(config, vocab=500, eos_id=0))


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("gpt2", "nano"),
        ("gpt2", "dsgpt2-112m"),
        ("llama", "nano"),
        ("llama", "qwen2.5-0.5b"),
        ("llama", "qwen3-0.6b"),
        ("bert", "tiny"),
        ("bert", "megatron-345m"),
    ],
)
def test_every_family_of_textmill_passes(family: str, size: str) -> None:
    check(family, size)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(tmp_path: Path, mistake: str) -> None:
    name, right, wrong = MISTAKES[mistake]
    source = Path(MYNET).read_text()
    assert right in source
    path = tmp_path / "mynet.py"
    path.write_text(source.replace(right, wrong, 1))
    with pytest.raises(TextmillError) as caught:
        check(str(path), "small")
    assert f"mynet.py: {name}: " in str(caught.value)


def test_a_size_that_the_file_does_not_have(tmp_path: Path) -> None:
    """In words, also where the file itself would raise a KeyError; a given shape needs no size."""
    path = tmp_path / "mynet.py"
    path.write_text(Path(MYNET).read_text().replace("config.size not in SIZES", "False"))
    with pytest.raises(TextmillError, match=r"model\.size: .*mynet\.py has no size 'nano'; choose one of small"):
        check(str(path), "nano")
    shape = open_family(str(path)).shape_of(ModelConfig(family=str(path), size="small"), vocab=500, eos_id=0)
    check_family(ModelConfig(family=str(path), size="nano"), shape, activation_checkpointing=False)


def test_verify_checks_a_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", MYNET]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert lines[-1].startswith("verify: mynet keeps the contract of a family")
    path = tmp_path / "leaky.py"
    path.write_text(Path(MYNET).read_text().replace(NORM_1, MISTAKES["sees the next token"][2]))
    assert main(["verify", str(path)]) == 2
    captured = capsys.readouterr()
    assert "causality: other logits at position 0 after a change of the later token 1" in captured.err
    given = [f"folder={tmp_path}", f"model.family={path}", "model.size=small"]
    assert main(["run", "quickstart", *given]) == 2
    assert "causality: other logits at position 0" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists(), "before anything is prepared"
