"""One table of the store, on this worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.device import DONE, Device, Event
from poseidon.exchange.lossy.device_encoder import DeviceEncoder
from ps_server import Keeping, TableSpec
from ps_server.protocol.messages import Payload
from ps_server.protocol.precision import as_array, as_tensor
from ps_server.rules import history_count


def of_values(name: str) -> str:
    """Return the name of the shards' own value of a table among what is held back."""
    return f"{name}, values"


class Streams(NamedTuple):
    """For copies out of a device, and into it."""

    out: Any
    into: Any


class ServerTable:
    """The state of one table on this worker.

    `value` is the tensor's own memory on a CPU. A GPU tensor has a copy on the host, which
    `publish` copies to it.

    Args:
        device: of the tensor.
        streams: for its copies.
        encoders: of its pushes, for each of an iteration; none where the host encodes them, if it
            does.
    """

    def __init__(
        self,
        trained: Trained,
        spec: TableSpec,
        device: Device,
        streams: Streams,
        encoders: Sequence[DeviceEncoder] = (),
    ) -> None:
        self.rule = trained.rule
        self.rate_index = trained.rate_index
        self.staleness = spec.staleness
        self.has_own_value = spec.has_own_value
        self.is_copy = spec.keeping is Keeping.COPY
        self.encoders = encoders
        self.encodes_pushes = spec.gradient_codec is not None
        self._name = spec.name
        self.of_values = of_values(spec.name)
        self.statistics = trained.statistics
        self.tensor = trained.tensor
        self._on_host = device.is_host
        flat = trained.tensor.detach().reshape(-1)
        self._device = device
        self._streams = streams
        self._gradients: list[Tensor] = []
        self._left: Event | None = None
        """After which the tensor may be written to; None: since its value was copied it has not
        been handed over.
        """
        self.copied_in: Event = DONE
        """After which `value` may be written to."""
        self.value: Payload = as_array(
            flat if self._on_host else device.host_memory(flat.numel(), dtype=flat.dtype)
        )
        if self._on_host:
            assert np.shares_memory(self.value, as_array(trained.tensor.detach()))
        has_history = spec.adds_changes and spec.keeping is Keeping.GRADIENTS
        self.history = [
            torch.zeros(self.value.size if has_history else 0, dtype=torch.float32, device="cpu")
            for _ in range(history_count(trained.rule.kind))
        ]
        self.initial_history: list[Tensor] = []
        self.unsent: Array | None = None
        """Of a resumed run with a codec or with 16 bits, on rank 0: what the shards keep beside the
        history (`Client.history`).
        """
        self.begun = False
        self.pushes = 0  # of this iteration
        self.pending: Tensor | None = None
        self.last_read: Payload = self.value.copy() if self.statistics else self.value
        """The values of statistics when they were last read."""

    def of_pushes(self, virtual_worker: int) -> str:
        """Return the name of what a codec holds back of a virtual worker's pushes."""
        return f"{self._name}, pushes of {virtual_worker}"

    def reload(self) -> None:
        """Copy a GPU tensor to its copy on the host."""
        if not self._on_host:
            np.copyto(self.value, as_array(self.tensor.detach().reshape(-1).cpu()))

    def set_history(self, history: History) -> None:
        """Continue from this history: here at staleness > 0, on the shards at 0."""
        if self.is_copy or self.statistics:
            return
        arrays = [
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32).reshape(-1))
            for array in history
        ]
        if self.staleness == 0:
            self.initial_history = arrays
        else:
            for own, given in zip(self.history, arrays, strict=False):
                own.copy_(given)

    def to_host(self, gradient: Tensor, number: int, clock: int = 0) -> tuple[Tensor, Event]:
        """Hand over the tensor. Return push `number` of an iteration in host memory, and the event
        after which it is there and `value` may be written to. An encoder encodes it before.

        The caller keeps the gradient until then.

        Args:
            clock: of the push, where there is an encoder.
        """
        self._left = ready = self._device.event()
        if gradient.device.type == "cpu":
            return gradient, self.copied_in
        out = gradient
        if self.encoders:
            with self._device.on(self._streams.out):
                self._device.wait(ready)
                out = self.encoders[number].encode(gradient, clock)
        while len(self._gradients) <= number:
            memory = self._device.host_memory(out.numel(), dtype=out.dtype)
            self._gradients.append(memory)
        memory = self._gradients[number]
        return memory, self._device.copy(out, memory, self._streams.out, ready)

    def publish(self) -> None:
        """Note the values of statistics; copy the host copy of a GPU tensor to it."""
        if self.statistics:
            np.copyto(self.last_read, self.value)
        if not self._on_host:
            left = self._device.event() if self._left is None else self._left
            value, to = as_tensor(self.value), self.tensor.detach().reshape(-1)
            self.copied_in = self._device.copy(value, to, self._streams.into, left)
            self._device.wait(self.copied_in)
            self._left = None

    def await_value(self) -> None:
        """Wait until `value` may be written to, where no push has waited for that."""
        if self._left is None:
            self.copied_in.synchronize()
