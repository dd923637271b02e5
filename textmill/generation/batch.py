"""Texts that are continued together: they join and leave between any two steps, and none changes another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from textmill.generation.requests import Done, Reason, Request, Token, Top
from textmill.generation.sampling import Rules, State, new_state, next_ids, rules_of
from textmill.generation.texts import StopWatch, Stream
from textmill.tokens.tokenizer import TextTokenizer

READ_AT_ONCE = 8192
"""Tokens of prompts that are read in one go, at most, unless one prompt alone has more."""
NOT_FINITE = "the model's scores are not finite; its weights are damaged or its training diverged; use an earlier --step"
Event = Token | Done


class Slots(Protocol):
    """Keys and values of texts at work, as a family's decode module keeps them."""

    net: Any
    slots: int
    length: int
    device: torch.device

    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor: ...
    def decode(self, ids: list[int], places: list[int]) -> Tensor: ...
    def move(self, source: int, target: int, used: int) -> None: ...
    def take(self, sources: list[int], used: int) -> None: ...


def slots_type(family: str) -> Any:
    """The family's way to decode: models/FAMILY_decode_torch.py has Slots."""
    return import_module(f"textmill.models.{family}_decode_torch").Slots


@dataclass
class Row:
    """One text at work."""

    number: int
    request: Request
    room: int
    """New tokens at most."""
    ids: list[int]
    """The prompt and what is new."""
    state: State
    stream: Stream
    watch: StopWatch
    used: int = 0
    """Tokens whose keys and values are in the slot."""
    told: tuple[tuple[float | None, Top], ...] = ()
    """The prompt's log-probabilities, when asked."""

    def add(self, id_: int, logprob: float | None, top: Top) -> tuple[Token | None, Reason | None]:
        """Take one more token; what it gave, and why it is the last one if it is."""
        if id_ in self.state.ends:
            return None, "stop"
        self.ids.append(id_)
        self.state.add(id_)
        token = Token(id_, self.watch.add(self.stream.add(id_)), logprob, top)
        if self.watch.hit:
            return token, "stop"
        return token, "length" if self.state.number >= self.room else None

    def done(self, reason: Reason, message: str = "") -> Done:
        """The end, with the text that was held back."""
        text = "" if self.watch.hit else self.watch.add(self.stream.end())
        text += self.watch.end()
        if self.watch.hit and reason == "length":
            reason = "stop"
        return Done(reason, self.state.number, text, message, self.told)


@dataclass
class Batch:
    """The texts at work, in the first slots; a step gives each of them one token."""

    slots: Slots
    tokenizer: TextTokenizer
    positions: int
    """Tokens that the model sees."""
    open_stream: Callable[[Sequence[int]], Stream]
    """Makes a text's stream from its prompt."""
    rows: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    _rules: Rules | None = None

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self.slots.slots - len(self.rows) - len(self.waiting)

    def add(self, number: int, request: Request, room: int) -> None:
        """Let a text join at the next step; there must be a free slot."""
        ends = tuple(dict.fromkeys((self.tokenizer.end, *request.stop_ids)))
        vocab, device = self.tokenizer.vocab, self.slots.device
        state = new_state(request.sample, request.ids, ends=ends, bias=request.bias, vocab=vocab, device=device)
        stream, watch = self.open_stream(request.ids), StopWatch(request.stop)
        self.waiting.append(Row(number, request, room, list(request.ids), state, stream, watch))

    def drop(self, number: int, reason: Reason, message: str = "") -> Done | None:
        """End a text now; None: it is not there."""
        for place, row in enumerate(self.rows):
            if row.number == number:
                self._leave(place)
                return row.done(reason, message)
        for row in self.waiting:
            if row.number == number:
                self.waiting.remove(row)
                return row.done(reason, message)
        return None

    def clear(self) -> None:
        """Forget every text."""
        self.rows, self.waiting, self._rules = [], [], None

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Event]]:
        """Let waiting texts join, then one token for every text; what became sure, by number."""
        events: list[tuple[int, Event]] = []
        self._join()
        for place in reversed([place for place, row in enumerate(self.rows) if row.room < 1]):
            events.append((self.rows[place].number, self.rows[place].done("length")))
            self._leave(place)
        if not self.rows:
            return events
        self._slide()
        scores_NV = self.slots.decode([row.ids[-1] for row in self.rows], [row.used for row in self.rows])[:, : self.tokenizer.vocab]
        states = [row.state for row in self.rows]
        self._rules = self._rules or rules_of(states, self.slots.device)
        ids = next_ids(scores_NV, states, self._rules)
        logs = self._logs(scores_NV, ids)
        ended = []
        for place, (row, id_) in enumerate(zip(self.rows, ids, strict=True)):
            row.used += 1
            if id_ is None:
                events.append((row.number, row.done("error", NOT_FINITE)))
                ended.append(place)
                continue
            token, reason = row.add(id_, *logs.get(place, (None, ())))
            if token is not None:
                events.append((row.number, token))
            if reason is not None:
                events.append((row.number, row.done(reason)))
                ended.append(place)
        for place in reversed(ended):
            self._leave(place)
        return events

    def _join(self) -> None:
        """Read the prompts of waiting texts, all but the last token, which the next step takes."""
        self.waiting.sort(key=lambda row: len(row.ids))
        while self.waiting:
            group = [self.waiting.pop(0)]
            while self.waiting and (len(group) + 1) * len(self.waiting[0].ids) <= READ_AT_ONCE and not group[-1].request.echo:
                group.append(self.waiting.pop(0))
            first = len(self.rows)
            self.rows += group
            self._rules = None
            if len(group[-1].ids) > 1:
                hidden_NTE = self.slots.prefill(first, [row.ids[:-1] for row in group])
                for place, row in enumerate(group):
                    row.used = len(row.ids) - 1
                    if row.request.echo:
                        row.told = self._told(row, hidden_NTE[place, : row.used])
            elif group[0].request.echo:
                group[0].told = ((None, ()),)

    def _slide(self) -> None:
        """A text that fills the model's view goes on with the last half of it."""
        for place, row in enumerate(self.rows):
            if row.used + 1 > self.positions:
                view = row.ids[-(self.positions // 2) :]
                if len(view) > 1:
                    self.slots.prefill(place, [view[:-1]])
                row.used = len(view) - 1

    def _leave(self, place: int) -> None:
        """Give a slot back; the last text moves into it, so that the texts at work stay together."""
        last = len(self.rows) - 1
        if place != last:
            self.slots.move(last, place, self.rows[last].used)
            self.rows[place] = self.rows[last]
        self.rows.pop()
        self._rules = None

    def _logs(self, scores_NV: Tensor, ids: Sequence[int | None]) -> dict[int, tuple[float, Top]]:
        """Log-probabilities of the chosen and the likeliest tokens, by row, where they are asked."""
        asking = [place for place, row in enumerate(self.rows) if row.request.logprobs and ids[place] is not None]
        if not asking:
            return {}
        chosen = torch.tensor([ids[place] for place in asking], device=scores_NV.device)
        wanted = [self.rows[place].request.logprobs for place in asking]
        return dict(zip(asking, _tops(scores_NV[asking], chosen, wanted), strict=True))

    def _told(self, row: Row, hidden_TE: Tensor) -> tuple[tuple[float | None, Top], ...]:
        """Log-probabilities of a prompt's own tokens, from the second on."""
        told: list[tuple[float | None, Top]] = [(None, ())]
        for begin in range(0, len(hidden_TE), 128):
            scores_TV = self.slots.net.logits(hidden_TE[begin : begin + 128])[:, : self.tokenizer.vocab]
            found = torch.tensor(row.request.ids[begin + 1 : begin + 1 + len(scores_TV)], device=scores_TV.device)
            told += _tops(scores_TV, found, [row.request.logprobs] * len(scores_TV))
        return tuple(told)


def _tops(scores_NV: Tensor, chosen_N: Tensor, wanted: list[int]) -> list[tuple[float, Top]]:
    """Each row's log-probability of one token, and as many of the likeliest as are wanted."""
    logs_NV = scores_NV.float().log_softmax(1)
    values_NK, ids_NK = logs_NV.topk(min(max(wanted), logs_NV.shape[1]), dim=1)
    rows = zip(logs_NV.gather(1, chosen_N[:, None])[:, 0].tolist(), ids_NK.tolist(), values_NK.tolist(), wanted, strict=True)
    return [(log, tuple(zip(ids[:count], values[:count], strict=True))) for log, ids, values, count in rows]
