"""What every section of the config has in common, and the marks its fields bear."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A part of the config: frozen, strict about types, unknown keys refused, a docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


def how(default: Any, **rules: Any) -> Any:
    """A field that says how the work is done and not what comes out: free to change in mid-run."""
    return Field(default, json_schema_extra={"how": True}, **rules)


def texts(default: Any) -> Any:
    """A `how` field that lists free texts: on the command line a comma does not part them."""
    return Field(default, json_schema_extra={"how": True, "texts": True})


def place(default: Any = None, **rules: Any) -> Any:
    """A `how` field that names a folder: relative to the YAML file it stands in."""
    return Field(default, json_schema_extra={"how": True, "place": True}, **rules)


def source(default: Any = None, **rules: Any) -> Any:
    """A field that names something to read: a path relative to the YAML file where there is one, else a name."""
    return Field(default, json_schema_extra={"source": True}, **rules)


def marks(field: FieldInfo) -> dict[str, Any]:
    """The marks of a field."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}
