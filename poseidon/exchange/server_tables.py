"""The state of an exchange through the parameter server: one table for each
tensor, and what a snapshot holds of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.side_stream import SideStream
from ps_server import Client, Keeping, TableSpec
from ps_server.rules import history_count


class ServerTable:
    """The state of one table on this worker.

    `value` is the tensor's own memory on a CPU. A GPU tensor has a copy on the host, which `publish` copies to it.
    """

    def __init__(self, trained: Trained, spec: TableSpec, side: SideStream) -> None:
        self.rule = trained.rule
        self.staleness = spec.staleness
        self.encodes_values = spec.value_codec is not None
        self.is_copy = spec.keeping is Keeping.COPY
        self.of_pushes = f"{spec.name}, pushes"
        self.of_values = f"{spec.name}, values"
        self.statistics = trained.statistics
        self.shape = tuple(trained.tensor.shape)
        self._tensor = trained.tensor
        self._on_cpu = trained.tensor.device.type == "cpu"
        flat = trained.tensor.detach().reshape(-1)
        self._side = side
        self._gradient: Tensor | None = None
        self.value: Array = (flat if self._on_cpu else side.host_buffer(flat.numel()).copy_(flat)).numpy()
        if self._on_cpu:
            assert np.shares_memory(self.value, trained.tensor.detach().numpy())
        has_history = spec.adds_changes and spec.keeping is Keeping.GRADIENTS
        self.history = [
            torch.zeros(self.value.size if has_history else 0, dtype=torch.float32, device="cpu")
            for _ in range(history_count(trained.rule.kind))
        ]
        self.initial_history: list[Tensor] = []
        self.unsent: Array | None = None
        """Of a resumed run with a codec, on rank 0: what the shards keep beside the history (`Client.history`)."""
        self.begun = False
        self.pending: Tensor | None = None
        self.last_read: Array = self.value.copy() if self.statistics else self.value
        """The values of statistics when they were last read."""

    def reload(self) -> None:
        """Copy a GPU tensor to its copy on the host."""
        if not self._on_cpu:
            np.copyto(self.value, self.copy_to_host())

    def set_history(self, history: History) -> None:
        """Continue from this history: here at staleness > 0, on the shards at 0."""
        if self.is_copy or self.statistics:
            return
        arrays = [
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32).reshape(-1)) for array in history
        ]
        if self.staleness == 0:
            self.initial_history = arrays
        else:
            for own, given in zip(self.history, arrays, strict=False):
                own.copy_(given)

    def to_host(self, gradient: Tensor) -> Tensor:
        """Return the gradient in host memory; a copy from a GPU runs on the current stream."""
        if gradient.device.type == "cpu":
            return gradient
        if self._gradient is None:
            self._gradient = self._side.host_buffer(gradient.numel())
        return self._gradient.copy_(gradient, non_blocking=True)

    def copy_to_host(self) -> Array:
        """Return a copy of the module's tensor on the host."""
        return self._tensor.detach().reshape(-1).cpu().numpy().copy()

    def publish(self) -> None:
        """Note the values of statistics; copy the host copy of a GPU tensor to it."""
        if self.statistics:
            np.copyto(self.last_read, self.value)
        if not self._on_cpu:
            self._tensor.detach().reshape(-1).copy_(torch.from_numpy(self.value), non_blocking=True)


class ServerState:
    """See `ExchangeState`. At staleness 0 the shards keep the histories, above it each worker keeps its own.

    Args:
        client: connected to every shard.
        tables: one for each tensor.
    """

    def __init__(self, client: Client, tables: Sequence[ServerTable]) -> None:
        self._client = client
        self._tables = tables
        self._held_back: Mapping[str, Array] = {}
        self.private = any(table.staleness > 0 for table in tables)

    def histories(self) -> list[History]:
        """See `ExchangeState`. A tensor that does not travel through the server has none here."""
        return [
            [array.reshape(table.shape) for array in self._history(index, table)]
            for index, table in enumerate(self._tables)
        ]

    def _history(self, index: int, table: ServerTable) -> Sequence[Array]:
        if table.is_copy:
            return []
        if table.statistics:  # no rule moves them; Caffe's solverstate has zeros there
            return [np.zeros(table.value.size, np.float32)] * len(table.history)
        if table.staleness == 0:
            return self._client.history(index)[: history_count(table.rule.kind)]
        return [history.numpy().copy() for history in table.history]

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        found = {}
        for index, table in enumerate(self._tables):
            held_back = self._client.held_back(index)
            if held_back is not None:
                found[table.of_pushes] = held_back.copy()
            if table.encodes_values and self._client.rank == 0:
                found[table.of_values] = self._client.history(index)[-1]
        return found

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        for table in self._tables:
            for name in (table.of_pushes, table.of_values):
                if name in held_back and held_back[name].size != table.value.size:
                    raise SnapshotError(
                        f"the snapshot holds back {held_back[name].size} elements of {name}; expected {table.value.size}"
                    )
        self._held_back = held_back

    def restore(self) -> None:
        """Continue from what `hold_back` was given since the last call: nothing where it was not called."""
        for index, table in enumerate(self._tables):
            held_back = self._client.held_back(index)
            if held_back is not None:
                held_back[:] = self._held_back.get(table.of_pushes, 0.0)
            table.unsent = self._held_back.get(table.of_values) if table.encodes_values else None
        self._held_back = {}

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        return {}
