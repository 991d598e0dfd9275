"""What can go wrong, as a tree; the command line turns each into one sentence and an exit code.

PoseidonError
├── UsageError        a flag or an argument is wrong; exit code 2
├── DefinitionError   a net or solver definition is wrong; carries file, line and column
├── DataError         a database, image, list or mean file is missing, broken or misused
├── SnapshotError     a .caffemodel or .solverstate cannot be read, written or matched
├── MachinefileError  a machinefile line is wrong
└── JobError          a job could not start, or one of its processes failed
    └── JobInterrupted   a process, a host or the way between them was lost: a new start may well succeed

Law: the text of an error is one sentence that names the thing, the place and what was expected.
The library raises; only `poseidon.cli` exits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# A name in a damaged file can be as long as the file; a sentence cannot.
_LONGEST = 1000


class PoseidonError(Exception):
    """Base of every error a user can cause or should read. The text is a full sentence."""

    exit_code = 1


class UsageError(PoseidonError):
    """A flag or an argument is wrong."""

    exit_code = 2


class DefinitionError(PoseidonError):
    """A net or solver definition is wrong.

    Args:
        message: what is wrong and what was expected.
        source: the file, or another name for where the text came from.
        line: 1-based line of the mistake, if known.
        column: 1-based column of the mistake, if known.
    """

    def __init__(
        self, message: str, *, source: str | None = None, line: int | None = None, column: int | None = None
    ) -> None:
        self.message = message = shown(message)
        self.source = source
        self.line = line
        self.column = column
        place = ":".join(shown(str(part)) for part in (source, line, column) if part is not None)
        super().__init__(f"{place}: {message}" if place else message)


class DataError(PoseidonError):
    """A database, image, list or mean file is missing, broken or misused."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


class SnapshotError(PoseidonError):
    """A .caffemodel or .solverstate cannot be read, written or matched to the net."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


class MachinefileError(PoseidonError):
    """A machinefile line is wrong."""


class JobError(PoseidonError):
    """A job could not start, or one of its processes failed."""


class JobInterrupted(JobError):
    """A process, a host or the way between them was lost, so a new start may well succeed.

    Args:
        message: one sentence.
        iteration: how far the job had come.
        while_starting: it had not started; a new start makes sense only where the same job has started before.
    """

    def __init__(self, message: str, *, iteration: int, while_starting: bool) -> None:
        super().__init__(message)
        self.iteration = iteration
        self.while_starting = while_starting


class JobUnwanted(JobError):
    """The user has killed the job on one of its hosts."""


def shown(text: str) -> str:
    """The text of an error that quotes a file: in one line, what cannot be printed as its escape, the middle of much left out."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """The legal name that `name` most likely means, or None when none is near.

    A name that differs in case or underscores alone comes first, then one whose words are longer or shorter forms of these
    (conv_param: convolution_param), then one that begins with it or has its words, then one that is a typing mistake away.
    """
    wanted = _words(name)
    candidates = {candidate: _words(candidate) for candidate in legal}
    for is_meant in (_same, _word_by_word, _begins, _contains):
        found = [candidate for candidate, words in candidates.items() if is_meant(wanted, words)]
        if found:
            return min(found, key=lambda candidate: (abs(len(candidate) - len(name)), candidate))
    lowered = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.65)
    return lowered[close[0]] if close else None


_LEAST = 3  # letters of a word that may stand for a longer one


def _words(name: str) -> list[str]:
    return [word for word in name.lower().replace("-", "_").split("_") if word]


def _same(wanted: list[str], words: list[str]) -> bool:
    return "".join(wanted) == "".join(words)


def _word_by_word(wanted: list[str], words: list[str]) -> bool:
    return len(wanted) == len(words) and all(map(_short_for, wanted, words))


def _begins(wanted: list[str], words: list[str]) -> bool:
    text = "".join(wanted)
    return len(text) >= _LEAST and "".join(words).startswith(text)


def _contains(wanted: list[str], words: list[str]) -> bool:
    return bool(wanted) and all(len(word) >= _LEAST and word in words for word in wanted)


def _short_for(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return short == long or (len(short) >= _LEAST and long.startswith(short))
