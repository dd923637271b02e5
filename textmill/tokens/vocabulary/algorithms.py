"""Vocabularies from counted words: what a word is, how words are counted, and how each kind of vocabulary is fitted on them.

The library's trainers are fed from counts, so that counting may run anywhere and in any order: the same text gives the same vocabulary."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from textmill.config import TokenizerConfig
from textmill.config.vocabulary import UNKNOWN_TOKENS, special_tokens_of
from textmill.errors import TextmillError

BOUNDARY = re.compile(r"(?<=\S)(?=[ \n]\S)")
"""Before a lone space or line end every kind of tokenizer begins a new word, so the stretches between them can be counted first."""
HELD = 500_000
"""Different stretches that are held before they are cut into words."""
MOST_WORDS = 20_000_000
"""Different words that are held; when there are more, those seen once go."""
LONGEST = 256
"""Characters of a word that unigram is fitted on; a longer one is cut."""
TOLD = 2048
"""Characters that the library is told at a time; it holds a few hundred such texts, with 16 bytes for each character."""
MARK = "##"
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECIMALS = 9
"""Of a score: the trainer's sums differ behind them from run to run."""
ADDED = 0.0001
"""The trainer gives characters that no piece is left of the lowest score, and each one this much more than the last."""


class WordCounter:
    """Counts the words of texts as a tokenizer cuts them."""

    def __init__(self, inner: Tokenizer) -> None:
        self.normalizer, self.pre_tokenizer = inner.normalizer, inner.pre_tokenizer
        self.stretches: Counter[str] = Counter()
        self.words: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count the words of one more text."""
        self.stretches.update(BOUNDARY.split(text))
        if len(self.stretches) > HELD:
            self._cut()

    def counts(self) -> Counter[str]:
        """Every word seen and how often."""
        self._cut()
        return self.words

    def _cut(self) -> None:
        words = self.words
        for stretch, count in self.stretches.items():
            text = self.normalizer.normalize_str(stretch) if self.normalizer else stretch
            for word, _ in self.pre_tokenizer.pre_tokenize_str(text):
                words[word] += count
        self.stretches.clear()


def merge_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of all parts together, sorted by word."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
        if len(total) > MOST_WORDS:
            total = Counter({word: count for word, count in total.items() if count > 1})
    return dict(sorted(total.items()))


def new_inner(config: TokenizerConfig, model: models.Model | None = None) -> Tokenizer:
    """A tokenizer of the kind that the config names, with a model or still without vocabulary."""
    inner = Tokenizer(model or models.BPE())
    if config.kind == "wordpiece":
        cjk = config.split_cjk is not False
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=cjk,
            strip_accents=config.strip_accents,
            lowercase=bool(config.lowercase),
        )
    elif config.lowercase:
        inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts := _cuts(config)) > 1 else cuts[0]
    if config.kind == "bpe":
        inner.decoder = decoders.ByteLevel()
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    elif config.kind == "wordpiece":
        inner.decoder = decoders.WordPiece(prefix=MARK, cleanup=False)
    else:
        inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return inner


def _cuts(config: TokenizerConfig) -> list[pre_tokenizers.PreTokenizer]:
    digits = [pre_tokenizers.Digits(individual_digits=True)] if config.split_digits else []
    han = (
        [pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated")] if config.split_cjk and config.kind != "wordpiece" else []
    )
    if config.kind == "bpe":
        return [*han, *digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if config.kind == "wordpiece":
        return [pre_tokenizers.BertPreTokenizer(), *digits]
    lines, signs = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Punctuation("isolated")
    return [
        apart([*special_tokens_of(config), *BYTES]),
        lines,
        signs,
        *han,
        *digits,
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="never"),
    ]


def apart(pieces: list[str], known: Container[str] = ()) -> pre_tokenizers.PreTokenizer:
    """A cut inside of what looks like one of these pieces: unigram would look it up like any other.

    The cut is beside a known character where there is one, since two unknown ones in a row are one token."""
    looks = ["<(?=0x[0-9A-F]{2}>)"] if BYTES[0] in pieces else []
    for text in pieces:
        if len(text) > 1 and text not in BYTES:
            at = next((at for at in range(1, len(text)) if text[at - 1] in known or text[at] in known), 1)
            before, sign, after = map(re.escape, (text[: at - 1], text[at - 1], text[at:]))
            looks.append(f"(?<={before}){sign}(?={after})")
    return pre_tokenizers.Split(Regex("|".join(looks)), "merged_with_previous")


def train(words: Mapping[str, int], config: TokenizerConfig) -> Tokenizer:
    """Fit a vocabulary on counted words; its special tokens are known to the tokenizer."""
    if not words:
        raise TextmillError(
            "fit-tokenizer: there is no text to fit on; give it documents, or raise tokenizer.fit_sample"
        )
    tokens = special_tokens_of(config)
    fitted = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}[config.kind](
        words, config, tokens
    )
    inner = new_inner(config, fitted)
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    if config.kind == "wordpiece" and {"[CLS]", "[SEP]"} <= set(tokens):
        marks = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", marks)
    return inner


def _train_bpe(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab, min_frequency=config.min_frequency, special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    return _fed(models.BPE(), words.items(), trainer)


def _train_wordpiece(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    """BPE with marked continuations, as the library fits WordPiece; it numbers those in a random order, unless they are there before."""
    alphabet = _alphabet(words, config.character_coverage)
    kept = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    first = sorted(alphabet)
    inside = [MARK + character for character in sorted(set().union(*(word[1:] for word in kept)))]
    least = len(tokens) + len(first) + len(inside)
    _check_room(config, least, len(alphabet))
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab, min_frequency=config.min_frequency, special_tokens=[*tokens, *inside], initial_alphabet=first,
        continuing_subword_prefix=MARK, show_progress=False,
    )  # fmt: skip
    model = _fed(models.BPE(continuing_subword_prefix=MARK), kept.items(), trainer)
    merged = [piece for piece, _ in sorted(_vocab_of(model).items(), key=lambda item: item[1])][least:]
    vocab = {piece: number for number, piece in enumerate([*tokens, *first, *inside, *merged])}
    return models.WordPiece(
        vocab, unk_token=_unknown(tokens), continuing_subword_prefix=MARK, max_input_chars_per_word=100
    )


def _train_unigram(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    fallback, unknown = config.byte_fallback is not False, _unknown(tokens)
    reserved = [*tokens, *(BYTES if fallback else [])]
    alphabet = _alphabet(words, config.character_coverage)
    _check_room(config, len(reserved) + len(alphabet), len(alphabet))
    trainer = trainers.UnigramTrainer(
        vocab_size=config.vocab - len(reserved) + 1, special_tokens=[unknown], unk_token=unknown,
        initial_alphabet=sorted(alphabet), show_progress=False,
    )  # fmt: skip
    model = _fed(models.Unigram(), _covered(words, alphabet), trainer)
    found = _settled({piece: score for piece, score in _pieces_of(model) if piece not in set(reserved)})
    lowest = min((score for _, score in found), default=0.0)
    pieces = [(piece, lowest) for piece in reserved] + found
    return models.Unigram(pieces, unk_id=reserved.index(unknown), byte_fallback=fallback)


def _settled(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Pieces and scores, the same in every run: rounded, and without the random order in which lone characters were added at the end."""
    lowest = min(scores.values())
    steps = {piece: (score - lowest) / ADDED for piece, score in scores.items() if len(piece) == 1}
    added = sorted(piece for piece, step in steps.items() if step < len(steps) and abs(step - round(step)) < 1e-4)
    scores = scores | dict(zip(added, sorted((scores[piece] for piece in added), reverse=True), strict=True))
    return sorted(
        ((piece, round(score, DECIMALS)) for piece, score in scores.items()), key=lambda item: (-item[1], item[0])
    )


def _fed(model: models.Model, words: Iterable[tuple[str, int]], trainer: trainers.Trainer) -> models.Model:
    """A model fitted on counted words: the trainers only count for themselves, so each word is told as often as it was seen."""
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # in no kind of tokenizer has a word a space in it
    inner.train_from_iterator(_told(words), trainer)
    fitted: models.Model = inner.model
    return fitted


def _told(words: Iterable[tuple[str, int]]) -> Iterator[str]:
    for word, count in words:
        often = max(1, TOLD // (len(word) + 1))
        for _ in range(count // often):
            yield (word + " ") * often
        if rest := count % often:
            yield (word + " ") * rest


def _alphabet(words: Mapping[str, int], coverage: float) -> set[str]:
    """The most frequent characters that make up this share of all."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    left, alphabet = coverage * counts.total(), set()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if left <= 0:
            break
        alphabet.add(character)
        left -= count
    return alphabet


def _covered(words: Mapping[str, int], alphabet: set[str]) -> Iterator[tuple[str, int]]:
    """Words without rare characters, and the stretches between these of the others."""
    for word, count in words.items():
        if alphabet.issuperset(word):
            stretches = [word]
        else:
            stretches = "".join(character if character in alphabet else " " for character in word).split(" ")
        for stretch in stretches:
            for start in range(0, len(stretch), LONGEST):
                yield stretch[start : start + LONGEST], count


def _check_room(config: TokenizerConfig, least: int, characters: int) -> None:
    if config.vocab < least:
        raise TextmillError(
            f"tokenizer.vocab: {config.vocab:,} is too small: the text's {characters:,} characters, special tokens and bytes "
            f"take {least:,}; raise it, or lower tokenizer.character_coverage={config.character_coverage}"
        )


def _unknown(tokens: list[str]) -> str:
    return next(token for token in tokens if token in UNKNOWN_TOKENS)


def _vocab_of(model: models.Model) -> dict[str, int]:
    vocab: dict[str, int] = Tokenizer(model).get_vocab()
    return vocab


def _pieces_of(model: models.Model) -> list[tuple[str, float]]:
    pieces: list[tuple[str, float]] = json.loads(Tokenizer(model).to_str())["model"]["vocab"]
    return pieces
