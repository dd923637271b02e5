"""The planning rules: settings from facts about the text and the machine, and the minutes to use. Pure arithmetic.

`plan_for` is the entry point. For each width it computes how many epochs of the text fit in the time, and chooses the
largest net that still sees the text often enough. Batch, rates and weight decay follow from that (`auto_settings`).
docs/autopilot.md has the rules, bench/LOG.md the measurements behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from textmill.engines import MANY_CORES, shortest_compiled_run
from textmill.engines.distillation import generations_cost
from textmill.models import open_family
from textmill.tokens.vocabulary.algorithms import PIECE_CHARACTERS
from textmill.training.auto_preset import MAX_EPOCHS, auto_settings, best_batch_tokens, target_epochs

GENERATIONS = 2
"""As many if there is time for all: the second one is better than the first; more are not measured."""
SPARE_TIME = 1.5
"""As much time as they are expected to need must be there, since two generations that both have to end sooner are worse
than one; what is not needed is not used."""
WIDTHS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1600)
"""Widths to choose from; a net has one layer for 64 channels, and at least two."""
VOCABS = (512, 1024, 2048, 4096, 8192, 16384, 32000)
BYTES_PER_ENTRY = 800
MANY_BYTES_PER_ENTRY = 1600
"""Bytes of text for each vocabulary entry, so that most entries are seen often enough to be learnt. The second, if time
is left over: a smaller vocabulary then only makes overfitting harder."""
FLOPS_PER_PARAMETER = 6
"""Multiplications and additions of forward and backward, for each parameter and token."""
MAX_PARAMETERS_PER_TOKEN = 25
"""The largest net for a text: more parameters for each unique token do not help."""
REPEATED_EPOCHS = 8
"""From this many epochs on, dropout and a head that has the weights of the embeddings are used against overfitting. In
fewer epochs, both cost loss."""
DROPOUT = 0.1
MIN_HELD_OUT_BYTES = 20_000
MIN_HELD_OUT_DOCUMENTS = 5
"""What each of the valid and test splits has at least, as long as that is not more than a tenth of the text."""
EMBEDDING_RATE_FACTOR = 4.0
"""If the head has weights of its own: the learning rate of the embeddings, as a multiple of the head's."""
MASKED = 0.15
"""The fraction of tokens that a model for masked tokens predicts; its head is computed for these only."""
MAX_LENGTH = 1024
MASKED_LENGTH = 128
"""The longest samples; those of masked tokens are as long as in the first nine tenths of BERT's training."""
MIN_VOCAB = 2048
MANY_CHARACTERS_VOCAB = 8192
"""The smallest WordPiece vocabularies: for alphabets, and for scripts with thousands of characters."""
MANY_CHARACTERS = ("Cjk", "Hangul", "Hiragana", "Katakana")
MIN_SECTION = 1000
"""Characters of a document that plain text is cut into, at least: enough for several sentences."""
COMPILE_SECONDS = 30.0
FEW_CORES_SECONDS = 60.0
"""On a GPU, what compiling takes, and what it takes with few cores."""
EAGER_SPEED = 0.5
LLAMA_EAGER_SPEED = 0.3
"""The speed of a net that is not compiled, relative to a compiled one; a Llama's steps as CUDA graphs have 0.60 to 0.64
of a GPT-2's tokens/s."""
LLAMA_EPOCHS = 5
"""A Llama that is not compiled on a GPU is better than a GPT-2 from so many epochs on, although it is slower: it was
worse in 2.3 epochs and better in 8.6."""
SMALL_EAGER_GAIN = 1.25
"""A small net that is not compiled reaches this times `EAGER_SPEED`, since its steps are CUDA graphs."""
MIN_BATCH_TOKENS = 512
"""Steps of fewer tokens hardly take less time."""
MAX_MINUTES = {"cpu": 5.0, "cuda": 30.0}
"""The most minutes of a plan if the user names none."""
STAGE_RATES: Mapping[str, float] = {"prepare": 8e6, "tokenize": 3e6}
"""Bytes of text that one core handles in a second; several cores handle as much as the root of their number."""
FIT_RATE = 2.5e6
"""Bytes of text in a second that a vocabulary is fitted on, which uses one core for most of its time."""
FITTED_BYTES_PER_MINUTE = 5e6
FITTED_BYTES = 20e6
MIN_FITTED_DOCUMENTS = 2000
"""A vocabulary is fitted on about this much text, at most the second: more takes time and hardly changes it
(bench/LOG.md). Fewer documents are all used, unless they are so long that pieces of them are sampled."""


@dataclass(frozen=True)
class TextProfile:
    """A text, as far as planning needs it."""

    bytes: int
    """Bytes of text, markup and compression not counted."""
    documents: int
    """Estimated number of documents."""
    duplicates: float
    """The fraction of the sample's bytes in documents that occurred before."""
    bytes_per_token: Mapping[int, float]
    """By vocabulary size, on documents that the trial vocabulary was not fitted on."""
    scripts: Mapping[str, float]
    """The fraction of letters in each script, the most frequent first."""
    section: int = 0
    """`corpus.section_chars` for plain text; 0: documents are given."""
    cut_records: bool = False
    """Whether records are cut into sections too, as plain text is."""
    typical_document_bytes: float = 0.0
    """Mean bytes of the documents, weighted by their bytes: where most of the text is, even if most documents are
    short."""
    split_by: str = "document"
    """`corpus.split_by`: position or file where documents are sections of longer texts, field:NAME where many documents
    have the same value of a field such as author."""
    near_duplicates: float = 0.0
    """The fraction of the sample's bytes in documents that nearly repeat an earlier one."""
    scans: str = ""
    """The scanned documents of the sample, if it has any: their number and first names."""

    @property
    def held_out_percent(self) -> int:
        """How much of the text each of the valid and test splits gets: text that the net does not learn from."""
        needed = max(MIN_HELD_OUT_BYTES / max(1, self.bytes), MIN_HELD_OUT_DOCUMENTS / self.different_documents)
        return min(10, max(1, math.ceil(100 * needed)))

    @property
    def train_bytes(self) -> float:
        """Bytes of text in the train split, duplicates removed."""
        return self.bytes * (1 - self.held_out_percent / 50) * (1 - self.duplicates)

    @property
    def different_documents(self) -> int:
        """Estimated number of documents, duplicates removed."""
        return max(1, round(self.documents * (1 - self.duplicates)))

    @property
    def document_bytes(self) -> float:
        """Mean bytes of a document."""
        return self.bytes / max(1, self.documents)


@dataclass(frozen=True)
class MachineProfile:
    """A machine, as far as planning needs it."""

    device: str
    """cpu or cuda."""
    name: str
    cores: int
    memory: int
    """Bytes of the device's memory."""
    rates: tuple[tuple[int, float], tuple[int, float]]
    """(parameters, achieved operations per second) of a small and a larger net in training; compiled on a GPU."""
    startup_seconds: float
    """Seconds of a command that are not work on text or steps: imports, saving, evaluating."""

    def flops(self, parameters: float) -> float:
        """Achieved operations per second with a net of so many parameters: a power law through the two measured
        ones."""
        (small, slow), (large, fast) = self.rates
        power = math.log(fast / slow) / math.log(large / small)
        bounded = min(max(parameters, small / 4), large * 8)
        return slow * math.pow(bounded / small, max(0.0, min(1.0, power)))


@dataclass(frozen=True)
class Plan:
    """The chosen settings."""

    vocab: int
    layers: int
    heads: int
    width: int
    length: int
    batch: int
    """Samples of a step."""
    epochs: float
    steps: int
    minutes: float
    """Minutes of the whole command."""
    ends_early: bool
    """Whether the run is expected to end after `epochs`, sooner than the minutes allow."""
    learning_rate: float
    adamw_rate_factor: float
    weight_decay: float
    dropout: float
    parameters: int
    """Of blocks and head, which decide the time of a step."""
    train_tokens: int
    """Unique tokens of the train split."""
    seconds: float
    """Estimated seconds of training, of the first generation."""
    compiled: bool
    """Whether the net is compiled: on a GPU, if that saves more time than it takes."""
    generations: int = 1
    """`train.generations`: another one if the text, not the time, is the limit."""

    @property
    def all_seconds(self) -> float:
        """Estimated seconds of training, of all generations."""
        return self.seconds * generations_cost(self.generations)

    def is_untied(self, family: str) -> bool:
        """Whether the head has weights of its own: that of a Llama, in few epochs."""
        return family == "llama" and self.epochs < REPEATED_EPOCHS


def plan_for(text: TextProfile, machine: MachineProfile, minutes: float, family: str = "gpt2") -> Plan:
    """The settings for this text on this machine, so that the whole command takes about these minutes."""
    masked = open_family(family).OBJECTIVE == "masked"
    training_seconds = max(5.0, 60 * minutes - _other_seconds(text, machine, minutes))
    predicted = MASKED if masked else 1.0
    eager = _Pace(0.0, _eager_speed(machine, family))
    pace = _compiled_pace(machine)
    if not _is_compiled(machine, minutes, training_seconds, pace, eager):
        pace = eager
    net = _best_candidate(text, machine, pace.full_speed_seconds(training_seconds), predicted)
    if pace.compiled and not _may_be_long(machine, net):
        pace = eager
        net = _best_candidate(text, machine, pace.full_speed_seconds(training_seconds), predicted)
    epochs = min(net.epochs, MAX_EPOCHS)
    run_tokens = epochs * net.unique_tokens
    length = min(_length(text, machine, net, run_tokens), MASKED_LENGTH if masked else MAX_LENGTH)
    batch = max(1, round(max(MIN_BATCH_TOKENS, best_batch_tokens("muon", run_tokens)) / length))
    steps = max(20, round(run_tokens / (batch * length)))
    seconds = pace.seconds_for(machine, net.multiplied_parameters, run_tokens)
    wanted_seconds = SPARE_TIME * seconds * generations_cost(GENERATIONS)
    has_time_left = net.epochs > MAX_EPOCHS and wanted_seconds <= training_seconds
    settings = auto_settings("muon", net.width, net.parameters, net.unique_tokens, run_tokens, batch * length)
    return Plan(
        vocab=net.vocab,
        layers=net.layers,
        heads=net.heads,
        width=net.width,
        length=length,
        batch=batch,
        epochs=epochs,
        steps=steps,
        minutes=minutes,
        ends_early=net.epochs > MAX_EPOCHS,
        learning_rate=settings.learning_rate,
        adamw_rate_factor=settings.adamw_rate_factor,
        weight_decay=settings.weight_decay,
        dropout=DROPOUT if epochs >= REPEATED_EPOCHS and net.parameters >= net.unique_tokens else 0.0,
        parameters=net.parameters,
        train_tokens=round(net.unique_tokens),
        compiled=pace.compiled,
        seconds=seconds,
        generations=GENERATIONS if has_time_left and not masked else 1,
    )


def _best_candidate(
    text: TextProfile, machine: MachineProfile, full_speed_seconds: float, predicted: float
) -> _Candidate:
    """The largest net that still sees the text often enough; a larger one would end undertrained."""
    candidates = list(_candidates(text, machine, full_speed_seconds, predicted))
    return max(
        (candidate for candidate in candidates if candidate.fits_text and candidate.sees_text_often_enough),
        key=lambda candidate: candidate.parameters,
        default=candidates[0],
    )


def _may_be_long(machine: MachineProfile, net: _Candidate) -> bool:
    """Whether MAX_EPOCHS of the text take so long without compiling that the engine compiles the net.

    A small net that is not compiled reaches more than its fraction of a compiled one's speed (bench/LOG.md).
    """
    speed = EAGER_SPEED * max(SMALL_EAGER_GAIN * machine.rates[0][1], machine.flops(net.multiplied_parameters))
    seconds = FLOPS_PER_PARAMETER * net.multiplied_parameters * MAX_EPOCHS * net.unique_tokens / speed
    return seconds >= shortest_compiled_run(machine.cores)


@dataclass(frozen=True)
class _Pace:
    """How fast steps are, compiled or not."""

    compile_seconds: float
    speed: float
    """Relative to the measured one."""

    @property
    def compiled(self) -> bool:
        return self.compile_seconds > 0

    def full_speed_seconds(self, training_seconds: float) -> float:
        """Seconds at the measured speed in which as many steps are done as in so many seconds of this run."""
        return (training_seconds - self.compile_seconds) * self.speed

    def seconds_for(self, machine: MachineProfile, parameters: float, tokens: float) -> float:
        """Seconds of training on so many tokens."""
        at_full_speed = FLOPS_PER_PARAMETER * parameters * tokens / machine.flops(parameters)
        return self.compile_seconds + at_full_speed / self.speed


def _compiled_pace(machine: MachineProfile) -> _Pace:
    return _Pace(COMPILE_SECONDS if machine.cores >= MANY_CORES else FEW_CORES_SECONDS, 1.0)


def _eager_speed(machine: MachineProfile, family: str) -> float:
    if machine.device == "cpu":
        return 1.0
    return LLAMA_EAGER_SPEED if family == "llama" else EAGER_SPEED


def _is_compiled(
    machine: MachineProfile, minutes: float, training_seconds: float, compiled: _Pace, eager: _Pace
) -> bool:
    """Whether compiling saves time in a run of so many seconds, and the engine does it."""
    saves_time = compiled.full_speed_seconds(training_seconds) >= eager.full_speed_seconds(training_seconds)
    return machine.device == "cuda" and 60 * minutes >= shortest_compiled_run(machine.cores) and saves_time


def default_minutes(text: TextProfile, machine: MachineProfile, family: str = "gpt2") -> float:
    """Minutes until more training stops helping, at most 30 on a GPU and 5 on a CPU."""
    max_minutes = MAX_MINUTES[machine.device]
    plan = plan_for(text, machine, max_minutes, family)
    if not plan.ends_early:
        return max_minutes
    seconds = plan.all_seconds * (SPARE_TIME if plan.generations > 1 else 1)
    return min(max_minutes, math.ceil(10 * (seconds + _other_seconds(text, machine, max_minutes)) / 60) / 10)


def auto_family(text: TextProfile, machine: MachineProfile, minutes: float) -> str:
    """The family that is best for a text on this machine.

    A Llama needs fewer bits per byte in the same time. Only if it is not compiled on a GPU, where its steps take 1.6
    times as long as GPT-2's, and the time is too short to repeat the text, GPT-2 is better (bench/LOG.md).
    """
    plan = plan_for(text, machine, minutes, "llama")
    return "llama" if machine.device == "cpu" or plan.compiled or plan.epochs >= LLAMA_EPOCHS else "gpt2"


def layers_of(width: int) -> int:
    """Layers of a net of this width."""
    return max(2, width // 64)


def heads_of(width: int) -> int:
    """Attention heads of a net of this width: 64 channels each, or 32."""
    return width // (64 if width % 64 == 0 else 32)


@dataclass(frozen=True)
class _Candidate:
    """A net that the plan may choose, and how often it would see the text in the time."""

    vocab: int
    width: int
    unique_tokens: float
    """Tokens of the text with this vocabulary."""
    epochs: float
    predicted_fraction: float = 1.0
    """The fraction of tokens that the head is computed for."""

    @property
    def layers(self) -> int:
        return layers_of(self.width)

    @property
    def heads(self) -> int:
        return heads_of(self.width)

    @property
    def block_parameters(self) -> int:
        return 12 * self.layers * self.width**2

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.width * self.vocab

    @property
    def multiplied_parameters(self) -> float:
        """Parameters that a token is multiplied with, on average."""
        return self.block_parameters + self.predicted_fraction * self.width * self.vocab

    @property
    def fits_text(self) -> bool:
        """Whether the text is large enough for so many parameters."""
        return self.parameters <= MAX_PARAMETERS_PER_TOKEN * self.unique_tokens

    @property
    def sees_text_often_enough(self) -> bool:
        """Whether the net would not end undertrained."""
        return self.epochs >= target_epochs(self.parameters, self.unique_tokens)


def _candidates(
    text: TextProfile, machine: MachineProfile, seconds: float, predicted_fraction: float
) -> Iterator[_Candidate]:
    """A net of each width, with its best vocabulary and the epochs that fit in the seconds."""

    def candidate(width: int, bytes_per_entry: int) -> _Candidate:
        vocab = _vocab(text, width, predicted_fraction, bytes_per_entry)
        unique_tokens = text.train_bytes / text.bytes_per_token[vocab]
        parameters = _Candidate(vocab, width, unique_tokens, 0, predicted_fraction).multiplied_parameters
        run_tokens = seconds * machine.flops(parameters) / (FLOPS_PER_PARAMETER * parameters)
        return _Candidate(vocab, width, unique_tokens, run_tokens / unique_tokens, predicted_fraction)

    for width in WIDTHS:
        small_vocab = candidate(width, MANY_BYTES_PER_ENTRY)
        yield small_vocab if small_vocab.epochs > MAX_EPOCHS else candidate(width, BYTES_PER_ENTRY)


def _vocab(text: TextProfile, width: int, predicted_fraction: float, bytes_per_entry: int) -> int:
    """The vocabulary that makes a pass over the text cheapest, among those whose entries are seen often enough."""
    allowed = [vocab for vocab in text.bytes_per_token if vocab * bytes_per_entry <= text.train_bytes]

    def cost_per_byte(vocab: int) -> float:
        net = _Candidate(vocab, width, 1.0, 0, predicted_fraction)
        return net.multiplied_parameters / text.bytes_per_token[vocab]

    return min(allowed or [min(text.bytes_per_token)], key=cost_per_byte)


def _length(text: TextProfile, machine: MachineProfile, net: _Candidate, run_tokens: float) -> int:
    """Tokens of a sample: short on a CPU and for small nets, and not longer than two usual documents."""
    if net.parameters < 1e6:
        longest = 64
    elif machine.device == "cpu":
        longest = 256
    else:
        longest = 512 if run_tokens < 5e7 else MAX_LENGTH
    two_documents = 2 * text.document_bytes / text.bytes_per_token[net.vocab]
    next_power_of_two = 1 << math.ceil(math.log2(max(2.0, two_documents)))
    return max(32, min(longest, next_power_of_two))


def fitted_fraction(text: TextProfile, minutes: float) -> float:
    """The fraction of the documents, or of the pieces of long ones, that the vocabulary is fitted on."""
    wanted = min(FITTED_BYTES, FITTED_BYTES_PER_MINUTE * max(1.0, minutes))
    many = text.different_documents >= MIN_FITTED_DOCUMENTS or text.document_bytes > 2 * PIECE_CHARACTERS
    return float(f"{wanted / text.bytes:.2g}") if many and text.bytes > wanted else 1.0


def _other_seconds(text: TextProfile, machine: MachineProfile, minutes: float) -> float:
    """Seconds of the stages before and after training, with start-up."""
    fit = text.bytes * fitted_fraction(text, minutes) / FIT_RATE
    parts = (text.bytes / rate / math.sqrt(machine.cores) for rate in STAGE_RATES.values())
    return machine.startup_seconds + fit + sum(parts)


def limit_vocabs(text: TextProfile) -> TextProfile:
    """The text with only those vocabularies that hold its characters, each twice: at the start of a word and inside."""
    many = sum(share for script, share in text.scripts.items() if script in MANY_CHARACTERS) > 0.01
    least = MANY_CHARACTERS_VOCAB if many else MIN_VOCAB
    allowed = {vocab: size for vocab, size in text.bytes_per_token.items() if vocab >= least}
    largest = max(text.bytes_per_token)
    return replace(text, bytes_per_token=allowed or {largest: text.bytes_per_token[largest]})
