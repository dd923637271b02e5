"""textmill COMMAND WHERE [section.key=value ...]: parses the command line, calls the command, prints one-line errors.

`textmill train recipe.yaml train.steps=9 --force` goes through `main`, `_run`, `_parse` and `_call`:

    _parse   positional arguments ["recipe.yaml"], settings ["train.steps=9"], flag values {"force": "yes"}
    _call    opens recipe.yaml with these settings as a RunConfig and calls
             textmill.training.generations.train(config, force="yes"), as the row of `train` in commands/table.py
             describes it
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from textmill.commands.table import COMMANDS, Command, Flag, load_function
from textmill.errors import EXIT_DONE, EXIT_STOPPED, TextmillError, explain_os_error
from textmill.processes.output import OutputLost, exit_code_of, protect_output
from textmill.processes.signals import run_and_exit

USAGE = "textmill COMMAND WHERE [section.key=value ...] [--flag]"
WHERE_HELP = "WHERE is a YAML file, a folder that textmill wrote, a Hugging Face model folder, or the name of a recipe."
SPINS = "1000"
"""How often an idle OpenMP thread looks for work before it sleeps, some 50 microseconds. By default threads look for it
much longer, which makes a step up to a hundred times slower if other programs use the cores (bench/LOG.md)."""
SHOWN_ARGUMENTS = 3
"""How many of too many arguments an error repeats."""


def command() -> NoReturn:
    """The program `textmill`. Only a command whose result is its output ends when nobody reads that."""
    sys.argv[1:] = _take_local_rank(sys.argv[1:])
    asks_for_help = len(sys.argv) < 2 or bool({"-h", "--help"} & set(sys.argv))
    row = None if asks_for_help else COMMANDS.get(sys.argv[1])
    output = protect_output(result_is_output=row is None or row.result_is_output)
    run_and_exit(lambda: exit_code_of(main(), output))


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    started = time.perf_counter()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # before torch is imported
    try:
        try:
            code = _run(_take_local_rank(sys.argv[1:] if argv is None else argv), started)
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


def _take_local_rank(argv: list[str]) -> list[str]:
    """The arguments without `--local_rank=N`, which the launchers of DeepSpeed and older torch add in front of them."""
    if argv and (given := re.fullmatch(r"--local[-_]rank=(\d+)", argv[0])):
        os.environ.setdefault("LOCAL_RANK", given[1])
        return argv[1:]
    return argv


def _report(error: TextmillError) -> int:
    """Print the error, even if a signal arrives meanwhile; return its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with suppress(OSError, ValueError, OutputLost):  # in a log with both streams the error comes last
        sys.stdout.flush()
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


def _run(argv: list[str], started: float) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return EXIT_DONE
    if argv[0] in ("-V", "--version"):
        from textmill import __version__

        print(f"textmill {__version__}")
        return EXIT_DONE
    if argv[0].endswith(".py"):  # a script of another tool
        argv = ["from", shlex.join(argv)]
    name = argv[0]
    rest = argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        advice = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise TextmillError(f"'{name}': unknown command; {advice}")
    if "--help" in rest or "-h" in rest:
        print(command_help(name, every="--all" in rest))
        return EXIT_DONE
    for flag in COMMANDS[name].flags:
        if flag.function and flag.name in rest:
            print(load_function(flag.function)())
            return EXIT_DONE
    from textmill.processes.signals import handled_signals

    for number in {signal.SIGTERM, signal.SIGHUP} & set(handled_signals()):
        signal.signal(number, _interrupt)
    row = COMMANDS[name]
    arguments, settings, flag_values = _parse(rest, name, row)
    if row.timed:
        flag_values["started"] = started
    _call(name, row, arguments, settings, flag_values)
    return EXIT_DONE


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _parse(argv: list[str], name: str, row: Command) -> tuple[list[str], list[str], dict[str, Any]]:
    """The positional arguments, the settings, and the values of flags by the parameter that they set."""
    flags = {flag.name: flag for flag in row.flags}
    arguments: list[str] = []
    settings: list[str] = []
    texts_by_flag: dict[str, list[str]] = {}
    remaining = iter(argv)
    for argument in remaining:
        if argument.startswith("-") and argument != "-":
            typed_name, equals, text = argument.partition("=")
            if typed_name not in flags:
                raise TextmillError(_flag_advice(typed_name, name, row))
            flag = flags[typed_name]
            if flag.kind == "switch" and equals:
                raise TextmillError(f"{flag.name}: takes no value, found '{text}'; write {flag.name} or leave it out")
            if flag.kind != "switch":
                text = text if equals else next(remaining, "")
                if not text:
                    raise TextmillError(f"{flag.name}: needs a value: {flag.summary}")
            texts_by_flag.setdefault(flag.name, []).append(text)
        elif name != "from" and re.match(r"^[A-Za-z_][\w.]*=", argument) and not os.path.exists(argument):
            settings.append(argument)
        else:
            arguments.append(argument)
    for flag in row.flags:
        if flag.name in texts_by_flag and flag.excludes in texts_by_flag:
            raise TextmillError(f"{flag.name}: cannot be used together with {flag.excludes}; use one of them")
        if flag.example and flag.name not in texts_by_flag:
            raise TextmillError(f"{name}: needs {flag.name}; write: {_usage(name)}")
    values = {flags[typed].parameter: _value(flags[typed], texts) for typed, texts in texts_by_flag.items()}
    return arguments, settings, values


def _flag_advice(typed_name: str, name: str, row: Command) -> str:
    """The error for a flag that the command does not have, with the setting or flag that was probably meant."""
    from textmill.config.keys import suggest_key
    from textmill.config.other_names import describe_target, is_reason, target_of

    flags = [*(flag.name for flag in row.flags), "--help"]
    target = target_of(typed_name)
    if name == "from":
        return f"{typed_name}: unknown flag; put the whole command in quotes: {_usage(name)}"
    if (target is None or is_reason(target)) and any(
        flag.name == typed_name for command in COMMANDS.values() for flag in command.flags
    ):
        return f"{typed_name}: '{name}' does not take it; it takes {', '.join(flags)}"
    if target is None and (near := difflib.get_close_matches(typed_name, flags, n=1, cutoff=0.7)):
        return f"{typed_name}: unknown flag; did you mean '{near[0]}'?"
    if target is None:
        typed_key = typed_name.lstrip("-").replace("-", "_")
        return f"{typed_name}: unknown flag; settings are written section.key=value; {suggest_key(typed_key)}"
    is_key = target[0] != "@" and "=" not in target and not is_reason(target)
    return f"{typed_name}: unknown flag; {f'write {target}=VALUE' if is_key else describe_target(target)}"


def _value(flag: Flag, texts: list[str]) -> object:
    """The value that a flag passes to the command's function, from what was typed after each of its occurrences."""
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
        if flag.kind == "step":
            expected = "a number, latest or best"
        else:
            expected = "the number of a step" if flag.parameter == "step" else "a whole number"
        raise TextmillError(f"{flag.name}: found '{text}'; give {expected}")
    return int(text)


def _call(name: str, row: Command, arguments: list[str], settings: list[str], flag_values: dict[str, Any]) -> None:
    """Check the arguments, import the command's function and call it."""
    values = _group_arguments(name, row, arguments)
    if settings and not row.takes_settings:
        raise TextmillError(f"{name}: takes no settings, found '{settings[0]}'; leave it out")
    if row.opens is not None:
        config = _open_config(name, row, arguments[0], settings, flag_values)
        rest: list[Any] = values[1:]
        if "[WHERE ...]" in row.arguments:
            from textmill.where import open_where

            rest = [[open_where(argument, settings) for argument in values[1]]]
        row.load()(config, *rest, **flag_values)
    elif row.takes_settings:
        row.load()(*values, settings=settings, **flag_values)
    else:
        row.load()(*values, **flag_values)


def _group_arguments(name: str, row: Command, arguments: list[str]) -> list[str | list[str]]:
    """The arguments as the function takes them: `WHERE [TEXT ...]` and a b c -> ["a", ["b", "c"]]."""
    single = [argument for argument in row.arguments if not argument.rstrip("]").endswith("...")]
    takes_list = len(single) < len(row.arguments)
    required = [argument for argument in single if not argument.startswith("[")]
    if len(arguments) < len(required) or (len(arguments) > len(single) and not takes_list):
        _refuse_bare_keys(arguments[len(single) :])
        needed = " ".join(row.arguments) or "no argument"
        advice = _excess_advice(name, row, arguments[len(single) :])
        raise TextmillError(f"{name}: needs {needed}, {_describe_found(arguments)}; {advice}")
    values: list[str | list[str]] = [*arguments[: len(single)]]
    if takes_list:
        values.append(arguments[len(single) :])
    return values


def _describe_found(arguments: list[str]) -> str:
    more = f" and {len(arguments) - SHOWN_ARGUMENTS} more" if len(arguments) > SHOWN_ARGUMENTS else ""
    return f"found {len(arguments)}: {', '.join(arguments[:SHOWN_ARGUMENTS])}{more}" if arguments else "found none"


def _excess_advice(name: str, row: Command, excess: list[str]) -> str:
    """What to write instead of too few or too many arguments."""
    repeated = next((flag for flag in row.flags if flag.kind == "texts"), None)
    if repeated and excess and all(os.path.exists(argument) for argument in excess):
        return f"a pattern after {repeated.name} needs quotes: {repeated.name} {repeated.example}"
    if excess and name == "generate":
        return f"a prompt is written sample.prompt={shlex.quote(' '.join(excess))}"
    return f"write: {_usage(name)}"


def _refuse_bare_keys(arguments: list[str]) -> None:
    """Say so if an argument is a setting without its value: `train.steps`, or `train.steps 10`."""
    from textmill.config.keys import all_fields

    for key in {name for name, _ in all_fields()}.intersection(arguments):
        raise TextmillError(f"{key}: a setting needs a value, without spaces; write {key}=VALUE")


def _open_config(name: str, row: Command, argument: str, settings: list[str], flag_values: dict[str, Any]) -> Any:
    """The config of WHERE; the folder of a checkpoint sets the value of --step."""
    from textmill.where import open_where

    if row.opens == "model" and (kind := next((one for one in settings if one.startswith("engine.kind=")), None)):
        raise TextmillError(f"{kind}: '{name}' runs the model with torch, whatever it was trained with; leave it out")
    where = open_where(argument, settings)
    if where.bare_model and row.opens != "model":
        raise TextmillError(
            f"{argument}: is a model, not a run; start a run from it: textmill {name} CONFIG model.init_from={argument}"
        )
    takes_step = any(flag.parameter == "step" for flag in row.flags)
    if where.step is not None and takes_step and "step" not in flag_values:
        if row.opens != "model":
            raise TextmillError(
                f"{argument}: is one checkpoint; to resume from it: textmill {name} RUN --step {where.step}"
            )
        flag_values["step"] = where.step
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
        "'textmill COMMAND --help' lists the settings that matter most, --help --all every one.",
        "Start with: textmill run quickstart",
    ]
    return "\n".join(lines)


def command_help(name: str, every: bool = False) -> str:
    """What `textmill COMMAND --help` prints: its usage, its flags, and the settings that matter most, or `every` one
    that it reads."""
    from textmill.config.keys import keys_help, section_help, short_help

    row = COMMANDS[name]
    lines = [_usage(name) + (" [section.key=value ...]" if row.settings else ""), f"  {row.summary}", ""]
    lines += [f"  {flag.name:<10} {flag.summary}" for flag in row.flags] + [f"  {'--help':<10} print this help"]
    if not row.settings:
        return "\n".join(lines)
    lines += [f"  {'--all':<10} with --help: every setting that it reads", "", WHERE_HELP, ""]
    if every:
        sections = map(section_help, ("folder", *row.sections))
        return "\n".join([*lines, *sections, *([keys_help(row.keys.split())] if row.keys else [])])
    return "\n".join([*lines, short_help(row.settings.split())])
