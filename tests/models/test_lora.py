"""LoRA against PEFT: its folders and ours, merged and as a separate branch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.damage import WRONG, mutated
from tests.support.weights import noisy_weights, open_with_adapters, shape_of
from textmill.checkpoints.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    PREFIX,
    open_adapter,
    read_base_and_adapter,
    read_weights,
)
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import drop, dropout_keys
from textmill.models import open_family
from textmill.models.base_torch import BaseNet
from textmill.models.lora import adapter_weights, dropout_sites, initial_adapters, peft_config_of
from textmill.models.nets_torch import checkpoint_tensors, fill, new_net, open_net, parameters_of
from textmill.storage.tensor_files import encode_safetensors, fingerprint_weights

CPU = torch.device("cpu")
NUMBERS = {"layers": 2, "heads": 3, "width": 24, "inner": 40, "positions": 20}
VOCAB = 90
IDS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
LORAS = [
    LoraConfig(rank=3, alpha=7.0),
    LoraConfig(rank=2, alpha=2.0, targets=["attn", "h.1.mlp.c_fc"]),
    LoraConfig(rank=1, alpha=3.0, targets=["c_proj"]),
]


def write(path: Path, named: list[Any]) -> None:
    path.write_bytes(b"".join(encode_safetensors(named)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model without zero weights."""
    folder, shape = tmp_path_factory.mktemp("base"), shape_of("nano", NUMBERS, VOCAB)
    (folder / "config.json").write_text(json.dumps(open_family("gpt2").hf_config_of(shape)))
    write(folder / "model.safetensors", noisy_weights(shape))
    return folder


def written(folder: Path, base: Path, lora: LoraConfig) -> Path:
    """An adapter folder of ours with noise in A and B."""
    shape, dice = shape_of("nano", NUMBERS, VOCAB), np.random.default_rng(2)
    pairs = [
        (PREFIX + name, values + dice.normal(0, 0.2, values.shape).astype(np.float32))
        for name, values in initial_adapters(shape, lora, 5)
    ]
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(peft_config_of(shape, lora, str(base))))
    write(folder / ADAPTER_MODEL, pairs)
    return folder


def logits_of(folder: Path, opened: Callable[[Path], BaseNet] = lambda folder: open_net(folder, CPU)) -> torch.Tensor:
    net = opened(folder)
    with torch.no_grad():
        return net.logits(net(IDS))


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) < 1e-5


@pytest.mark.parametrize("lora", LORAS)
def test_peft_opens_ours_and_gives_our_logits(base: Path, tmp_path: Path, lora: LoraConfig) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = written(tmp_path / "ours", base, lora)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    assert sum("lora_A" in name for name, _ in theirs.named_parameters()) == len(open_adapter(folder).pairs)
    with torch.no_grad():
        wanted, bare = theirs(IDS).logits, theirs.unload()(IDS).logits
    assert (wanted - bare).abs().max() > 0.01, "the adapter does something"
    assert near(logits_of(folder, open_with_adapters), wanted)
    assert near(logits_of(folder), wanted)


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"target_modules": ["c_attn", "mlp.c_proj"], "lora_dropout": 0.3}]
)
def test_peft_folders_open_here_and_give_their_logits(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import LoraConfig as Theirs
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["c_attn", "c_proj", "c_fc"],
        "fan_in_fan_out": True,
        **options,
    }
    model = AutoModelForCausalLM.from_pretrained(base)
    # What PEFT calls its true start: B is drawn as A is.
    theirs = get_peft_model(model, Theirs(task_type="CAUSAL_LM", init_lora_weights=False, **settings)).eval()
    # With embeddings, as PEFT saves them if they changed; the name of a tied head is not in the base's file.
    theirs.save_pretrained(tmp_path, save_embedding_layers=not options)
    with torch.no_grad():
        wanted = theirs(IDS).logits
    assert not near(logits_of(base), wanted)
    assert near(logits_of(tmp_path), wanted)
    assert near(logits_of(tmp_path, open_with_adapters), wanted)
    with torch.no_grad():
        merged = theirs.merge_and_unload()
    ours = dict(read_weights(tmp_path))
    for name, values in merged.state_dict().items():
        if name in ours:
            assert np.abs(ours[name] - values.numpy()).max() < 1e-6, name


class FixedDropout(torch.nn.Module):
    """Replaces PEFT's dropout: drops the elements that our hash chooses."""

    def __init__(self, share: float, keys: torch.Tensor, site: int) -> None:
        super().__init__()
        self.given = (share, keys, site)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = drop(torch.ones_like(x), *self.given)
        assert not torch.equal(kept, torch.ones_like(x))
        return x * kept


@pytest.mark.parametrize("lora", LORAS)
def test_dropout_is_applied_where_peft_applies_it(base: Path, tmp_path: Path, lora: LoraConfig) -> None:
    """PEFT's own training forward with our dropout mask; without keys, as in evaluation, nothing is dropped."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    folder = written(tmp_path / "ours", base, lora.model_copy(update={"dropout": 0.4}))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    keys, sites = dropout_keys(3, 7, np.arange(len(IDS))), dropout_sites(shape_of("nano", NUMBERS, VOCAB))
    layers = {
        name.removeprefix("base_model.model."): one
        for name, one in theirs.named_modules()
        if isinstance(one, LoraLayer)
    }
    for name, layer in layers.items():
        assert layer.lora_dropout["default"].p == 0.4, "the share travels"
        layer.lora_dropout["default"] = FixedDropout(0.4, keys, sites[name])
    assert len({sites[name] for name in layers}) == len(layers), "each has masks of its own"
    net = open_with_adapters(folder)
    with torch.no_grad():
        wanted, without = theirs(IDS).logits, logits_of(folder)
        assert near(net.logits(net(IDS, keys)), wanted)
        assert near(net.logits(net(IDS)), without)
    assert (wanted - without).abs().max() > 0.01


def test_new_adapters_change_nothing_and_have_pefts_initial_scale(base: Path) -> None:
    shape, lora = shape_of("nano", {"layers": 1, "width": 96, "heads": 3}, VOCAB), LoraConfig(rank=16)
    first = dict(initial_adapters(shape, lora, 5))
    again = dict(initial_adapters(shape_of("nano", {"layers": 3, "width": 96, "heads": 3}, VOCAB), lora, 5))
    assert all(np.array_equal(values, again[name]) for name, values in first.items()), "seed and name decide"
    assert not any(values.any() for name, values in first.items() if "lora_B" in name)
    for name, values in first.items():
        if "lora_A" in name:
            wanted = torch.empty(2000, values.shape[1])
            torch.nn.init.kaiming_uniform_(wanted, a=5**0.5)
            assert values.std() == pytest.approx(float(wanted.std()), rel=0.1), name


def test_adapters_read_back_exactly(base: Path, tmp_path: Path) -> None:
    """In memory, queries, keys and values are grouped by head, and so are the rows of B."""
    lora = LORAS[0]
    adapter = open_adapter(written(tmp_path / "ours", base, lora))
    net = new_net(shape_of("nano", NUMBERS, VOCAB), CPU, lora)
    fill(net, read_base_and_adapter(adapter), "test")
    back = dict(checkpoint_tensors(net, {parameter: parameter for _, parameter in net.named_parameters()}))
    assert len(back) == len(parameters_of(net)) == 2 * 12 + 4 + 2 * len(adapter.pairs)
    for name, values in read_base_and_adapter(adapter):
        assert np.array_equal(back[name], values), name


def test_targets_name_matrices_and_parts() -> None:
    shape = shape_of("nano", NUMBERS, VOCAB)

    def stems(*targets: str) -> set[str]:
        weights = adapter_weights(shape, LoraConfig(targets=list(targets)))
        return {weight.name.removeprefix("transformer.").rpartition(".lora_")[0] for weight in weights}

    blocks = ("h.0", "h.1")
    assert stems("c_proj") == {f"{block}.{part}.c_proj" for block in blocks for part in ("attn", "mlp")}
    assert stems("attn") == {f"{block}.attn.{name}" for block in blocks for name in ("c_attn", "c_proj")}
    assert stems("h.1") == {"h.1.attn.c_attn", "h.1.attn.c_proj", "h.1.mlp.c_fc", "h.1.mlp.c_proj"}
    assert stems("h.0.mlp.c_fc", "h.1.attn.c_a*") == {"h.0.mlp.c_fc", "h.1.attn.c_attn"}
    with pytest.raises(
        TextmillError,
        match=r"model\.lora\.targets: 'q_proj' matches no matrix .*; it has c_attn, c_proj, c_fc in each block",
    ):
        stems("q_proj")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True; textmill reads plain LoRA"),
        ({"rank_pattern": {"c_fc": 2}}, "rank_pattern is .*; textmill reads plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' .*; textmill reads LORA"),
        ({"r": "many"}, "r is 'many'"),
        ({"r": 5}, "has no lora_A and lora_B of rank 5"),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
        (
            {"base_model_name_or_path": "./nowhere/at all"},
            r"the base model of this adapter is missing: .*nowhere/at all: no such folder",
        ),
        (
            {"fan_in_fan_out": False},
            r"'transformer\.h\.0\.attn\.c_attn\.weight' is \[24, 72\]; the adapter was made for \[72, 24\]",
        ),
    ],
)
def test_unreadable_adapters_are_refused_in_one_line(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = written(tmp_path / "ours", base, LORAS[0])
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**settings, **change}))
    with pytest.raises(TextmillError, match=message):
        list(read_weights(folder))


def test_any_damage_is_reported_in_one_line(base: Path, tmp_path: Path) -> None:
    """Random damage in adapter_config.json and progress.json: the folder opens, or is refused in one line."""
    folder, dice, messages = written(tmp_path / "ours", base, LORAS[0]), random.Random(11), []
    settings = json.loads((folder / ADAPTER_CONFIG).read_text()) | {
        "use_rslora": False,
        "rank_pattern": {},
        "use_dora": False,
    }
    wrong = tuple("./no such folder" if one == "wrong" else one for one in WRONG)  # no download is tried
    progress = {"step": 3, "made_from": {"model.init_from": fingerprint_weights(base)}}
    for number in range(60):
        trees = [mutated(settings, dice, wrong), progress] if number % 4 else [settings, mutated(progress, dice, wrong)]
        for name, tree in zip((ADAPTER_CONFIG, "progress.json"), trees, strict=True):
            (folder / name).write_text(json.dumps(tree))
        for merged in (True, False):
            try:
                open_net(folder, CPU) if merged else list(read_base_and_adapter(open_adapter(folder)))
            except TextmillError as error:
                messages.append(str(error))
    assert len(set(messages)) > 10
    assert not any("\n" in one for one in messages)


def test_an_adapter_of_another_model_or_of_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "ours", base, LORAS[0])
    pairs = [
        (name.replace("h.1.", "h.7."), values)
        for name, values in initial_adapters(shape_of("nano", NUMBERS, VOCAB), LORAS[0], 5)
    ]
    write(folder / ADAPTER_MODEL, [(PREFIX + name, values) for name, values in pairs])
    with pytest.raises(TextmillError, match=r"has no 'transformer\.h\.7\.attn\.c_attn', which the adapter changes"):
        list(read_weights(folder))
    with pytest.raises(TextmillError, match="is an adapter itself; merge that one first"):
        list(read_weights(written(tmp_path / "second", folder, LORAS[0])))
