"""textmill VERB WHERE [section.key=value ...]: finds the verb, opens WHERE, prints what went wrong in one line."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from textmill.errors import EXIT_DONE, EXIT_STOPPED, TextmillError
from textmill.processes.exits import leave_after


@dataclass(frozen=True)
class Verb:
    """A verb of the command: where its function is, what it says of itself, what it takes."""

    place: str
    summary: str
    sections: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


ALL = ("corpus", "tokenizer", "tokens", "runner", "model", "train", "engine", "evaluate", "sample", "track")

# Plain data, so that `textmill --help` imports nothing.
VERBS = {
    "new": Verb("textmill.commands.new:new", "look at your text and this machine, write a config to start from", (), ("--text",)),
    "run": Verb("textmill.commands.run:run", "the whole chain, skipping what is done", ALL, ("--force",)),
    "prepare": Verb("textmill.corpus.prepare:prepare", "text in, clean documents out", ("corpus", "runner"), ("--force",)),
    "fit-tokenizer": Verb("textmill.tokens.vocabulary.fitting:fit_tokenizer", "a vocabulary for the corpus", ("tokenizer", "runner"), ("--force",)),
    "tokenize": Verb("textmill.tokens.tokenize:tokenize", "documents in, token ids out", ("tokens", "tokenizer", "runner"), ("--force",)),
    "merge": Verb("textmill.tokens.merge:merge", "join token stores: merge OUT A B ...", (), ("--force",)),
    "train": Verb("textmill.training.loop:train", "train, or go on", ("model", "train", "engine", "sample", "track"), ("--force", "--step")),
    "verify": Verb("textmill.verification:verify", "prove a parallel config equal to one process, small, on this machine", ("engine",), ()),
    "evaluate": Verb("textmill.evaluation:evaluate", "measure a model on a split", ("evaluate", "train", "engine"), ("--step", "--json")),
    "generate": Verb("textmill.generation:generate", "continue a text", ("sample", "engine"), ("--step", "--json")),
    "chat": Verb("textmill.generation.chat:chat", "talk with a model that was finetuned for it", ("sample", "engine"), ("--step",)),
    "serve": Verb("textmill.server:serve", "answer over HTTP, with a page to try it", ("serve", "sample", "engine"), ("--step",)),
    "export": Verb("textmill.conversion:export", "a plain Hugging Face folder, adapters merged", ("export",), ("--force", "--step")),
    "show": Verb("textmill.commands.show:show", "look at a corpus, at token stores, or at what a step saw", (), ("--step",)),
    "check": Verb("textmill.commands.check:check", "prove a folder whole: every bit of its data, and its manifest", (), ()),
    "recipes": Verb("textmill.commands.recipes:recipes", "list the recipes that come with textmill", (), ()),
}  # fmt: skip

FLAGS = {
    "--force": "start this stage anew in the same place",
    "--step": "N, latest or best: which checkpoint; show: whose documents",
    "--json": "print JSON instead of text",
    "--text": "your text: files, a folder or a quoted glob",
    "--help": "this help",
}

USAGE = "textmill VERB WHERE [section.key=value ...] [--flag]"
WHERE_HELP = "WHERE is a YAML file, a folder that textmill made, a Hugging Face model folder, or a recipe's name."


def command() -> NoReturn:
    """The program `textmill`."""
    leave_after(main)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            code = _run(words)
            print(end="", flush=True)
            return code
        except TextmillError as error:
            return _told(error)
    except KeyboardInterrupt as interrupt:
        if refused := _interrupted(interrupt):
            return _told(refused)
        print("textmill: stopped; what was finished is kept, the same command goes on from there", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:
        sys.stderr.close()  # the reader left; there is nobody to tell
        return EXIT_DONE


def _told(error: TextmillError) -> int:
    """Say what was wrong, whoever asks the process to end meanwhile; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    if str(error):
        print("textmill: " + " ".join(str(error).split()), file=sys.stderr)
    return error.exit_code


def _interrupted(interrupt: BaseException) -> TextmillError | None:
    """The refusal that was on its way when a signal came, as when a launcher ends all processes because one has refused."""
    context = interrupt.__context__
    while context is not None and not isinstance(context, TextmillError):
        context = context.__context__
    return context


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return EXIT_DONE
    if words[0] in ("-V", "--version"):
        from textmill import __version__

        print(f"textmill {__version__}")
        return EXIT_DONE
    name, rest = words[0], words[1:]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
        advice = f"did you mean '{near[0]}'?" if near else f"the verbs are {', '.join(VERBS)}"
        raise TextmillError(f"'{name}': no such verb; {advice}")
    verb = VERBS[name]
    if "--help" in rest or "-h" in rest:
        print(verb_help(name, verb))
        return EXIT_DONE
    signal.signal(signal.SIGTERM, _as_interrupt)
    places, settings, flags = _sorted_words(rest, name, verb)
    _call(name, verb, places, settings, flags)
    return EXIT_DONE


def _as_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _sorted_words(words: list[str], name: str, verb: Verb) -> tuple[list[str], list[str], dict[str, str]]:
    """Places, settings and flags of a command line."""
    places, settings, flags = [], [], {}
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            flag, sign, value = word.partition("=")
            if flag not in verb.flags:
                raise TextmillError(_flag_advice(flag, name, verb))
            if sign and flag not in ("--step", "--text"):
                raise TextmillError(f"{flag}: takes no value, found '{value}'; say {flag} or leave it out")
            if flag in ("--step", "--text"):
                value = value if sign else next(rest, "")
                if not value:
                    raise TextmillError(f"{flag}: needs a value: {FLAGS[flag]}")
            flags[flag] = value
        elif re.match(r"^[A-Za-z_][\w.]*=", word) and not os.path.exists(word):
            settings.append(word)
        else:
            places.append(word)
    if "--force" in flags and "--step" in flags:
        raise TextmillError("--force: starts anew, and --step goes on from a checkpoint; say one of them")
    return places, settings, flags


def _flag_advice(flag: str, name: str, verb: Verb) -> str:
    from textmill.config.keys import OTHER_WORDS, key_advice

    word = flag.lstrip("-").replace("-", "_")
    if flag in FLAGS:
        return f"{flag}: '{name}' does not take it; it takes {', '.join((*verb.flags, '--help'))}"
    key = OTHER_WORDS.get(word)
    return f"{flag}: no such flag; " + (
        f"say {key}=VALUE" if key else f"settings are said as section.key=value; {key_advice(word)}"
    )


def _call(name: str, verb: Verb, places: list[str], settings: list[str], flags: dict[str, str]) -> None:
    module, _, function = verb.place.partition(":")
    call = getattr(import_module(module), function)
    if name == "recipes":
        call()
    elif name == "new":
        _one_place(places, name, "DIR --text 'texts/*.txt'")
        call(places[0], flags.get("--text"), settings)
    elif name == "merge":
        if not places:
            raise TextmillError(
                "merge: wants a place to write and stores to join, found none; say: textmill merge OUT A B ..."
            )
        call(places[0], places[1:], "yes" if "--force" in flags else "no")
    elif name == "show":
        _one_place(places, name, "WHERE")
        step = _step_of(flags["--step"]) if "--step" in flags else None
        if isinstance(step, str):
            raise TextmillError(f"--step: found '{step}'; show wants the number of a step")
        call(places[0], settings, step)
    elif name == "check":
        _one_place(places, name, "WHERE")
        call(places[0], settings)
    else:
        from textmill.where import open_where

        _one_place(places, name, "WHERE")
        where = open_where(places[0], settings)
        if name not in ("evaluate", "generate", "chat", "serve", "export") and where.bare:
            raise TextmillError(
                f"{places[0]}: is a model, not a run; start one from it: textmill {name} CONFIG model.init_from={places[0]}"
            )
        if name == "train" and where.step is not None and "--step" not in flags:
            raise TextmillError(
                f"{places[0]}: is one checkpoint; to go back to it say: textmill train RUN --step {where.step}"
            )
        options: dict[str, Any] = {}
        if "--force" in verb.flags:
            options["force"] = ("changed" if name == "run" else "yes") if "--force" in flags else "no"
        if "--step" in verb.flags:
            options["step"] = _step_of(flags["--step"]) if "--step" in flags else where.step or "latest"
        if "--json" in flags:
            options["as_json"] = True
        call(where.config, **options)


def _one_place(places: list[str], name: str, wanted: str) -> None:
    if len(places) != 1:
        found = f"found {len(places)}: {', '.join(places)}" if places else "found none"
        raise TextmillError(f"{name}: wants one place, {found}; say: textmill {name} {wanted}")


def _step_of(text: str) -> int | str:
    if text in ("latest", "best"):
        return text
    if not text.isdigit():
        raise TextmillError(f"--step: found '{text}'; give a number, latest or best")
    return int(text)


def help_text() -> str:
    """What `textmill --help` prints."""
    lines = ["textmill: raw text in any language to a trained, measured language model", "", f"  {USAGE}", ""]
    lines += [f"  {name:<14} {verb.summary}" for name, verb in VERBS.items()]
    lines += [
        "",
        WHERE_HELP,
        "'textmill VERB --help' lists the settings that a verb reads. Start with: textmill run quickstart",
    ]
    return "\n".join(lines)


def verb_help(name: str, verb: Verb) -> str:
    """What `textmill VERB --help` prints: the verb, its flags, and the sections it reads."""
    from textmill.config.help import section_help

    place = {"new": "DIR", "recipes": "", "merge": "OUT A B ..."}.get(name, "WHERE")
    lines = [
        f"textmill {name} {place}".rstrip() + (" [section.key=value ...]" if verb.sections else ""),
        f"  {verb.summary}",
        "",
    ]
    told = {**FLAGS, "--force": "make anew what was made from something else"} if name == "run" else FLAGS
    lines += [f"  {flag:<10} {told[flag]}" for flag in (*verb.flags, "--help")]
    if verb.sections:
        lines += ["", WHERE_HELP, ""] + [section_help(section) for section in ("folder", *verb.sections)]
    return "\n".join(lines)
