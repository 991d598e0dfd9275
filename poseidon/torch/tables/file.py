"""The rows of a row table in a checkpoint: a file beside it for each table.

    header   a line of JSON: the table, the rule's histories, and the number of updates
    pieces   8 bytes N, little endian; N numbers of rows as uint32; N values; N of each history

The last piece has N = 0. The file has the rows that a gradient has changed, and those to which the
script gave a value.

Law: files are written and read piece by piece, so they may be larger than a worker's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from poseidon.base.durable import replacing
from poseidon.errors import SnapshotError
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_settings import RowTableSpec

_COUNT_BYTES = 8
_MOST_ROWS = 2**24
Piece = tuple[RowIds, Sequence[Array]]


def rows_path(checkpoint: Path, table: int) -> Path:
    """Return the path of the rows of table number `table` of a checkpoint."""
    return checkpoint.with_name(f"{checkpoint.name}.rows{table}")


def write_rows(path: Path, spec: RowTableSpec, clock: int, pieces: Iterable[Piece]) -> None:
    """Write the rows of a table.

    Args:
        clock: number of its updates.
        pieces: rows, and values with histories.

    Raises:
        SnapshotError: the file cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(json.dumps(_header(spec, clock)).encode() + b"\n")
            for rows_N, arrays in pieces:
                _write_piece(file, rows_N, arrays)
            file.write(bytes(_COUNT_BYTES))
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error


def _header(spec: RowTableSpec, clock: int) -> dict[str, object]:
    return {
        "poseidon_rows": 1,
        "name": spec.name,
        "rows": spec.rows,
        "dim": spec.dim,
        "rule": spec.rule.kind.value,
        "init": spec.init.value,
        "scale": spec.scale,
        "seed": spec.seed,
        "updates": clock,
    }


def _write_piece(file: BinaryIO, rows_N: RowIds, arrays: Sequence[Array]) -> None:
    file.write(len(rows_N).to_bytes(_COUNT_BYTES, "little"))
    file.write(rows_N.tobytes())
    for array in arrays:
        file.write(array.tobytes())


def read_rows(path: Path, spec: RowTableSpec, clock: int) -> Iterator[Piece]:
    """Yield the rows of a table, piece by piece.

    Args:
        clock: number of its updates in the checkpoint.

    Raises:
        SnapshotError: the file is missing or damaged, or of a different table.
    """
    try:
        with path.open("rb") as file:
            header = file.readline(2**16)
            expected = _header(spec, clock)
            if _parsed(header) != expected:
                raise SnapshotError(
                    f"{path} has a different table: "
                    f"{header[:300].decode(errors='replace').strip()}; expected "
                    f"{json.dumps(expected)}"
                )
            while (piece := _read_piece(file, path, spec)) is not None:
                yield piece
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error


def _parsed(header: bytes) -> object:
    try:
        return json.loads(header)
    except (ValueError, RecursionError):
        return None


def _read_piece(file: BinaryIO, path: Path, spec: RowTableSpec) -> Piece | None:
    count = int.from_bytes(_exactly(file, _COUNT_BYTES, path), "little")
    if count == 0:
        return None
    if count > _MOST_ROWS:
        raise SnapshotError(f"{path} is damaged: a piece of {count} rows")
    rows_N = np.frombuffer(_exactly(file, 4 * count, path), np.uint32)
    if rows_N[-1] >= spec.rows or np.any(rows_N[1:] <= rows_N[:-1]):
        raise SnapshotError(f"{path} is damaged: its numbers of rows are out of order")
    arrays = [
        np.frombuffer(_exactly(file, 4 * count * width, path), np.float32).reshape(count, width)
        for width in spec.widths
    ]
    return rows_N, arrays


def _exactly(file: BinaryIO, size: int, path: Path) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise SnapshotError(f"{path} is truncated")
    return content
