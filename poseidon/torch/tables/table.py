"""`poseidon.Table`: an embedding that no worker holds.

Law: a worker has the rows of the batches that it works on, and no others. Their memory is freed
with the step.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.errors import UsageError
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.torch.update_rules import UpdateRule
from ps_server import RowInit, SpecError
from ps_server.protocol.messages import RowIds
from ps_server.protocol.row_settings import RowTableSpec

WHOLE = (torch.int64, torch.int32)


class Mode(Enum):
    """What a table gives for each of the indices, or for each bag of them."""

    ROWS = "rows"
    """The row of each index, as nn.Embedding."""
    SUM = "sum"
    """The sum over a bag, as nn.EmbeddingBag."""
    MEAN = "mean"
    """The mean over a bag."""


class Lookup(Protocol):
    """What a table needs of its group."""

    def rows(self, rows_U: RowIds, device: torch.device) -> Tensor:
        """Return the values of rows, U x dim; a leaf whose gradient is pushed, where gradients are
        wanted.
        """


class Table(nn.Module):
    """An embedding whose rows are on the shards. It is used as nn.Embedding, in a module that
    `poseidon.distribute` was given.

    A forward pass pulls the rows of its indices, the backward pass sums their gradients, and
    `group.step()` pushes these. The module has no parameter of it, and its `state_dict` nothing;
    `group.save()` writes the rows that training has changed.

    Args:
        rows: number of rows.
        dim: float32 elements of a row.
        rule: how rows follow from gradients: SGD without momentum, Adam (torch.optim.SparseAdam),
            AdaGrad or RowWiseAdaGrad; None: the rule that `distribute` was given.
        init: the first values: `normal`, `uniform` (from -scale to scale) or `zeros`.
        scale: standard deviation, or limit, of the first values.
        seed: of the first values, which follow from it and the row's number.
        padding_idx: an index whose row is zero and is not trained; None: there is none.
        mode: `rows`, as nn.Embedding; `sum` or `mean`, as nn.EmbeddingBag.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        rule: UpdateRule | None = None,
        init: str = "normal",
        scale: float = 1.0,
        seed: int = 0,
        padding_idx: int | None = None,
        mode: str = "rows",
    ) -> None:
        super().__init__()
        try:
            self.mode = Mode(mode)
            self.spec = RowTableSpec(
                name="Table",
                rows=rows,
                dim=dim,
                init=RowInit(init),
                scale=float(scale),
                seed=seed,
            )
        except (SpecError, ValueError, TypeError) as error:
            raise UsageError(
                f"Table({rows}, {dim}): {error}; expected rows and dim of 1 or more, init of "
                f"{', '.join(member.value for member in RowInit)}, and mode of "
                f"{', '.join(member.value for member in Mode)}"
            ) from error
        self.rule = rule
        self.padding_idx = padding_idx
        self.lookup: Lookup | None = None
        """Set by the group."""

    def extra_repr(self) -> str:
        """Return the arguments, for `print`."""
        return f"{self.spec.rows}, {self.spec.dim}, mode={self.mode.value}"

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return the rows of the indices, of shape (*indices.shape, dim); or of each bag the sum or
        mean, of shape (bags, dim).

        Args:
            indices: int64 or int32, of any shape; of bags (bags, indices of each), or flat with
                `offsets`.
            offsets: where each bag begins.

        Raises:
            UsageError: an index is out of range, or the table is in no group.
        """
        rows_U, places = distinct(indices, self.spec.rows, self.padding_idx, type(self).__name__)
        weight = self._lookup.rows(rows_U, indices.device)
        padding = len(rows_U)
        if self.padding_idx is not None or not padding:
            weight = torch.cat([weight, weight.new_zeros(1, self.spec.dim)])
        padding_idx = padding if self.padding_idx is not None else None
        places = places.to(indices.device)
        if self.mode is Mode.ROWS:
            return functional.embedding(places, weight, padding_idx=padding_idx)
        return functional.embedding_bag(
            places,
            weight,
            None if offsets is None else offsets.to(places.dtype),
            mode=self.mode.value,
            padding_idx=padding_idx,
        )

    @property
    def _lookup(self) -> Lookup:
        if self.lookup is None:
            raise UsageError(
                f"a Table of {self.spec.rows} rows has no shards; expected it in the module that "
                "distribute() was given, before the group's close()"
            )
        return self.lookup


leave_out_of_graphs(Table.forward, "a Table pulls rows from the shards, which is not a computation")


def distinct(
    indices: Tensor, rows: int, padding_idx: int | None, name: str
) -> tuple[RowIds, Tensor]:
    """Return the rows that indices name, each once in increasing order, and for each index its
    place among them.

    The place of padding is the number of rows.

    Args:
        indices: int64 or int32, of any shape.
        padding_idx: the index that names no row; None: each does.

    Raises:
        UsageError: an index is of a different type or out of range.
    """
    if indices.dtype not in WHOLE:
        raise UsageError(
            f"{name} was given indices of {indices.dtype}; expected torch.int64 or torch.int32"
        )
    flat = indices.detach().cpu().numpy().reshape(-1)
    if len(flat) and not (flat.min() >= 0 and flat.max() < rows):
        wrong = flat.min() if flat.min() < 0 else flat.max()
        raise UsageError(f"{name} was given the index {wrong}; expected 0 to {rows - 1}")
    found, places = np.unique(flat, return_inverse=True)
    if padding_idx is not None:
        at = int(np.searchsorted(found, padding_idx))
        if at < len(found) and found[at] == padding_idx:
            found = np.delete(found, at)
            places = np.where(places == at, len(found), places - (places > at))
    shaped = torch.from_numpy(places.reshape(tuple(indices.shape)).astype(np.int64))
    return found.astype(np.uint32), shaped
