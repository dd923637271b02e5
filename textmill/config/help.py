"""The settings as a person reads them: each key with its default and its docstring."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from textmill.config import RunConfig, Section
from textmill.config.load import spoken_type
from textmill.config.words import fields, section_types


def section_help(name: str) -> str:
    """All keys of one section, as --help prints them."""
    lines: list[str] = []
    for key, field in fields():
        if key != name and not key.startswith(name + "."):
            continue
        sections = section_types(field.annotation)
        if sections and key == name:
            lines.append(f"{name}: {(sections[0].__doc__ or '').strip()}")
            continue
        wanted = spoken_type(field.annotation)
        lines.append(f"  {key}={_shown(field.get_default(call_default_factory=True))}" + (f"   ({wanted})" if not sections else ""))
        lines += textwrap.wrap(field.description or "", 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, Section):
        return "..."
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def all_help() -> str:
    """Every section, for the docs."""
    return "\n".join(section_help(name) for name in RunConfig.model_fields)
