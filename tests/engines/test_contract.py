"""What every engine promises to the loop; a new engine gets these tests by existing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.engine_runs import LENGTH, LORA, ROWS, VOCAB, batch_of, config_of, first_of, rows_of, run, started
from textmill.config import RunConfig
from textmill.engines import Engine, open_engine
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.nets_torch import fill, new_net
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.blend import BatchSizes
from textmill.training.divergence import find_mismatch

LAST_NORMS = ("ln_f.weight", "layer.1.output.LayerNorm.weight", "1.post_attention_layernorm.weight")


def logits_of(config: RunConfig, engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Of transformers' GPT-2; of other families the net's own, which tests/models compares with transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    family = open_family(config.model.family)
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    with torch.no_grad():
        if config.model.family != "gpt2":
            net = new_net(shape, torch.device("cpu"))
            fill(net, engine.weights(), "the engine")
            return net.logits(net(ids))
        theirs = GPT2LMHeadModel(GPT2Config(**family.hf_config_of(shape))).eval()
        theirs.load_state_dict({name: torch.from_numpy(values) for name, values in engine.weights()}, strict=False)
        theirs.tie_weights()
        logits: torch.Tensor = theirs(ids).logits
        return logits


@pytest.mark.parametrize("loss", ["token_mean", "sample_mean"])
def test_the_first_loss_matches_the_formula(kind: str, loss: str) -> None:
    config = config_of(kind, loss=loss)
    engine, batch = started(config), batch_of(0)
    scores = torch.log_softmax(logits_of(config, engine, torch.from_numpy(batch.inputs).long()).double(), -1)
    labelled = batch.labels != IGNORED
    losses = [
        -scores[row, labelled[row]].gather(1, torch.from_numpy(batch.labels[row, labelled[row]]).long()[:, None])
        for row in range(ROWS)
    ]
    token_mean = float(torch.cat(losses).mean())
    sample_mean = float(np.mean([float(one.mean()) for one in losses if len(one)]))
    step = engine.train_step(batch, 0, 0.0)
    assert step.loss == pytest.approx({"token_mean": token_mean, "sample_mean": sample_mean}[loss], rel=1e-6)
    assert step.loss_tokens == int(labelled.sum())


@pytest.mark.long_with("jax")
@pytest.mark.parametrize(("loss", "dropout"), [("token_mean", 0.2), ("sample_mean", 0.0)])
def test_micro_batches_of_unequal_samples_equal_one_batch(kind: str, loss: str, dropout: float) -> None:
    whole = run(started(config_of(kind, loss=loss, dropout=dropout)), range(5))
    for micro_batch in (1, 4):
        parts = run(started(config_of(kind, loss=loss, dropout=dropout, micro_batch=micro_batch)), range(5))
        assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.long_with("jax")
def test_a_batch_ramp_up_gives_the_losses_of_torch(kind: str) -> None:
    ramp = [2, 6, 4]  # two sizes: JAX makes a program of each
    sizes = [BatchSizes(ROWS, ramp).size_at(step) for step in range(6)]
    assert sizes[0] == 2
    assert sizes[-1] == ROWS

    def steps_of(kind: str, micro_batch: int) -> list[tuple[float, float, int]]:
        engine = started(config_of(kind, dropout=0.1, micro_batch=micro_batch, batch_rampup=ramp, clip=0.3))
        steps = [engine.train_step(rows_of(batch_of(step), slice(size)), step, 1e-2) for step, size in enumerate(sizes)]
        return [(step.loss, step.norm, step.loss_tokens) for step in steps]

    for found, wanted in zip(steps_of(kind, 2), steps_of("torch", 1), strict=True):
        assert found == (pytest.approx(wanted[0], rel=2e-6), pytest.approx(wanted[1], rel=2e-5), wanted[2])


@pytest.mark.long_with("jax")
def test_dropout_changes_training_and_not_evaluation(kind: str) -> None:
    with_it, without = started(config_of(kind, dropout=0.5)), started(config_of(kind))
    assert with_it.eval_step(batch_of(0)).loss == without.eval_step(batch_of(0)).loss
    assert with_it.train_step(batch_of(0), 0, 0.0).loss != without.train_step(batch_of(0), 0, 0.0).loss


@pytest.mark.long_with("jax")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_isolated_documents_have_the_losses_of_separate_ones(kind: str, dropout: float) -> None:
    """Two documents in one window: each asks the same as in a window of its own, whatever stands beside it."""
    engine = started(config_of(kind, dropout=dropout))
    ids = batch_of(3, unequal=False).inputs
    cut = LENGTH // 3
    numbers = np.repeat([1, 2], [cut, LENGTH - cut])[None].repeat(ROWS, 0).astype(np.int32)
    labels = np.roll(ids, -1, 1)
    labels[:, [cut - 1, LENGTH - 1]] = IGNORED
    samples = np.arange(ROWS)
    whole = engine.eval_step(Batch(ids, labels, samples, documents=numbers))
    alone = [
        engine.eval_step(Batch(ids[:, part], labels[:, part], samples)) for part in (slice(0, cut), slice(cut, LENGTH))
    ]
    assert whole.loss == pytest.approx(sum(one.loss for one in alone), rel=1e-6)
    assert whole.loss_tokens == sum(one.loss_tokens for one in alone)
    other = ids.copy()
    other[:, :cut] = (other[:, :cut] + 7) % VOCAB
    second = labels.copy()
    second[:, :cut] = IGNORED
    losses = [
        engine.train_step(Batch(given, second, samples, documents=numbers), 0, 0.0).loss for given in (ids, other)
    ]
    assert losses[0] == losses[1], "a changed document changes nothing in the other"
    joined = [engine.train_step(Batch(given, second, samples), 0, 0.0).loss for given in (ids, other)]
    assert joined[0] != joined[1], "without documents it does"


@pytest.mark.long_with("jax")
def test_a_saved_engine_resumes_bitwise(kind: str) -> None:
    config = config_of(kind, dropout=0.1)
    straight = started(config)
    run(straight, range(4))
    weights = [(name, values.copy()) for name, values in straight.weights()]
    moments, updates = list(straight.optimizer_state()), straight.updates()
    assert updates == 4
    later = run(straight, range(4, 9))
    family = open_family(config.model.family)
    again = open_engine(
        config.engine, config.train, family.shape_of(config.model, vocab=VOCAB, eos_id=0), config.model.lora
    )
    again.load(weights, moments, updates, "saved")
    assert [loss.hex() for loss in run(again, range(4, 9))] == [loss.hex() for loss in later]
    for (name, one), (_, other) in zip(straight.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


def test_adapters_match_the_torch_engine(kind: str) -> None:
    # Epsilon is above what rounding leaves of a gradient that is none, which Adam would make as large as any other.
    config, theirs = (
        config_of(of, dropout=0.1, micro_batch=2, lora=LORA, clip=0.3, epsilon=1e-6) for of in (kind, "torch")
    )
    engine, torch_ = started(config), started(theirs)
    wanted = run(torch_, range(6))
    assert run(engine, range(6)) == pytest.approx(wanted, rel=2e-6)
    assert wanted != run(
        started(config_of("torch", dropout=0.1, lora=LORA.model_copy(update={"dropout": 0.0}))), range(6)
    ), "it drops"
    weights, moments = dict(engine.weights()), dict(engine.optimizer_state())
    for found, values in ((weights, torch_.weights()), (moments, torch_.optimizer_state())):
        expected = dict(values)
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            assert np.linalg.norm(found[name] - one) <= 1e-4 * np.linalg.norm(one), name
    assert weights.keys() == {name.removeprefix("m/") for name in moments if name.startswith("m/")}
    assert all(".lora_" in name for name in weights)
    assert all(values.any() for values in weights.values()), "each has learnt"
    assert [engine.describe()[key] for key in ("parameters", "trained")] == [
        torch_.describe()[key] for key in ("parameters", "trained")
    ]
    shape = open_family(config.model.family).shape_of(config.model, vocab=VOCAB, eos_id=0)
    again = open_engine(config.engine, config.train, shape, config.model.lora)
    again.load({**dict(first_of(config, shape)), **weights}.items(), moments.items(), 6, "saved")
    assert [loss.hex() for loss in run(again, range(6, 8))] == [loss.hex() for loss in run(engine, range(6, 8))]


@pytest.mark.long_with("jax")
def test_adapters_train_in_half_precision(kind: str) -> None:
    """As in fp32 but for rounding; what is saved is fp32, and a base that stays in bf16 loses no more than its
    rounding."""
    config = config_of(kind, micro_batch=4, lora=LORA)
    half = started(config.model_copy(update={"engine": config.engine.model_copy(update={"precision": "bf16"})}))
    wanted = run(started(config_of("torch", micro_batch=4, lora=LORA)), range(6))
    # A CPU without bf16 makes torch switch mkldnn off for the whole process; the other tests need it on.
    with torch.backends.mkldnn.flags(enabled=True):
        assert run(half, range(6)) == pytest.approx(wanted, rel=2e-2)
    assert all(values.dtype == np.float32 and values.any() for _, values in half.weights())


def test_host_copies_do_not_change_with_the_net(kind: str) -> None:
    engine = started(config_of(kind))
    before = list(engine.weights())
    kept = [values.copy() for _, values in before]
    run(engine, range(2))
    for (name, values), copy in zip(before, kept, strict=True):
        assert np.array_equal(values, copy), name


@pytest.mark.long_with("jax")
def test_clipping_bounds_the_update(kind: str) -> None:
    free, clipped = started(config_of(kind, clip=0.0)), started(config_of(kind, clip=1e-3))
    one, other = free.train_step(batch_of(0), 0, 1e-2), clipped.train_step(batch_of(0), 0, 1e-2)
    assert one.norm == pytest.approx(other.norm, rel=1e-6), "the norm is that before clipping"
    first = {name.removeprefix("m/"): values for name, values in clipped.optimizer_state() if name.startswith("m/")}
    norm = np.sqrt(sum(float((values.astype(np.float64) ** 2).sum()) for values in first.values())) / (1 - 0.9)
    assert norm == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.long_with("jax")
def test_only_matrices_decay(kind: str) -> None:
    engine = started(config_of(kind, weight_decay=0.5))
    before = dict(engine.weights())
    nothing = batch_of(0)
    engine.train_step(Batch(nothing.inputs, np.full_like(nothing.labels, IGNORED), nothing.samples), 0, 0.1)
    for name, values in engine.weights():
        factor = 0.95 if before[name].ndim == 2 else 1.0
        np.testing.assert_allclose(values, before[name] * np.float32(factor), rtol=1e-6, atol=1e-8, err_msg=name)


def test_a_non_finite_gradient_skips_the_update(kind: str) -> None:
    engine = started(config_of(kind))
    run(engine, range(2))
    weights = [(name, values.copy()) for name, values in engine.weights()]
    moments, updates = list(engine.optimizer_state()), engine.updates()
    broken = [(name, np.full_like(values, np.inf) if name.endswith(LAST_NORMS) else values) for name, values in weights]
    engine.load(broken, moments, updates, "broken")
    step = engine.train_step(batch_of(3), 3, 1e-2)
    assert step.skipped
    assert engine.updates() == updates
    for (name, values), (_, before) in zip(engine.weights(), broken, strict=True):
        assert np.array_equal(values, before), name
    for (name, values), (_, before) in zip(engine.optimizer_state(), moments, strict=True):
        assert np.array_equal(values, before), name


def test_evaluation_sums(kind: str) -> None:
    engine = started(config_of(kind, micro_batch=4))
    sums = engine.eval_step(batch_of(0))
    assert sums.loss_tokens == int((batch_of(0).labels != IGNORED).sum())
    assert sums.loss / sums.loss_tokens == pytest.approx(engine.train_step(batch_of(0), 0, 0.0).loss, rel=1e-6)
    assert 0 <= sums.correct <= sums.loss_tokens
    run(engine, range(20), unequal=False)
    learnt = engine.eval_step(batch_of(19, unequal=False))
    assert learnt.correct > sums.correct


def test_checksums_show_the_weight_of_a_replica_that_differs(kind: str) -> None:
    config = config_of(kind)
    first, second = started(config), started(config)
    assert find_mismatch([first.replica_checksums(), second.replica_checksums()]) is None
    weights = dict(first.weights())
    name = next(name for name in weights if name.endswith(LAST_NORMS))
    second.load([*{**weights, name: weights[name] + 1e-3}.items()], [], 0, "another weight")
    mismatch = find_mismatch([first.replica_checksums(), second.replica_checksums()])
    assert mismatch is not None
    assert name in mismatch


def test_a_field_that_the_family_does_not_use_raises_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(kind)
    engine = started(config)
    batch = replace(batch_of(0), documents=np.ones((ROWS, LENGTH), np.int32))
    monkeypatch.setattr(open_family(config.model.family), "BATCH_FIELDS", frozenset())
    with pytest.raises(TextmillError, match=r"the batches have documents, which the model family \w+ does not use"):
        engine.train_step(batch, 0, 0.0)
    with pytest.raises(TextmillError, match="documents"):
        engine.eval_step(batch)


def test_one_process_takes_every_sample(kind: str) -> None:
    engine = started(config_of(kind))
    assert engine.first
    assert list(range(ROWS))[engine.samples_of(ROWS)] == list(range(ROWS))
    engine.close()
