"""Named sets of settings for cleaning and for pretraining, and the names of cleaning rules and languages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

RuleName = Literal[
    "repair",
    "markers",
    "html",
    "newlines",
    "controls",
    "unicode",
    "compatibility",
    "invisibles",
    "punctuation",
    "width",
    "dsgpt2",
    "emails",
    "phones",
    "url_lines",
    "boilerplate",
    "spaces",
]
PresetName = Literal["web", "books", "chat", "encyclopaedia", "none"]

BASIC: list[RuleName] = ["unicode", "newlines", "controls", "spaces"]

# Sites of images, films, sound, games, shops and forums, and files that are not pages: what web link lists hold
# besides prose.
_DOMAINS = (
    "500px amazon apple artstation bandcamp dailymotion deviantart discord discordapp dropbox ebay facebook fbcdn "
    "flickr gfycat giphy github google gyazo imageshack imgflip imgur instagram liveleak livememe memegenerator "
    "photobucket pinimg pinterest pixiv prntscr puu quickmeme redd reddit redditmedia reddituploads soundcloud "
    "spotify streamable strawpoll tinypic tumblr twimg twitch twitter vid vimeo vine vocaroo walmart wikimedia "
    "wikipedia xkcd youtu youtube ytimg"
).split()
_EXTENSIONS = (
    ".3gp .7z .aac .ai .apk .avi .bin .bmp .bz2 .css .csv .dmg .doc .docx .eps .exe .flac .flv .gif .gz .gzip .ico "
    ".iso .jar .jpeg .jpg .js .json .log .m4a .m4v .mid .mkv .mov .mp3 .mp4 .mpeg .mpg .odt .ogg .pdf .png .ppt .pptx "
    ".psd .py .rar .rss .rtf .sql .svg .swf .tar .tgz .tif .tiff .torrent .ttf .txt .wav .webm .webp .wmv .xls .xlsx "
    ".xml .xz .zip"
).split()

NONE: dict[str, Any] = {
    "rules": BASIC,
    "newline_markers": ["<n>"],
    "min_chars": 1,
    "max_chars": 0,
    "min_words": 0,
    "max_words": 0,
    "max_symbols": 1.0,
    "max_digits": 1.0,
    "max_repeated_lines": 1.0,
    "max_repeated_words": 1.0,
    "languages": [],
    "language_score": 0.0,
    "block_domains": [],
    "block_extensions": [],
}
"""The defaults of all cleaning settings."""

_OWN: dict[str, dict[str, Any]] = {
    "none": {},
    # Megatron's recipe for OpenWebText: repaired, English, at least 128 words, no blocked sites; and nothing that is
    # not prose.
    "web": {
        "rules": ["repair", "html", *BASIC, "invisibles", "url_lines", "boilerplate"],
        "min_words": 128,
        "languages": ["en"],
        "max_symbols": 0.3,
        "max_digits": 0.3,
        "max_repeated_lines": 0.3,
        "max_repeated_words": 0.3,
        "block_domains": _DOMAINS,
        "block_extensions": _EXTENSIONS,
        "dedup": "near",
    },
    "books": {
        "rules": ["repair", *BASIC, "invisibles"],
        "min_words": 20,
        "max_symbols": 0.3,
        "max_digits": 0.3,
        "max_repeated_words": 0.5,
        "dedup": "near",
    },
    "chat": {"rules": ["repair", *BASIC, "invisibles", "emails", "phones"], "min_chars": 2, "max_symbols": 0.8},
    "encyclopaedia": {
        "rules": ["repair", "html", *BASIC, "invisibles"],
        "min_words": 20,
        "max_symbols": 0.4,
        "max_digits": 0.4,
        "max_repeated_lines": 0.3,
        "max_repeated_words": 0.5,
        "dedup": "near",
    },
}
PRESETS: dict[str, dict[str, Any]] = {name: {**NONE, **own} for name, own in _OWN.items()}

TrainPresetName = Literal["none", "auto", "pretrain-nano", "pretrain-muon", "pretrain-adamw"]
_PRETRAIN: dict[str, Any] = {
    "schedule": "cosine",
    "warmup": 0.05,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "clip": 1.0,
}
TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # Learning rates, weight decay, batch and warm-up follow when net, tokens and length are known.
    "auto": {"optimizer": "muon", "schedule": "cosine", "muon": {"momentum": 0.9}, "betas": [0.9, 0.95], "clip": 1.0},
    # The best of the settings tried on the nano size and a megabyte of text in samples of 64, on a CPU.
    "pretrain-nano": {
        **_PRETRAIN,
        "optimizer": "muon",
        "learning_rate": 1e-2,
        "min_learning_rate": 6e-4,
        "muon": {"momentum": 0.9},
        "betas": [0.9, 0.99],
        "batch": 16,
    },
    # The best of the settings tried on 124M parameters and 52M tokens in samples of 1,024, all in
    # bench/LOG.md.
    "pretrain-muon": {
        **_PRETRAIN,
        "optimizer": "muon",
        "learning_rate": 4.5e-3,
        "muon": {"momentum": 0.9, "adamw_rate_factor": 2.2},
        "batch": 32,
    },
    "pretrain-adamw": {**_PRETRAIN, "optimizer": "adamw", "learning_rate": 6e-4, "batch": 64},
}


def fill_from_preset(given: Any, presets: dict[str, dict[str, Any]]) -> Any:
    """A section's settings over those of the preset that it names; a sub-section is filled key by key."""
    preset = given.get("preset", "none") if isinstance(given, dict) else None
    return _fill(presets[preset], given) if isinstance(preset, str) and preset in presets else given


def _fill(below: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    filled = {**below, **over}
    for name in below.keys() & over.keys():
        if isinstance(below[name], dict) and isinstance(over[name], dict):
            filled[name] = _fill(below[name], over[name])
        elif isinstance(below[name], dict) and isinstance(over[name], BaseModel):
            explicit = {key: getattr(over[name], key) for key in over[name].model_fields_set}
            filled[name] = _fill(below[name], explicit)
    return filled


def omit_preset_values(settings: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """A section's settings without those that its preset sets to the same value."""
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(preset.get(name), dict):
            if inner := omit_preset_values(value, preset[name]):
                own[name] = inner
        elif name not in preset or value != preset[name]:
            own[name] = value
    return own


LANGUAGES = frozenset(
    """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy
    da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy
    ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min
    mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm
    ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep
    vi vls vo wa war wuu xal xmf yi yo yue zh
    """.split()
)
"""Codes of the languages that the detector distinguishes."""
COUNTRIES = {
    "kr": "ko",
    "jp": "ja",
    "cn": "zh",
    "gb": "en",
    "us": "en",
    "dk": "da",
    "cz": "cs",
    "gr": "el",
    "in": "hi",
    "se": "sv",
}
"""Country codes that are mistaken for language codes, and the language meant."""
