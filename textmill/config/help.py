"""The settings as a person reads them: each key with its default and its docstring."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from pydantic.fields import FieldInfo

from textmill.config import RunConfig, Section
from textmill.config.keys import all_fields, section_types
from textmill.config.mistakes import describe_type


def section_help(name: str) -> str:
    """All keys of one section, as --help prints them; what several kinds of it have in common stands under the first."""
    root = RunConfig.model_fields[name]
    lines: list[str] = [] if section_types(root.annotation) else _key_lines(name, root)
    said: set[tuple[str, str | None]] = set()
    for section in section_types(root.annotation):
        lines.append(f"{name}: {(section.__doc__ or '').strip()}")
        for key, field in all_fields(section, f"{name}."):
            if (key, field.description) not in said:
                lines += _key_lines(key, field)
            said.add((key, field.description))
    return "\n".join(lines) + "\n"


def _key_lines(key: str, field: FieldInfo) -> list[str]:
    wanted = "" if section_types(field.annotation) else f"   ({describe_type(field.annotation)})"
    line = f"  {key}={_shown(field.get_default(call_default_factory=True))}{wanted}"
    return [line, *textwrap.wrap(field.description or "", 96, initial_indent="      ", subsequent_indent="      ")]


def _shown(value: Any) -> str:
    if isinstance(value, Section):
        return "..."
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def all_help() -> str:
    """Every section, for the docs."""
    return "\n".join(section_help(name) for name in RunConfig.model_fields)
