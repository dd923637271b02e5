"""Trains vocabularies on word counts: byte-level BPE, WordPiece and unigram.

Training on counts lets workers count words in any order: the same text always gives the same vocabulary.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from textmill.config import TokenizerConfig
from textmill.config.tokenizer import UNKNOWN_TOKENS, special_tokens_of
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.token_bytes import BYTE_TOKENS, SPACE

COUNTED_CHARACTERS = 1 << 20
"""Characters whose segments, cut at `BOUNDARY`, are counted at once, before they are split into words."""
MAX_SEGMENTS = 500_000
"""Most distinct text segments in memory before they are split into words."""
MAX_WORDS = 20_000_000
"""Most distinct words in memory; if there are more, words seen once are dropped."""
MAX_WORD_CHARACTERS = 256
"""Longest word for unigram training, in characters; longer words are cut."""
FEED_CHARACTERS = 2048
"""Characters per text passed to the library; it buffers a few hundred texts, at 16 bytes per character."""
MIN_FREQUENCY = 2
"""A pair of tokens that occurs less often is not merged."""
CONTINUATION = "##"
SCORE_DECIMALS = 9
"""Decimals kept of a score; further ones vary from run to run."""
ADDED_SCORE_STEP = 0.0001
"""The trainer adds missing characters at the end, each with a score this much above the previous one."""

BOUNDARY = re.compile(r"(?<=\S)(?=[ \n]\S)")
"""Every kind of tokenizer starts a new word before a single space or newline."""
PIECE_CHARACTERS = 1 << 16
"""Documents up to twice this length are sampled whole, longer ones in pieces of about this length."""


def train_vocabulary(words: Mapping[str, int], config: TokenizerConfig) -> Tokenizer:
    """Train a vocabulary on word counts and return a tokenizer with it and with its special tokens."""
    if not words:
        raise TextmillError("fit-tokenizer: no text to fit on; add documents, or raise tokenizer.fit_sample")
    tokens = special_tokens_of(config)
    train_model = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}[config.kind]
    inner = new_tokenizer(config, train_model(words, config, tokens))
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    cls, sep = ("[CLS]", "[SEP]") if config.kind == "wordpiece" else ("<s>", "</s>")
    if {cls, sep} <= set(tokens) and (config.kind == "wordpiece" or "<mask>" in tokens):  # for a masked model
        special = [(token, inner.token_to_id(token)) for token in (cls, sep)]
        inner.post_processor = processors.TemplateProcessing(f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", special)
    return inner


def train_bpe_on_texts(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """The byte-level BPE vocabulary that the texts' word counts give, without a pass to count them; all in memory."""
    inner = new_tokenizer(config)
    inner.train_from_iterator(texts, _bpe_trainer(config, special_tokens_of(config)))
    return inner


def _bpe_trainer(config: TokenizerConfig, tokens: list[str]) -> trainers.Trainer:
    return trainers.BpeTrainer(
        vocab_size=config.vocab,
        min_frequency=MIN_FREQUENCY,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _train_bpe(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    return _train_on_counts(models.BPE(), words.items(), _bpe_trainer(config, tokens))


def _train_wordpiece(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    """BPE with a continuation prefix, which is how the library trains WordPiece.

    The continuation characters are given to the trainer in order; else it would number them in random order.
    """
    alphabet = _alphabet(words, config.character_coverage)
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    initials = sorted(alphabet)
    inner_characters: set[str] = set().union(*(word[1:] for word in words))
    continuations = [CONTINUATION + character for character in sorted(inner_characters)]
    unmerged = len(tokens) + len(initials) + len(continuations)
    _check_vocab_size(config, unmerged, len(alphabet))
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[*tokens, *continuations],
        initial_alphabet=initials,
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    model = _train_on_counts(models.BPE(continuing_subword_prefix=CONTINUATION), words.items(), trainer)
    trained: dict[str, int] = Tokenizer(model).get_vocab()
    merged = sorted(trained, key=trained.__getitem__)[unmerged:]
    vocab = {token: number for number, token in enumerate([*tokens, *initials, *continuations, *merged])}
    return models.WordPiece(
        vocab, unk_token=_unknown(tokens), continuing_subword_prefix=CONTINUATION, max_input_chars_per_word=100
    )


def _train_unigram(words: Mapping[str, int], config: TokenizerConfig, tokens: list[str]) -> models.Model:
    byte_fallback = config.byte_fallback is not False
    unknown = _unknown(tokens)
    reserved = [*tokens, *(BYTE_TOKENS if byte_fallback else [])]
    alphabet = _alphabet(words, config.character_coverage)
    _check_vocab_size(config, len(reserved) + len(alphabet), len(alphabet))
    trainer = trainers.UnigramTrainer(
        vocab_size=config.vocab - len(reserved) + 1,
        special_tokens=[unknown],
        unk_token=unknown,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    model = _train_on_counts(models.Unigram(), _words_in_alphabet(words, alphabet), trainer)
    pieces: list[tuple[str, float]] = json.loads(Tokenizer(model).to_str())["model"]["vocab"]
    scores = {token: score for token, score in pieces if token not in set(reserved)}
    scored = _make_deterministic(scores)
    lowest = min((score for _, score in scored), default=0.0)
    entries = [(token, lowest) for token in reserved] + scored
    return models.Unigram(entries, unk_id=reserved.index(unknown), byte_fallback=byte_fallback)


def _make_deterministic(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Tokens and scores, the same in every run: scores are rounded, and characters the trainer added are sorted."""
    lowest = min(scores.values())
    steps = {token: (score - lowest) / ADDED_SCORE_STEP for token, score in scores.items() if len(token) == 1}
    added = sorted(token for token, step in steps.items() if step < len(steps) and abs(step - round(step)) < 1e-4)
    scores = scores | dict(zip(added, sorted((scores[token] for token in added), reverse=True), strict=True))
    return sorted(
        ((token, round(score, SCORE_DECIMALS)) for token, score in scores.items()), key=lambda item: (-item[1], item[0])
    )


def _train_on_counts(model: models.Model, words: Iterable[tuple[str, int]], trainer: trainers.Trainer) -> models.Model:
    """Train a model on word counts; the library counts words itself, so each word is passed as often as it was seen."""
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # no kind of tokenizer has words with a space
    inner.train_from_iterator(_repeat_words(words), trainer)
    fitted: models.Model = inner.model
    return fitted


def _repeat_words(words: Iterable[tuple[str, int]]) -> Iterator[str]:
    for word, count in words:
        per_text = max(1, FEED_CHARACTERS // (len(word) + 1))
        for _ in range(count // per_text):
            yield (word + " ") * per_text
        if rest := count % per_text:
            yield (word + " ") * rest


def _alphabet(words: Mapping[str, int], coverage: float) -> set[str]:
    """The most frequent characters that together cover this fraction of the text."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    left = coverage * counts.total()
    alphabet = set()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if left <= 0:
            break
        alphabet.add(character)
        left -= count
    return alphabet


def _words_in_alphabet(words: Mapping[str, int], alphabet: set[str]) -> Iterator[tuple[str, int]]:
    """Words of frequent characters; words with rare characters are split at these."""
    for word, count in words.items():
        if alphabet.issuperset(word):
            segments = [word]
        else:
            segments = "".join(character if character in alphabet else " " for character in word).split(" ")
        for segment in segments:
            for start in range(0, len(segment), MAX_WORD_CHARACTERS):
                yield segment[start : start + MAX_WORD_CHARACTERS], count


def _check_vocab_size(config: TokenizerConfig, least: int, characters: int) -> None:
    if config.vocab < least:
        raise TextmillError(
            f"tokenizer.vocab: {config.vocab:,} is too small: the {characters:,} characters of the text, "
            f"the special tokens and "
            f"the bytes need {least:,}; raise it, or lower tokenizer.character_coverage={config.character_coverage}"
        )


def _unknown(tokens: list[str]) -> str:
    return next(token for token in tokens if token in UNKNOWN_TOKENS)


def new_tokenizer(config: TokenizerConfig, model: models.Model | None = None) -> Tokenizer:
    """A tokenizer of the configured kind, with the given model or without a vocabulary."""
    inner = Tokenizer(model or models.BPE())
    if config.kind == "wordpiece":
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=bool(config.lowercase)
        )
    elif config.lowercase:
        inner.normalizer = normalizers.Lowercase()
    steps = _pre_tokenizers(config)
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if config.kind == "bpe":
        inner.decoder = decoders.ByteLevel()
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    elif config.kind == "wordpiece":
        inner.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    else:
        inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return inner


def _pre_tokenizers(config: TokenizerConfig) -> list[pre_tokenizers.PreTokenizer]:
    digits = [pre_tokenizers.Digits(individual_digits=True)] if config.split_digits else []
    if config.kind == "bpe":
        return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if config.kind == "wordpiece":
        return [pre_tokenizers.BertPreTokenizer(), *digits]
    return [
        split_reserved([*special_tokens_of(config), *BYTE_TOKENS]),
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.Punctuation("isolated"),
        *digits,
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="never"),
    ]


def split_reserved(tokens: list[str], known: Container[str] = ()) -> pre_tokenizers.PreTokenizer:
    """Split text that looks like one of these tokens, which unigram would otherwise look up like any other.

    The split is next to a known character if there is one, because two unknown characters in a row become one token.
    """
    patterns = ["<(?=0x[0-9A-F]{2}>)"] if BYTE_TOKENS[0] in tokens else []
    for text in tokens:
        if len(text) > 1 and text not in BYTE_TOKENS:
            split = 1
            for place in range(1, len(text)):
                if text[place - 1] in known or text[place] in known:
                    split = place
                    break
            before, character, after = map(re.escape, (text[: split - 1], text[split - 1], text[split:]))
            patterns.append(f"(?<={before}){character}(?={after})")
    return pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")


class WordCounter:
    """Counts the words of texts, split as the tokenizer splits them."""

    def __init__(self, inner: Tokenizer) -> None:
        self.normalizer = inner.normalizer
        self.pre_tokenizer = inner.pre_tokenizer
        self.segments: Counter[str] = Counter()
        self.words: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count the words of one more text."""
        for piece in cut_text(text, COUNTED_CHARACTERS):
            self.segments.update(BOUNDARY.split(piece))
            if len(self.segments) > MAX_SEGMENTS:
                self._split_segments()

    def counts(self) -> Counter[str]:
        """How often each word was seen."""
        self._split_segments()
        return self.words

    def _split_segments(self) -> None:
        words = self.words
        for segment, count in self.segments.items():
            text = self.normalizer.normalize_str(segment) if self.normalizer else segment
            for word, _ in self.pre_tokenizer.pre_tokenize_str(text):
                words[word] += count
        self.segments.clear()


def merge_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the counts of all parts; the result is sorted by word."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
        if len(total) > MAX_WORDS:
            total = Counter({word: count for word, count in total.items() if count > 1})
    return dict(sorted(total.items()))


def cut_text(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Pieces of `size` characters or more, each at most twice as long; they are cut between words where possible."""
    start = 0
    while len(text) - start > 2 * size:
        found = BOUNDARY.search(text, start + size, start + 2 * size)
        end = found.start() if found else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:] if start else text
