"""Finetuned heads: losses and gradients of transformers' classes, padding, and equal steps on every mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.engine_runs import MAKE
from tests.support.weights import noisy_weights
from textmill.config import CorpusConfig, ModelConfig, RunConfig, ShapeConfig, TrainConfig
from textmill.engines import Engine, open_engine
from textmill.engines.losses_torch import forward_heads
from textmill.engines.micro_batches import micro_batches, token_weights
from textmill.errors import TextmillError
from textmill.models import open_family, with_label_head
from textmill.models.nets_torch import fill, new_net, parameters_of
from textmill.tokens.batches.batch import IGNORED, Batch

CPU = torch.device("cpu")
VOCAB, ROWS, LENGTH = 90, 4, 20
TASKS = ["sequence-classification", "token-classification", "question-answering"]
CLASSES = ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
NAMES = ("a", "b", "c")


def shape_of(task: str, norm: str = "post", dropout: float = 0.0) -> Any:
    numbers = ShapeConfig(layers=2, width=32, positions=LENGTH, norm=norm, dropout=dropout)  # type: ignore[arg-type]
    config = ModelConfig(family="bert", size="tiny", shape=numbers)
    shape = open_family("bert").shape_of(config, vocab=VOCAB, eos_id=3)
    return with_label_head(shape, task, () if task == TASKS[2] else NAMES)


def batch_of(task: str, lengths: tuple[int, ...] = (LENGTH,) * ROWS, step: int = 0) -> Batch:
    """Pairs of texts with random labels, the rest of each row padding."""
    dice = np.random.default_rng(step)
    inputs = dice.integers(4, VOCAB, (len(lengths), LENGTH)).astype(np.int32)
    filled = np.arange(LENGTH) < np.array(lengths)[:, None]
    labels = np.full(inputs.shape, IGNORED, np.int32)
    if task == TASKS[0]:
        labels[:, 0] = dice.integers(0, len(NAMES), len(lengths))
    elif task == TASKS[1]:
        chosen = (dice.random(inputs.shape) < 0.6) & filled
        labels[chosen] = dice.integers(0, len(NAMES), int(chosen.sum()))
    else:
        labels[:, 0] = dice.integers(0, lengths)
        labels[:, 1] = dice.integers(labels[:, 0], lengths)
    types = ((np.arange(LENGTH) > 7) & filled).astype(np.int32)
    samples = np.arange(step * len(lengths), (step + 1) * len(lengths))
    return Batch(np.where(filled, inputs, 0), labels, samples, filled.astype(np.int32), types)


def theirs_of(shape: Any) -> Any:
    import transformers

    kind = "Bert" if shape.norm == "post" else "MegatronBert"
    config = getattr(transformers, f"{kind}Config")(**open_family("bert").hf_config_of(shape))
    theirs = getattr(transformers, f"{kind}For{CLASSES[TASKS.index(shape.task)]}")(config).eval()
    named = {name: torch.from_numpy(values) for name, values in noisy_weights(shape)}
    loaded = theirs.load_state_dict(named, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    return theirs


def their_loss(theirs: Any, shape: Any, batch: Batch) -> torch.Tensor:
    """The loss of transformers' class; of answers in padded rows, its formula over the tokens that are no padding."""
    given = {
        "input_ids": torch.tensor(batch.inputs),
        "token_type_ids": torch.tensor(batch.types),
        "attention_mask": torch.tensor(batch.documents),
    }
    labels = torch.tensor(batch.labels).long()
    if shape.task == TASKS[0]:
        return theirs(**given, labels=labels[:, 0]).loss
    if shape.task == TASKS[1]:
        return theirs(**given, labels=labels).loss
    if bool(given["attention_mask"].all()):
        return theirs(**given, start_positions=labels[:, 0], end_positions=labels[:, 1]).loss
    out, counts = theirs(**given), given["attention_mask"].sum(1).tolist()
    losses = [
        F.cross_entropy(logits[row, :count], labels[row, place])
        for place, logits in enumerate((out.start_logits, out.end_logits))
        for row, count in enumerate(counts)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("lengths", [(LENGTH,) * ROWS, (20, 9, 14, 11)], ids=["full", "padded"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_equal_transformers(task: str, norm: str, lengths: tuple[int, ...]) -> None:
    shape, batch = shape_of(task, norm), batch_of(task, lengths)
    theirs, net = theirs_of(shape), new_net(shape, CPU)
    fill(net, noisy_weights(shape), "test")
    wanted = their_loss(theirs, shape, batch)
    wanted.backward()
    tokens = int((batch.labels != IGNORED).sum())
    weights, total = token_weights(batch, "token_mean", tokens, len(lengths)), 0.0
    for _, part in micro_batches(batch, net, 2, CPU, weights=weights):
        loss, reported = forward_heads(net, part, torch.float32).training_loss(
            TrainConfig(), None, gradient_is_one=True
        )
        loss.backward()
        total += float(reported)
    assert total == pytest.approx(wanted.item(), abs=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = parameters_of(net)
    assert gradients.keys() == compared.keys()
    for name, (weight, parameter) in compared.items():
        assert parameter.grad is not None, name
        rows = weight.shape[0]
        assert (parameter.grad[:rows] - gradients[name]).abs().max() < 1e-5, name


def engine_of(task: str, kind: str = "torch", micro_batch: int = ROWS) -> Engine:
    corpus = CorpusConfig(labels=task)  # type: ignore[arg-type]
    train = TrainConfig(layout="labelled", batch=ROWS, length=LENGTH, learning_rate=1e-2, clip=0.0)
    engine = MAKE[kind](device="cpu", micro_batch=micro_batch)
    tokens = {"overlap": 4}
    config = RunConfig(corpus=corpus, tokens=tokens, model=ModelConfig(family="bert"), train=train, engine=engine)
    shape = shape_of(task, dropout=0.1)
    opened = open_engine(config.engine, config.train, shape, config.model.lora)
    opened.load(noisy_weights(shape), [], 0, "the first weights")
    return opened


@pytest.mark.parametrize("task", TASKS)
def test_micro_batches_change_nothing(task: str) -> None:
    """Dropout, also before the head, depends on the sample and not on its place in a micro-batch."""
    lengths = (20, 9, 14, 11)
    losses = []
    for micro_batch in (ROWS, 1):
        engine = engine_of(task, micro_batch=micro_batch)
        steps = [engine.train_step(batch_of(task, lengths, step), step, 1e-2) for step in range(3)]
        losses.append([(step.loss, step.norm) for step in steps])
        sums = engine.eval_step(batch_of(task, lengths))
        assert sums.loss_tokens == int((batch_of(task, lengths).labels != IGNORED).sum())
        losses[-1].append((sums.loss, float(sums.correct)))
    assert np.allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.long
def test_deepspeed_computes_the_same_steps() -> None:
    for task in TASKS:
        torch_engine, deepspeed = engine_of(task), engine_of(task, "deepspeed")
        for step in range(3):
            found = [one.train_step(batch_of(task, step=step), step, 1e-2).loss for one in (torch_engine, deepspeed)]
            assert found[0] == pytest.approx(found[1], rel=2e-6), task


def test_jax_is_refused() -> None:
    with pytest.raises(
        TextmillError, match=r"train\.layout: the JAX engine has no heads for labels; set engine\.kind=torch"
    ):
        engine_of(TASKS[0], "jax")
