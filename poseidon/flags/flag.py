"""A flag of a command, and fields of dataclasses that declare one.

Law: a field is the only place that has a flag's default, its help and its reader. `flags_of` makes
the flags of a command of it, and `values_of` the fields of a command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from poseidon.flags.values import count, member_of, natural, number, one_of, parts, truth, whole


class Opens(Enum):
    """What a value names that exists before the command begins; the value is its name in messages."""

    NOTHING = ""
    FILE = "file"
    FOLDER = "folder"
    FILE_OR_FOLDER = "file or folder"
    NET = "net"
    """A definition, a database, or FILE.py:FUNCTION or MODULE:FUNCTION, which the command reads."""
    MACHINEFILE = "machinefile"
    MODEL = "model"
    DATABASE = "database"
    SNAPSHOT = "snapshot"
    LOG = "log"


class Section(Enum):
    """A group of flags of a job: its headline in the help of a topic, the topic, and the headline
    in the help of the flags that people need first, where it differs.
    """

    ARGUMENTS = "Arguments", ""
    TRAINED = "What to train", ""
    EXTRACTED = "What to extract", ""
    SETTINGS = "Fields of the solver", "", "What to train"
    MACHINES = "Where it runs", "hosts"
    RAY = "On a Ray cluster: --launcher=ray:NAME=VALUE,...", "ray"
    EXCHANGE = "How gradients are exchanged", "exchange"
    ROUNDS = (
        "Rounds of local steps: --local_steps=H,NAME=VALUE,...",
        "rounds",
        "How gradients are exchanged",
    )
    FAILURES = "Signals and failures", "signals"
    ELASTIC = (
        "Snapshots in memory: --elastic=COPIES,NAME=VALUE,...",
        "elastic",
        "Signals and failures",
    )
    OUTPUT = "Output", "output"
    TERMINAL = "On a terminal", "output", "Output"

    def __init__(self, title: str, topic: str, first: str = "") -> None:
        self.title, self.topic, self.first = title, topic, first or title


class Takes(Enum):
    """What a flag takes from the command line, or that it is an argument without a flag."""

    VALUE = "a value; the last one counts"
    VALUES = "a value each time; all of them count"
    SWITCH = "true or false; true without a value"
    WORD = "an argument"
    OPTIONAL_WORD = "an argument, or none"
    WORDS = "any number of arguments"
    REST = "all that follows, also flags of a different program"

    @property
    def is_word(self) -> bool:
        """Whether it is an argument without a flag."""
        return self in (Takes.WORD, Takes.OPTIONAL_WORD, Takes.WORDS, Takes.REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag.

    Attributes:
        name: as it is typed, without dashes; of an argument the attribute that holds it.
        text: its help, in half a sentence; empty: the help does not show it.
        read: returns the value of a text, or raises argparse.ArgumentTypeError.
        dest: the attribute that holds its value; empty: `name`.
        choices: the texts that it takes; empty: `read` decides.
        takes: what it takes.
        opens: what its value, or each of its values, names.
        section: where the help of a job shows it.
        note: what is said when it is given, as it has no effect.
        rare: whether the help shows it only under its topic.
        of: the flag whose value has it as `name=value`, and what stands before it there:
            `launcher=ray:`; empty: it is a flag itself.
    """

    name: str
    text: str = ""
    metavar: str = "X"
    read: Callable[[str], Any] = str
    default: Any = None
    dest: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    takes: Takes = Takes.VALUE
    required: bool = False
    opens: Opens = Opens.NOTHING
    section: Section = Section.ARGUMENTS
    note: str = ""
    rare: bool = False
    of: str = ""

    @property
    def attribute(self) -> str:
        """The attribute of the parsed command line that holds its value."""
        return self.dest or (f"{self.head}_{self.name}" if self.of else self.name)

    @property
    def head(self) -> str:
        """The name of the flag whose value has it; empty: it is a flag itself."""
        return self.of.partition("=")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it may be given by, without dashes."""
        return () if self.takes.is_word or self.of else (self.name, *self.aliases)

    @property
    def title(self) -> str:
        """What messages call it."""
        if self.of:
            return f"--{self.of}{self.name}"
        return self.metavar if self.takes.is_word else f"--{self.name}"


def option(default: Any, text: str, section: Section, /, *, name: str = "", **settings: Any) -> Any:
    """Return a field of a dataclass that is a flag of the field's name.

    The default says how a value is read, if `read` does not: a switch for a truth value, a number,
    a member of an Enum by its value, otherwise a text.

    Args:
        default: of the field; an empty tuple may be read from a text.
        text: see `Flag`. `{default}` stands for the default, and `{choices}` for the choices.
        section: see `Flag`.
        name: of the flag, where it differs.
        settings: the rest of `Flag`. A `default` there is the flag's, where it differs. The
            `metavar` of a whole number is N.
    """
    read: dict[str, Any] = {}
    if isinstance(default, bool):
        read = {"read": truth, "takes": Takes.SWITCH}
    elif isinstance(default, Enum):
        words = tuple(str(member.value) for member in type(default))
        read = {"read": member_of(type(default), settings.pop("instead", None)), "choices": words}
    elif isinstance(default, int):
        read = {"read": whole}
    elif isinstance(default, float):
        read = {"read": number}
    chosen = {"default": default, **read, **settings}
    if chosen.get("read") in (whole, count, natural):
        chosen = {"metavar": "N", **chosen}
    text = _described(text, default, chosen.get("choices", ()))
    flag = Flag(name=name, text=text, section=section, **chosen)
    return field(default=default, metadata={"flag": flag})


def declared(flag: Flag, section: Section) -> Any:
    """Return a field of a dataclass that is this flag."""
    return field(default=flag.default, metadata={"flag": replace(flag, section=section)})


def flag_of(entry: Field[Any]) -> Flag | None:
    """Return the flag that a field declares; None if it declares none."""
    flag: Flag | None = entry.metadata.get("flag")
    return flag and replace(flag, name=flag.name or entry.name)


def flags_of(kind: Any) -> Iterator[Flag]:
    """Return the flags that the fields of a dataclass declare, in the fields' order."""
    return (flag for entry in fields(kind) if (flag := flag_of(entry)))


def title_of(kind: Any, name: str) -> str:
    """Return what messages call the flag of a field."""
    flag = flag_of(next(entry for entry in fields(kind) if entry.name == name))
    return flag.title if flag else name


def values_of(kind: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Return the values that a parsed command line has for the fields of a dataclass, by field."""
    return {
        entry.name: getattr(given, flag.attribute)
        for entry in fields(kind)
        if (flag := flag_of(entry))
    }


def _described(text: str, default: Any, choices: Sequence[str]) -> str:
    shown = default.value if isinstance(default, Enum) else default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif isinstance(default, int | float):
        shown = f"{default:g}"
    marked = [f"{word} (default)" if word == shown else word for word in choices]
    return text.format(default=shown, choices=", ".join(marked))


BACKENDS = ("leveldb", "lmdb")
"""The kinds of a database."""
IMPORT = Flag(
    name="import",
    text="Python modules that add layers",
    dest="imports",
    metavar="MODULES",
    read=parts,
    default=(),
)
ON_TERMINAL = "on a terminal: auto (log and bar), bar, lines"
"""The help of --progress of a command with a log."""


class ShownProgress(Enum):
    """A value of --progress."""

    AUTO = "auto"
    """On a terminal the bar below the log; in a pipe the log, and lines on the progress of a
    job.
    """
    BAR = "bar"
    """On a terminal the bar alone, with warnings and results; in a pipe as `auto`."""
    LINES = "lines"
    """The log, and lines on the progress, also on a terminal."""


def progress(text: str = "auto (a bar on a terminal), bar, lines (one a minute)") -> Flag:
    """Return the flag --progress of a command that is not a job."""
    words = tuple(shown.value for shown in ShownProgress)
    read, usual = one_of(words), ShownProgress.AUTO.value
    return Flag(name="progress", text=text, read=read, choices=words, default=usual, metavar="HOW")
