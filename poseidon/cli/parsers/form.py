"""A command: the table of its flags, in groups, what a mistake does, and how help looks: a line for
each flag, of at most 80 columns.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from poseidon.base.paths import own_command
from poseidon.cli.parsers.reading import HelpWanted, Mistake, of_every_command, read, topics_of
from poseidon.flags.flag import Flag, Opens, Takes
from poseidon.flags.values import one_of

WIDTH = 80
_COUNTED = {Takes.OPTIONAL_WORD: "[{}]", Takes.WORDS: "[{} ...]"}
"""How usage shows arguments that may be missing or several."""


def refuse(command: str, problem: str) -> NoReturn:
    """End the process with code 2 and the sentence for a wrong command line.

    Args:
        command: the command whose help to read; empty for `poseidon` itself.
        problem: what is wrong. It may end with a question.
    """
    words = f" {command}" if command else ""
    see = " See" if problem.endswith("?") else "; see"
    print(f"poseidon{words}: {problem}{see} {own_command()}{words} --help", file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of `poseidon`. Its code is the function `run_NAME(arguments)` of a module. It
    returns the exit code, or raises `PoseidonError`, whose text is printed.

    Attributes:
        module: the module of `poseidon.cli` that has its code.
        line: what it does, in a few words.
        description: what it does, in sentences, with the terms that its flags use.
        verbatim: whether all words but a first --help are another program's. `words` of the
            namespace has them.
    """

    name: str
    module: str
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
class FlagGroup:
    """Flags under one headline.

    Attributes:
        terms: the meaning of its terms, in sentences.
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
        self.arguments = FlagGroup("Arguments", flags=[*of_every_command()])
        self._groups = {self.arguments.title: self.arguments}

    def section(self, title: str, terms: str = "") -> FlagGroup:
        """Return the group of flags with this headline; a new one comes last."""
        return self._groups.setdefault(title, FlagGroup(title, terms))

    def flags(self) -> Iterator[Flag]:
        """Return all flags, in the order of the help."""
        return (flag for group in self._groups.values() for flag in group.flags)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the flags: `argv` has them as they were given, `notes` a sentence for each one
        without effect, `opened` those whose values name what must exist, with the values.

        A mistake ends the process with one sentence and code 2.
        """
        name, flags = self._command.name, list(self.flags())
        values: dict[str, Any] = {"words": list(words), "notes": []}
        try:
            if not self._command.verbatim or list(words[:1]) in (["--help"], ["-h"]):
                values = read(flags, words)
        except HelpWanted as wanted:
            print(self.help(str(wanted)), end="", flush=True)
            sys.exit(0)
        except Mistake as mistake:
            refuse(name, str(mistake))
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
        parts = [_usage(command.name, [flag for flag in self.flags() if flag.text])]
        if topic in ("", "all"):
            parts += [
                _wrapped(command.description),
                "example:\n" + textwrap.indent(command.example, "  "),
            ]
        parts += map(_section, self._shown(topic if topics else "all"))
        if topics:
            more = f"More: poseidon {command.name} --help=TOPIC, of {', '.join(topics)}."
            parts.append(_wrapped(more))
        return "\n\n".join(parts) + "\n"

    def _shown(self, topic: str) -> Iterable[FlagGroup]:
        """Return the groups that the help of a topic shows, with the flags that it shows."""
        shown: dict[str, FlagGroup] = {}
        for group in self._groups.values():
            for flag in group.flags:
                title, terms = (group.title, group.terms) if topic else (flag.section.first, "")
                of_topic = (
                    topic in ("all", flag.section.topic) if topic else not (flag.rare or flag.of)
                )
                if flag.text and of_topic:
                    shown.setdefault(title, FlagGroup(title, terms)).add(flag)
        return shown.values()


def flag(group: FlagGroup, name: str, text: str, **settings: Any) -> None:
    """Add a flag with a value, one of `choices` if there are any; `settings` are the rest of
    `Flag`.
    """
    if "choices" in settings:
        settings = {"read": one_of(settings["choices"]), **settings}
    group.add(Flag(name=name, text=text, **settings))


def switch(group: FlagGroup, name: str, text: str, **settings: Any) -> None:
    """Add a flag that is on without a value, and on or off with one."""
    flag(group, name, text, **{"default": False, "takes": Takes.SWITCH, **settings})


def word(parser: Parser, name: str, text: str, **settings: Any) -> None:
    """Add an argument without a flag, which messages call by its name in capitals."""
    settings = {"takes": Takes.WORD, "metavar": name.upper(), **settings}
    flag(parser.arguments, name, text, **settings)


def _usage(command: str, shown: Sequence[Flag]) -> str:
    """Return the line of usage of a command with these flags."""
    words = [_left(flag) for flag in shown if flag.required]
    places = [flag for flag in shown if flag.takes.is_word]
    words += ["[flags]", *(_COUNTED.get(flag.takes, "{}").format(flag.title) for flag in places)]
    return " ".join([f"usage: poseidon {command}", *words])


def _section(group: FlagGroup) -> str:
    """Return a headline, the meaning of its terms, and each flag in a line."""
    lines = [f"{group.title}:", *([_wrapped(group.terms)] if group.terms else [])]
    column = 4 + max(len(_left(flag)) for flag in group.flags)
    for flag in group.flags:
        first, *others = textwrap.wrap(flag.text, WIDTH - column, break_on_hyphens=False)
        lines += [f"  {_left(flag)}".ljust(column) + first]
        lines += [" " * column + line for line in others]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _left(flag: Flag) -> str:
    """Return the beginning of a flag's line in the help."""
    if flag.takes is Takes.SWITCH and not flag.of:
        return f"--[no]{flag.name}" if flag.default else flag.title
    value = "" if flag.takes.is_word else f"={flag.metavar}"
    return (flag.name if flag.of else flag.title) + value
