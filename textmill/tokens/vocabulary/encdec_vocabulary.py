"""Opens the vocab.txt of EncDecTokenizer (Yuan, CPM-2): greedy longest match, Chinese tokens without a prefix.

Each line is a token: U+2582 is a space and U+2583 a line break, and a token without Chinese characters that continues a
word begins with ##. Here a token that begins a word gets the mark U+2581 instead, so that a longest match without a
prefix finds the same tokens. Words are cut at borders of scripts and not with jieba.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

MARK = "\u2581"
SPACE = "\u2582"
NEWLINE = "\u2583"
FIRST_CHINESE = "\u4e00"
LAST_CHINESE = "\u9fff"
UNREACHABLE = "\ue000"
"""Starts the name of a line that no text is encoded as, such as a Chinese token with ##."""
LONGEST_WORD = 200
"""Characters of the longest word; a longer one is unknown."""
ROLES = {
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


def is_encdec(tokens: list[str]) -> bool:
    """Whether the lines of a vocab.txt are a vocabulary of EncDecTokenizer."""
    return {"<unk>", SPACE, NEWLINE} <= set(tokens) and "[UNK]" not in tokens


def open_encdec(tokens: list[str]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a vocabulary, and its special tokens by transformers' names for them."""
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
    found = {role: next((name for name in names if name in special), None) for role, names in ROLES.items()}
    return inner, {role: name for role, name in found.items() if name is not None}


def _name_of(token: str) -> str | None:
    """The text that is looked up for a token; None if no text is encoded as it."""
    if _SPECIAL.fullmatch(token) or token in (SPACE, NEWLINE):
        return token
    if _CHINESE.search(token):
        return None if token.startswith("##") else token
    continues = token.startswith("##") and len(token) > 2
    return token[2:] if continues else MARK + token
