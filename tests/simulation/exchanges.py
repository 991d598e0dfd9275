"""The exchange of a worker in a simulated world: its threads hand a baton around, and those that
move messages are loops of the process. Simulated are its sockets and clocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from poseidon.exchange import serial_executor, worker_links
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.factors import rebuilding
from poseidon.exchange.host import unix_wire
from poseidon.exchange.observer import TransitTimes
from ps_server import monitor, pump
from ps_server.keys import Keyring
from ps_server.monitor import owned_thread
from tests.simulation.launcher import Primitives
from tests.simulation.network import ADDRESS, End, Fabric, SimulatedClient, SimulatedWire
from tests.simulation.processes import Process
from tests.simulation.unix_sockets import SimulatedSelectors, UnixSockets


class WorkerWire(SimulatedWire):
    """The wire of a worker, whose connections to shards have an end of their own.

    Attributes:
        of_shards: that end; None: it is not connected to them.
    """

    def __init__(self, fabric: Fabric, process: Process, name: str = "") -> None:
        super().__init__(fabric, process, name)
        self._name = name or process.name
        self.of_shards: End | None = None

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> SimulatedClient:
        """See `Wire`."""
        if addresses[0].startswith(ADDRESS):
            return super().connect(addresses, keys)
        self.of_shards = self._fabric.end(self.listening.process, f"{self._name} to shards")
        return SimulatedClient(self._fabric, self.of_shards, addresses)


class _LoopThread:
    """Stands for the thread of what moves messages, which is a loop of its process.

    Args:
        primitives: of the run.
        process: it is in.
        steps: returns its steps.
        fail: takes what they have raised.
        ends: that wake it.
    """

    def __init__(
        self,
        primitives: Primitives,
        process: Process,
        steps: Callable[[], Iterator[float]],
        fail: Callable[[Exception], object],
        ends: Sequence[End],
    ) -> None:
        self.ident: int | None = None
        self._primitives = primitives
        self._process = process
        self._steps = steps
        self._fail = fail
        self._ends = ends
        self._over = False

    def start(self) -> None:
        """See `threading.Thread`."""
        self.ident = 1
        loop = self._process.loop(self._steps(), self._failed, self._ended)
        for end in self._ends:
            end.loop = loop

    def join(self) -> None:
        """See `threading.Thread`."""
        self._primitives.wait(lambda: self._over, None)

    def _failed(self, error: Exception) -> None:
        self._fail(error)
        self._ended()

    def _ended(self) -> None:
        self._over = self._process.changed = True


def _forget_file(wire: unix_wire.UnixWire) -> None:
    """Close the file of a process that has died."""
    if wire.file is not None and not wire._is_closed:
        os.close(wire.file)
        wire.file = None


def stand_ins(
    primitives: Primitives, wire_of: Callable[[Process], WorkerWire]
) -> list[tuple[Any, str, object]]:
    """Return what stands for what in the modules of an exchange: owner, name and stand-in.

    Args:
        wire_of: returns the wire of the process that runs.
    """

    def pump_thread(name: str, work: Any, failed: Callable[[Exception], object]) -> _LoopThread:
        process, end = primitives.current, wire_of(primitives.current).of_shards
        assert end is not None
        return _LoopThread(primitives, process, work.__self__.steps, failed, [end])

    def links_thread(name: str, work: Any, failed: Callable[[Exception], object]) -> Any:
        moved = work.__self__
        wire = moved._out.wire
        if isinstance(wire, unix_wire.UnixWire):
            primitives.current.on_death.append(lambda silent: _forget_file(wire))
            return owned_thread(name, work, failed)
        ends = [wire.listening, wire.sending]
        return _LoopThread(primitives, primitives.current, moved.steps, failed, ends)

    clock, now_ns = primitives.world.clock, primitives.time.perf_counter_ns
    threaded = (monitor, rebuilding, unix_wire, serial_executor)
    return [
        *((module, "threading", primitives.threading) for module in threaded),
        *((module, "time", primitives.time) for module in (monitor, unix_wire)),
        (serial_executor, "queue", primitives.queue),
        (pump, "owned_thread", pump_thread),
        (worker_links, "owned_thread", links_thread),
        (unix_wire, "socket", UnixSockets(primitives)),
        (unix_wire, "selectors", SimulatedSelectors(primitives)),
        (
            Exchange.__init__,
            "__kwdefaults__",
            {**(Exchange.__init__.__kwdefaults__ or {}), "now_ns": now_ns},
        ),
        (TransitTimes.__init__, "__defaults__", (clock,)),
    ]
