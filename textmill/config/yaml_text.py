"""YAML as textmill reads and writes it: what is written is read back as the same values."""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_SCIENTIFIC = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$")
_FIRST_CHARACTERS = list("-+.0123456789")


class YamlLoader(yaml.SafeLoader):
    """YAML 1.2 numbers: 6e-4 is a number here too."""


class _Dumper(yaml.SafeDumper):
    """The same numbers: the text "6e-4" is quoted."""


YamlLoader.add_implicit_resolver(_FLOAT, _SCIENTIFIC, _FIRST_CHARACTERS)
_Dumper.add_implicit_resolver(_FLOAT, _SCIENTIFIC, _FIRST_CHARACTERS)


def format_yaml(tree: Any) -> str:
    """A tree as the text of a YAML file."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def format_yaml_value(value: Any) -> str:
    """A value in one line, as after `section.key=`."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")
