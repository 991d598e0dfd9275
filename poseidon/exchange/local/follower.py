"""The carrier of a follower: of a worker whose host exchanges with others through a leader.

`group.py` has the laws.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.carrier import CarrierState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.local.carrier import HostCarrier
from poseidon.exchange.local.connection import Buffer, Kind, Message, connect
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.host_delivery import FollowerDelivery
from poseidon.exchange.local.reduction import Hello, Reduction, Welcome, join
from poseidon.exchange.turns import Factors
from ps_server import LocalProtocolError, PeerLost, ServerError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.rules import history_count


class FollowerCarrier(HostCarrier):
    """Contributes to its leader, and takes the values that the leader publishes.

    Args:
        tensors: the same on all workers.
    """

    state: FollowerState

    def __init__(self, tensors: Sequence[Trained], group: LocalGroup) -> None:
        super().__init__(tensors)
        self._group = group
        self._monitor = group.new_monitor()
        network = group.network
        self._connection = connect(group.address, network)
        try:
            self._reduction = self._join()
        except ServerError:
            self._connection.close()
            network.interruption.check()
            raise
        self._published = [0] * len(tensors)
        self._delivery = FollowerDelivery(self._send, self._monitor)
        self.control = JobControl(self._delivery, root=False)
        self.state = FollowerState(tensors, self._monitor, private=self._private)
        self._thread = threading.Thread(
            target=self._listen, name=f"local-{network.rank}", daemon=True
        )
        self._thread.start()

    def _join(self) -> Reduction:
        self._connection.send(
            Kind.HELLO, Hello.of(self._tensors).pack(), number=self._group.network.rank
        )
        message, files = self._connection.receive_files(self._group.network.timeout_s)
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
        self.settle(0)

    def settle(self, clock: int) -> None:
        self._take_all()  # each publication is taken
        self._round += 1
        self._take_all()
        self._send(Kind.TAKEN)

    def _take(self, index: int) -> None:
        self._monitor.wait_for(
            lambda: True if self._published[index] >= self._round else None,
            f"tensor '{self._tensors[index].name}' did not come from the leading worker",
        )
        self._reduction.receive(index)

    def _add(self, index: int, part: Tensor | None, number: int) -> None:
        self._reduction.contribute(index, part, number)
        self._send(Kind.PART, index=index)

    def _add_factors(self, index: int, factors: Factors | None) -> None:
        pieces = [factor.cpu().contiguous().numpy().data for factor in factors or ()]
        rows = len(factors[0]) if factors else 0
        self._send(Kind.FACTORS, *pieces, index=index, number=rows)

    def _add_release(self, index: int) -> None:
        self._send(Kind.RELEASED, index=index)

    def close(self) -> None:
        if self._monitor.closed:
            return
        self._monitor.close()
        with contextlib.suppress(PeerLost):  # the leader has left already
            self._connection.send(Kind.LEAVE)
        self._connection.close()
        self._thread.join()
        self._reduction.close()

    def _send(self, kind: Kind, *payload: Buffer, index: int = 0, number: int = 0) -> None:
        try:
            self._connection.send(kind, *payload, index=index, number=number)
        except PeerLost:
            # the leader may have sent the reason before it left
            self._thread.join(self._group.network.timeout_s)
            self._monitor.check()
            raise

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
        private: as on the leader.
    """

    def __init__(self, tensors: Sequence[Trained], monitor: Monitor, *, private: bool) -> None:
        self._tensors = tensors
        self._monitor = monitor
        self._received: deque[bytearray] = deque()
        self.private = private

    def put(self, packed: bytearray) -> None:
        """Note the history of a tensor that the leader has sent; under the lock."""
        self._received.append(packed)

    def histories(self) -> Mapping[int, History]:
        if not self.private:
            raise LocalProtocolError("the history is shared, and only worker 0 reads it")
        found: dict[int, History] = {}
        for index, trained in enumerate(self._tensors):
            packed = self._monitor.wait_for(
                lambda: self._received.popleft() if self._received else None,
                f"the leading worker sent no history of '{trained.name}'",
            )
            shape = history_count(trained.rule.kind), *trained.tensor.shape
            found[index] = list(np.frombuffer(packed, np.float32).reshape(shape))
        return found
