"""One table of the store, on this worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.device import DONE, Event, Streams
from poseidon.exchange.lossy.device_encoder import DeviceEncoder
from ps_server import Keeping, TableSpec
from ps_server.protocol.messages import Payload
from ps_server.protocol.precision import as_array, as_tensor
from ps_server.rules import history_count


def of_values(name: str) -> str:
    """Return the name of the shards' own value of a table among what is held back."""
    return f"{name}, values"


class ServerTable:
    """The state of one table on this worker.

    `value` is the tensor's own memory on a CPU. A GPU tensor has a copy on the host, which
    `publish` copies to it.

    Args:
        trained: what the table holds.
        streams: of the tensor's device.
        encoders: of its pushes, for each of an iteration; none where the host encodes them, if it
            does.

    Attributes:
        history: at staleness 0 the one to continue from, for the shards; above it this worker's.
        pushes: of this iteration.
    """

    def __init__(
        self,
        trained: Trained,
        spec: TableSpec,
        streams: Streams,
        encoders: Sequence[DeviceEncoder] = (),
    ) -> None:
        self.trained = trained
        self.spec = spec
        self.encoders = encoders
        self._streams = streams
        self._gradients: list[Tensor] = []
        self._left: Event | None = None
        """After which the tensor may be written to; None: since its value was copied it has not
        been handed over.
        """
        self.copied_in: Event = DONE
        """After which `value` may be written to."""
        flat, device = trained.tensor.detach().reshape(-1), streams.device
        self.value: Payload = as_array(
            flat if device.is_host else device.host_memory(flat.numel(), dtype=flat.dtype)
        )
        if device.is_host:
            assert np.shares_memory(self.value, as_array(trained.tensor.detach()))
        has_history = spec.adds_changes and spec.keeping is Keeping.GRADIENTS
        self.history = [
            torch.zeros(self.value.size, dtype=torch.float32, device="cpu")
            for _ in range(history_count(trained.rule.kind) if has_history else 0)
        ]
        self.pushes = 0
        self.pending: Tensor | None = None
        self.last_read: Payload = self.value.copy() if trained.statistics else self.value
        """The values of statistics when they were last read."""

    @property
    def is_copy(self) -> bool:
        """Whether other carriers move the tensor."""
        return self.spec.keeping is Keeping.COPY

    def of_pushes(self, virtual_worker: int) -> str:
        """Return the name of what a codec holds back of a virtual worker's pushes."""
        return f"{self.spec.name}, pushes of {virtual_worker}"

    def reload(self) -> None:
        """Copy a GPU tensor to its copy on the host."""
        if not self._streams.device.is_host:
            np.copyto(self.value, as_array(self.trained.tensor.detach().reshape(-1).cpu()))

    def set_history(self, history: History) -> None:
        """Continue from this history: here at staleness > 0, on the shards at 0."""
        if self.is_copy or self.trained.statistics:
            return
        arrays = [
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32).reshape(-1))
            for array in history
        ]
        if self.spec.staleness == 0:
            self.history = arrays
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
        device, stream, _ = self._streams
        self._left = ready = device.event()
        if gradient.device.type == "cpu":
            return gradient, self.copied_in
        out = gradient
        if self.encoders:
            with device.on(stream):
                device.wait(ready)
                out = self.encoders[number].encode(gradient, clock)
        while len(self._gradients) <= number:
            self._gradients.append(device.host_memory(out.numel(), dtype=out.dtype))
        memory = self._gradients[number]
        return memory, device.copy(out, memory, stream, ready)

    def publish(self) -> None:
        """Note the values of statistics; copy the host copy of a GPU tensor to it."""
        if self.trained.statistics:
            np.copyto(self.last_read, self.value)
        device = self._streams.device
        if not device.is_host:
            left = device.event() if self._left is None else self._left
            value, to = as_tensor(self.value), self.trained.tensor.detach().reshape(-1)
            self.copied_in = device.copy(value, to, self._streams.into, left)
            device.wait(self.copied_in)
            self._left = None

    def await_value(self) -> None:
        """Wait until `value` may be written to, where no push has waited for that."""
        if self._left is None:
            self.copied_in.synchronize()
