"""Terms of distillation and their gradients equal straight torch; engines give the same, and refuse what cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.engine_runs import VOCAB, batch_of, config_of, rows_of, started
from tests.support.teachers import distilling, write_teacher
from textmill.config import DistilConfig, TorchEngine, TrainConfig
from textmill.engines.distillation import matched_layers
from textmill.engines.distillation_torch import Prediction, distillation_loss
from textmill.engines.losses_torch import WeightedLabels
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.storage.tensor_files import encode_safetensors, read_model
from textmill.tokens.batches.batch import IGNORED

TOKENS, WIDTH, WORDS, ROWS = 37, 16, 50, 64
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def reference(
    student: Tensor, teachers: list[Tensor], labels: Tensor, weights: Tensor, distil: DistilConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Straight torch: the loss and its terms, from all logits at once."""
    heat = distil.temperature
    target = torch.stack([(one / heat).softmax(1) for one in teachers]).mean(0)
    own = (student / heat).softmax(1)
    divergence = F.kl_div(own.log(), target, reduction="none").sum(1)
    terms = {
        "labels": F.cross_entropy(student, labels, ignore_index=IGNORED, reduction="none"),
        "kl": divergence * heat**2,
        "mse": (student - torch.stack(teachers).mean(0)).square().sum(1),
    }
    sums = {name: (values * weights).sum() for name, values in terms.items()}
    return torch.stack([getattr(distil, name) * one for name, one in sums.items()]).sum(), sums


@pytest.mark.parametrize("count", [1, 3])
def test_terms_and_gradients(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.engines.losses_torch.CPU_LOGITS", 5 * ROWS)  # chunks of five tokens
    distil = DistilConfig(teachers=["x"], kl=0.7, labels=0.4, mse=0.01, temperature=1.7)
    torch.manual_seed(1)
    x, head, bias = torch.randn(TOKENS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    labels = torch.randint(0, WORDS, (TOKENS,))
    labels[::4] = IGNORED
    weights = torch.rand(TOKENS).where(labels != IGNORED, 0)
    # The teachers have other widths and other paddings.
    teachers = [
        Prediction(torch.randn(TOKENS, 8 + one), torch.randn(WORDS + 7 * one, 8 + one), torch.randn(WORDS + 7 * one))
        for one in range(count)
    ]

    def straight(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        own = [one.to(dtype).requires_grad_() for one in (x.clone(), head.clone(), bias.clone())]
        given = [
            (one.x_ME.to(dtype) @ one.head_VE.to(dtype).T + one.bias_V.to(dtype))[:, :WORDS]  # type: ignore[union-attr]
            for one in teachers
        ]
        logits = (own[0] @ own[1].T + own[2])[:, :WORDS]
        total, terms = reference(logits, given, labels, weights.to(dtype), distil)
        total.backward()  # type: ignore[no-untyped-call]
        return total, terms, [one.grad.double() for one in own if one.grad is not None]

    (wanted, terms, gradients), (_, _, rounded) = straight(torch.float64), straight(torch.float32)
    singles, report = [one.clone().requires_grad_() for one in (x, head, bias)], torch.zeros(3)
    loss = distillation_loss(
        singles[0],
        singles[1],
        WeightedLabels(labels, weights),
        WORDS,
        teachers,
        TrainConfig(distil=distil),
        report,
        bias_V=singles[2],
    )
    (loss * 1).backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert report.tolist() == pytest.approx([one.item() for one in terms.values()], rel=1e-6)
    # How far float32 is from exact depends on the CPU's order of sums: straight torch shows it on the same CPU. Chunks
    # add up in another order, so an element may be off by a few times as much, wherever it is in the tensor.
    for single, exact, straight32 in zip(singles, gradients, rounded, strict=True):
        assert single.grad is not None
        bound = 4 * float((straight32 - exact).abs().max())
        torch.testing.assert_close(single.grad.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_a_step_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Loss, terms and gradient norm of a step on unequal micro-batches; teachers and student by transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    names = [write_teacher(tmp_path / "a"), write_teacher(tmp_path / "b", layers=4)]
    config = distilling(kind, names, kl=0.6, labels=0.3, cosine=0.8, mse=0.001, hidden=0.2)
    engine, batch = started(config), batch_of(0)
    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    student = GPT2LMHeadModel(GPT2Config(**family.hf_config_of(shape))).eval()
    student.load_state_dict({name: torch.from_numpy(values) for name, values in engine.weights()}, strict=False)
    student.tie_weights()
    ids, labels = torch.from_numpy(batch.inputs).long(), torch.from_numpy(batch.labels).long().flatten()
    rows = labels != IGNORED
    weights = torch.full((int(rows.sum()),), 1 / int(rows.sum()))

    def read(model: Any) -> tuple[Tensor, list[Tensor]]:
        before_norm: list[Tensor] = []
        handle = model.transformer.ln_f.register_forward_hook(lambda module, given, out: before_norm.append(given[0]))
        out = model(ids, output_hidden_states=True)
        handle.remove()
        states = [*out.hidden_states[1:-1], before_norm[0], out.hidden_states[-1]]
        return out.logits.flatten(0, 1)[rows], [one.flatten(0, 1)[rows] for one in states]

    logits, states = read(student)
    with torch.no_grad():
        given = [read(GPT2LMHeadModel.from_pretrained(name).eval()) for name in names]
    distil = config.train.distil
    loss, terms = reference(logits, [one for one, _ in given], labels[rows], weights, distil)
    cosine = torch.stack([1 - F.cosine_similarity(states[-1], other[-1]) for _, other in given]).mean()
    pairs = [(0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 3)]  # teacher, block of the student, block of the teacher
    hidden = torch.stack([(states[own] - given[who][1][block]).square().mean() for who, own, block in pairs]).mean()
    loss = loss + 0.8 * cosine + distil.hidden * hidden
    loss.backward()  # type: ignore[no-untyped-call]
    norm = math.sqrt(sum(float(one.grad.double().square().sum()) for one in student.parameters()))

    step = engine.train_step(batch, 0, 0.0)
    assert step.loss == pytest.approx(float(terms["labels"]), rel=1e-5)
    found = {"distil_kl": terms["kl"], "distil_mse": terms["mse"], "distil_cosine": cosine, "distil_hidden": hidden}
    assert step.terms == pytest.approx({name: float(value) for name, value in found.items()}, rel=1e-5)
    assert step.norm == pytest.approx(norm, rel=1e-4)


def test_the_student_comes_to_predict_as_its_teacher(tmp_path: Path) -> None:
    config = distilling("torch", [write_teacher(tmp_path / "a")], kl=1.0, labels=0.0)
    engine, batch = started(config), batch_of(0, unequal=False)
    found = [engine.train_step(batch, step, 1e-2).terms["distil_kl"] for step in range(30)]
    assert found[-1] < found[0] / 4


@on_a_gpu
@pytest.mark.parametrize("compiled", [True, False])
def test_teachers_and_loss_on_a_gpu_equal_the_cpu(compiled: bool, tmp_path: Path) -> None:
    """Compiled, or with teachers and student launched as one CUDA graph."""
    config = distilling("torch", [write_teacher(tmp_path / "a")], mse=0.001, cosine=0.5, hidden=0.2)
    on_gpu = TorchEngine(device="cuda", precision="fp32", micro_batch=4, compile=compiled)
    here, there = started(config), started(config.model_copy(update={"engine": on_gpu}))
    for step in [0, 1, 2, 0, 1, 2]:
        one, other = (engine.train_step(batch_of(step), step, 1e-3) for engine in (here, there))
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.norm == pytest.approx(one.norm, rel=1e-3)
        assert other.terms == pytest.approx(one.terms, rel=1e-3)
    graphs: Any = there.graphs  # type: ignore[attr-defined]
    assert compiled == (graphs is None)
    assert compiled or any(graphs.run_pass.graphs.values())


def test_padding_rows_of_a_teacher_are_left_out(tmp_path: Path) -> None:
    plain, padded = (write_teacher(tmp_path / str(vocab), vocab=vocab) for vocab in (VOCAB, VOCAB + 10))
    weights = dict(read_model(Path(plain)))
    wide = {
        name: values if name != "transformer.wte.weight" else np.concatenate([values, 9 + values[:10]])
        for name, values in weights.items()
    }
    (Path(padded) / "model.safetensors").write_bytes(b"".join(encode_safetensors(wide.items())))
    found = [started(distilling("torch", [name])).train_step(batch_of(0), 0, 0.0).terms for name in (plain, padded)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_valid_loss_has_no_teacher(tmp_path: Path) -> None:
    engine, plain = (
        started(distilling("torch", [write_teacher(tmp_path / "a")])),
        started(config_of("torch", micro_batch=2)),
    )
    batch = rows_of(batch_of(3), slice(0, 6))
    assert engine.eval_step(batch) == plain.eval_step(batch)


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({"vocab": VOCAB - 1}, {}, r"predicts 149 tokens, the model 150; both need the same tokenizer"),
        ({"width": 16}, {"cosine": 1.0}, r"has width 16, the model 32, and train.distil.cosine"),
        ({}, {"hidden": 1.0, "teacher_layers": [5]}, r"train.distil.teacher_layers: there is no block 5"),
    ],
)
def test_teachers_that_do_not_fit(
    sizes: dict[str, int], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TextmillError, match=message):
        started(distilling("torch", [write_teacher(tmp_path / "a", **sizes)], **settings))


def test_matched_layers() -> None:
    distil = DistilConfig(teachers=["x"], hidden=1.0)
    assert matched_layers(distil, 6, 12) == ([0, 1, 2, 3, 4, 5], [1, 3, 5, 7, 9, 11])
    assert matched_layers(distil, 2, 2) == ([0, 1], [0, 1])
    assert matched_layers(distil, 4, 2) == ([0, 1, 2, 3], [0, 0, 1, 1])


def test_settings_without_a_term_are_refused() -> None:
    with pytest.raises(TextmillError, match=r"no term uses them"):
        DistilConfig(teachers=["x"], kl=0.0)
    with pytest.raises(TextmillError, match=r"train.distil.temperature: there are no teachers"):
        DistilConfig(temperature=5.0)
    with pytest.raises(TextmillError, match=r"only train.distil.hidden uses layers"):
        DistilConfig(teachers=["x"], teacher_layers=[1])
