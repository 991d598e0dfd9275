"""The carrier of a follower: of a worker whose host exchanges with others through a leader.

`group.py` has the laws.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.carrier import CarrierState, FactoredCarrier, GradientCarrier, Step
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.local.connection import Buffer, Kind, Message, connect
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.host_delivery import FollowerDelivery
from poseidon.exchange.local.reduction import Hello, Reduction, Welcome, join
from ps_server import LocalProtocolError, PeerLost, ServerError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.rules import history_count


class FollowerCarrier(GradientCarrier, FactoredCarrier):
    """Contributes to its leader, and takes the values that the leader publishes.

    Args:
        tensors: the same on all workers.
        group: the local group of this worker.

    Attributes:
        control: of the exchange of this carrier.
    """

    state: FollowerState

    def __init__(self, tensors: Sequence[Trained], group: LocalGroup) -> None:
        self.indices = range(len(tensors))
        self._tensors = tensors
        self._group = group
        self._monitor = group.new_monitor()
        self._connection = connect(group.address, group.timeout_s, group.interruption)
        try:
            self._reduction = self._join()
        except ServerError:
            self._connection.close()
            group.interruption.check()
            raise
        self._published = [0] * len(tensors)
        self._taken = [0] * len(tensors)
        self._round = 0
        self._parts: Counter[int] = Counter()  # of each tensor, contributed in this iteration
        self._begun: set[int] = set()
        self._released: set[int] = set()
        self._delivery = FollowerDelivery(self._send, self._monitor)
        self.control = JobControl(self._delivery, root=False)
        self.state = FollowerState(tensors, self._monitor, private=self._private)
        self._thread = threading.Thread(
            target=self._listen, name=f"local-{group.rank}", daemon=True
        )
        self._thread.start()

    def _join(self) -> Reduction:
        self._connection.send(Kind.HELLO, Hello.of(self._tensors).pack(), number=self._group.rank)
        message, files = self._connection.receive_files(self._group.timeout_s)
        if message.kind is Kind.FAILED:
            raise PeerLost(message.payload.decode())
        welcome = Welcome.unpack(message.payload)
        self.by_factors = frozenset(welcome.by_factors)
        self._private = welcome.private_histories
        self.schemes = welcome.schemes
        """The scheme of each tensor in the leader's plan."""
        return join(self._tensors, self._group, welcome, files)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        """Take the first values; the leader's histories and clock are used."""
        self._take_all()

    def start(self, step: Step) -> None:
        """Begin an iteration; the leader's rate is used."""
        self._round += 1
        self._parts.clear()
        self._begun.clear()
        self._released.clear()

    def begin(self, index: int, gradient: Tensor) -> None:
        self._contribute(index, gradient.detach().reshape(-1))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.wait(index)
        self._begun.add(index)
        pieces = [factor.detach().cpu().contiguous().numpy().data for factor in (u_KN, v_KM)]
        self._send(Kind.FACTORS, *pieces, index=index, number=u_KN.shape[0])

    def release(self, index: int) -> None:
        if index not in self._released:
            self._released.add(index)
            self._send(Kind.RELEASED, index=index)

    def wait(self, index: int) -> None:
        if self._taken[index] == self._round:
            return
        self._wait_for_value(index)
        self._reduction.receive(index)
        self._taken[index] = self._round

    def finish(self, limit: float) -> None:
        for index, trained in enumerate(self._tensors):
            self.wait(index)
            if trained.statistics and index not in self._parts:
                self._contribute(index, trained.tensor.detach().reshape(-1))
            elif index in self.by_factors:
                if index not in self._begun:
                    self._send(Kind.FACTORS, index=index)
                self.release(index)
            elif index not in self._parts:
                self._contribute(index, None)

    def settle(self, clock: int) -> None:
        self._take_all()

    def close(self) -> None:
        if self._monitor.closed:
            return
        self._monitor.close()
        with contextlib.suppress(PeerLost):  # the leader has left already
            self._connection.send(Kind.LEAVE)
        self._connection.close()
        self._thread.join()
        self._reduction.close()

    def _contribute(self, index: int, part: Tensor | None) -> None:
        self.wait(index)  # before it has the value, a worker would overwrite its last part
        self._reduction.contribute(index, part, self._parts[index])
        self._parts[index] += 1
        self._send(Kind.PART, index=index)

    def _take_all(self) -> None:
        """Take every value of `open` or `settle`, in which no tensor begins."""
        self._round += 1
        for index in range(len(self._tensors)):
            self.wait(index)
        self._send(Kind.TAKEN)

    def _send(self, kind: Kind, *payload: Buffer, index: int = 0, number: int = 0) -> None:
        try:
            self._connection.send(kind, *payload, index=index, number=number)
        except PeerLost:
            # the leader may have sent the reason before it left
            self._thread.join(self._group.timeout_s)
            self._monitor.check()
            raise

    def _wait_for_value(self, index: int) -> None:
        self._monitor.wait_for(
            lambda: True if self._published[index] >= self._round else None,
            f"tensor '{self._tensors[index].name}' did not come from the leading worker",
        )

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                with self._monitor:
                    self._receive(message)
                    self._monitor.notify()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self._monitor.fail(as_server_error(error, "listening to the leading worker failed"))

    def _receive(self, message: Message) -> None:
        match message.kind:
            case Kind.VALUE:
                self._published[message.index] += 1
            case Kind.SIGNALS | Kind.GATHERED:
                self._delivery.receive(message)
            case Kind.HISTORIES:
                self.state.put(message.payload)
            case Kind.FAILED:
                raise PeerLost(message.payload.decode())
            case Kind.LEAVE:
                raise PeerLost("the leading worker of this machine has left")
            case _:
                raise PeerLost(f"the leading worker sent an unexpected {message.kind.name}")


class FollowerState(CarrierState):
    """Private histories come from the leader (`LeaderState`).

    Args:
        tensors: one history each.
        monitor: guards the state that the threads of this worker share.
        private: as on the leader.
    """

    def __init__(self, tensors: Sequence[Trained], monitor: Monitor, *, private: bool) -> None:
        self._tensors = tensors
        self._monitor = monitor
        self._received: list[bytearray] = []
        self.private = private

    def put(self, packed: bytearray) -> None:
        """Note histories that the leader has sent; under the lock."""
        self._received.append(packed)

    def histories(self) -> Mapping[int, History]:
        if not self.private:
            raise LocalProtocolError("the history is shared, and only worker 0 reads it")
        packed = self._monitor.wait_for(
            lambda: self._received.pop(0) if self._received else None,
            "the leading worker sent no histories",
        )
        flat, found, start = np.frombuffer(packed, np.float32), dict[int, History](), 0
        for index, trained in enumerate(self._tensors):
            size, count = trained.tensor.numel(), history_count(trained.rule.kind)
            rows = flat[start : start + count * size].reshape(count, *trained.tensor.shape)
            found[index] = [row.copy() for row in rows]
            start += count * size
        return found
