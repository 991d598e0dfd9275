"""A command: the table of its flags, in groups, and what a mistake in a command line does."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.base.hints import own_command
from poseidon.cli.parsers.layout import section, usage, wrapped
from poseidon.cli.parsers.reading import HelpWanted, Mistake, read, topics_of
from poseidon.flags.flag import Flag, Opens, Takes
from poseidon.flags.shared import ShownProgress
from poseidon.flags.values import one_of

_OF_GLOG_SWITCHES = ("logtostderr", "alsologtostderr", "colorlogtostderr", "log_prefix")
"""Flags of Caffe's logging library that ask for what happens in any case: the log is on standard
error, in its form.
"""
_OF_GLOG = {
    "log_dir": "logs are in the job's folder, --output",
    "minloglevel": "--progress=logs=WHOSE says whose log is shown",
    "stderrthreshold": "--progress=logs=WHOSE says whose log is shown",
    "v": "",
    "vmodule": "",
    "logbuflevel": "",
    "logbufsecs": "",
    "max_log_size": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of `poseidon`; its code is the module of that name in `poseidon.cli`, which has
    `run(arguments)`. It returns the exit code, or raises `PoseidonError`, whose text is printed.

    Attributes:
        name: as it is typed.
        line: what it does, in a few words.
        description: what it does, in sentences, with the terms that its flags use.
        example: command lines that work.
        verbatim: whether all words but a first --help are another program's. `words` of the
            namespace has them.
    """

    name: str
    line: str
    description: str
    example: str
    declare: Callable[[Parser], None]
    verbatim: bool = False

    def parser(self) -> Parser:
        parser = Parser(self)
        self.declare(parser)
        return parser


@dataclass(slots=True)
class Group:
    """Flags under one headline.

    Attributes:
        terms: the meaning of its terms, in sentences.
        flags: in the order in which they are shown.
    """

    title: str
    terms: str = ""
    flags: list[Flag] = field(default_factory=list)

    def add(self, *flags: Flag) -> None:
        self.flags += flags


class Parser:
    """The flags of one command, and the reader of its command lines."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.arguments = Group("Arguments")
        self._groups = [self.arguments]
        for name in _OF_GLOG_SWITCHES:
            switch(self.arguments, name, "")
        for name, instead in _OF_GLOG.items():
            retired(self.arguments, name, instead)

    def section(self, title: str, terms: str = "") -> Group:
        """Return the group of flags with this headline; a new one comes last."""
        for group in self._groups:
            if group.title == title:
                return group
        self._groups.append(Group(title, terms))
        return self._groups[-1]

    def flags(self) -> Iterator[Flag]:
        """Return all flags, in the order of the help."""
        return (flag for group in self._groups for flag in group.flags)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the flags; a mistake ends the process with one sentence and code 2."""
        name = self._command.name
        try:
            return self.read(words)
        except HelpWanted as wanted:
            print(self.help(wanted.topic), end="", flush=True)
            sys.exit(0)
        except Mistake as mistake:
            hint = f"see {own_command()} {name} --help"
            print(f"poseidon {name}: {mistake}; {hint}", file=sys.stderr)
            sys.exit(2)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the flags: `argv` has them as they were given, `notes` a sentence for each one
        without effect, `opened` those whose values name what must exist, with the values.

        Raises:
            Mistake: the command line is not legal.
            HelpWanted: it asks for help.
        """
        name, flags = self._command.name, list(self.flags())
        if self._command.verbatim and list(words[:1]) not in (["--help"], ["-h"]):
            values: dict[str, Any] = {"words": list(words), "notes": []}
        else:
            values = read(flags, words)
        opened = [
            (flag, values[flag.attribute])
            for flag in flags
            if flag.opens is not Opens.NOTHING and values.get(flag.attribute)
        ]
        return argparse.Namespace(command=name, argv=[name, *words], opened=opened, **values)

    def help(self, topic: str = "all") -> str:
        """Return usage, description, an example, and each flag in a line.

        Args:
            topic: one of `topics_of`; empty: the flags that people need first.
        """
        command, topics = self._command, topics_of(self.flags())
        parts = [usage(command.name, [flag for flag in self.flags() if flag.text])]
        if topic in ("", "all"):
            parts += [
                wrapped(command.description),
                "example:\n" + textwrap.indent(command.example, "  "),
            ]
        for group in self._shown(topic if topics else "all"):
            parts.append(section(group.title, group.terms, group.flags))
        if topics:
            parts.append(
                wrapped(f"More: poseidon {command.name} --help=TOPIC, of {', '.join(topics)}.")
            )
        return "\n\n".join(parts) + "\n"

    def _shown(self, topic: str) -> Iterable[Group]:
        """Return the groups that the help of a topic shows, with the flags that it shows."""
        shown: dict[str, Group] = {}
        for group in self._groups:
            for flag in filter(lambda flag: flag.text, group.flags):
                if topic in ("all", flag.section.topic) and topic:
                    found = shown.setdefault(group.title, Group(group.title, group.terms))
                elif topic or flag.rare or flag.of:
                    continue
                else:
                    found = shown.setdefault(flag.section.first, Group(flag.section.first))
                found.add(flag)
        return shown.values()


def flag(group: Group, name: str, text: str, **settings: Any) -> None:
    """Add a flag with a value; `settings` are the rest of `Flag`."""
    group.add(Flag(name=name, text=text, **settings))


def solver_flag(group: Group, name: str, text: str, **settings: Any) -> None:
    """Add a flag for a field of the solver: --display=5 for --set display=5."""
    read = settings.pop("read", str)
    settings = {"dest": "settings", "default": (), "takes": Takes.VALUES, "rare": True, **settings}
    flag(group, name, text, read=lambda value: f"{name}={read(value)}", **settings)


def switch(group: Group, name: str, text: str, **settings: Any) -> None:
    """Add a flag that is on without a value, and on or off with one."""
    flag(group, name, text, **{"default": False, "takes": Takes.SWITCH, **settings})


def retired(group: Group, name: str, instead: str = "", *, alone: bool = False) -> None:
    """Add a flag of Caffe or of the original Poseidon that scripts pass and nothing here needs.

    Args:
        instead: half a sentence on what to use; may be empty.
        alone: it may stand without a value.
    """
    note = f"--{name} has no effect here" + (f": {instead}" if instead else "")
    flag(group, name, "", note=note, takes=Takes.SWITCH if alone else Takes.VALUE)


def chosen(group: Group, name: str, text: str, choices: Sequence[str], **settings: Any) -> None:
    """Add a flag with these values; see `one_of`."""
    flag(group, name, text, read=one_of(choices), choices=tuple(choices), **settings)


def word(parser: Parser, name: str, text: str, **settings: Any) -> None:
    """Add an argument without a flag."""
    flag(parser.arguments, name, text, **{"takes": Takes.WORD, **settings})


def progress_flag(
    group: Group, text: str = "auto (a bar on a terminal), bar, lines (one a minute)"
) -> None:
    choices = tuple(shown.value for shown in ShownProgress)
    chosen(group, "progress", text, choices, default=ShownProgress.AUTO.value, metavar="HOW")
