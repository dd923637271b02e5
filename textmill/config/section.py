"""What every section of the config has in common: the markers of fields, and presets that fill several of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A part of the config: frozen, strict about types, unknown keys refused, a docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


def changeable(default: Any, **rules: Any) -> Any:
    """A field that decides how the work is done, not its result: it may change in mid-run."""
    return Field(default, json_schema_extra={"changeable": True}, **rules)


def free_texts(default: Any) -> Any:
    """A changeable list of free texts: on the command line a comma does not separate them."""
    return Field(default, json_schema_extra={"changeable": True, "free_texts": True})


def path(default: Any = None, **rules: Any) -> Any:
    """A changeable field that names a file or folder, relative to the YAML file that sets it."""
    return Field(default, json_schema_extra={"changeable": True, "path": True}, **rules)


def source(default: Any = None, suffix: str = "", **rules: Any) -> Any:
    """A field that names an input: a path relative to the YAML file where it exists, else a name.

    With a `suffix`, only a file whose name ends so is a path, whatever folders there are.
    """
    return Field(default, json_schema_extra={"source": True, "suffix": suffix}, **rules)


def models(default: Any, **rules: Any) -> Any:
    """A field with a list of models: paths relative to the YAML file where they exist, else names of the hub."""
    return Field(default, json_schema_extra={"models": True}, **rules)


def per_call(default: Any, **rules: Any) -> Any:
    """A field of one call of a command: a folder that textmill writes does not record it."""
    return Field(default, json_schema_extra={"per_call": True}, **rules)


def field_markers(field: FieldInfo) -> dict[str, Any]:
    """The markers of a field: changeable, path, source, suffix, models, task_files, evaluation_files, free_texts,
    per_call."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def results_of(section: Section, name: str) -> dict[str, Any]:
    """The settings of a section that decide the result, flat: 'train.chat.pack' -> True."""
    flat: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if field_markers(field).get("changeable"):
            continue
        if isinstance(value, Section):
            flat |= results_of(value, f"{name}.{key}")
        else:
            flat[f"{name}.{key}"] = value
    return flat


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
