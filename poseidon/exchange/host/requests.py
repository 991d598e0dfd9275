"""The workers of a host whose tensors differ: each exchanges its own shards of a module with the
workers of its plane, and nothing passes between the workers of the host but what follows.

Law: all workers have a request of rank 0 before they end the iteration that it names. The worker
with local rank 0 is of rank 0's plane, so it has (`job_control.py`). At the end of each iteration
it tells the others of its host how many it has, and they wait for as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from poseidon.exchange.base import History
from poseidon.exchange.carrier import Carrier, CarrierState, Step
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.job_control import JobControl
from ps_server.transport.base import Buffer


class HostRequests(Carrier):
    """A carrier of no tensor, which is the first of an exchange of shards.

    Args:
        control: of all workers of the job.
        on_start: called at the start of each iteration with its number.
    """

    indices = ()

    def __init__(
        self,
        group: HostGroup,
        control: JobControl,
        *,
        on_start: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.state = CarrierState()
        self._group = group
        self._control = control
        self._on_start = on_start
        self._counts: deque[int] = deque()
        group.peers.on("Requests", 1, self._note)
        group.links.start()

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        pass

    def start(self, step: Step) -> None:
        self._on_start(step.iteration)

    def wait(self, index: int) -> None:
        raise AssertionError("no tensor is of this carrier")

    def finish(self, limit: float) -> None:
        group = self._group
        if group.rank == 0:
            group.send(group.others, "Requests", len(self._control.requests))
            return

        def told() -> int | None:
            if self._counts:
                return self._counts.popleft()
            group.check_left(lambda rank: rank == 0)
            return None

        what = "the requests that the first worker of this machine has did not come"
        self._control.await_requests(group.monitor.wait_for(told, what))

    def settle(self, clock: int) -> None:
        pass

    def close(self) -> None:
        if not self._group.monitor.closed:
            self._group.links.leave()
            self._group.close()

    def _note(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        if sender == 0:
            self._counts.append(fields[0])
