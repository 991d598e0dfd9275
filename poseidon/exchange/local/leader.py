"""The carrier of a leader: of the worker that exchanges with other hosts for all workers of its
own.

`group.py` has the laws.

Threads: the training loop; one that receives from each follower; one for collections
(`host_delivery.py`); and the leader's loop (`leader_loop.py`), which calls the inner exchange.
Tensors belong to the exchange while the leader's loop waits for them, so the training loop needs no
copy: it waits until the leader's loop has published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.carrier import Step, UnitedState
from poseidon.exchange.exchange import Exchange, ExchangeState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.kinds import Scheme
from poseidon.exchange.local.carrier import HostCarrier
from poseidon.exchange.local.connection import Connection, Kind, Message, accept, refuse, send_all
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.host_delivery import LeaderDelivery
from poseidon.exchange.local.leader_loop import Contribution, LeaderLoop
from poseidon.exchange.local.process_group import Rendezvous
from poseidon.exchange.local.reduction import (
    Hello,
    ReductionKind,
    Welcome,
    default_kind,
    ground_of,
    reduction_over,
)
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.turns import Factors
from ps_server import PeerLost, ServerError
from ps_server.errors import as_server_error


class LeaderCarrier(HostCarrier):
    """Adds what the workers of its host contribute, and passes it to an exchange between hosts.

    Args:
        inner: the exchange between hosts; its replicas are hosts. This carrier closes it.
        tensors: what to keep together, the same on all workers.
        reduction: how tensors move within the host; None: the default for their devices.
        encoded: indices of the tensors that a codec takes of each virtual worker by itself.
        schemes: of each tensor, for the plans of the followers.
    """

    def __init__(
        self,
        inner: Exchange,
        tensors: Sequence[Trained],
        group: LocalGroup,
        *,
        reduction: ReductionKind | None = None,
        encoded: AbstractSet[int] = frozenset(),
        schemes: Sequence[Scheme] = (),
    ) -> None:
        super().__init__(tensors)
        self._schemes = schemes
        self._encoded = encoded
        self._inner = inner
        self._monitor = group.new_monitor()
        if not group.tree.averages:
            inner.take_nodes()
        self.by_factors = frozenset(i for i in inner.by_factors if not tensors[i].statistics)
        try:
            self._accept_followers(group, reduction)
        except ServerError:
            inner.close()
            raise
        self._failing = threading.Lock()
        self._failed = False
        self._delivery = LeaderDelivery(inner.control, self._connections, self._monitor, self._fail)
        self.control = JobControl(self._delivery, root=inner.control.root)
        self.state = LeaderState(inner.state, self._connections)
        self._loop = LeaderLoop(
            inner,
            tensors,
            by_factors=self.by_factors,
            connections=self._connections,
            control=self._delivery,
            reduction=self._reduction,
            tree=group.tree,
            monitor=self._monitor,
            failed=self._fail,
        )
        self._listeners = [
            threading.Thread(
                target=self._listen, args=(worker, connection), name=f"local-{worker}", daemon=True
            )
            for worker, connection in enumerate(self._connections, start=1)
        ]
        for listener in self._listeners:
            listener.start()

    def _accept_followers(self, group: LocalGroup, reduction: ReductionKind | None) -> None:
        own, network = Hello.of(self._tensors), group.network
        devices = [own.device]

        def check(message: Message) -> None:
            hello = Hello.unpack(message.payload)
            devices.append(hello.device)
            if hello.sizes != own.sizes:
                raise PeerLost(
                    f"worker {message.number} of this machine has other tensors than its leader"
                )

        self._connections = accept(group.address, network, check)
        try:
            ground = ground_of(reduction or default_kind(devices, group.tree), group)
            welcome = Welcome(
                address=ground.address if isinstance(ground, Rendezvous) else "",
                by_factors=self.by_factors,
                private_histories=self._inner.state.private,
                schemes=self._schemes,
            )
            for connection in self._connections:
                files = [] if isinstance(ground, Rendezvous) else [ground]
                connection.send(Kind.WELCOME, welcome.pack(), files=files)
            self._reduction = reduction_over(
                ground, self._tensors, group, self.by_factors, self._encoded
            )
        except ServerError as error:
            refuse(self._connections, error)
            network.interruption.check()
            raise

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self._settle(lambda: self._inner.open(histories, clock))

    def start(self, step: Step) -> None:
        super().start(step)
        self._loop.iterate(step)

    def _take(self, index: int) -> None:
        self._loop.wait(index, self._round)
        self._reduction.published(index)

    def _add(self, index: int, part: Tensor | None, number: int) -> None:
        if part is None:
            part = torch.zeros_like(self._tensors[index].tensor.detach().view(-1))
        self._hand_in(Kind.PART, index, part)

    def _add_factors(self, index: int, factors: Factors | None) -> None:
        if factors is not None:
            self._loop.stacks[index].own(*factors)
        self._hand_in(Kind.FACTORS, index)

    def _add_release(self, index: int) -> None:
        self._hand_in(Kind.RELEASED, index)

    def _hand_in(self, kind: Kind, index: int, part: Tensor | None = None) -> None:
        self._monitor.check()
        ready = self._loop.side.record_event()
        self._loop.contribute(Contribution(0, Message(kind=kind, index=index), part, ready))

    def settle(self, clock: int) -> None:
        self._settle(self._inner.settle)

    def traffic(self) -> Mapping[int, Traffic]:
        return self._inner.traffic()

    def close(self) -> None:
        if self._monitor.closed:
            return
        self._loop.close()
        self._delivery.close()
        send_all(self._connections, Kind.LEAVE)
        for connection in self._connections:
            connection.close()
        for listener in self._listeners:
            listener.join()
        self._reduction.close()
        self._inner.close()
        self._delivery.join()

    def _settle(self, step: Callable[[], None]) -> None:
        self._take_all()  # each publication is taken
        self._loop.settle(step)
        self._round += 1
        self._take_all()

    def _listen(self, worker: int, connection: Connection) -> None:
        try:
            while True:
                message = connection.receive()
                if message.kind is Kind.GATHER:
                    self._delivery.contribute(worker, message.number, message.payload)
                    continue
                self._loop.contribute(Contribution(worker, message))
                if message.kind is Kind.LEAVE:
                    self._delivery.leave(worker)
                    return
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            if not self._monitor.closed:
                self._fail(
                    as_server_error(error, f"listening to worker {worker} of this machine failed")
                )

    def _fail(self, error: ServerError) -> None:
        # The followers get the first error before the training loop of this worker does: it closes
        # the connections then.
        with self._failing:
            if not self._failed:
                self._failed = True
                send_all(
                    self._connections, Kind.FAILED, str(error).encode(errors="backslashreplace")
                )
            self._monitor.fail(error)


class LeaderState(UnitedState):
    """Private histories belong to the host, so they are sent to the followers, too."""

    def __init__(self, inner: ExchangeState, connections: Sequence[Connection]) -> None:
        super().__init__([inner])
        self._connections = connections

    def histories(self) -> Mapping[int, History]:
        found = super().histories()
        if self.private:
            for index, history in found.items():
                arrays = [array.reshape(-1).data for array in history]
                send_all(self._connections, Kind.HISTORIES, *arrays, index=index)
        return found
