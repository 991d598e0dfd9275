"""How a command line is read: words and a table of flags in, values out.

Flags follow gflags, as Caffe's tools do: -flag or --flag, -flag=value or -flag value, and for a
switch -flag, -flag=true or -noflag. A flag may not be cut short: what `--max` stands for would
change with every new flag.
"""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from poseidon.errors import nearest
from poseidon.flags.flag import Flag, Takes
from poseidon.flags.values import TRUTH


class Mistake(Exception):
    """The command line is not legal; the text is a sentence that says why."""


class HelpWanted(Exception):
    """The command line asks for help."""


class Reading:
    """One command line that is read, word by word."""

    def __init__(self, flags: Sequence[Flag], words: Sequence[str]) -> None:
        self._flags = flags
        self._rest = deque(words)
        self._names = {name: flag for flag in flags for name in flag.names}
        self._places = [flag for flag in flags if flag.takes.is_word]
        self._takes_the_rest = any(flag.takes is Takes.REST for flag in self._places)
        self._values = {flag.attribute: flag.default for flag in flags}
        self._given: dict[str, Flag] = {}

    def values(self) -> dict[str, Any]:
        """Return the value of each flag by its attribute, and `notes`, a sentence for each flag
        without effect.

        Raises:
            Mistake: a word is not a flag or a value of this command, or one is missing.
            HelpWanted: a flag asks for help.
        """
        words = list[str]()
        while self._rest:
            word = self._rest.popleft()
            if _is_flag(word):
                self._take(word)
            elif not self._places:
                self._refuse([word])
            elif word == "--" or self._takes_the_rest:
                words += [*([word] if word != "--" else []), *self._rest]
                break
            else:
                words.append(word)
        self._place(words)
        notes = [flag.note for flag in self._given.values() if flag.note]
        return {**self._values, "notes": notes}

    def _take(self, word: str) -> None:
        """Take a flag, and its value from it or from the next word."""
        name, equals, text = word.lstrip("-").partition("=")
        flag = self._names.get(name)
        if flag is None:
            flag, text = self._names.get(name.removeprefix("no")), "false"
            off = name.startswith("no") and flag is not None and flag.takes is Takes.SWITCH
            if flag is None or not off or equals:
                self._refuse([word])
        elif flag.takes is Takes.NOTHING:
            raise HelpWanted
        elif flag.takes is Takes.SWITCH and not equals:
            own = bool(self._rest) and self._rest[0].lower() in (*TRUTH, *flag.choices)
            text = self._rest.popleft() if own else "true"
        elif not equals:
            if not self._rest or _is_flag(self._rest[0]):
                raise Mistake(f"{flag.title}: expected a value")
            text = self._rest.popleft()
        self._given[flag.name] = flag
        self._set(flag, text)

    def _place(self, words: list[str]) -> None:
        """Divide the words among the arguments: each gets one, and the first that may have more
        gets what is left.
        """
        spare = len(words) - sum(flag.takes is Takes.WORD for flag in self._places)
        rest = deque(words)
        missing = list[str]()
        for flag in self._places:
            if flag.takes in (Takes.WORDS, Takes.REST):
                count = max(spare, 0) if flag.takes is Takes.WORDS else len(rest)
                self._values[flag.attribute] = tuple(
                    self._read(flag, rest.popleft()) for _ in range(count)
                )
                spare -= count
            elif flag.takes is Takes.OPTIONAL_WORD:
                if spare > 0:
                    self._set(flag, rest.popleft())
                spare -= 1
            elif rest:
                self._set(flag, rest.popleft())
            else:
                missing.append(flag.title)
        missing += [
            flag.title for flag in self._flags if flag.required and flag.name not in self._given
        ]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise Mistake(f"{' and '.join(missing)} {verb} missing")
        if rest:
            self._refuse(list(rest))

    def _set(self, flag: Flag, text: str) -> None:
        value = self._read(flag, text)
        if flag.takes is Takes.VALUES:
            value = (*self._values[flag.attribute], value)
        self._values[flag.attribute] = value

    def _read(self, flag: Flag, text: str) -> Any:
        if not text and (flag.required or flag.takes in (Takes.OPTIONAL_WORD, Takes.WORDS)):
            raise Mistake(f"{flag.title}: expected a value")  # such as "$JOB", which is not set
        try:
            return flag.read(text)
        except argparse.ArgumentTypeError as error:
            raise Mistake(f"{flag.title}: {error}") from error

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise Mistake because of arguments that no flag of this command takes."""
        shown = [flag for flag in self._flags if flag.text and not flag.takes.is_word]
        if not words[0].startswith("-"):
            files = [flag for flag in shown if flag.required and flag.metavar == "FILE"]
            hint = f", did you mean {files[0].title}={words[0]}?" if files else ""
            raise Mistake(f"did not expect '{' '.join(words)}'{hint}")
        name, _, text = words[0].partition("=")
        plain = name.lstrip("-").replace("-", "_")
        near = nearest(plain, [flag.name for flag in shown])
        hint = f", did you mean --{near}?" if near else ""
        if "settings" in self._values:
            hint = _setting(plain, text) or hint
        if not near and "script" in self._values:
            hint = "; the script's own flags come after the script"
        raise Mistake(f"unknown flag {name}{hint}")


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag and not a value, such as -1."""
    return re.match(r"--?[a-zA-Z]", word) is not None


def _setting(name: str, value: str) -> str:
    """Return a hint for a flag that is named like a field of the solver; empty for another flag."""
    # an import of protobuf takes longer than the flags
    from poseidon.proto.caffe_pb2 import SolverParameter

    field = {"lr": "base_lr", "learning_rate": "base_lr", "iterations": "max_iter"}.get(name, name)
    if field not in SolverParameter.DESCRIPTOR.fields_by_name:
        return ""
    return f", did you mean --set {field}={value or 'VALUE'}?"
