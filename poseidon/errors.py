"""The exceptions of Poseidon, as a tree; the command line prints each as one sentence and exits
with its code.

PoseidonError
├── UsageError        a flag or an argument is wrong; exit code 2
├── DefinitionError   a net or solver definition is wrong; carries file, line and column
├── DataError         a database, image, list or mean file is missing, broken or misused
├── SnapshotError     a .caffemodel or .solverstate cannot be read, written or matched
├── MachinefileError  a machinefile line is wrong
└── JobError          a job could not start, or one of its processes failed
    └── JobInterrupted   a process, a host or the network between them was lost; a restart may succeed

Law: the text of an error is one sentence: what is wrong, where, and what was expected.
The library raises; only `poseidon.cli` exits.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import resource
from collections.abc import Iterable
from contextlib import suppress

from poseidon.base.text_files import joined, visible_line

# A name in a damaged file can be as long as the file, so a message quotes at most this many
# characters.
_LONGEST = 1000


class PoseidonError(Exception):
    """Base class of all errors for users. The text is a full sentence, on one line, since names in
    it are foreign; further lines are indented, so none looks like a line of a log.
    """

    exit_code = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(
            *(_visible_lines(part) if isinstance(part, str) else part for part in parts)
        )


def _visible_lines(text: str) -> str:
    return "\n  ".join(map(visible_line, text.split("\n  ")))


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
        self,
        message: str,
        *,
        source: str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        self.message = message = printable(message)
        self.source = source
        self.line = line
        self.column = column
        location = ":".join(
            printable(str(part)) for part in (source, line, column) if part is not None
        )
        super().__init__(f"{location}: {message}" if location else message)


class DataError(PoseidonError):
    """A database, image, list or mean file is missing, broken or misused."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class SnapshotError(PoseidonError):
    """A .caffemodel or .solverstate cannot be read, written or matched to the net."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MachinefileError(PoseidonError):
    """A machinefile line is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class JobError(PoseidonError):
    """A job could not start, or one of its processes failed.

    Attributes:
        traceback: of the exception that has ended a worker; empty: there was none.
    """

    traceback = ""


class JobInterrupted(JobError):
    """A process, a host or the network between them was lost, so a restart may succeed.

    Args:
        message: one sentence.
        iteration: the last iteration that the job reported.
        while_starting: the job had not started yet; a restart makes sense only if the same job has
            started before.
    """

    def __init__(self, message: str, *, iteration: int, while_starting: bool) -> None:
        super().__init__(message)
        self.iteration = iteration
        self.while_starting = while_starting


class JobKilled(JobError):
    """The user has killed the job on one of its hosts."""


def printable(text: str) -> str:
    """Return a text for an error message: on one line, unprintable characters
    escaped, the middle of a long text left out.
    """
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
            for c in joined(text)
        )
    return shortened(text)


def shortened(text: str) -> str:
    """Return a text without the middle of a long one."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def out_of_memory(error: BaseException, in_use: str = "") -> str | None:
    """Return what to do about an error of Python, numpy or torch that says that
    memory ran out; None for another error.

    Args:
        in_use: what is in use then, as `3.1 of 80.0 GiB`; empty: unknown.
    """
    text = str(error)
    # of torch, which this package does not import
    on_gpu = type(error).__name__ == "OutOfMemoryError"
    if not (on_gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator" in text):
        return None
    amount = re.search(r"allocate ([\d.]+ \w+)", text)
    more = f"{amount[1]} more do not fit" if amount else ""
    used = f"{in_use} are in use" if in_use else ""
    found = " while ".join(part for part in (more, used) if part)
    return (
        f"out of memory{' of the GPU' if on_gpu else ''}{f': {found}' if found else ''}; "
        "use a smaller batch_size or file, or put fewer workers on this machine"
    )


def limit_reached(error: BaseException) -> str | None:
    """Return what to do about an error that says that this process may have no further file,
    thread or process, or no larger file; None for another error.
    """
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files and connections: ulimit -n allows {limit}; set a higher limit, as ulimit -n 4096"
    if number == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most != resource.RLIM_INFINITY:  # else it is the limit of the file system
            return f"a file may have at most {most} bytes (ulimit -f); set a higher limit, as ulimit -f unlimited"
    if number == errno.EAGAIN or "can't start new thread" in str(error):
        return (
            "no more threads or processes can be started; set higher limits (ulimit -u, ulimit "
            "-v, or of the container), or put fewer workers on this machine"
        )
    return None


def shared_memory_full(error: BaseException) -> str | None:
    """Return what to do about an error of torch that says that a batch does not fit into shared
    memory; None for another error.
    """
    text = str(error)
    if not re.search(r"(?:out of|insufficient) shared memory|unable to .*</?torch_", text):
        return None
    size = ""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        size = f" ({found.f_frsize * found.f_blocks >> 20} MiB)"
    return (
        f"a batch of a DataLoader's worker does not fit into shared memory, /dev/shm{size}; enlarge "
        "it (docker run --shm-size=8g), or use num_workers=0"
    )


def described(error: BaseException) -> str:
    """Return the type and the text of an error on one line, the middle of a long one left out."""
    text = shortened(" ".join(line.strip() for line in str(error).splitlines()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `2 workers`, `3 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """Return the legal name that `name` most likely means, or None if no name is similar.

    The order of preference: a name that differs only in case or underscores; one whose words are
    longer or shorter forms (conv_param: convolution_param); one that begins with `name` or contains
    its words; one that differs by a typing error.
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


# A longer list would hide the message.
_MOST_LISTED = 8


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return a clause such as `unknown layer type 'Convolutoin'; did you mean 'Convolution'?`.

    An empty name was not given: `missing policy; known: exp, fixed`.
    """
    names = sorted(set(choices))
    near = nearest(name, names)
    text = f"unknown {kind} '{name}'" if name else f"missing {kind}"
    if near:
        return f"{text}; did you mean '{near}'?"
    if names and len(names) <= _MOST_LISTED:
        return f"{text}; known: {', '.join(names)}"
    return text


_LEAST = 3  # letters of a word that may abbreviate a longer one


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
