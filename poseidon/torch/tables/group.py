"""The row tables of a group: `Table`s, and the weights of sparse embeddings; and their rows in a
checkpoint.

One step, for each table:

    forward      pull the rows of the batch (or take those that were prefetched)
    backward     sum the gradients of each row
    step()       push them

A checkpoint has a file beside it for each table:

    header    a line of JSON: the table, the rule's histories, and the number of updates
    pieces    8 bytes N, little endian; N numbers of rows as uint32; N values; N of each history

The last piece has N = 0. The file has the rows that a gradient has changed, and those to which the
script gave a value. It is written and read piece by piece, so no process holds a whole table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor, nn

from poseidon.base.durable import replacing
from poseidon.base.foreign_files import open_regular
from poseidon.engine.leaf import Found, Leaf, Scope
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.alone import RowTables
from poseidon.torch.tables.link import Callbacks, EmbeddingRows, TableLink, link_of
from poseidon.torch.tables.plan import PlannedTable
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_settings import RowTableSpec


class TableGroup:
    """All row tables of a group."""

    def __init__(self) -> None:
        self.links: list[TableLink] = []

    def open(
        self,
        planned: Sequence[PlannedTable],
        tables: RowTables,
        callbacks: Callbacks,
        *,
        root: bool,
    ) -> None:
        """Create the tables, the same on every worker, and give the weights of sparse embeddings to
        the shards. A collection follows.
        """
        for table in planned:
            link = link_of(table, tables, callbacks)
            self.links.append(link)
            if isinstance(link, EmbeddingRows):
                link.give(root=root)

    def prefetch(self, module: nn.Module, indices: Tensor) -> None:
        """Request the rows that a module will look up.

        Raises:
            UsageError: the module has no rows here, or an index is out of range.
        """
        for link in self.links:
            if link.planned.module is module:
                link.prefetch(indices)
                return
        raise UsageError(
            f"prefetch() was given {type(module).__name__}, which has no rows on the shards; "
            "expected a poseidon.Table, or an nn.Embedding or nn.EmbeddingBag with sparse=True, of "
            "the module that distribute() was given"
        )

    def leaf(self, come: Callable[[], object]) -> Leaf:
        """Return the number of updates of each table, by name. Their rows are in files beside it.

        Args:
            come: waits until the shards have the rows.
        """

        def load(found: Found) -> None:
            self._load(found.shared, found.source.path)
            come()

        return Leaf(
            name="tables",
            scope=Scope.SHARED,
            read=lambda: {link.spec.name: link.clock for link in self.links},
            write=load,
            check=self._check,
        )

    def write(self, checkpoint: Path) -> list[Path]:
        """Write the rows of all tables beside a checkpoint, on rank 0. Return the files.

        No worker pushes meanwhile: each needs rank 0's next push.
        """
        paths = []
        for index, link in enumerate(self.links):
            paths.append(rows_path(checkpoint, index))
            write_rows(paths[-1], link.spec, link.clock, link.stored())
        return paths

    def _check(self, found: Found) -> None:
        """Refuse a state of other tables, or one without the files of its tables beside it."""
        names = [link.spec.name for link in self.links]
        if list(found.shared) != names:
            raise SnapshotError(
                f"{found.source.name} has the tables {', '.join(found.shared) or 'none'}; this "
                f"module has {', '.join(names) or 'none'}"
            )
        if names and not found.source.is_file:
            raise UsageError(
                f"load_state_dict() lacks the rows of table '{names[0]}', which are in files beside "
                "a checkpoint; use resume()"
            )

    def _load(self, clocks: Mapping[str, int], checkpoint: Path | None) -> None:
        """Continue from the rows beside a checkpoint.

        Args:
            checkpoint: on rank 0; None on others.

        Raises:
            SnapshotError: a file is missing or damaged, or of a different table.
        """
        for index, link in enumerate(self.links):
            clock, pieces = clocks[link.spec.name], None
            if checkpoint is not None:
                pieces = read_rows(rows_path(checkpoint, index), link.spec, clock)
            link.restore(clock, pieces)

    def push(self, own_rate: Callable[[], float], step: int) -> None:
        """End an iteration of all tables."""
        for link in self.links:
            planned = link.planned
            rate = own_rate() if planned.rate is None else planned.rate(step)
            link.push(rate * planned.rate_factor)

    def drop(self) -> None:
        for link in self.links:
            link.drop()

    def settle(self) -> None:
        for link in self.links:
            link.settle()

    def close(self) -> None:
        for link in self.links:
            link.close()


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
        with open_regular(path) as file:
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
