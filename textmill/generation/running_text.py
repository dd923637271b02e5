"""One text while it is generated: its tokens so far, how they become text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from textmill.generation.incremental_text import StopStringFilter, TextDecoder
from textmill.generation.requests import Done, FinishReason, Request, Token, TopTokens
from textmill.generation.sampling import SamplingState

NOT_FINITE = (
    "the model's logits are not finite; its weights are damaged or its training diverged; use an earlier --step"
)
Event = Token | Done


@dataclass(eq=False)
class RunningText:
    """One text of a batch."""

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
    received: int = 0
    """New tokens in `ids`. `state.new_tokens` may be one more: a token that the device is still computing."""
    finished: bool = False
    """Whether the text has ended; tokens that are still pending for it are discarded."""

    def receive(self, id_: int, logprob: float | None, top: TopTokens) -> list[Event]:
        """Append a token; return its event, followed by Done if the text ends with it.

        -1 means that the model's logits were not finite.
        """
        if id_ < 0:
            return [self.finish("error", NOT_FINITE)]
        if id_ in self.state.ends:
            return [self.finish("stop")]
        self.ids.append(id_)
        self.received += 1
        self.state.add(id_)
        token = Token(id_, self.stops.add(self.decoder.add(id_)), logprob, top)
        if self.stops.hit:
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
        return Done(reason, self.received, text, message, self.prompt_logprobs)
