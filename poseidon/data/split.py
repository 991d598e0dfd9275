"""Dividing a database among clients that share no file system.

Law: record i, counted in key order, goes to part i mod n with key and value unchanged; the parts appear beside the
database as `<name>_0` to `<name>_<n-1>`, all of them or none, and nothing is overwritten.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from poseidon.data.cursor import Cursor, open_cursor, records
from poseidon.data.database import Backend, require
from poseidon.data.partition import part_path
from poseidon.data.progress import Report, silent
from poseidon.data.staging import staging
from poseidon.data.writer import open_writer, refuse_existing, translated_writes
from poseidon.errors import UsageError


def partition_data(source: Path, parts: int, *, replace: bool = False, report: Report = silent) -> int:
    """Divide the database `source` into `parts` >= 1 databases of the same kind.

    Args:
        source: LMDB or LevelDB folder; it is only read (LevelDB, too, must be free of other owners).
        parts: number of parts; their sizes differ by at most one record.
        replace: let earlier parts, however many, make way for the new ones instead of refusing.
        report: told how many records are written, for a progress bar.

    Returns:
        number of records.

    Raises:
        UsageError: `parts` is not positive or exceeds the number of records.
        DataError: the database cannot be read, or a part exists already.
    """
    if parts < 1:
        raise UsageError(f"cannot divide {source} into {parts} parts: expected at least 1")
    backend = require(source)
    targets = [part_path(source, part) for part in range(parts)]
    with ExitStack() as stack:
        cursor = stack.enter_context(closing(open_cursor(source, backend)))
        length = len(cursor)
        if parts > length:
            raise UsageError(f"cannot divide {source} into {parts} parts: it has only {length} records")
        stack.enter_context(translated_writes(source))
        stage = stack.enter_context(staging(source.with_name(f"{source.name}-parts")))
        old = [part.name for part in existing_parts(source)] if replace else []
        for target in targets:
            if target.name not in old:
                refuse_existing(target)
        _deal(cursor, [stage.folder / target.name for target in targets], backend, report)
        stage.publish([target.name for target in targets], remove=old)
    return length


def existing_parts(source: Path) -> list[Path]:
    """The parts `<source>_<number>` that lie beside `source`, by number."""
    prefix = f"{source.name}_"
    numbered = [
        (int(entry.name.removeprefix(prefix)), entry)
        for entry in source.parent.iterdir()
        if entry.name.startswith(prefix) and entry.name.removeprefix(prefix).isdecimal()
    ]
    return [entry for _, entry in sorted(numbered)]


def _deal(cursor: Cursor, targets: list[Path], backend: Backend, report: Report) -> None:
    """Deal all records of `cursor` out to new databases, one at a time."""
    length = len(cursor)
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(open_writer(target, backend))) for target in targets]
        for number, (key, value) in enumerate(records(cursor)):
            writers[number % len(writers)].put(key, bytes(value))
            report("dividing", number + 1, length)
