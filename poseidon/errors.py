"""What can go wrong, as a tree; the command line turns each into one sentence and an exit code.

PoseidonError
├── UsageError        a flag or an argument is wrong; exit code 2
├── DefinitionError   a net or solver definition is wrong; carries file, line and column
├── DataError         a database, image, list or mean file is missing, broken or misused
├── SnapshotError     a .caffemodel or .solverstate cannot be read, written or matched
├── MachinefileError  a machinefile line is wrong
└── JobError          a job could not start, or one of its processes failed

Law: the text of an error is one sentence that names the thing, the place and what was expected.
The library raises; only `poseidon.cli` exits.
"""

from __future__ import annotations


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
        self.message = message
        self.source = source
        self.line = line
        self.column = column
        place = ":".join(str(part) for part in (source, line, column) if part is not None)
        super().__init__(f"{place}: {message}" if place else message)


class DataError(PoseidonError):
    """A database, image, list or mean file is missing, broken or misused."""


class SnapshotError(PoseidonError):
    """A .caffemodel or .solverstate cannot be read, written or matched to the net."""


class MachinefileError(PoseidonError):
    """A machinefile line is wrong."""


class JobError(PoseidonError):
    """A job could not start, or one of its processes failed."""
