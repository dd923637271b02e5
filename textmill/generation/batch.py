"""Decodes a batch of texts (continuous batching): texts join and leave between any two steps, and are independent.

The running texts are in the first slots of the KV cache. A step with A and B running and C waiting:

    join       read C's prompt, without its last token, into the third slot (prefill); what it has in common with
               another text is copied (prefix cache)
    decode     one forward pass over the last tokens of A, B and C; choose the next token of each
    receive    append the three tokens to their texts; B ends
    compact    move C into B's slot

On a GPU the batch runs ahead: step 2 starts the computation of its tokens first, from those of step 1, which only the
GPU knows yet. Then it receives the tokens of step 1, and the host turns them into text while the GPU computes.

Shapes in names: N texts, V vocabulary, T prompt tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.devices import PendingCopy, copy_to_device
from textmill.generation.constraints import TokenTable
from textmill.generation.incremental_text import StopStringFilter, TextDecoder
from textmill.generation.requests import Done, FinishReason, Request, Token, TopTokens, max_new_tokens_served
from textmill.generation.sampling import (
    CapturedSampling,
    SamplingRules,
    SamplingState,
    choose_next_ids,
    collect_rules,
    new_state,
)
from textmill.models.base_torch import BaseNet
from textmill.models.decode_torch import NetSlots
from textmill.ranges import count_common
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

NOT_FINITE = (
    "the model's logits are not finite; its weights are damaged or its training diverged; use an earlier --step"
)
PROMPT_CHUNK = 128
"""Prompt tokens whose logits are computed at once."""

Event = Token | Done


@dataclass(frozen=True)
class PendingTokens:
    """The tokens of one step, which the device may still be computing."""

    texts: list[RunningText]
    ids_N: Tensor
    host_copy: PendingCopy
    """The same ids on their way to the host."""
    logprobs: dict[int, tuple[float, TopTokens]]
    """By index in `texts`."""


@dataclass
class RunningBatch:
    """The running texts, in the first slots; each step adds one token to every text."""

    slots: NetSlots
    tokenizer: TextTokenizer
    positions: int
    """The model's context length."""
    new_decoder: Callable[[Sequence[int]], TextDecoder]
    """Returns a text decoder for a prompt."""
    tokens: TokenTable
    """For constrained texts."""
    limit: int
    """Texts at a time; there may be more slots."""
    prefixes: PrefixCache | None = None
    """Texts that have ended, for prompts that begin like them; None: every prompt is computed from its start."""
    running: list[RunningText] = field(default_factory=list)
    """By slot."""
    waiting: list[RunningText] = field(default_factory=list)
    """Texts that join at the next step."""
    run_ahead: bool = False
    """Start a step before the tokens of the previous one are received."""
    captured_sampling: CapturedSampling | None = None
    """Set if the slots' steps are CUDA graphs."""
    _rules: SamplingRules | None = None
    """The sampling rules of the running texts; None if texts have joined or left since they were collected."""
    _last: PendingTokens | None = None
    """The tokens of the previous step."""
    _pending: PendingTokens | None = None
    """The same, if they are not received yet."""

    @property
    def free(self) -> int:
        """Number of texts that may join."""
        return self.limit - len(self.running) - len(self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether no text runs or waits."""
        return not self.running and not self.waiting

    def check(self, request: Request) -> None:
        """Raise if the request cannot be done."""
        max_new_tokens_served(request, self.positions, self.tokenizer.vocab)

    def add(self, number: int, request: Request) -> None:
        """Let a text join at the next step; there must be a free slot."""
        max_new = max_new_tokens_served(request, self.positions, self.tokenizer.vocab)
        ends = tuple(dict.fromkeys((*self.tokenizer.end_ids, *request.stop_ids)))
        vocab = self.tokenizer.vocab
        device = self.slots.device
        sample = request.sample
        if request.grammar:  # it decides when the text may end
            sample = sample.model_copy(update={"min_tokens": 0})
        state = new_state(sample, request.ids, ends=ends, bias=request.bias, vocab=vocab, device=device)
        if request.grammar:
            state.constraint = self.tokens.new_constraint(request.grammar, ends)
        decoder = self.new_decoder(request.ids)
        stops = StopStringFilter(request.stop)
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
        self.running = []
        self.waiting = []
        self._rules = None
        self._pending = None
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
        if self._pending is not None and not self._can_run_ahead():
            events += self._receive(self._pending)
            self._compact()
            self._pending = None
            if not self.running:
                return events
        self._slide()
        logits_NV = self._decode()
        previous = self._pending
        # The host reads penalties' and constraints' last tokens while the GPU computes the logits after them.
        if previous is not None and any(text.state.needs_last_token for text in self.running):
            events += self._receive(previous)
            previous = None
        tokens = self._choose(logits_NV)
        self._last = tokens
        if self.run_ahead:
            self._pending = tokens
        else:
            previous = tokens
        if previous is not None:
            events += self._receive(previous)
        self._compact()
        return events

    def _join(self) -> None:
        """Prefill the prompts of all waiting texts, as many at once as fit into one prefill."""
        self.waiting.sort(key=lambda text: len(text.ids))
        if self.prefixes is not None:
            self.waiting = [text for text in self.waiting if not self._reuse(text, self.prefixes)]
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
        """Read prompts into the next slots, each without its last token, which the next step decodes.

        Texts with the same prompt share one prefill. Prompts p, q and p with two texts running: slots 2 and 3 get p and
        q, and slot 4 gets a copy of slot 2.
        """
        first_slot = len(self.running)
        first_with_prompt: dict[tuple[int, ...], RunningText] = {}
        for text in group:
            first_with_prompt.setdefault(text.request.ids, text)
        repeated = [text for text in group if first_with_prompt[text.request.ids] is not text]
        self.running += [*first_with_prompt.values(), *repeated]
        self._rules = None
        contexts = [text.ids[:-1] for text in first_with_prompt.values()]
        hidden_NTE = self.slots.prefill(first_slot, contexts) if any(contexts) else None
        rows = {ids: row for row, ids in enumerate(first_with_prompt)}
        for slot, text in enumerate(self.running[first_slot:], first_slot):
            row = rows[text.request.ids]
            text.cached = len(text.ids) - 1
            if first_slot + row != slot:
                self.slots.move(first_slot + row, slot, text.cached)
            if text.request.echo:
                hidden_TE = None if hidden_NTE is None else hidden_NTE[row, : text.cached]
                text.prompt_logprobs = compute_prompt_logprobs(
                    self.slots.net, self.tokenizer.vocab, text.request, hidden_TE
                )

    def _reuse(self, text: RunningText, prefixes: PrefixCache) -> bool:
        """Let a text join whose prompt begins like another text, and read the rest of it; False if there is none."""
        context = text.ids[:-1]
        if text.request.echo or len(context) < self.slots.least_reused:
            return False
        common, saved = prefixes.find(context)
        source: int | None = None
        for slot, other in enumerate(self.running):
            if (count := count_common(context, other.valid_ids(self.slots.least_reused))) > common:
                common, source = count, slot
        if common < self.slots.least_reused:
            return False
        slot = len(self.running)
        self.running.append(text)
        self._rules = None
        if source is not None:
            self.slots.move(source, slot, common)
        elif saved is not None:
            self.slots.restore(slot, saved, common)
        if common < len(context):
            self.slots.resume(slot, common, context[common:])
        text.cached = len(context)
        text.reused = common
        return True

    def _can_run_ahead(self) -> bool:
        """Whether the next step's logits need the pending tokens on the device only, not on the host, which must know
        them for texts that end with them or fill the context."""
        return all(text.state.new_tokens < text.max_new and text.cached < self.positions for text in self.running)

    def _slide(self) -> None:
        """Continue each text that fills the context with the last half of it."""
        for slot, text in enumerate(self.running):
            if text.cached + 1 > self.positions:
                context = text.ids[-(self.positions // 2) :]
                if len(context) > 1:
                    self.slots.prefill(slot, [context[:-1]])
                text.cached = len(context) - 1

    def _decode(self) -> Tensor:
        """Start the computation of the logits of every text's next token."""
        cached = [text.cached for text in self.running]
        return self.slots.decode(self._last_ids(), cached)[:, : self.tokenizer.vocab]

    def _choose(self, logits_NV: Tensor) -> PendingTokens:
        """Start the choice of every text's next token."""
        states = [text.state for text in self.running]
        self._rules = self._rules or collect_rules(states, self.slots.device)
        ids_N = choose_next_ids(logits_NV, states, self._rules, self.captured_sampling)
        logprobs = self._compute_logprobs(logits_NV, ids_N)
        for text in self.running:
            text.cached += 1
            text.state.new_tokens += 1
        return PendingTokens(list(self.running), ids_N, PendingCopy(ids_N), logprobs)

    def _last_ids(self) -> Tensor:
        """Return every text's last token as a device tensor; pending tokens are known only there.

        A and B are pending, and B and C run: B's token is the second of the pending ones, C's is the last of its ids.
        """
        if self._last is not None and self._last.texts == self.running:
            return self._last.ids_N
        pending = self._pending
        known_N = copy_to_device([text.ids[-1] for text in self.running], self.slots.device)
        if pending is None:
            return known_N
        pending_index = {id(text): index for index, text in enumerate(pending.texts)}
        first_known = len(pending.texts)  # in the concatenation of pending and known ids
        sources = [pending_index.get(id(text), first_known + index) for index, text in enumerate(self.running)]
        return torch.cat([pending.ids_N, known_N])[copy_to_device(sources, self.slots.device)]

    def _compute_logprobs(self, logits_NV: Tensor, ids_N: Tensor) -> dict[int, tuple[float, TopTokens]]:
        """Return log-probabilities of the chosen and the most likely tokens, for the texts that ask for them."""
        indices = [index for index, text in enumerate(self.running) if text.request.logprobs]
        if not indices:
            return {}
        chosen = ids_N[indices].clamp(min=0)
        counts = [self.running[index].request.logprobs for index in indices]
        return dict(zip(indices, top_logprobs(logits_NV[indices], chosen, counts), strict=True))

    def _receive(self, tokens: PendingTokens) -> list[tuple[int, Event]]:
        """Wait for a step's tokens, and append them to their texts, of which some may end."""
        events: list[tuple[int, Event]] = []
        for index, (text, id_) in enumerate(zip(tokens.texts, tokens.host_copy.values(), strict=True)):
            if text.finished:
                continue
            logprob, top = tokens.logprobs.get(index, (None, ()))
            for event in text.receive(id_, logprob, top):
                events.append((text.number, event))
        return events

    def _compact(self) -> None:
        """Remove finished texts, and move the last texts into their slots: [A, (B), C, D] becomes [A, D, C]."""
        finished = [slot for slot, text in enumerate(self.running) if text.finished]
        if not finished:
            return
        if self.prefixes is not None:
            for slot in finished:
                ids = self.running[slot].valid_ids(self.slots.least_reused)
                if len(ids) and self.prefixes.is_new(ids):
                    self.prefixes.add(ids, self.slots.save(slot, len(ids)))
        count = len(self.running) - len(finished)
        free = [slot for slot in finished if slot < count]
        sources = [slot for slot in range(count, len(self.running)) if not self.running[slot].finished]
        for target, source in zip(free, sources, strict=True):
            self.slots.move(source, target, self.running[source].cached)
            self.running[target] = self.running[source]
        del self.running[count:]
        self._rules = None


@dataclass(eq=False)
class RunningText:
    """One text while it is generated: its tokens so far, how they become text, and when it ends."""

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
    reused: int = 0
    """Those of them that were copied from another text."""
    prompt_logprobs: tuple[tuple[float | None, TopTokens], ...] = ()
    """With `echo`: the prompt's log-probabilities."""
    received: int = 0
    """New tokens in `ids`. `state.new_tokens` may be one more: a token that the device is still computing."""
    finished: bool = False
    """Whether the text has ended; tokens that are still pending for it are discarded."""

    def valid_ids(self, least: int) -> list[int]:
        """The tokens whose keys and values are in the slot from its start; none if they are fewer than `least`.

        A text that has slid has others there.
        """
        has_slid = self.cached < len(self.ids) - 1
        return [] if has_slid or self.cached < least else self.ids[: self.cached]

    def receive(self, id_: int, logprob: float | None, top: TopTokens) -> list[Event]:
        """Append a token; return its event, followed by Done if the text ends with it.

        -1 means that the model's logits were not finite.
        """
        if id_ < 0:
            return [self.finish("error", NOT_FINITE)]
        constraint = self.state.constraint
        if id_ in self.state.ends:
            problem = constraint.problem if constraint is not None else ""
            return [self.finish("error", problem) if problem else self.finish("stop")]
        self.ids.append(id_)
        self.received += 1
        self.state.add(id_)
        token = Token(id_, self.stops.add(self.decoder.add(id_)), logprob, top)
        if constraint is not None and constraint.problem:
            return [token, self.finish("error", constraint.problem)]
        if self.stops.hit or (constraint is not None and constraint.is_complete):
            return [token, self.finish("stop")]
        if self.received >= self.max_new:
            return [token, self.finish("length")]
        return [token]

    def finish(self, reason: FinishReason, message: str = "") -> Done:
        """End the text and return its last event, with the text that was held back."""
        self.finished = True
        text = "" if self.stops.hit else self.stops.add(self.decoder.end())
        text += self.stops.end()
        if self.stops.hit and reason == "length":  # the held-back text completed a stop string
            reason = "stop"
        return Done(reason, self.received, text, message, self.prompt_logprobs, self.reused)


def top_logprobs(logits_NV: Tensor, chosen_N: Tensor, counts: list[int]) -> list[tuple[float, TopTokens]]:
    """Return each row's log-probability of the chosen token, and its `counts` most likely tokens."""
    logprobs_NV = logits_NV.float().log_softmax(1)
    values_NK, ids_NK = logprobs_NV.topk(min(max(counts), logprobs_NV.shape[1]), dim=1)
    chosen = logprobs_NV.gather(1, chosen_N[:, None])[:, 0].tolist()
    rows = zip(chosen, ids_NK.tolist(), values_NK.tolist(), counts, strict=True)
    return [(logprob, tuple(zip(ids[:count], values[:count], strict=True))) for logprob, ids, values, count in rows]


def compute_prompt_logprobs(
    net: BaseNet, vocab: int, request: Request, hidden_TE: Tensor | None
) -> tuple[tuple[float | None, TopTokens], ...]:
    """Return log-probabilities of a prompt's tokens; the first has none.

    `hidden_TE` are the hidden states of all prompt tokens but the last; None if there is a single token.
    """
    found: list[tuple[float | None, TopTokens]] = [(None, ())]
    if hidden_TE is None:
        return tuple(found)
    for begin in range(0, len(hidden_TE), PROMPT_CHUNK):
        logits_TV = net.logits(hidden_TE[begin : begin + PROMPT_CHUNK])[:, :vocab]
        next_ids = request.ids[begin + 1 : begin + 1 + len(logits_TV)]
        chosen_T = torch.tensor(next_ids, device=logits_TV.device)
        found += top_logprobs(logits_TV, chosen_T, [request.logprobs] * len(logits_TV))
    return tuple(found)


class SavedText(NamedTuple):
    """The tokens of a text, and their keys and values as `NetSlots.save` returns them."""

    ids: NDArray[np.int64]
    memory: Tensor


class PrefixCache:
    """Keys and values of texts that have ended, for prompts that begin like them, such as the next turn of a chat.

    They have at most `limit` tokens together; the one unused longest comes first, and leaves first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._texts: list[SavedText] = []

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.ids) for text in self._texts)

    def find(self, ids: Sequence[int]) -> tuple[int, Tensor | None]:
        """The most tokens that a text has in common with these from the start, and its keys and values."""
        wanted = np.array(ids, np.int64)
        counts = [count_common(wanted, text.ids) for text in self._texts]
        if not any(counts):
            return 0, None
        best = int(np.argmax(counts))
        self._texts.append(self._texts.pop(best))
        return counts[best], self._texts[-1].memory

    def is_new(self, ids: Sequence[int]) -> bool:
        """Whether a text fits, and no other begins with it."""
        new = np.array(ids, np.int64)
        return len(ids) <= self.limit and all(count_common(new, text.ids) < len(ids) for text in self._texts)

    def add(self, ids: Sequence[int], memory: Tensor) -> None:
        """Keep a text instead of those that it begins with, and of the oldest ones if there are too many tokens."""
        new = np.array(ids, np.int64)
        self._texts = [text for text in self._texts if count_common(new, text.ids) < len(text.ids)]
        self._texts.append(SavedText(new, memory))
        while self.tokens > self.limit:
            self._texts.pop(0)
