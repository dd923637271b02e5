"""Value embeddings, which transformers has not: its net with the same computed by hooks, resume, decoding, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.engine_runs import LENGTH, VOCAB, batch_of
from tests.support.model_folders import korean_tokenizer
from tests.support.weights import noisy_weights
from textmill.cli import main
from textmill.config import JaxEngine, LoraConfig, ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import open_engine
from textmill.engines.meshes import check_divides_net
from textmill.errors import TextmillError
from textmill.models import initial_weights, open_family, read_shape, weights_of
from textmill.models.decode_torch import NetSlots
from textmill.models.lora import peft_config_of
from textmill.models.nets_torch import fill, new_net, open_net
from textmill.models.parameter_groups import rules_of
from textmill.models.resizing import select_layers
from textmill.storage.tensor_files import encode_safetensors

CPU = torch.device("cpu")
FAMILY = open_family("llama")
OPTIONS: dict[str, dict[str, Any]] = {
    "value embeddings": {"value_embeddings": 1},
    "value embeddings in every layer": {"value_embeddings": 3},
    "all": {"activation": "relu2", "value_embeddings": 2, "qk_norm": True, "untied": True},
}


def shape_of(name: str) -> Any:
    numbers = {"layers": 3, "heads": 4, "kv_heads": 2, "width": 48, "head_width": 16, "positions": 64, **OPTIONS[name]}
    return FAMILY.shape_of(ModelConfig(family="llama", shape=ShapeConfig(**numbers)), vocab=160, eos_id=0)


class Theirs:
    """A Llama or Qwen3 of transformers; hooks compute the options."""

    def __init__(self, shape: Any, named: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = "qwen3" if shape.qk_norm else "llama"
        given = {name: torch.from_numpy(values) for name, values in named}
        config = AutoConfig.for_model(**{**FAMILY.hf_config_of(shape), "model_type": kind})
        self.net = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        self.shape, self.ids = shape, torch.zeros(0)
        # The tables of layers 0, 1, 2, as the documentation has them.
        tables = {0: [None] * 3, 1: [0, None, 0], 2: [0, 1, 1], 3: [0, 1, 2]}[shape.value_embeddings]
        for layer, (block, table) in enumerate(zip(self.net.model.layers, tables, strict=True)):
            name = f"model.layers.{layer}"
            if table is not None:
                gate = given.pop(f"{name}.self_attn.value_gate.weight")
                rows = given[f"model.value_embeddings.{table}.weight"]
                block.self_attn.v_proj.register_forward_hook(self.adding_values(gate, rows))
        for table in range(shape.value_embeddings):
            del given[f"model.value_embeddings.{table}.weight"]
        loaded = self.net.load_state_dict(given, strict=False)
        assert loaded.unexpected_keys == []
        assert loaded.missing_keys == ([] if shape.untied else ["lm_head.weight"])
        self.net.tie_weights()

    def adding_values(self, gate: Tensor, rows: Tensor) -> Any:
        def hook(_: Any, inputs: Any, values: Tensor) -> Tensor:
            strength = 2 / (1 + torch.exp(-(inputs[0][..., :32] @ gate.T)))
            return values + strength.repeat_interleave(self.shape.head_width, -1) * rows[self.ids]

        return hook

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        self.ids = ids
        found: Tensor = self.net(ids).logits
        return found


def opened(name: str) -> tuple[Any, Any, Theirs]:
    shape = shape_of(name)
    named, net = noisy_weights(shape), new_net(shape, CPU)
    fill(net, named, "test")
    return shape, net, Theirs(shape, named)


def random_ids(*size: int) -> Tensor:
    return torch.randint(0, 160, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_transformers_with_hooks(name: str) -> None:
    _, net, theirs = opened(name)
    ids, lengths = random_ids(2, 50), [17, 1, 32]
    documents = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None].repeat(2, 1)
    with torch.no_grad():
        assert (net.logits(net(ids)) - theirs.logits(ids)).abs().max() < 1e-5
        wanted = torch.cat([theirs.logits(part) for part in ids.split(lengths, 1)], 1)
        assert (net.logits(net(ids, documents_NT=documents)) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["value embeddings", "all"])
def test_decoding_equals_transformers_with_hooks(name: str) -> None:
    _, net, theirs = opened(name)
    ids, lengths = random_ids(3, 30), [9, 1, 20]
    slots, wanted = NetSlots(net, 3, 32), theirs.logits(ids)
    slots.prefill(0, [text[:length] for text, length in zip(ids.tolist(), lengths, strict=True)])
    for step in range(6):
        places = [length + step for length in lengths]
        assert (slots.decode(ids[range(3), places], places) - wanted[range(3), places]).abs().max() < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_transformers_with_hooks(name: str) -> None:
    """The engine's loss and gradients, computed in chunks, against torch's cross-entropy."""
    from textmill.engines.losses_torch import LossFormula, WeightedLabels, summed_loss

    shape, net, theirs = opened(name)
    ids, labels = random_ids(2, 40), random_ids(2, 40).flip(1)
    x_ME = net(ids).flatten(0, 1)
    weighted = WeightedLabels(labels.flatten(), torch.full((80,), 1 / 80))
    summed_loss(x_ME, net.head, weighted, LossFormula(160)).backward()
    theirs.ids = ids
    logits = theirs.net(ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    wanted = {key: one.grad for key, one in theirs.net.named_parameters() if one.grad is not None}
    ours = {f"model.{key}" if key != "lm_head.weight" else key: one.grad for key, one in net.named_parameters()}
    compared = 0
    for key, gradient in wanted.items():
        assert (ours[key][: len(gradient)] - gradient).abs().max() < 1e-5
        compared += 1
    assert compared > 20
    for weight in weights_of(shape):
        gradient = dict(net.named_parameters())[weight.parameter].grad
        assert gradient is not None
        assert gradient.abs().max() > 0, weight.name


def new_engine(name: str) -> Any:
    shape = ShapeConfig(layers=2, width=32, heads=4, kv_heads=2, positions=LENGTH, **OPTIONS[name])
    config = RunConfig(
        model=ModelConfig(family="llama", size="nano", shape=shape),
        train=TrainConfig(batch=8, length=LENGTH, optimizer="muon"),
        engine=TorchEngine(device="cpu", micro_batch=4),
    )
    return open_engine(config.engine, config.train, FAMILY.shape_of(config.model, vocab=VOCAB, eos_id=0))


@pytest.mark.parametrize("name", ["value embeddings", "all"])
def test_the_loss_falls_and_a_saved_engine_resumes_bitwise(name: str) -> None:
    engine, other = new_engine(name), new_engine(name)
    first = list(initial_weights(engine.net.shape, 1))
    engine.load(first, [], 0, "start")
    before = engine.eval_step(batch_of(0))
    for step in range(6):
        engine.train_step(batch_of(0), step, 1e-2)
    other.load(list(engine.weights()), list(engine.optimizer_state()), engine.updates(), "saved")
    assert engine.eval_step(batch_of(0)).loss < 0.9 * before.loss
    for step in range(6, 9):
        losses = [float(one.train_step(batch_of(step), step, 1e-2).loss) for one in (engine, other)]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_config_json_says_that_only_textmill_opens_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape = shape_of(name)
    (tmp_path / "config.json").write_text(json.dumps(FAMILY.hf_config_of(shape)))
    assert read_shape(tmp_path) == shape
    with pytest.raises(ValueError, match="textmill-llama"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(("name", "rate"), [("value embeddings", 1), ("all", 6)])
def test_embeddings_that_are_not_the_head_have_a_rate_of_their_own(name: str, rate: float) -> None:
    found = rules_of(shape_of(name), TrainConfig(layer_decay=0.5, embedding_rate_factor=6))
    assert found["model.value_embeddings.0.weight"].rate == 6 * 0.5**4
    assert found["model.embed_tokens.weight"].rate == rate * 0.5**4
    assert found.get("lm_head.weight", found["model.norm.weight"]).rate == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": 1}, "qk_norm is 1; a textmill-llama config.json has true or false there"),
        ({"value_embeddings": -1}, "value_embeddings is -1; a textmill-llama config.json has a whole number there"),
        ({"value_embeddings": 4}, "value_embeddings is 4, more than the 3 layers"),
    ],
)
def test_wrong_values_in_config_json_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        FAMILY.shape_of_hf({**FAMILY.hf_config_of(shape_of("all")), **changes}, "config.json")


def test_more_tables_than_layers_are_refused() -> None:
    with pytest.raises(TextmillError, match="13 tables are more than the 12 layers"):
        FAMILY.shape_of(ModelConfig(family="llama", shape=ShapeConfig(value_embeddings=13)), vocab=160, eos_id=0)


def test_blocks_with_tables_of_their_own_cannot_be_chosen() -> None:
    """Layer 1 has neither table nor gate: it cannot be the last of two, which has both."""
    with pytest.raises(TextmillError, match=r"init_layers: model\.init_from has value_embeddings=1, .* remove"):
        select_layers(shape_of("value embeddings"), [0, 1])


def write_model(folder: Path, name: str) -> Any:
    """A model folder; returns its shape."""
    tokenizer = korean_tokenizer(vocab=420)
    shape = replace(shape_of(name), vocab=tokenizer.vocab, eos_id=tokenizer.eos_id)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FAMILY.hf_config_of(shape)))
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(noisy_weights(shape))))
    tokenizer.save(folder)
    return shape


def test_an_adapter_is_merged_into_a_folder_for_textmill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged weights are W + alpha / rank * B A, and compute what transformers with hooks does with them."""
    shape, lora, folder = write_model(tmp_path / "base", "all"), LoraConfig(rank=2, alpha=6), tmp_path / "adapter"
    pairs = dict(noisy_weights(shape, seed=5, lora=lora)[len(weights_of(shape)) :])
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(peft_config_of(shape, lora, str(tmp_path / "base"))))
    named = [(f"base_model.model.{name}", values) for name, values in pairs.items()]
    (folder / "adapter_model.safetensors").write_bytes(b"".join(encode_safetensors(named)))
    assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}"]) == 0
    assert "with its adapter merged, as hf in fp32" in (printed := capsys.readouterr().out)
    assert "only textmill opens it" in printed
    wanted = dict(noisy_weights(shape))
    for stem in {name.partition(".lora_")[0] for name in pairs}:
        wanted[f"{stem}.weight"] += 3 * pairs[f"{stem}.lora_B.weight"] @ pairs[f"{stem}.lora_A.weight"]
    ids, net = random_ids(2, 20), open_net(tmp_path / "out", CPU)
    with torch.no_grad():
        assert (net.logits(net(ids)) - Theirs(shape, wanted.items()).logits(ids)).abs().max() < 1e-5
    card = (tmp_path / "out" / "README.md").read_text()
    assert "transformers" not in card
    assert "textmill generate FOLDER" in card
    assert main(["export", str(folder), f"export.folder={tmp_path / 'other'}", "export.kind=gguf"]) == 2
    assert "only textmill opens this model" in capsys.readouterr().err


def test_what_has_no_such_net_refuses_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of other tools, tensor parallelism and JAX; generation works."""
    folder = tmp_path / "model"
    shape = write_model(folder, "value embeddings")
    assert main(["generate", str(folder), "sample.prompt=a", "sample.max_tokens=4"]) == 0
    for kind in ("hf", "gguf"):
        assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}", f"export.kind={kind}"]) == 2
        assert f"export.kind: {kind} has no value_embeddings=1 of model.shape" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    with pytest.raises(TextmillError, match=r"tensor parallelism has no value_embeddings=1 of model\.shape"):
        check_divides_net(shape, 2)
    pytest.importorskip("jax", reason="needs the extra jax")
    with pytest.raises(TextmillError, match="llama with value_embeddings=1 has no JAX net"):
        open_engine(JaxEngine(), TrainConfig(), shape)
