"""Reads the commands of a shell script without running any of them.

Only what scripts that start a training use: quotes, comments, continued lines, variables and arrays, pipes and lists of
commands. The value of `$(...)` and of a variable that the script does not set is unknown, so it stays as it is written.
`shlex` knows neither variables nor arrays, and a shell would run the script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?\n")
"""A backslash at the end of a line; a comment after it is a mistake that READMEs make, and is not part of the text."""
PLACEHOLDER = re.compile(r"<[^\s<>|&;'\"$()]*( [^\s<>|&;'\"$()]+)*>")
"""<OUTPUT_DIRECTORY> in a README; a shell would take it for a redirection."""
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|(\w+)|([@*#?!$-]))")
FIELD = re.compile(r"(?:\$\([^)]*\)+|`[^`]*`|\S)+")
"""A word in the value of a variable outside of quotes."""
COMMENT_LINE = re.compile(r"^[ \t]*#[^\n]*\n", re.MULTILINE)
"""A backslash at its end continues nothing; between continued lines the command goes on after it."""
BATCH_OPTION = re.compile(r"^#SBATCH\s+--(nodes|ntasks|ntasks-per-node)[=\s]\s*(\d+)", re.MULTILINE)
"""What sbatch reads, and gives the script as variables."""
CASE = re.compile(r"^[ \t]*case\b.*?^[ \t]*esac\b", re.DOTALL | re.MULTILINE)
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2$", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"^(\w+)\+?=")
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "time", "!", "exec", "eval", "nohup", "sudo", "{"}
DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
IDLE = set(
    "[ [[ test : true set shift exit return wait sleep echo printf cat cd ls mkdir cp mv rm touch chmod for done "
    "fi } function pkill kill clear tee".split()
)
"""Commands that start nothing; branches of `if` and bodies of loops are read once each."""


@dataclass
class Script:
    """The commands of a text, each a list of words, and the variables that it sets."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    """The scripts that it starts and that were read."""

    def read(self, text: str) -> None:
        """Add the commands of a text."""
        for name, value in BATCH_OPTION.findall(text):
            self.variables[f"SLURM_{'N' if name == 'nodes' else ''}{name.upper().replace('-', '_')}"] = [value]
        text = HERE_DOCUMENT.sub(r"\3", COMMENT_LINE.sub("", text.replace("\r\n", "\n")))
        text = CASE.sub("", text)  # the script's own options: what it sets before them is the default
        _Reader(CONTINUED.sub(lambda found: "" if found[0] == "\\\n" else " ", text), self).read()

    def add(self, words: list[str], assigned: list[str]) -> None:
        """Add a command, or keep what it assigns; `assigned` has the names of variables that its first words set."""
        while words and words[0] in KEYWORDS:
            words = words[1:]
        if words and words[0] in DECLARATIONS:
            words = words[1:]
        rest = words[len(assigned) :]
        if rest[:1] and rest[0] in IDLE:
            return
        if rest[:1] in (["bash"], ["sh"]) and "-c" in rest[:3]:
            self.read(" ".join(rest[rest.index("-c") + 1 : rest.index("-c") + 2]))
        elif "-c" in rest and rest[rest.index("-c") - 1] in ("bash", "sh"):  # srun ... bash -c '...'
            place = rest.index("-c")
            inner = Script(variables=self.variables)
            inner.read(" ".join(rest[place + 1 : place + 2]))
            self.commands += [[*rest[: place - 1], *command] for command in inner.commands]
        elif rest:
            self.commands.append(rest)


class _Reader:
    """One pass over a text."""

    def __init__(self, text: str, script: Script) -> None:
        self.text = text
        self.script = script
        self.place = 0
        self.words: list[str] = []
        self.assigned: list[str] = []
        self.word: list[str] | None = None
        """The fields of the word that is being read; None between words. A variable outside of quotes may hold
        several."""

    def read(self) -> None:
        while self.place < len(self.text):
            self._step(self.text[self.place])
        self._end_command()

    def _step(self, character: str) -> None:
        rest = self.text[self.place :]
        if character == "'":
            end = self.text.find("'", self.place + 1)
            self._add(self.text[self.place + 1 : end if end > 0 else None])
            self.place = end + 1 if end > 0 else len(self.text)
        elif character == '"':
            self._read_quoted()
        elif character == "\\":
            self._add(rest[1:2])
            self.place += 2
        elif character == "#" and self.word is None:
            self.place += len(rest.partition("\n")[0])
        elif end := _substitution_end(rest):
            self._add(rest[:end])
            self.place += end
        elif found := VARIABLE.match(rest):
            self._add_fields([part for value in self._value(found) for part in FIELD.findall(value)])
            self.place += found.end()
        elif found := PLACEHOLDER.match(rest):
            self._add(found[0])
            self.place += found.end()
        elif found := re.match(r"\d?[<>]+&?\s*[\w./&-]*", rest if self.word is None else ""):
            self.place += found.end()  # a redirection
        elif character == "(" and self.word and ASSIGNMENT.match(self.word[0]):
            self._read_array()
        elif character in "\n;|&()":
            self._end_command()
            self.place += 1
        elif character.isspace():
            self._end_word()
            self.place += 1
        else:
            self._add(character)
            self.place += 1

    def _read_quoted(self) -> None:
        """A text in double quotes: one word, with the values of its variables."""
        self.place += 1
        if not self.text.startswith(('$@"', '$*"'), self.place):
            self._add("")
        while self.place < len(self.text) and self.text[self.place] != '"':
            rest = self.text[self.place :]
            if rest[0] == "\\" and rest[1:2] in ('"', "\\", "$", "`"):
                self._add(rest[1])
                self.place += 2
            elif end := _substitution_end(rest):
                self._add(rest[:end])
                self.place += end
            elif found := VARIABLE.match(rest):
                values = self._value(found)
                if "[@]" in found[0]:  # each element is a word of its own
                    self._add_fields(values)
                else:
                    self._add(" ".join(values))
                self.place += found.end()
            else:
                self._add(rest[0])
                self.place += 1
        self.place += 1

    def _read_array(self) -> None:
        """NAME=( words )."""
        assert self.word is not None
        name = self.word[0].partition("=")[0]
        self.word = None
        depth_end = self.text.find(")", self.place)
        end = depth_end if depth_end > 0 else len(self.text)
        inner = Script(variables=self.script.variables)
        inner.read(re.sub(r"(^|\s)#[^\n]*", " ", self.text[self.place + 1 : end]).replace("\n", " "))
        words = [word for command in inner.commands for word in command]
        old = self.script.variables.get(name.removesuffix("+"), []) if name.endswith("+") else []
        self.script.variables[name.removesuffix("+")] = [*old, *words]
        self.place = end + 1

    def _value(self, found: re.Match[str]) -> list[str]:
        """The value of a variable; what the script does not set stays as it is written, "$@" is empty."""
        name = found[1] or found[3]
        if found[4]:
            return []
        value = self.script.variables.get(name, [found[0]] if found[2] is None else [""])
        if found[2] is None or value != [""]:
            return value
        return [VARIABLE.sub(lambda inner: " ".join(self._value(inner)), re.sub(r"[\"']", "", found[2]))]

    def _add(self, text: str) -> None:
        self.word = self.word or [""]
        self.word[-1] += text

    def _add_fields(self, fields: list[str]) -> None:
        """Add the first to this word; each of the others begins a new one."""
        if fields:
            first, *others = fields
            self._add(first)
            assert self.word is not None
            self.word += others

    def _end_word(self) -> None:
        if self.word is None:
            return
        first = ASSIGNMENT.match(self.word[0])
        before = [word for word in self.words if word not in DECLARATIONS | KEYWORDS]
        if first and len(before) == len(self.assigned):
            name = first[1]
            value = " ".join(self.word)[first.end() :]
            if first[0].endswith("+="):
                value = " ".join(self.script.variables.get(name, [])) + value
            self.script.variables[name] = [value]
            self.assigned.append(name)
        self.words += self.word if not first else [" ".join(self.word)]
        self.word = None

    def _end_command(self) -> None:
        self._end_word()
        self.script.add(self.words, self.assigned)
        self.words = []
        self.assigned = []


def _substitution_end(text: str) -> int:
    """Where the `$(...)`, `$((...))` or backquotes end that a text begins with; 0 if it begins with none."""
    if text.startswith("`"):
        return text.find("`", 1) + 1
    if not text.startswith("$("):
        return 0
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and not depth:
            return place + 1
    return 0
