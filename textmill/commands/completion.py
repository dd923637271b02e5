"""The command completion: a script with which bash or zsh completes commands, flags, settings and their values.

argcomplete and shtab complete argparse's options, and ours are `section.key=value` words; argcomplete would also start
Python at every TAB.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from textmill.commands.table import COMMANDS, Command
from textmill.config import SIZES, RunConfig
from textmill.config.keys import all_fields, section_types
from textmill.errors import TextmillError
from textmill.where import recipe_names

SHELLS = ("bash", "zsh")
ZSH_START = "#compdef textmill\nautoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = r"""# Completion of textmill's command line; regenerate it after an upgrade: textmill completion SHELL
_textmill_flags() { case "$1" in
@FLAGS@
esac; }
_textmill_sections() { case "$1" in
@SECTIONS@
esac; }
_textmill_keys() { case "$1" in
@KEYS@
esac; }
_textmill_values() { case "$1" in
@VALUES@
esac; }
_textmill_files() {
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$1"))
    type compopt &> /dev/null && compopt -o filenames 2> /dev/null
}
_textmill() {
    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" key="" word
    local -i places=0 at
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$cur"))
        return
    fi
    # bash splits words at "=": key, =, value; zsh does not.
    if [ "$cur" = "=" ]; then key="$before"; cur=""
    elif [ "$before" = "=" ] && [ "$COMP_CWORD" -gt 3 ]; then key="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    local head=""
    case "$cur" in
        -*) ;;
        *.*=*) key="${cur%%=*}"; head="$key="; cur="${cur#*=}" ;;
    esac
    if [ -n "$key" ]; then
        COMPREPLY=($(compgen -P "$head" -W "$(_textmill_values "$key")" -- "$cur"))
        [ ${#COMPREPLY[@]} -eq 0 ] && [ -z "$head" ] && _textmill_files "$cur"
        return
    fi
    if [ "$before" = "--step" ]; then
        COMPREPLY=($(compgen -W "latest best" -- "$cur"))
        return
    fi
    if [ "$command" = completion ]; then
        COMPREPLY=($(compgen -W "@SHELLS@" -- "$cur"))
        return
    fi
    case "$cur" in
        -*) COMPREPLY=($(compgen -W "$(_textmill_flags "$command") --help" -- "$cur")); return ;;
        *.*)
            for word in $(_textmill_sections "$command"); do
                case "$cur" in "$word".*) COMPREPLY=($(compgen -S = -W "$(_textmill_keys "$word")" -- "$cur")) ;; esac
            done
            if [ ${#COMPREPLY[@]} -gt 0 ]; then
                type compopt &> /dev/null && compopt -o nospace 2> /dev/null
                return
            fi
            _textmill_files "$cur"
            return ;;
    esac
    for ((at = 2; at < COMP_CWORD; at++)); do
        case "${COMP_WORDS[at]}" in
            -*) ;;
            *) [ "${COMP_WORDS[at]}" != "=" ] && [ "${COMP_WORDS[at+1]}" != "=" ] && [ "${COMP_WORDS[at-1]}" != "=" ] &&
                places+=1 ;;
        esac
    done
    if [ "$places" -eq 0 ]; then
        COMPREPLY=($(compgen -W "@RECIPES@" -- "$cur"))
        _textmill_files "$cur"
        return
    fi
    COMPREPLY=($(compgen -S . -W "$(_textmill_sections "$command")" -- "$cur"))
    if [ ${#COMPREPLY[@]} -gt 0 ]; then
        type compopt &> /dev/null && compopt -o nospace 2> /dev/null
    else
        _textmill_files "$cur"
    fi
}
complete -F _textmill textmill
"""


def completion(shell: str) -> None:
    """Print the script for a shell."""
    if shell not in SHELLS:
        raise TextmillError(f"completion: found '{shell}'; the shells are {', '.join(SHELLS)}")
    print((ZSH_START if shell == "zsh" else "") + build_script(), end="")


def build_script() -> str:
    """The script with today's commands, flags, keys and values."""
    sections = [name for name, field in RunConfig.model_fields.items() if section_types(field.annotation)]
    keys = {section: _keys_of(section) for section in sections}
    filled = {
        "COMMANDS": " ".join(COMMANDS),
        "SHELLS": " ".join(SHELLS),
        "RECIPES": " ".join(recipe_names()),
        "FLAGS": _cases((name, " ".join(flag.name for flag in row.flags)) for name, row in COMMANDS.items()),
        "SECTIONS": _cases((name, " ".join(_sections_of(row, sections))) for name, row in COMMANDS.items()),
        "KEYS": _cases((section, " ".join(found)) for section, found in keys.items()),
        "VALUES": _cases((key, " ".join(values)) for key, values in values_of_keys().items() if values),
    }
    script = SCRIPT
    for name, text in filled.items():
        script = script.replace(f"@{name}@", text)
    return script


def values_of_keys() -> dict[str, list[str]]:
    """The values to choose from, of each key that has some."""
    values: dict[str, dict[str, None]] = {}
    for key, field in all_fields():
        if not section_types(field.annotation):
            values.setdefault(key, {}).update(dict.fromkeys(_choices(field.annotation)))
    values["model.size"] = {size: None for sizes in SIZES.values() for size in sizes}
    values["model.family"] = dict.fromkeys(SIZES)
    return {key: list(found) for key, found in values.items()}


def _choices(annotation: Any) -> Iterable[str]:
    """The texts that an annotation names: literals, true and false, also inside lists and unions."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return ()


def _keys_of(section: str) -> list[str]:
    fields = [(key, field) for key, field in all_fields() if key.startswith(f"{section}.")]
    return list(dict.fromkeys(key for key, field in fields if not section_types(field.annotation)))


def _sections_of(row: Command, every: list[str]) -> list[str]:
    """The sections that a command reads; those that only look at a folder take all."""
    read = dict.fromkeys([*row.sections, *(key.partition(".")[0] for key in row.keys.split())])
    return list(read) or (every if row.takes_settings else [])


def _cases(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f'    {name}) echo "{text}" ;;' for name, text in rows)
