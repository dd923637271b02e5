"""Decodes a batch of texts (continuous batching): texts join and leave between any two steps, and are independent.

Shapes in names: N texts, V vocabulary, K most likely tokens, T prompt tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from textmill.generation.incremental_text import StopStringFilter, TextDecoder
from textmill.generation.requests import Done, FinishReason, Request, Token, TopTokens
from textmill.generation.sampling import SamplingRules, SamplingState, choose_next_ids, collect_rules, new_state
from textmill.kernels.transfer_torch import PendingCopy, copy_to_device
from textmill.models.decode_torch import Slots
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

NOT_FINITE = (
    "the model's logits are not finite; its weights are damaged or its training diverged; use an earlier --step"
)
PROMPT_CHUNK = 128
"""Prompt tokens whose logits are computed at once, for `echo`."""
Event = Token | Done


@dataclass(eq=False)
class RunningText:
    """One text of the batch."""

    number: int
    """The request's number."""
    request: Request
    max_new: int
    ids: list[int]
    """The prompt and the new tokens."""
    state: SamplingState
    decoder: TextDecoder
    stops: StopStringFilter
    cached: int = 0
    """Tokens whose keys and values are in the slot."""
    prompt_logprobs: tuple[tuple[float | None, TopTokens], ...] = ()
    """With `echo`: the prompt's log-probabilities."""
    new_tokens: int = 0
    """New tokens received."""
    finished: bool = False
    """Whether the text has ended; tokens that are still pending for it are discarded."""

    def add(self, id_: int, logprob: float | None, top: TopTokens) -> tuple[Token | None, FinishReason | None]:
        """Append a token; return its event, and the reason if the text ends with it."""
        if id_ < 0 or id_ in self.state.ends:
            return None, "error" if id_ < 0 else "stop"
        self.ids.append(id_)
        self.new_tokens += 1
        self.state.add(id_)
        token = Token(id_, self.stops.add(self.decoder.add(id_)), logprob, top)
        if self.stops.hit:
            return token, "stop"
        return token, "length" if self.new_tokens >= self.max_new else None

    def finish(self, reason: FinishReason, message: str = "") -> Done:
        """End the text and return its last event, with the text that was held back."""
        self.finished = True
        text = "" if self.stops.hit else self.stops.add(self.decoder.end())
        text += self.stops.end()
        if self.stops.hit and reason == "length":
            reason = "stop"
        return Done(reason, self.new_tokens, text, message, self.prompt_logprobs)


@dataclass(frozen=True)
class PendingTokens:
    """The tokens of one step, which the device may still be computing."""

    texts: list[RunningText]
    ids_N: Tensor
    host_copy: PendingCopy
    """The same ids on their way to the host."""
    logprobs: dict[int, tuple[float, TopTokens]]
    """By index in `texts`."""

    def wait(self) -> list[int]:
        """Return the ids once the copy is complete."""
        ids: list[int] = self.host_copy.values()
        return ids


@dataclass
class Batch:
    """The running texts, in the first slots; each step adds one token to every text."""

    slots: Slots
    tokenizer: TextTokenizer
    positions: int
    """The model's context length."""
    new_decoder: Callable[[Sequence[int]], TextDecoder]
    """Returns a text decoder for a prompt."""
    limit: int
    """Texts at a time; there may be more slots."""
    running: list[RunningText] = field(default_factory=list)
    waiting: list[RunningText] = field(default_factory=list)
    run_ahead: bool = False
    """Start a step before the tokens of the previous one are read: a GPU works while the host handles the text."""
    _rules: SamplingRules | None = None
    _pending: PendingTokens | None = None

    @property
    def free(self) -> int:
        """Number of texts that may join."""
        return self.limit - len(self.running) - len(self.waiting)

    def add(self, number: int, request: Request, max_new: int) -> None:
        """Let a text join at the next step; there must be a free slot."""
        ends = tuple(dict.fromkeys((self.tokenizer.end, *request.stop_ids)))
        vocab, device = self.tokenizer.vocab, self.slots.device
        state = new_state(request.sample, request.ids, ends=ends, bias=request.bias, vocab=vocab, device=device)
        decoder, stops = self.new_decoder(request.ids), StopStringFilter(request.stop)
        self.waiting.append(RunningText(number, request, max_new, list(request.ids), state, decoder, stops))

    def drop(self, number: int, reason: FinishReason, message: str = "") -> Done | None:
        """End a text now; None if it is not in the batch."""
        for text in self.running:
            if text.number == number:
                done = text.finish(reason, message)
                self._compact()
                return done
        for text in self.waiting:
            if text.number == number:
                self.waiting.remove(text)
                return text.finish(reason, message)
        return None

    def fail(self, message: str) -> dict[int, Done]:
        """Remove every text after a failed step; return their last events by number."""
        ends = {text.number: text.finish("error", message) for text in (*self.running, *self.waiting)}
        self.running, self.waiting, self._rules, self._pending = [], [], None, None
        return ends

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Event]]:
        """Let waiting texts join, then decode one token for every text; return the events with the texts' numbers."""
        self._join()
        events: list[tuple[int, Event]] = [
            (text.number, text.finish("length")) for text in self.running if text.max_new < 1
        ]
        self._compact()
        if not self.running:
            return events
        if self._pending and not self._can_run_ahead():
            events += self._receive(self._pending)
        if self.running:
            self._slide()
            before, self._pending = self._pending, self._decode()
            events += self._receive(before) if before else []
            events += self._receive(self._pending) if not self.run_ahead else []
        return events

    def _can_run_ahead(self) -> bool:
        """Whether the next step can start before the last tokens are known on the host."""
        return all(
            text.state.new_tokens < text.max_new
            and text.cached < self.positions
            and text.state.seen_V is None
            and text.state.counts_V is None
            for text in self.running
        )

    def _decode(self) -> PendingTokens:
        """Start the computation of every text's next token."""
        cached = [text.cached for text in self.running]
        logits_NV = self.slots.decode(self._last_ids(), cached)[:, : self.tokenizer.vocab]
        states = [text.state for text in self.running]
        self._rules = self._rules or collect_rules(states, self.slots.device)
        ids_N = choose_next_ids(logits_NV, states, self._rules)
        logprobs = self._compute_logprobs(logits_NV, ids_N)
        for text in self.running:
            text.cached += 1
            text.state.new_tokens += 1
        return PendingTokens(list(self.running), ids_N, PendingCopy(ids_N), logprobs)

    def _last_ids(self) -> Tensor:
        """Return every text's last token as a device tensor; pending ones are known only there."""
        pending = self._pending
        if pending and pending.texts == self.running:
            return pending.ids_N
        indices = {id(text): index for index, text in enumerate(pending.texts)} if pending else {}
        known_N = copy_to_device([text.ids[-1] for text in self.running], self.slots.device)
        if pending is None:
            return known_N
        sources = [indices.get(id(text), len(indices) + index) for index, text in enumerate(self.running)]
        return torch.cat([pending.ids_N, known_N])[copy_to_device(sources, self.slots.device)]

    def _receive(self, pending: PendingTokens) -> list[tuple[int, Event]]:
        """Wait for a step's tokens, add them to their texts, and remove texts that end."""
        if pending is self._pending:
            self._pending = None
        events: list[tuple[int, Event]] = []
        for index, (text, id_) in enumerate(zip(pending.texts, pending.wait(), strict=True)):
            if text.finished:
                continue
            token, reason = text.add(id_, *pending.logprobs.get(index, (None, ())))
            if token is not None:
                events.append((text.number, token))
            if reason is not None:
                events.append((text.number, text.finish(reason, NOT_FINITE if reason == "error" else "")))
        self._compact()
        return events

    def _join(self) -> None:
        """Prefill the prompts of waiting texts without their last token, which the next step decodes."""
        self.waiting.sort(key=lambda text: len(text.ids))
        while self.waiting:
            group = [self.waiting.pop(0)]
            while (
                self.waiting
                and not group[-1].request.echo
                and self.slots.fits_one_prefill(len(group) + 1, len(self.waiting[0].ids) - 1)
            ):
                group.append(self.waiting.pop(0))
            self._prefill(group)

    def _prefill(self, group: list[RunningText]) -> None:
        """Prefill prompts into the next slots; texts with the same prompt share one prefill."""
        first, distinct = len(self.running), {text.request.ids: text for text in reversed(group)}
        slots = {ids: first + number for number, ids in enumerate(distinct)}
        self.running += [*distinct.values(), *(text for text in group if distinct[text.request.ids] is not text)]
        self._rules = None
        longest = max(len(text.ids) for text in group)
        contexts = [text.ids[:-1] for text in distinct.values()]
        hidden_NTE = self.slots.prefill(first, contexts) if longest > 1 else None
        for slot, text in enumerate(self.running[first:], first):
            source, text.cached = slots[text.request.ids], len(text.ids) - 1
            if source != slot:
                self.slots.move(source, slot, text.cached)
            if text.request.echo:
                hidden_TE = None if hidden_NTE is None else hidden_NTE[source - first, : text.cached]
                text.prompt_logprobs = self._compute_prompt_logprobs(text, hidden_TE)

    def _slide(self) -> None:
        """Continue each text that fills the context with the last half of it."""
        for slot, text in enumerate(self.running):
            if text.cached + 1 > self.positions:
                context = text.ids[-(self.positions // 2) :]
                if len(context) > 1:
                    self.slots.prefill(slot, [context[:-1]])
                text.cached = len(context) - 1

    def _compact(self) -> None:
        """Remove finished texts, and move the last texts into their slots, so that the first slots stay in use."""
        kept = [slot for slot, text in enumerate(self.running) if not text.finished]
        if (count := len(kept)) < len(self.running):
            free = [slot for slot in range(count) if self.running[slot].finished]
            for target, source in zip(free, kept[count - len(free) :], strict=True):
                self.slots.move(source, target, self.running[source].cached)
                self.running[target] = self.running[source]
            del self.running[count:]
            self._rules = None

    def _compute_logprobs(self, logits_NV: Tensor, ids_N: Tensor) -> dict[int, tuple[float, TopTokens]]:
        """Return log-probabilities of the chosen and the most likely tokens, for the texts that ask for them."""
        indices = [index for index, text in enumerate(self.running) if text.request.logprobs]
        if not indices:
            return {}
        chosen = ids_N[indices].clamp(min=0)
        counts = [self.running[index].request.logprobs for index in indices]
        return dict(zip(indices, _top_logprobs(logits_NV[indices], chosen, counts), strict=True))

    def _compute_prompt_logprobs(
        self, text: RunningText, hidden_TE: Tensor | None
    ) -> tuple[tuple[float | None, TopTokens], ...]:
        """Return log-probabilities of a prompt's tokens; the first has none. `hidden_TE` is None for a single token."""
        found: list[tuple[float | None, TopTokens]] = [(None, ())]
        for begin in range(0, 0 if hidden_TE is None else len(hidden_TE), PROMPT_CHUNK):
            assert hidden_TE is not None
            logits_TV = self.slots.net.logits(hidden_TE[begin : begin + PROMPT_CHUNK])[:, : self.tokenizer.vocab]
            next_ids = text.request.ids[begin + 1 : begin + 1 + len(logits_TV)]
            chosen = torch.tensor(next_ids, device=logits_TV.device)
            found += _top_logprobs(logits_TV, chosen, [text.request.logprobs] * len(logits_TV))
        return tuple(found)


def _top_logprobs(logits_NV: Tensor, chosen_N: Tensor, counts: list[int]) -> list[tuple[float, TopTokens]]:
    """Return each row's log-probability of the chosen token, and its `counts` most likely tokens."""
    logprobs_NV = logits_NV.float().log_softmax(1)
    values_NK, ids_NK = logprobs_NV.topk(min(max(counts), logprobs_NV.shape[1]), dim=1)
    chosen = logprobs_NV.gather(1, chosen_N[:, None])[:, 0].tolist()
    rows = zip(chosen, ids_NK.tolist(), values_NK.tolist(), counts, strict=True)
    return [(logprob, tuple(zip(ids[:count], values[:count], strict=True))) for logprob, ids, values, count in rows]
