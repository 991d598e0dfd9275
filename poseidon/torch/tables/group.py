"""The row tables of a group: `Table`s, and the weights of sparse embeddings.

One step, for each table:

    forward      pull the rows of the batch (or take those that were prefetched)
    backward     sum the gradients of each row
    step()       push them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from poseidon.engine.state_tree import Found, Leaf, Scope
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.row_tables import RowTables
from poseidon.torch.tables.file import read_rows, rows_path, write_rows
from poseidon.torch.tables.link import Callbacks, EmbeddingRows, TableLink, link_of
from poseidon.torch.tables.plan import PlannedTable


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
                f"load_state_dict() with table '{names[0]}', whose rows are in files beside a "
                "checkpoint; expected resume()"
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
