"""The place of a process in its job, as a script sees it: rank, exchange membership, callbacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from poseidon.base.call_names import OF_TORCH, LoopPosition
from poseidon.engine.logged_values import Value, check
from poseidon.engine.memory import ScriptMemory, StartEnded, is_failure
from poseidon.engine.random_streams import RandomStreams
from poseidon.engine.snapshot_files import WrittenSnapshot
from poseidon.engine.snapshot_runs import Prefixes
from poseidon.errors import JobError, described
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built, Connect
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, Scheme
from ps_server import ServerError
from ps_server.trace import NO_TRACE, Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisWorker:
    """Rank, number of workers and device of this process.

    Attributes:
        rank: 0..size-1.
        size: number of workers; 1 under plain `python`.
        device: where this worker computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


LOGGER = logging.getLogger(__name__)
LEAVE_S = 30.0
"""Longest wait for the other workers of a host where an exception has ended a `with` block."""
OF_NO_LOOP = -1
"""The number of calls of torch.distributed beside those of loops."""


class Loop(Protocol):
    """A training loop, as other loops of its process see it."""

    def is_asked_to_stop(self) -> bool:
        """Return whether the job was asked to stop after a step that this loop has made."""

    def is_asked_for_snapshot(self) -> bool:
        """Return whether the job was asked for a snapshot after this loop's last step."""


class Loops:
    """The training loops of one process: a script may distribute several modules.

    Attributes:
        open: those that are not closed, in the order in which they began.
        begun: how many have begun in this job.
        several: whether more than one has been open at a time.
        streams: the random streams of this process's virtual workers; None: there are none.
        prefixes: with which this process writes checkpoints; None: it has written none.
    """

    def __init__(self) -> None:
        self.prefixes: Prefixes | None = None
        self.open: list[Loop] = []
        self.begun = 0
        self.several = False
        self.streams: RandomStreams | None = None
        self._are_stopped = False
        self._positions: dict[int, LoopPosition] = {}

    @property
    def steps(self) -> int:
        """Steps that the first loop has finished; 0: there is none."""
        return self._positions[0].steps if 0 in self._positions else 0

    @property
    def are_asked_to_stop(self) -> bool:
        """Whether the job was asked to stop after a step that a loop has made."""
        with suppress(ServerError):  # an exchange that has failed brings no request
            return self._are_stopped or any(one.is_asked_to_stop() for one in self.open)
        return False

    def add(self, loop: Loop) -> None:
        """Add a loop that is open; a second time does nothing."""
        if loop not in self.open:
            self.open.append(loop)
        self.several = self.several or len(self.open) > 1

    def remove(self, loop: Loop) -> None:
        """Remove a loop that closes; a second time does nothing."""
        if loop in self.open:
            self._are_stopped = self.are_asked_to_stop
            self.open.remove(loop)

    def together(self, number: int, position: LoopPosition) -> LoopPosition:
        """Return the position of all loops, of which one has a new position: the steps of the
        first; iterations and collections are the sums over all loops, since all workers make the
        calls of all loops in the same order.
        """
        self._positions[number] = position
        every = self._positions.values()
        return LoopPosition(
            steps=self.steps,
            iterations=sum(one.iterations for one in every),
            collections=sum(one.collections for one in every),
            collection=position.collection,
            raised=position.raised,
            loop=None if any(one.loop is None for one in every) else number,
            loops=tuple(
                self._positions[one].iterations if one in self._positions else 0
                for one in range(max(self._positions) + 1)
            ),
        )


class Observed:
    """The exchange of a module, which nothing observes. Observers are subclasses."""

    def __init__(self, built: Built) -> None:
        self.built, self.exchange = built, built.exchange

    def watch(self) -> None:
        """Start to observe the layers of the module, whose hooks so far count as their work."""

    def close(self) -> None:
        """Report the last measurements, and close the exchange."""
        self.exchange.close()


class Closing(Protocol):
    """What a script has opened, such as an exchange of a module that no group has."""

    def close(self) -> None:
        """Close it. A second call does nothing."""


def _alone(own: str) -> tuple[str, ...]:
    raise JobError("a worker that is alone connects to nobody")


class LoopJob:
    """The job of a process's training loops, as they see it. This one is of a process that trains
    alone.

    Attributes:
        name: the job's id; empty: a process that trains alone has none.
        script: the name of the script, without its ending.
        trace: records what is sent and received.
    """

    name = ""
    script = "checkpoint"
    trace: Tracer = NO_TRACE

    def observe(self, built: Built, _: nn.Module) -> Observed:
        """Put an observer around the exchange of a module."""
        return Observed(built)

    def schemes(self, _: Sequence[str]) -> Sequence[Scheme]:
        """Return the scheme of each tensor, by the tensors' names, that an earlier start or run has
        chosen; empty: none.
        """
        return ()

    def say(self, sentence: str) -> None:
        """Take a sentence for the user; a job's is in its log."""
        LOGGER.info("%s", sentence)

    def log(self, iteration: int, values: Mapping[str, Value]) -> None:
        """Take what the script logs: an iteration, and values by name."""
        check(iteration, values)

    def saved(self, written: WrittenSnapshot) -> None:
        """Note a checkpoint that is complete on disk."""

    def opened(self, built: Built) -> None:
        """Note an exchange that is open."""

    def progressed(self, position: LoopPosition) -> None:
        """Note the position of all loops, at the beginning and end of each step, of each collection
        and of `distribute`. Must be fast.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One worker and its connections to its job. The default is a process that trains alone.

    Attributes:
        connect: exchanges addresses with the rest of the job.
        folder: the job's output folder; None: a process that trains alone has none.
        checkpoint: the checkpoint to resume from, on rank 0's host; None: a fresh start.
        unfit_for_ddp: a sentence on a flag that has no effect on DDP's modules; empty: none.
        threads_given: whether the user has given the job's number of threads.
        memory: the memory snapshots of this worker; None: the job has none.
        reducers: of the script's DistributedDataParallel modules; closed at its end.
        number: index of this training loop in its process, from 0.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    member: Membership = field(default_factory=Membership)
    connect: Connect = _alone
    job: LoopJob = field(default_factory=LoopJob)
    folder: Path | None = None
    checkpoint: Path | None = None
    unfit_for_ddp: str = ""
    threads_given: bool = False
    memory: ScriptMemory | None = None
    reducers: list[Closing] = field(default_factory=list)
    number: int = 0
    loops: Loops = field(default_factory=Loops)

    @property
    def rank(self) -> int:
        """The rank of this worker, 0..size-1."""
        return self.member.network.rank

    @property
    def size(self) -> int:
        """Number of workers; 1 of a process that trains alone."""
        return self.member.network.size

    @property
    def loop_memory(self) -> ScriptMemory | None:
        """The memory snapshots of this training loop: the job has those of its first one."""
        return self.memory if self.number == 0 else None

    @property
    def prefix(self) -> Path:
        """The prefix of checkpoints whose name the script leaves open."""
        if self.folder is None:
            return Path("checkpoints").absolute() / self.job.script
        return self.folder / "checkpoint"

    def build(
        self,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        module: nn.Module,
        shards: Sequence[Sequence[Trained]] = (),
    ) -> Observed:
        """Return the exchange of a module's tensors; see `build_exchange`."""
        built = build_exchange(
            tensors,
            settings,
            self.member,
            self.connect,
            trace=self.job.trace,
            schemes=() if shards or self.number else self.job.schemes([t.name for t in tensors]),
            shards=shards,
        )
        return self.job.observe(built, module)

    def end_waits(self, error: BaseException | None) -> None:
        """Let no exchange wait for other workers as it closes, where the job continues after its
        error; do nothing for other errors.
        """
        if self.memory is not None and isinstance(error, ServerError):
            self.member.network.interruption.interrupt(error)

    def fail(self, error: BaseException) -> None:
        """Let no exchange wait for other workers as it closes: the script has ended with an error."""
        ended = f"the script ended while other workers waited for it: {described(error)}"
        self.member.network.interruption.interrupt(
            error if isinstance(error, ServerError) else ServerError(ended)
        )

    def is_failure(self, error: BaseException) -> bool:
        """See `memory.is_failure`. An interrupt is none once the job was asked to stop."""
        stops = isinstance(error, KeyboardInterrupt) and self.loops.are_asked_to_stop
        return is_failure(error) and not stops

    @contextmanager
    def closing(self, error: BaseException | None) -> Iterator[None]:
        """Close the exchange of a `with` block inside this one.

        After an exception, which the other workers may not have, it waits for them for `LEAVE_S`.
        They may wait for another call of this one, which reports its exception after that.
        """
        if error is None or not self.is_failure(error):
            yield
            return
        timer = threading.Timer(LEAVE_S, self.fail, [error])
        timer.name, timer.daemon = f"leaving-{self.rank}", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def check_start(self) -> None:
        """Refuse a call of the script after the waits of this start were ended.

        Raises:
            StartEnded: they were, and the script has caught the error or computed meanwhile.
        """
        error = self.member.network.interruption.error
        if self.memory is not None and error is not None:
            raise StartEnded(error)

    def report_call(self, begun: int, name: str, last: int | None = None) -> int:
        """Report a call of torch.distributed that waits for all workers. Return the number of calls
        that wait for all workers, of loops too, so far.

        Args:
            begun: the number of such calls of torch.distributed so far.
            name: of the one that is waited for; empty: none.
            last: what this method has returned as that one began.
        """
        own = LoopPosition(collections=begun, collection=f"{OF_TORCH}{name}" if name else "")
        position = self.loops.together(OF_NO_LOOP, own)
        if name and last != position.collections:
            position = replace(position, loop=None)
        self.job.progressed(position)
        return position.collections

    def report(self, position: LoopPosition) -> None:
        """Report how far this loop has come."""
        self.job.progressed(self.loops.together(self.number, position))

    def of_next_loop(self) -> WorkerContext:
        """Return the context of the next training loop of a job, which has an exchange of its own.

        The first one has the plan of `--exchange=auto`, which is measured and recorded. Plans of
        later ones follow from the bytes, so that they are the same after a restart.
        """
        number, member = self.loops.begun, self.member
        self.loops.begun += 1
        if number == 0:
            return self
        if member.options.kind is ExchangeKind.AUTO:
            member = replace(member, options=replace(member.options, kind=ExchangeKind.HYBRID))
        if member.local_address:
            member = replace(member, local_address=f"{member.local_address}-{number}")
        return replace(self, number=number, member=member)
