"""Opens tokenizer files of others: tokenizer.json, GPT-2's two files, a vocab.txt, a sentencepiece .model."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.tokens.vocabulary.sentencepiece_model import open_sentencepiece

END = "<|endoftext|>"
GPT2_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
PREFIXED = ("*-vocab.json", "-merges.txt")
"""File names of dsGPT2, with a prefix that the user chooses."""
SPM_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.model")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
USUAL_NAMES = {
    "bos_token": (END, "<s>", "<bos>"),
    "eos_token": (END, "</s>", "<eos>"),
    "unk_token": ("<unk>", "[UNK]"),
    "sep_token": ("[SEP]",),
    "pad_token": ("<pad>", "[PAD]"),
    "cls_token": ("[CLS]",),
    "mask_token": ("<mask>", "[MASK]"),
}
"""The usual names of special tokens, for tokenizers whose files do not name them."""

BERT_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""What tokenizer_config.json says of a BERT's normalizer, by transformers' names and those of tokenizers."""
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
"""How Llama 3 and Qwen split a text into words."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""transformers' classes that take a tokenizer.json as it is."""

Opened = tuple[Tokenizer, dict[str, str]]
"""A tokenizer, and its special tokens by transformers' names for them (bos_token, eos_token ...)."""

MARK = "\u2581"
SPACE = "\u2582"
NEWLINE = "\u2583"
FIRST_CHINESE = "\u4e00"
LAST_CHINESE = "\u9fff"
UNREACHABLE = "\ue000"
"""Starts the name of a line that no text is encoded as, such as a Chinese token with ##."""
LONGEST_WORD = 200
"""Characters of the longest word; a longer one is unknown."""
ENCDEC_ROLES = {
    "unk_token": ("<unk>",),
    "bos_token": ("<s>",),
    "eos_token": ("[BOS]", "<eod>", "</s>"),
    "pad_token": ("<pad>",),
    "sep_token": ("<sep>", "[SEP]"),
    "mask_token": ("<mask>", "[MASK]"),
}
"""Special tokens by transformers' names; the token between two documents is [BOS], as Yuan's code has it."""
_SPECIAL = re.compile(r"</?[a-z_0-9]+>|\[[A-Z]+\]")
_CHINESE = re.compile(f"[{FIRST_CHINESE}-{LAST_CHINESE}]")


def open_files(where: Path, lowercase: bool | None = None) -> Opened:
    """Open the tokenizer of a folder or file; `lowercase` is for a vocab.txt without settings."""
    inner, known = _open_inner(where, lowercase)
    folder = where if where.is_dir() else where.parent
    roles = find_special_tokens(inner, {**known, **_read_special_tokens(folder)})
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and not (folder / "tokenizer.json").is_file():  # which says it itself
        flags = read_json(settings)
        begin, end = (roles.get(f"{name}_token") if flags.get(f"add_{name}_token") else None for name in ("bos", "eos"))
        if begin or end:
            add_special_around(inner, begin, end)
    return inner, roles


def add_special_around(inner: Tokenizer, begin: str | None, end: str | None) -> None:
    """Let a tokenizer put a begin or end token around a text in an encoding with special tokens."""
    before = f"{begin}:0 " if begin else ""
    after = f" {end}:0" if end else ""
    second = f"{f' {begin}:1' if begin else ''} $B:1{f' {end}:1' if end else ''}"
    special = [(token, inner.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    template = processors.TemplateProcessing(f"{before}$A:0{after}", f"{before}$A:0{after}{second}", special)
    previous = inner.post_processor
    inner.post_processor = template if previous is None else processors.Sequence([previous, template])


def find_special_tokens(inner: Tokenizer, known: dict[str, str]) -> dict[str, str]:
    """The special tokens in the vocabulary, by transformers' names: the known ones, else those with usual names."""
    named = dict(known)
    if "eos_token" not in known and "sep_token" not in known:
        named = {
            role: token for role in ROLES for token in USUAL_NAMES[role][::-1] if inner.token_to_id(token) is not None
        } | named
        if named.get("eos_token") == END:
            named = {"bos_token": END, "eos_token": END, "unk_token": END} | named
    return {role: named[role] for role in ROLES if role in named and inner.token_to_id(named[role]) is not None}


def _open_inner(where: Path, lowercase: bool | None) -> Opened:
    if where.is_file():
        return _open_file(where, lowercase)
    if (where / "tokenizer.json").is_file():
        inner, roles = _open_json(where / "tokenizer.json")
        return _apply_bert_settings(inner, where), roles
    for vocab, merges in GPT2_PAIRS:
        if (where / vocab).is_file() and (where / merges).is_file():
            return _open_byte_level(where / vocab, where / merges), {}
    for vocab_path in sorted(where.glob(PREFIXED[0])):
        merges_path = vocab_path.with_name(vocab_path.name.removesuffix("-vocab.json") + PREFIXED[1])
        if merges_path.is_file():
            return _open_byte_level(vocab_path, merges_path), {}
    for name in SPM_NAMES:
        if found := sorted(where.glob(name)):
            return open_sentencepiece(found[0])
    if (where / "vocab.txt").is_file():
        return _open_bert(where / "vocab.txt", lowercase)
    raise TextmillError(
        f"{where}: no tokenizer found; "
        f"expected tokenizer.json, vocab.json with merges.txt, encoder.json with vocab.bpe, "
        f"a sentencepiece .model, or a BERT vocab.txt"
    )


def _open_file(path: Path, lowercase: bool | None) -> Opened:
    pairs = {path.name: path.name.removesuffix("vocab.json") + "merges.txt"} | dict(GPT2_PAIRS)
    if path.suffix == ".model":
        return open_sentencepiece(path)
    if path.suffix == ".txt":
        return _open_bert(path, lowercase)
    if path.name.endswith(("vocab.json", "encoder.json")) and (merges := path.with_name(pairs[path.name])).is_file():
        return _open_byte_level(path, merges), {}
    return _open_json(path)


def _open_json(path: Path) -> Opened:
    try:
        return Tokenizer.from_file(str(path)), {}
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{path}: not a tokenizer.json ({error})") from None


def _read_bert_settings(folder: Path) -> dict[str, bool]:
    """How a BERT normalises text, as far as tokenizer_config.json says it."""
    path = folder / "tokenizer_config.json"
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict) or found.get("tokenizer_class") in PLAIN_CLASSES:
        return {}
    settings = {key: found[key] for key in BERT_SETTINGS if found.get(key) is not None}
    for key, value in settings.items():
        if not isinstance(value, bool):
            raise TextmillError(f"{path}: {key} is {value!r}; it must be true or false")
    return settings


def _apply_bert_settings(inner: Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json; of a BERT, tokenizer_config.json overrides it, as in transformers."""
    normalizer = inner.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        for key, value in _read_bert_settings(folder).items():
            if getattr(normalizer, BERT_SETTINGS[key]) != value:
                setattr(normalizer, BERT_SETTINGS[key], value)
        inner.normalizer = normalizer
    return inner


def _open_byte_level(vocab: Path, merges: Path) -> Tokenizer:
    try:
        inner = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{vocab}: not a vocabulary with merges in {merges.name} ({error})") from None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def _read_vocab_txt(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise TextmillError(f"{path}: not UTF-8 ({error}); a vocab.txt has one token per line") from None
    return [line.removesuffix("\r") for line in lines]


def _open_bert(path: Path, lowercase: bool | None) -> Opened:
    """A vocab.txt; `lowercase` None: as tokenizer_config.json says, else whether all its tokens are in lower case."""
    tokens = _read_vocab_txt(path)
    if is_encdec(tokens):
        return open_encdec(tokens)
    vocab = {token: number for number, token in enumerate(tokens)}
    missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in vocab]
    if missing:
        raise TextmillError(
            f"{path}: {missing[0]} is missing; "
            f"a BERT vocab.txt has one token per line, with [UNK], [CLS] and [SEP] among them"
        )
    settings = _read_bert_settings(path.parent)
    if lowercase is None:
        has_lower_case_only = all(token == token.lower() for token in vocab if not token.startswith("["))
        lowercase = settings.get("do_lower_case", has_lower_case_only)
    inner = new_wordpiece(vocab, "[UNK]")
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=lowercase,
    )
    names = {role: USUAL_NAMES[role][-1] for role in ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")}
    roles = {role: token for role, token in names.items() if token in vocab}
    inner.add_special_tokens(list(roles.values()))
    special = [(token, vocab[token]) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(
        "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special
    )
    return inner, roles


def new_wordpiece(vocab: dict[str, int], unknown: str) -> Tokenizer:
    """A tokenizer that splits words as BERT does, without a normalizer yet."""
    inner = Tokenizer(
        models.WordPiece(vocab, unk_token=unknown, continuing_subword_prefix="##", max_input_chars_per_word=100)
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return inner


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that transformers' files in the folder of a tokenizer name."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file() and isinstance(tree := read_json(folder / name), dict):
            named = {
                role: tree[role]["content"] if isinstance(tree[role], dict) else tree[role]
                for role in ROLES
                if tree.get(role)
            }
            found |= {role: token for role, token in named.items() if isinstance(token, str)}
    return found


def is_encdec(tokens: list[str]) -> bool:
    """Whether the lines of a vocab.txt are a vocabulary of EncDecTokenizer."""
    return {"<unk>", SPACE, NEWLINE} <= set(tokens) and "[UNK]" not in tokens


def open_encdec(tokens: list[str]) -> Opened:
    """The vocab.txt of EncDecTokenizer (Yuan, CPM-2): greedy longest match, Chinese tokens without a prefix.

    Each line is a token: U+2582 is a space and U+2583 a line break, and a token without Chinese characters that
    continues a word begins with ##. Here a token that begins a word gets the mark U+2581 instead, so that a longest
    match without a prefix finds the same tokens. Words are cut at borders of scripts and not with jieba.
    """
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        name = _name_of(token)
        vocab[f"{UNREACHABLE}{number}" if name is None or name in vocab else name] = number
    inner = Tokenizer(
        models.WordPiece(
            vocab, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=LONGEST_WORD + 1
        )
    )
    chinese = "".join(sorted({character for token in tokens for character in _CHINESE.findall(token)}))
    letters = "A-Za-z0-9"
    starts = f"(?<![{letters}])(?=[{letters}])|(?=[^{letters}{FIRST_CHINESE}-{LAST_CHINESE}{SPACE}{NEWLINE}])"
    inner.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", SPACE), normalizers.Replace("\n", NEWLINE), normalizers.Replace(Regex(starts), MARK)]
    )
    words = [f"[{chinese}]+"] if chinese else []
    words += [f"{MARK}[{letters}]+", f"(?m:{MARK}?.)"]
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(words)), "isolated")
    inner.decoder = decoders.Sequence(
        [decoders.Replace(MARK, ""), decoders.Replace(SPACE, " "), decoders.Replace(NEWLINE, "\n"), decoders.Fuse()]
    )
    special = [token for token in dict.fromkeys(tokens) if _SPECIAL.fullmatch(token)]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    found = {role: next((name for name in names if name in special), None) for role, names in ENCDEC_ROLES.items()}
    return inner, {role: name for role, name in found.items() if name is not None}


def is_chinese(text: str) -> bool:
    """Whether a text has a Chinese character."""
    return _CHINESE.search(text) is not None


def _name_of(token: str) -> str | None:
    """The text that is looked up for a token; None if no text is encoded as it."""
    if _SPECIAL.fullmatch(token) or token in (SPACE, NEWLINE):
        return token
    if is_chinese(token):
        return None if token.startswith("##") else token
    continues = token.startswith("##") and len(token) > 2
    return token[2:] if continues else MARK + token
