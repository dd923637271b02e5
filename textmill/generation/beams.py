"""Beam search: finds a likely text by extending the most likely partial texts, as transformers does.

With two beams, after "The": the extensions " mill" and " river" are the likeliest, so both run on; in the next step all
extensions of both are compared, and the two likeliest run on. A text that ends is set aside in `finished`. The search
stops when no running text is better than the finished ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from textmill.errors import TextmillError
from textmill.generation.batch import NOT_FINITE
from textmill.generation.incremental_text import StopStringFilter, WindowTextDecoder
from textmill.generation.requests import Done, Request
from textmill.generation.sampling import SamplingState, apply_bias_and_penalties, ban_end_tokens, new_state
from textmill.models.decode_torch import NetSlots
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from textmill.generation.generator import Generator


@dataclass(frozen=True)
class Beam:
    """A partial text: its new tokens, the sum of their log-probabilities, and the slot that holds its KV cache."""

    ids: tuple[int, ...]
    logprob: float
    slot: int = 0

    def score(self) -> float:
        """The mean log-probability of its tokens, by which finished texts are compared."""
        return self.logprob / len(self.ids)


def beam_search(generator: Generator, request: Request, max_new: int) -> list[Done]:
    """Return the different continuations that `sample.beams` beams find, of at most `max_new` tokens, best first."""
    sample = request.sample
    prompt = list(request.ids)
    tokenizer = generator.tokenizer
    ends = tuple(dict.fromkeys((*tokenizer.end_ids, *request.stop_ids)))
    slots = generator.new_slots(sample.beams, len(prompt) + max_new)
    if len(prompt) > 1:
        slots.prefill(0, [prompt[:-1]])
    running: list[Beam] = [Beam((), 0.0)]
    finished: list[Beam] = []
    for number in range(1, max_new + 1):
        logprobs_NV = _next_logprobs(slots, running, request, ends, tokenizer.vocab)
        # Enough candidates that `beams` of them go on even if each beam's likeliest extensions are its ends.
        candidates = _extend_beams(logprobs_NV, running, max(2, 1 + len(ends)) * sample.beams)
        finished += [beam for beam in candidates[: sample.beams] if beam.ids[-1] in ends or number == max_new]
        finished = sorted(finished, key=Beam.score, reverse=True)[: sample.beams]
        running = [beam for beam in candidates if beam.ids[-1] not in ends and number < max_new][: sample.beams]
        if not running or (len(finished) == sample.beams and running[0].score() <= finished[-1].score()):
            break
        slots.reorder([beam.slot for beam in running], len(prompt) + number - 1)
    by_text: dict[str, Done] = {}
    for beam in finished or [Beam((), 0.0)]:
        done = _decode_beam(tokenizer, request, beam, ends)
        by_text.setdefault(done.text, done)
    return list(by_text.values())


def _next_logprobs(slots: NetSlots, running: list[Beam], request: Request, ends: tuple[int, ...], vocab: int) -> Tensor:
    """[N, V]: the log-probabilities of each beam's next token, after bias, penalties and `sample.min_tokens`.

    All beams have the same length. The last token of a beam, or of the prompt, is not in the KV cache yet.
    """
    new_tokens = len(running[0].ids)
    cached_tokens = len(request.ids) + new_tokens - 1
    last_ids_N = torch.tensor([(beam.ids or request.ids)[-1] for beam in running], device=slots.device)
    logits_NV = slots.decode(last_ids_N, [cached_tokens] * len(running))[:, :vocab]
    if not bool(torch.isfinite(logits_NV).all()):
        raise TextmillError(NOT_FINITE)
    logprobs_NV = logits_NV.float().log_softmax(1)
    states = _sampling_states(request, running, ends, logprobs_NV)
    apply_bias_and_penalties(logprobs_NV, states, range(len(states)))
    may_not_end = tuple(range(len(states))) if new_tokens < request.sample.min_tokens else ()
    ban_end_tokens(logprobs_NV, states, may_not_end, {})
    return logprobs_NV


def _sampling_states(
    request: Request, running: list[Beam], ends: tuple[int, ...], logprobs_NV: Tensor
) -> list[SamplingState]:
    """Return the state that the penalties need, for each beam."""
    states = []
    vocab = logprobs_NV.shape[1]
    device = logprobs_NV.device
    for beam in running:
        state = new_state(request.sample, request.ids, ends=ends, bias=request.bias, vocab=vocab, device=device)
        for id_ in beam.ids:
            state.add(id_)
        state.new_tokens = len(beam.ids)
        states.append(state)
    return states


def _extend_beams(logprobs_NV: Tensor, running: list[Beam], count: int) -> list[Beam]:
    """Return the `count` most likely beams that are one token longer."""
    sums_NV = logprobs_NV + torch.tensor([[beam.logprob] for beam in running], device=logprobs_NV.device)
    values, indices = sums_NV.flatten().topk(min(count, sums_NV.numel()))
    vocab = logprobs_NV.shape[1]
    pairs = [(value, *divmod(index, vocab)) for value, index in zip(values.tolist(), indices.tolist(), strict=True)]
    return [Beam((*running[row].ids, id_), value, row) for value, row, id_ in pairs]


def _decode_beam(tokenizer: TextTokenizer, request: Request, beam: Beam, ends: tuple[int, ...]) -> Done:
    decoder = WindowTextDecoder(tokenizer, list(request.ids))
    stops = StopStringFilter(request.stop)
    ended = bool(beam.ids) and beam.ids[-1] in ends
    text = ""
    for id_ in beam.ids[:-1] if ended else beam.ids:
        text += stops.add(decoder.add(id_))
        if stops.hit:
            return Done("stop", decoder.tokens, text)
    text += stops.add(decoder.end()) + stops.end()
    return Done("stop" if ended or stops.hit else "length", decoder.tokens, text)
