"""Checkpoint folders: atomic writes, search, verification and pruning, under every fault that can be injected."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_models import single_process_snapshot
from textmill.checkpoints.folders import (
    find_checkpoint,
    find_checkpoint_damage,
    find_model,
    list_checkpoints,
    open_checkpoint,
    rank_checkpoints,
)
from textmill.checkpoints.writing import FilePlan, Snapshot, plan_files, prune, write_checkpoint
from textmill.errors import AlreadyReported, Interrupted, TextmillError
from textmill.processes.ranks import Ranks
from textmill.storage import faults
from textmill.storage.tensor_files import encode_safetensors, read_tensors
from textmill.training.run_folder import Saver


def snapshot(step: int, *, valid_loss: float | None = None, size: int = 50) -> Snapshot:
    values = np.random.default_rng(step).normal(size=(size, 3)).astype(np.float32)
    progress = {"step": step, "updates": step, "valid_loss": None if valid_loss is None else valid_loss.hex()}
    return single_process_snapshot(
        step,
        [("w", values), ("b", values[0])],
        [("m/w", values * 2)],
        progress,
        {"config.json": b"{}", "run.yaml": b"folder: .\n"},
    )


def equal(one: Any, other: Any) -> bool:
    return all(
        name == named and np.array_equal(values, found)
        for (name, values), (named, found) in zip(sorted(one), sorted(other), strict=True)
    )


class Threads:
    """The ranks of a run as threads of this process."""

    def __init__(self, rank: int, shared: list[Any], gate: threading.Barrier) -> None:
        self.rank, self.world, self.first = rank, len(shared), rank == 0
        self.shared, self.gate = shared, gate

    def all_gather(self, value: Any) -> list[Any]:
        self.shared[self.rank] = json.dumps(value)
        self.gate.wait(60)
        found = [json.loads(text) for text in self.shared]
        self.gate.wait(60)
        return found

    def report_progress(self, place: str | None = None) -> None:
        """There is no watchdog."""


def in_threads(world: int, work: Callable[[Any], Any]) -> list[Any]:
    shared, gate = [None] * world, threading.Barrier(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, [Threads(rank, shared, gate) for rank in range(world)]))


def test_a_written_checkpoint_reads_back(tmp_path: Path) -> None:
    wanted = snapshot(7, valid_loss=1.25)
    folder = write_checkpoint(tmp_path, wanted)
    assert folder.name == "step-0000007"
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.valid_loss) == (7, 1.25)
    assert equal(found.weights(), wanted.weights)
    assert equal(found.optimizer_state(), wanted.optimizer_state)


def test_safetensors_reads_our_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    wanted = snapshot(1).weights
    (tmp_path / "x.safetensors").write_bytes(b"".join(encode_safetensors(wanted)))
    assert equal(load_file(tmp_path / "x.safetensors").items(), wanted)


def test_we_read_files_of_safetensors_in_every_float_type(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    values = torch.randn(5, 4)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        save_file(
            {"a": values.to(dtype), "mask": torch.ones(3, dtype=torch.bool), "c": values[:, :1].to(dtype).contiguous()},
            tmp_path / "x",
        )
        found = dict(read_tensors(tmp_path / "x"))
        assert sorted(found) == ["a", "c"]
        assert np.array_equal(found["a"], values.to(dtype).float().numpy())


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, snapshot(5))
    folder = write_checkpoint(tmp_path, snapshot(10))
    dice = random.Random(4)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(30):
            place = dice.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[place] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            faults = find_checkpoint_damage(folder)
            # A flipped bit in a manifest's white space or in an unused key is harmless if everything else is intact.
            if not faults:
                assert "manifest" in path.name
                assert {name: account for name, account in json.loads(damaged)["files"].items()} == json.loads(whole)[
                    "files"
                ]
        path.write_bytes(whole)
    assert find_checkpoint_damage(folder) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing", "swap"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "progress.json", "config.json", "manifest.json", "run.yaml"]
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_checkpoint(tmp_path, snapshot(5))
    last = write_checkpoint(tmp_path, snapshot(10, size=51))
    path = last / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "missing":
        path.unlink()
    elif damage == "swap":
        if name in ("config.json", "run.yaml"):
            pytest.skip("both checkpoints hold the same bytes")
        shutil.copy(before / name, path)
    else:
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-3]), "empty": b""}[damage])
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 5
    warning = capsys.readouterr().err
    assert str(last) in warning
    assert name in warning or name == "manifest.json"
    with pytest.raises(TextmillError, match="damaged"):
        open_checkpoint(last)


def test_all_checkpoints_damaged_is_an_error(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, snapshot(5)) / "config.json").write_bytes(b"")
    with pytest.raises(TextmillError, match="every checkpoint is damaged"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "nothing") is None


def test_a_nan_loss_is_never_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, float("nan")), (2, 1.0), (3, 3.0), (4, float("inf"))):
        write_checkpoint(tmp_path, snapshot(step, valid_loss=loss))
        prune(tmp_path, keep=1, keep_every=None)
    assert list(list_checkpoints(tmp_path)) == [2, 4]
    best = find_checkpoint(tmp_path, "best")
    assert best is not None
    assert best.step == 2


def test_without_a_model_the_command_that_trains_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "my texts"
    project.mkdir()
    with pytest.raises(TextmillError, match="no checkpoint yet; train a model first, with textmill run or textmill tr"):
        find_model(project / "run", None)
    (project / "textmill.yaml").write_text("train: {}\n")
    with pytest.raises(TextmillError, match=r"no checkpoint yet; train the model first: textmill run 'my texts'$"):
        find_model(project / "run", None)


def test_a_model_is_the_best_checkpoint_and_the_latest_without_valid_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, loss in ((1, 2.0), (2, 1.5), (3, 9.75), (4, None)):
        write_checkpoint(tmp_path, snapshot(step, valid_loss=loss))
    assert find_model(tmp_path, None).step == 2
    best, latest = tmp_path / "step-0000002", tmp_path / "step-0000004"
    line = f"textmill: using {best}, valid loss 1.5000, the best checkpoint; the newest is {latest}\n"
    assert capsys.readouterr().err == line
    assert find_model(tmp_path, None, "latest").step == 4
    assert capsys.readouterr().err == f"textmill: using {latest}\n"
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 4, "train resumes from the latest"
    (best / "config.json").write_bytes(b"")
    assert find_model(tmp_path, None).step == 1
    for folder in list_checkpoints(tmp_path).values():
        (folder / "progress.json").write_text(json.dumps({"step": 1, "valid_loss": None}))
    assert rank_checkpoints(tmp_path, None)[0] == latest


def test_a_run_resumes_from_a_checkpoint_with_an_optimizer_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (write_checkpoint(tmp_path, snapshot(step, valid_loss=1 / step)) for step in (5, 10))
    (last / "optimizer.manifest.json").unlink()
    found = find_checkpoint(tmp_path, to_resume=True)
    assert found is not None
    assert found.step == 5
    assert f"{last} is damaged, skipping it: optimizer.manifest.json is missing" in capsys.readouterr().err
    best = find_checkpoint(tmp_path, "best")
    assert best is not None
    assert best.step == 10, "its weights are intact"
    with pytest.raises(TextmillError, match=r"resume from a step that has one \(--step 5\), or start a new run"):
        list(best.optimizer_state())
    (first / "optimizer.manifest.json").unlink()
    with pytest.raises(TextmillError, match=f"is lost; start a new run from its weights: model.init_from={last}"):
        find_checkpoint(tmp_path, to_resume=True)


def test_retention(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        write_checkpoint(tmp_path, snapshot(step, valid_loss=abs(step - 30.0)))
        prune(tmp_path, keep=2, keep_every=40)
    assert list(list_checkpoints(tmp_path)) == [30, 40, 60, 70], "the best, every 40th, the last two"
    assert [
        step for step, folder in list_checkpoints(tmp_path).items() if (folder / "optimizer.safetensors").exists()
    ] == [60, 70]
    assert all(find_checkpoint_damage(folder) == [] for folder in list_checkpoints(tmp_path).values()), (
        "without its optimizer state it is still intact"
    )
    best, by_number = find_checkpoint(tmp_path, "best"), find_checkpoint(tmp_path, 40)
    assert best is not None
    assert best.step == 30
    assert by_number is not None
    with pytest.raises(TextmillError, match=r"has no optimizer state: it was pruned, .* \(--step 60 or 70\)"):
        list(by_number.optimizer_state())
    with pytest.raises(TextmillError, match="no checkpoint of step 50; found 30, 40, 60, 70"):
        find_checkpoint(tmp_path, 50)


def test_a_full_disk_is_reported_and_loses_no_checkpoint(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2, keep_every=None)
    saver.save(snapshot(5))
    saver.wait()
    faults.arm("full@disk:9")
    try:
        saver.save(snapshot(10))
        with pytest.raises(Interrupted, match="No space left on device"):
            saver.wait()
    finally:
        faults.arm("")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000005"]
    assert find_checkpoint_damage(tmp_path / "step-0000005") == []


def test_false_headers_are_refused(tmp_path: Path) -> None:
    def file(header: dict[str, Any], data: bytes = b"\0" * 64) -> Path:
        text = json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    lies = [
        {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 32]}},
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        },
        {"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
        ["not", "a", "dict"],
    ]
    for lie in lies:
        with pytest.raises(TextmillError, match="safetensors"):
            list(read_tensors(file(lie)))  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").write_bytes((10**12).to_bytes(8, "little"))
    with pytest.raises(TextmillError, match=r"not readable as safetensors .*header too large"):
        list(read_tensors(tmp_path / "model.safetensors"))


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(TextmillError, match=r"found pytorch_model\.bin, which can run code"):
        list(open_checkpoint(tmp_path).weights())
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TextmillError, match="outside the folder"):
        list(open_checkpoint(tmp_path).weights())


def test_a_large_checkpoint_is_sharded(tmp_path: Path) -> None:
    dice = np.random.default_rng(1)
    weights = [
        (name, dice.normal(size=(size, 10)).astype(np.float32))
        for name, size in (("a", 10), ("b", 5), ("c", 30), ("d", 1))
    ]
    moments = [(f"m/{name}", values * 2) for name, values in weights]
    plans = (plan_files("model", weights, 700)[0], plan_files("optimizer", moments, 700)[0])
    assert [list(file) for file in plans[0].files] == [["a", "b"], ["c"], ["d"]], (
        "in order; only a tensor above the limit makes a file above it"
    )
    folder = write_checkpoint(tmp_path, Snapshot(3, weights, moments, {"step": 3}, {"config.json": b"{}"}, plans))
    names = {path.name for path in folder.glob("*.safetensors")}
    assert names == {
        f"{stem}-0000{number}-of-00003.safetensors" for stem in ("model", "optimizer") for number in (1, 2, 3)
    }
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert equal(found.weights(), weights)
    assert equal(found.optimizer_state(), moments)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for _, values in weights)
    for name in sorted(names):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])
        assert any(name in fault for fault in find_checkpoint_damage(folder))
        (folder / name).write_bytes(data)
    write_checkpoint(tmp_path, snapshot(4))
    prune(tmp_path, keep=1, keep_every=3)
    assert not list(folder.glob("optimizer*"))
    assert find_checkpoint_damage(folder) == []


def test_every_rank_writes_its_files_and_a_failing_rank_ends_all(tmp_path: Path) -> None:
    """Three ranks as threads: the tensors that each gets and writes, and the errors that each raises."""
    values = {name: np.full((4, 4), float(number), np.float32) for number, name in enumerate("abcdefg")}
    moments = {f"m/{name}": array * 2 for name, array in values.items()}

    def work(ranks: Ranks, step: int) -> tuple[set[str], BaseException | None]:
        plan = FilePlan("model", lambda name: values[name].nbytes, 128, ranks.rank, ranks.world)
        own = [(name, array) for name, array in values.items() if plan.add(name)]
        state = FilePlan("optimizer", lambda name: moments[name].nbytes, 64, ranks.rank, ranks.world, len(plan.files))
        mine = [(name, array) for name, array in moments.items() if state.add(name)]
        try:
            if step == 2 and ranks.rank == 1:
                own = [("a", values["a"])] * 2 + [("nowhere", values["a"])]  # an unknown file name
            write_checkpoint(
                tmp_path, Snapshot(step, own, mine, {"step": step}, {"config.json": b"{}"}, (plan, state)), ranks
            )
        except BaseException as error:
            return {name for name, _ in own}, error
        return {name for name, _ in own}, None

    outcomes = in_threads(3, lambda ranks: work(ranks, 1))
    assert [fault for _, fault in outcomes] == [None] * 3
    assert [sorted(names) for names, _ in outcomes] == [["a", "b", "g"], ["c", "d"], ["e", "f"]]
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert equal(found.weights(), list(values.items()))
    assert equal(found.optimizer_state(), list(moments.items()))
    outcomes = in_threads(3, lambda ranks: work(ranks, 2))
    assert [type(fault) for _, fault in outcomes] == [AlreadyReported, KeyError, AlreadyReported]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_a_folder_that_machines_do_not_share_is_reported_at_the_first_save(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        model, state = (FilePlan(stem, lambda _: 4, 4, ranks.rank, 2) for stem in ("model", "optimizer"))
        own = [(name, np.zeros(1, np.float32)) for name in "ab" if model.add(name)]
        with pytest.raises(TextmillError) as error:
            write_checkpoint(tmp_path / str(ranks.rank), Snapshot(1, own, [], {"step": 1}, {}, (model, state)), ranks)
        return str(error.value)

    first, second = in_threads(2, work)
    assert (
        "model-00002-of-00002.safetensors is missing, although a rank wrote it; set train.folder to a folder that all"
        in first
    )
    assert second == ""
    assert find_checkpoint(tmp_path / "0") is None


def test_transformers_opens_a_sharded_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from textmill.config import ModelConfig, ShapeConfig
    from textmill.models import initial_weights
    from textmill.models.gpt2 import family as gpt2

    shape = gpt2.shape_of(
        ModelConfig(size="nano", shape=ShapeConfig(layers=2, heads=2, width=16, positions=16)), vocab=50, eos_id=0
    )
    weights = list(initial_weights(shape, 3))
    plan = plan_files("model", weights, 4000)[0]
    assert len(plan.files) > 5
    files = {"config.json": json.dumps(gpt2.hf_config_of(shape)).encode()}
    folder = write_checkpoint(
        tmp_path, Snapshot(1, weights, [], {"step": 1}, files, (plan, plan_files("optimizer", [])[0]))
    )
    theirs, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values())
    found = {name.removeprefix("transformer."): values.numpy() for name, values in theirs.state_dict().items()}
    assert all(np.array_equal(found[name.removeprefix("transformer.")], values) for name, values in weights)
