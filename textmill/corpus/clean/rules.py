"""All cleaning rules, in the order in which they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from textmill.corpus.clean.characters import (
    drop_controls,
    plain_punctuation,
    replace_invisibles,
    to_half_width,
    to_nfc,
    to_nfkc,
    trim_spaces,
    unify_newlines,
)
from textmill.corpus.clean.lines import drop_boilerplate, drop_url_lines
from textmill.corpus.clean.markup import break_at_markers, mask_emails, mask_phones, only_korean, strip_html
from textmill.corpus.clean.repair import repair

Rule = Callable[[str], str]

RULES: dict[str, Rule] = {
    "repair": repair,
    "markers": break_at_markers,
    "html": strip_html,
    "newlines": unify_newlines,
    "controls": drop_controls,
    "unicode": to_nfc,
    "compatibility": to_nfkc,
    "invisibles": replace_invisibles,
    "punctuation": plain_punctuation,
    "width": to_half_width,
    "dsgpt2": only_korean,
    "emails": mask_emails,
    "phones": mask_phones,
    "url_lines": drop_url_lines,
    "boilerplate": drop_boilerplate,
    "spaces": trim_spaces,
}
"""The order avoids extra rounds. Encoding is repaired first. Markers are read before they could be taken for tags.
Entities are decoded before control characters are removed. Newlines are unified before control characters are removed.
NFC runs after control characters are gone, since one may separate a letter from its accent. Line rules run on nearly
finished lines."""

SINGLE_PASS_RULES = frozenset({"newlines", "controls", "unicode", "spaces"})
"""These rules alone never need a second round."""
MAX_ROUNDS = 10
"""More rounds than any text has needed."""


def clean(
    text: str, rules: Collection[str], changed: Counter[str] | None = None, overrides: Mapping[str, Rule] | None = None
) -> str:
    """Apply the rules in the order of RULES, and repeat until nothing changes.

    `changed` counts each rule that changed the text, once. `overrides` replaces rules that have settings of their own.
    """
    functions = [(name, (overrides or {}).get(name, function)) for name, function in RULES.items() if name in rules]
    changed_by: set[str] = set()
    for _ in range(1 if SINGLE_PASS_RULES.issuperset(rules) else MAX_ROUNDS):
        start = text
        for name, function in functions:
            after = function(text)
            if after is not text and after != text:
                changed_by.add(name)
                text = after
        if text is start or text == start:
            break
    if changed is not None:
        changed.update(changed_by)
    return text
