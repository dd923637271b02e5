"""Beam search: the likeliest whole text among those that the best beginnings lead to, as transformers finds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from textmill.errors import TextmillError
from textmill.generation.batch import NOT_FINITE, Slots
from textmill.generation.incremental_text import StopStringFilter, WindowTextDecoder
from textmill.generation.requests import Done, Request
from textmill.generation.sampling import State, forbid_ends, new_state, penalise_rows
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


class Home(Protocol):
    """What a search needs of a generator."""

    tokenizer: TextTokenizer

    def new_slots(self, slots: int, length: int) -> Slots: ...


@dataclass(frozen=True)
class Beam:
    """A beginning: its new tokens, the sum of their log-probabilities, and the slot that its keys and values come from."""

    ids: tuple[int, ...]
    score: float
    slot: int = 0

    def worth(self, penalty: float) -> float:
        """The score by which whole texts of different lengths are compared."""
        return self.score / math.pow(len(self.ids), penalty)


def search(home: Home, request: Request, room: int) -> Done:
    """The best continuation that `sample.beams` beams find, whole; `room` is how many new tokens it may have."""
    sample, prompt, tokenizer = request.sample, list(request.ids), home.tokenizer
    ends = tuple(dict.fromkeys((tokenizer.end, *request.stop_ids)))
    slots = home.new_slots(sample.beams, len(prompt) + room)
    if len(prompt) > 1:
        slots.prefill(0, [prompt[:-1]])
    running, finished, used = [Beam((), 0.0)], [], len(prompt) - 1
    for number in range(1, room + 1):
        last_N = torch.tensor([(beam.ids or prompt)[-1] for beam in running], device=slots.device)
        scores_NV = slots.decode(last_N, [used] * len(running))[:, : tokenizer.vocab]
        used += 1
        if not bool(torch.isfinite(scores_NV).all()):
            raise TextmillError(NOT_FINITE)
        logs_NV = scores_NV.float().log_softmax(1)
        states = _states(request, running, ends, logs_NV)
        penalise_rows(logs_NV, states, range(len(states)))
        forbid_ends(logs_NV, states, tuple(range(len(states))) if number <= sample.min_tokens else (), {})
        found = _best(logs_NV, running, max(2, 1 + len(ends)) * sample.beams)
        over = [beam.ids[-1] in ends or number == room for beam in found]
        finished += [beam for beam, last in zip(found[: sample.beams], over, strict=False) if last]
        finished = sorted(finished, key=lambda beam: -beam.worth(sample.length_penalty))[: sample.beams]
        running = [beam for beam, last in zip(found, over, strict=True) if not last][: sample.beams]
        full = len(finished) == sample.beams
        if not running or (
            full and running[0].worth(sample.length_penalty) <= finished[-1].worth(sample.length_penalty)
        ):
            break
        slots.take([beam.slot for beam in running], used)
    return _told(tokenizer, request, finished[0] if finished else Beam((), 0.0), ends)


def _states(request: Request, running: list[Beam], ends: tuple[int, ...], logs_NV: Tensor) -> list[State]:
    """What the penalties must know of each beam."""
    states = []
    for beam in running:
        state = new_state(
            request.sample, request.ids, ends=ends, bias=request.bias, vocab=logs_NV.shape[1], device=logs_NV.device
        )
        for id_ in beam.ids:
            state.add(id_)
        state.number = len(beam.ids)
        states.append(state)
    return states


def _best(logs_NV: Tensor, running: list[Beam], count: int) -> list[Beam]:
    """The likeliest beginnings that are one token longer."""
    sums_NV = logs_NV + torch.tensor([[beam.score] for beam in running], device=logs_NV.device)
    values, places = sums_NV.flatten().topk(min(count, sums_NV.numel()))
    pairs = [
        (value, *divmod(place, logs_NV.shape[1])) for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]
    return [Beam((*running[row].ids, id_), value, row) for value, row, id_ in pairs]


def _told(tokenizer: TextTokenizer, request: Request, best: Beam, ends: tuple[int, ...]) -> Done:
    stream, watch = WindowTextDecoder(tokenizer, list(request.ids)), StopStringFilter(request.stop)
    stopped = bool(best.ids) and best.ids[-1] in ends
    text = ""
    for id_ in best.ids[:-1] if stopped else best.ids:
        text += watch.add(stream.add(id_))
        if watch.hit:
            return Done("stop", stream.tokens, text)
    text += watch.add(stream.end()) + watch.end()
    return Done("stop" if stopped or watch.hit else "length", stream.tokens, text)
