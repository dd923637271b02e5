"""Several processes divide the requests of an evaluation; the results are those of one process."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.together import run_together
from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig, TorchEngine
from textmill.errors import AlreadyReported, TextmillError
from textmill.evaluation import scorer_torch
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer, token_log_likelihoods
from textmill.evaluation.task import Share
from textmill.processes.ranks import Ranks, run_on_all
from textmill.tokens.store import open_store

WORLD = 3


class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.world = rank, len(board)
        self._meeting, self._board = meeting, board

    def all_gather(self, value: Any) -> list[Any]:
        """Put the value on the board, wait for the others, take all."""
        self._board[self.rank] = json.dumps(value)
        self._meeting.wait(60)
        found = [json.loads(one) for one in self._board]
        self._meeting.wait(60)
        return found


def on_ranks(work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank returns or raises."""
    meeting, board, results = threading.Barrier(WORLD), [None] * WORLD, [None] * WORLD

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting, board))
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(scope="module")
def scorer(checkpoint: Checkpoint) -> TorchScorer:
    return open_scorer(checkpoint, TorchEngine(device="cpu", precision="fp32"), batch=4)


def test_each_rank_gets_the_results_of_one_process(
    scorer: TorchScorer, life: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_torch, "CPU_BATCH_TOKENS", 40)
    pairs = [([1, 2, 3 + number % 5], [number % 7, 9]) for number in range(40)]
    pairs += [([], [5] * number) for number in (1, 9)]
    store, windows = open_store(life / "tokens" / "valid"), 19
    computed: list[int] = []

    def measure(one: TorchScorer) -> tuple[Any, Any]:
        return one.score_tokens(pairs), one.sum_losses(store, length=24, stride=7, sample=windows, seed=3)

    def count(*given: Any, **named: Any) -> Any:
        computed.append(len(given[1]))
        return token_log_likelihoods(*given, **named)

    alone = measure(scorer)
    assert scorer.sum_losses(store, length=24, stride=7, sample=windows, seed=4).loss != alone[1].loss
    monkeypatch.setattr(scorer_torch, "token_log_likelihoods", count)
    measure(scorer)
    rows, computed[:] = sum(computed), []
    assert on_ranks(lambda ranks: measure(replace(scorer, share=Share(ranks, ranks.rank, WORLD)))) == [alone] * WORLD
    assert sum(computed) == rows, "no row is computed by two ranks"


def test_an_error_of_one_rank_ends_all_and_is_reported_once(scorer: TorchScorer) -> None:
    def work(ranks: ThreadRanks) -> Any:
        def fail() -> Any:
            if ranks.rank == 1:
                raise TextmillError("no memory left")
            return []

        return run_on_all(ranks, lambda: Share(ranks, ranks.rank, WORLD).gather(fail))

    errors = on_ranks(work)
    assert [type(error) for error in errors] == [AlreadyReported, TextmillError, AlreadyReported]
    assert str(errors[1]) == "no memory left"


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_two_processes_print_one_result(life: Path, tmp_path: Path, tensor: int) -> None:
    """Data parallel: the same bits. Tensor parallel: sums in another order."""
    items = [{"context": f"the mill {word}", "choices": ["by a river", "turns"], "answer": 0} for word in "abcdef"]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    copy = tmp_path / "life"
    shutil.copytree(life, copy)
    (tmp_path / "run.yaml").write_text(RunConfig(folder=str(copy)).to_yaml())
    words = ["evaluate", str(tmp_path / "run.yaml"), f"evaluate.tasks=[perplexity,choices:{tmp_path / 'quiz.jsonl'}]"]
    words += ["evaluate.batch=2", "engine.device=cpu", "engine.precision=fp32"]
    found = []
    for count, more in ((1, []), (2, [f"engine.mesh.tensor={tensor}"])):
        shutil.rmtree(copy / "run" / "evaluation", ignore_errors=True)
        assert run_together([sys.executable, "-m", "textmill", *words, *more], count) == "ok"
        files = sorted((copy / "run" / "evaluation").glob("*.json"))
        found.append({file.name: numbers(json.loads(file.read_text())) for file in files})
    assert len(found[0]) == 2
    assert found[1] == (found[0] if tensor == 1 else approximate(found[0]))


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """All numbers of a result but the seconds, flat."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": one for name, one in numbers(value).items()}
        elif key != "seconds" and isinstance(value, int | float):
            flat[key] = value
    return flat


def approximate(results: dict[str, dict[str, Any]]) -> Any:
    return {name: pytest.approx(values, rel=1e-5) for name, values in results.items()}
