"""textmill COMMAND WHERE [section.key=value ...]: parses the command line, calls the command, prints errors in one
line."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from typing import Any, NoReturn

from textmill.commands.table import COMMANDS, Command, Flag
from textmill.errors import EXIT_DONE, EXIT_STOPPED, TextmillError, explain_os_error
from textmill.processes.command_time import CommandTime
from textmill.processes.exits import run_and_exit
from textmill.processes.output import OutputLost, exit_code_of, protect_output

USAGE = "textmill COMMAND WHERE [section.key=value ...] [--flag]"
WHERE_HELP = "WHERE is a YAML file, a folder that textmill wrote, a Hugging Face model folder, or the name of a recipe."


def command() -> NoReturn:
    """The program `textmill`. Only a command whose result is its output ends when nobody reads that."""
    row = COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 and not {"-h", "--help"} & set(sys.argv) else None
    output = protect_output(result_is_output=row is None or row.result_is_output)
    run_and_exit(lambda: exit_code_of(main(), output))


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    command_time = CommandTime()
    try:
        try:
            code = _run(sys.argv[1:] if argv is None else argv, command_time)
            print(end="", flush=True)
            return code
        except TextmillError as error:
            return _report(error)
        except OutputLost:
            return EXIT_DONE  # `command` makes another exit code of it
        except OSError as error:
            if (explained := explain_os_error(error)) is None:
                raise
            return _report(explained)
    except KeyboardInterrupt as interrupt:
        if failure := _error_before(interrupt):
            return _report(failure)
        print("textmill: stopped; finished work is saved, the same command resumes from there", file=sys.stderr)
        return EXIT_STOPPED


def _report(error: TextmillError) -> int:
    """Print the error, even if a signal arrives meanwhile; return its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if str(error):
        print("textmill: " + " ".join(str(error).split()), file=sys.stderr)
    return error.exit_code


def _error_before(interrupt: BaseException) -> TextmillError | None:
    """The error that was being handled when a signal arrived: a launcher ends all processes as soon as one has
    failed."""
    context = interrupt.__context__
    while context is not None and not isinstance(context, TextmillError):
        context = context.__context__
    return context


def _run(argv: list[str], command_time: CommandTime) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return EXIT_DONE
    if argv[0] in ("-V", "--version"):
        from textmill import __version__

        print(f"textmill {__version__}")
        return EXIT_DONE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        advice = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise TextmillError(f"'{name}': unknown command; {advice}")
    if "--help" in rest or "-h" in rest:
        print(command_help(name))
        return EXIT_DONE
    from textmill.processes.signals import handled_signals

    for number in {signal.SIGTERM, signal.SIGHUP} & set(handled_signals()):
        signal.signal(number, _interrupt)
    arguments, settings, options = _parse(rest, name, COMMANDS[name])
    if COMMANDS[name].timed:
        options["command"] = command_time
    _call(name, COMMANDS[name], arguments, settings, options)
    return EXIT_DONE


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _parse(argv: list[str], name: str, row: Command) -> tuple[list[str], list[str], dict[str, Any]]:
    """The positional arguments, the settings, and the parameters that flags set."""
    known = {flag.name: flag for flag in row.flags}
    arguments: list[str] = []
    settings: list[str] = []
    given: dict[str, list[str]] = {}
    rest = iter(argv)
    for argument in rest:
        if argument.startswith("-"):
            name_given, equals, value = argument.partition("=")
            if name_given not in known:
                raise TextmillError(_flag_advice(name_given, name, row))
            flag = known[name_given]
            if flag.kind == "switch":
                if equals:
                    raise TextmillError(
                        f"{flag.name}: takes no value, found '{value}'; write {flag.name} or leave it out"
                    )
            elif not (value := value if equals else next(rest, "")):
                raise TextmillError(f"{flag.name}: needs a value: {flag.summary}")
            given.setdefault(flag.name, []).append(value)
        elif re.match(r"^[A-Za-z_][\w.]*=", argument) and not os.path.exists(argument):
            settings.append(argument)
        else:
            arguments.append(argument)
    for flag in row.flags:
        if flag.name in given and flag.excludes in given:
            raise TextmillError(f"{flag.name}: cannot be used together with {flag.excludes}; use one of them")
        if flag.example and flag.name not in given:
            raise TextmillError(f"{name}: needs {flag.name}; write: {_usage(name)}")
    return arguments, settings, {known[flag].parameter: _value(known[flag], texts) for flag, texts in given.items()}


def _flag_advice(name_given: str, name: str, row: Command) -> str:
    from textmill.config.keys import suggest_key
    from textmill.config.other_names import ADVICE, OTHER_NAMES

    flags = [*(flag.name for flag in row.flags), "--help"]
    if any(flag.name == name_given for one in COMMANDS.values() for flag in one.flags):
        return f"{name_given}: '{name}' does not take it; it takes {', '.join(flags)}"
    key_given = name_given.lstrip("-").replace("-", "_")
    key = OTHER_NAMES.get(key_given)
    if key is None and (near := difflib.get_close_matches(name_given, flags, n=1, cutoff=0.7)):
        return f"{name_given}: unknown flag; did you mean '{near[0]}'?"
    if key_given in ADVICE:
        return f"{name_given}: unknown flag; {ADVICE[key_given]}"
    advice = f"write {key}=VALUE" if key else f"settings are written section.key=value; {suggest_key(key_given)}"
    return f"{name_given}: unknown flag; {advice}"


def _value(flag: Flag, texts: list[str]) -> object:
    text = texts[-1]
    if flag.kind == "switch":
        return flag.value
    if flag.kind == "texts":
        return texts
    if flag.kind == "minutes":
        try:
            return float(text)
        except ValueError:
            raise TextmillError(f"{flag.name}: found '{text}'; give a number of minutes, such as 10") from None
    if flag.kind == "text" or (flag.kind == "step" and text in ("latest", "best")):
        return text
    if not text.isdigit():
        number = "the number of a step" if flag.parameter == "step" else "a whole number"
        choice = "a number, latest or best" if flag.kind == "step" else number
        raise TextmillError(f"{flag.name}: found '{text}'; give {choice}")
    return int(text)


def _call(name: str, row: Command, arguments: list[str], settings: list[str], options: dict[str, Any]) -> None:
    values = _arguments(name, row, arguments)
    if settings and not row.takes_settings:
        raise TextmillError(f"{name}: takes no settings, found '{settings[0]}'; leave it out")
    if row.opens != "nothing":
        row.load()(_open(name, row, arguments[0], settings, options), *values[1:], **options)
    elif row.takes_settings:
        row.load()(*values, settings=settings, **options)
    else:
        row.load()(*values, **options)


def _arguments(name: str, row: Command, found: list[str]) -> list[str | list[str]]:
    """The arguments as the function takes them; the last may be a list."""
    fixed = [argument for argument in row.arguments if not argument.rstrip("]").endswith("...")]
    listed = len(fixed) < len(row.arguments)
    required = [argument for argument in fixed if not argument.startswith("[")]
    if len(found) < len(required) or (len(found) > len(fixed) and not listed):
        many = f"found {len(found)}: {', '.join(found)}" if found else "found none"
        raise TextmillError(f"{name}: needs {' '.join(row.arguments) or 'no argument'}, {many}; write: {_usage(name)}")
    return [*found[: len(fixed)], *([found[len(fixed) :]] if listed else [])]


def _open(name: str, row: Command, argument: str, settings: list[str], options: dict[str, Any]) -> Any:
    """The config of WHERE; a checkpoint's folder sets the step."""
    from textmill.where import open_where

    where = open_where(argument, settings)
    if where.bare_model and row.opens != "model":
        raise TextmillError(
            f"{argument}: is a model, not a run; start a run from it: textmill {name} CONFIG model.init_from={argument}"
        )
    if where.step is not None and "step" not in options and any(flag.parameter == "step" for flag in row.flags):
        if row.opens != "model":
            raise TextmillError(
                f"{argument}: is one checkpoint; to resume from it: textmill {name} RUN --step {where.step}"
            )
        options["step"] = where.step
    return where.config


def _usage(name: str) -> str:
    row = COMMANDS[name]
    required = [f"{flag.name} {flag.example}" for flag in row.flags if flag.example]
    return " ".join(["textmill", name, *row.arguments, *required])


def help_text() -> str:
    """What `textmill --help` prints."""
    lines = ["textmill: from raw text in any language to a trained, evaluated and served language model", ""]
    lines += [f"  {USAGE}", ""]
    lines += [f"  {name:<14} {row.summary}" for name, row in COMMANDS.items()]
    lines += [
        "",
        WHERE_HELP,
        "'textmill COMMAND --help' lists the settings that a command reads. Start with: textmill run quickstart",
    ]
    return "\n".join(lines)


def command_help(name: str) -> str:
    """What `textmill COMMAND --help` prints: its usage, its flags, and the settings it reads."""
    from textmill.config.help import settings_help

    row = COMMANDS[name]
    lines = [_usage(name) + (" [section.key=value ...]" if row.sections else ""), f"  {row.summary}", ""]
    lines += [f"  {flag.name:<10} {flag.summary}" for flag in row.flags] + [f"  {'--help':<10} print this help"]
    if row.sections:
        lines += ["", WHERE_HELP, "", settings_help(name, ("folder", *row.sections))]
    return "\n".join(lines)
