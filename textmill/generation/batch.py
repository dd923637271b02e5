"""Texts that are continued together: they join and leave between any two steps, and none changes another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from textmill.generation.incremental_text import StopStringFilter, TextDecoder
from textmill.generation.requests import Done, FinishReason, Request, Token, TopTokens
from textmill.generation.sampling import SamplingRules, SamplingState, choose_next_ids, collect_rules, new_state
from textmill.kernels.transfer_torch import OnItsWay, on_device
from textmill.models.decode_torch import Slots
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

NOT_FINITE = (
    "the model's scores are not finite; its weights are damaged or its training diverged; use an earlier --step"
)
Event = Token | Done


@dataclass(eq=False)
class Row:
    """One text at work."""

    number: int
    request: Request
    room: int
    """New tokens at most."""
    ids: list[int]
    """The prompt and what is new."""
    state: SamplingState
    stream: TextDecoder
    watch: StopStringFilter
    used: int = 0
    """Tokens whose keys and values are in the slot."""
    told: tuple[tuple[float | None, TopTokens], ...] = ()
    """The prompt's log-probabilities, when asked."""
    count: int = 0
    """New tokens that have come."""
    gone: bool = False
    """Whether it is over; a token that was on its way to it is nobody's."""

    def add(self, id_: int, logprob: float | None, top: TopTokens) -> tuple[Token | None, FinishReason | None]:
        """Take one more token; what it gave, and why it is the last one if it is."""
        if id_ < 0 or id_ in self.state.ends:
            return None, "error" if id_ < 0 else "stop"
        self.ids.append(id_)
        self.count += 1
        self.state.add(id_)
        token = Token(id_, self.watch.add(self.stream.add(id_)), logprob, top)
        if self.watch.hit:
            return token, "stop"
        return token, "length" if self.count >= self.room else None

    def done(self, reason: FinishReason, message: str = "") -> Done:
        """The end, with the text that was held back."""
        self.gone = True
        text = "" if self.watch.hit else self.watch.add(self.stream.end())
        text += self.watch.end()
        if self.watch.hit and reason == "length":
            reason = "stop"
        return Done(reason, self.count, text, message, self.told)


@dataclass(frozen=True)
class InFlightRequest:
    """Tokens that were asked for and may not be there yet."""

    rows: list[Row]
    ids_N: Tensor
    coming: OnItsWay
    """The same for the host."""
    logs: dict[int, tuple[float, TopTokens]]

    def ids(self) -> list[int]:
        """The tokens, when they have come."""
        ids: list[int] = self.coming.values()
        return ids


@dataclass
class Batch:
    """The texts at work, in the first slots; a step gives each of them one token."""

    slots: Slots
    tokenizer: TextTokenizer
    positions: int
    """Tokens that the model sees."""
    open_stream: Callable[[Sequence[int]], TextDecoder]
    """Makes a text's stream from its prompt."""
    limit: int
    """Texts at a time; there may be more slots."""
    rows: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    ahead: bool = False
    """Ask for a text's next token before the last one is here: a GPU works while the host writes; a token comes one step later."""
    _rules: SamplingRules | None = None
    _flight: InFlightRequest | None = None

    @property
    def free(self) -> int:
        """Texts that may join."""
        return self.limit - len(self.rows) - len(self.waiting)

    def add(self, number: int, request: Request, room: int) -> None:
        """Let a text join at the next step; there must be a free slot."""
        ends = tuple(dict.fromkeys((self.tokenizer.end, *request.stop_ids)))
        vocab, device = self.tokenizer.vocab, self.slots.device
        state = new_state(request.sample, request.ids, ends=ends, bias=request.bias, vocab=vocab, device=device)
        stream, watch = self.open_stream(request.ids), StopStringFilter(request.stop)
        self.waiting.append(Row(number, request, room, list(request.ids), state, stream, watch))

    def drop(self, number: int, reason: FinishReason, message: str = "") -> Done | None:
        """End a text now; None: it is not there."""
        for row in self.rows:
            if row.number == number:
                done = row.done(reason, message)
                self._close_up()
                return done
        for row in self.waiting:
            if row.number == number:
                self.waiting.remove(row)
                return row.done(reason, message)
        return None

    def clear(self) -> None:
        """Forget every text."""
        self.rows, self.waiting, self._rules, self._flight = [], [], None, None

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Event]]:
        """Let waiting texts join, then one token for every text; what became sure, by number."""
        self._join()
        events: list[tuple[int, Event]] = [(row.number, row.done("length")) for row in self.rows if row.room < 1]
        self._close_up()
        if not self.rows:
            return events
        if self._flight and not self._may_run_ahead():
            events += self._land(self._flight)
        if self.rows:
            self._slide()
            before, self._flight = self._flight, self._launch()
            events += self._land(before) if before else []
            events += self._land(self._flight) if not self.ahead else []
        return events

    def _may_run_ahead(self) -> bool:
        """Whether the next token of every text can be asked for before the last one is known here."""
        return all(
            row.state.new_tokens < row.room and row.used < self.positions and row.state.seen_V is None and row.state.counts_V is None
            for row in self.rows
        )  # fmt: skip

    def _launch(self) -> InFlightRequest:
        """Ask for the next token of every text."""
        scores_NV = self.slots.decode(self._last_ids(), [row.used for row in self.rows])[:, : self.tokenizer.vocab]
        states = [row.state for row in self.rows]
        self._rules = self._rules or collect_rules(states, self.slots.device)
        ids_N = choose_next_ids(scores_NV, states, self._rules)
        logs = self._logs(scores_NV, ids_N)
        for row in self.rows:
            row.used += 1
            row.state.new_tokens += 1
        return InFlightRequest(list(self.rows), ids_N, OnItsWay(ids_N), logs)

    def _last_ids(self) -> Tensor:
        """The last token of every text, on the device; some of them are known only there."""
        flight = self._flight
        if flight and flight.rows == self.rows:
            return flight.ids_N
        places = {id(row): place for place, row in enumerate(flight.rows)} if flight else {}
        known_N = on_device([row.ids[-1] for row in self.rows], self.slots.device)
        if flight is None:
            return known_N
        sources = [places.get(id(row), len(places) + place) for place, row in enumerate(self.rows)]
        return torch.cat([flight.ids_N, known_N])[on_device(sources, self.slots.device)]

    def _land(self, flight: InFlightRequest) -> list[tuple[int, Event]]:
        """Take the tokens that were asked for; texts that are over leave."""
        if flight is self._flight:
            self._flight = None
        events: list[tuple[int, Event]] = []
        for place, (row, id_) in enumerate(zip(flight.rows, flight.ids(), strict=True)):
            if row.gone:
                continue
            token, reason = row.add(id_, *flight.logs.get(place, (None, ())))
            if token is not None:
                events.append((row.number, token))
            if reason is not None:
                events.append((row.number, row.done(reason, NOT_FINITE if reason == "error" else "")))
        self._close_up()
        return events

    def _join(self) -> None:
        """Read the prompts of waiting texts, all but the last token, which the next step takes."""
        self.waiting.sort(key=lambda row: len(row.ids))
        while self.waiting:
            group = [self.waiting.pop(0)]
            while (
                self.waiting
                and not group[-1].request.echo
                and self.slots.together(len(group) + 1, len(self.waiting[0].ids) - 1)
            ):
                group.append(self.waiting.pop(0))
            self._read(group)

    def _read(self, group: list[Row]) -> None:
        """Read prompts into the next slots; one that several texts have is read once and copied."""
        begin, read = len(self.rows), {row.request.ids: row for row in reversed(group)}
        places = {ids: begin + number for number, ids in enumerate(read)}
        self.rows += [*read.values(), *(row for row in group if read[row.request.ids] is not row)]
        self._rules = None
        longest = max(len(row.ids) for row in group)
        hidden_NTE = self.slots.prefill(begin, [row.ids[:-1] for row in read.values()]) if longest > 1 else None
        for place, row in enumerate(self.rows[begin:], begin):
            source, row.used = places[row.request.ids], len(row.ids) - 1
            if source != place:
                self.slots.move(source, place, row.used)
            if row.request.echo:
                row.told = (
                    ((None, ()),) if hidden_NTE is None else self._told(row, hidden_NTE[source - begin, : row.used])
                )

    def _slide(self) -> None:
        """A text that fills the model's view goes on with the last half of it."""
        for place, row in enumerate(self.rows):
            if row.used + 1 > self.positions:
                view = row.ids[-(self.positions // 2) :]
                if len(view) > 1:
                    self.slots.prefill(place, [view[:-1]])
                row.used = len(view) - 1

    def _close_up(self) -> None:
        """Give back the slots of texts that are gone; the last ones move into them, so that the texts at work stand together."""
        stay = [place for place, row in enumerate(self.rows) if not row.gone]
        if (left := len(stay)) < len(self.rows):
            free = [place for place in range(left) if self.rows[place].gone]
            for target, source in zip(free, stay[left - len(free) :], strict=True):
                self.slots.move(source, target, self.rows[source].used)
                self.rows[target] = self.rows[source]
            del self.rows[left:]
            self._rules = None

    def _logs(self, scores_NV: Tensor, ids_N: Tensor) -> dict[int, tuple[float, TopTokens]]:
        """Log-probabilities of the chosen and the likeliest tokens, by row, where they are asked."""
        asking = [place for place, row in enumerate(self.rows) if row.request.logprobs]
        if not asking:
            return {}
        chosen = ids_N[asking].clamp(min=0)
        wanted = [self.rows[place].request.logprobs for place in asking]
        return dict(zip(asking, _tops(scores_NV[asking], chosen, wanted), strict=True))

    def _told(self, row: Row, hidden_TE: Tensor) -> tuple[tuple[float | None, TopTokens], ...]:
        """Log-probabilities of a prompt's own tokens, from the second on."""
        told: list[tuple[float | None, TopTokens]] = [(None, ())]
        for begin in range(0, len(hidden_TE), 128):
            scores_TV = self.slots.net.logits(hidden_TE[begin : begin + 128])[:, : self.tokenizer.vocab]
            found = torch.tensor(row.request.ids[begin + 1 : begin + 1 + len(scores_TV)], device=scores_TV.device)
            told += _tops(scores_TV, found, [row.request.logprobs] * len(scores_TV))
        return tuple(told)


def _tops(scores_NV: Tensor, chosen_N: Tensor, wanted: list[int]) -> list[tuple[float, TopTokens]]:
    """Each row's log-probability of one token, and as many of the likeliest as are wanted."""
    logs_NV = scores_NV.float().log_softmax(1)
    values_NK, ids_NK = logs_NV.topk(min(max(wanted), logs_NV.shape[1]), dim=1)
    rows = zip(
        logs_NV.gather(1, chosen_N[:, None])[:, 0].tolist(), ids_NK.tolist(), values_NK.tolist(), wanted, strict=True
    )
    return [(log, tuple(zip(ids[:count], values[:count], strict=True))) for log, ids, values, count in rows]
