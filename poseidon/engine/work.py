"""The work of a worker's process: what differs between the kinds of work.

`poseidon.engine.process` has what is the same: it starts the work and reports how it ended.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from poseidon.base import glog
from poseidon.engine.document import TrainingDocument, WorkerDocument, document_of
from poseidon.engine.launcher_connection import NOTHING_NOTED, LauncherConnection
from poseidon.engine.memory import Regrouped, Snapshot
from poseidon.engine.observation import log_plan, open_trace
from poseidon.engine.own_time import OwnTime
from poseidon.engine.snapshot_files import WrittenSnapshot
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.exchange import Built
from poseidon.exchange.membership import Membership
from ps_server import PeerLost, PeerUnreachable, ServerError, StalenessTimeout
from ps_server.trace import NO_TRACE, Tracer

PROGRESS_S = 0.25
LOGGER = logging.getLogger(__name__)
Document = TypeVar("Document", bound=WorkerDocument)
Training = TypeVar("Training", bound=TrainingDocument)
NOTHING: Mapping[str, object] = {}


def loss_of(error: BaseException) -> Mapping[str, bool]:
    """Return what the event of an error tells about the loss of others."""
    lost = isinstance(error, PeerLost | StalenessTimeout)
    return {"peer_lost": lost, "unreachable": isinstance(error, PeerUnreachable)}


class Work(ABC, Generic[Document]):
    """The work of one worker.

    Args:
        launcher: takes events; `process` starts it before `run`.
    """

    document_class: ClassVar[type[WorkerDocument]]
    notes: ClassVar[Mapping[str, str]] = NOTHING_NOTED
    """See `LauncherConnection`: a test pass, for example, may keep the job busy for a while."""
    ends_at_once = False
    """Whether its process ends without waiting for the threads of the user's code."""

    def __init__(self, document: Document, launcher: LauncherConnection) -> None:
        self.document = document
        self.launcher = launcher

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return torch.device(self.document.device)

    @abstractmethod
    def run(self) -> Mapping[str, object]:
        """Do the work. Return what the `done` event says besides.

        An exception ends the worker, which reports it in one sentence.
        """

    @abstractmethod
    def location(self, error: BaseException) -> str:
        """Return the line of the user's own code where an error was raised; empty: elsewhere."""


class ProgressReporter:
    """Reports iterations to the launcher, a few times a second, and the last one.

    Args:
        more: returns what an event says of an iteration besides.
        start: iterations before the run. They are reported at its end, if it makes none.
    """

    def __init__(
        self,
        launcher: LauncherConnection,
        more: Callable[[int], Mapping[str, object]],
        start: int = 0,
    ) -> None:
        self._launcher, self._more = launcher, more
        self._iteration, self._reported = start, 0
        self._next_s = 0.0

    def __call__(self, iteration: int, **fields: object) -> None:
        """Note an iteration; report it when the last report is long enough ago.

        Args:
            fields: of a test that is under way, for an event of its own.
        """
        self._iteration = iteration
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_S
            self.report()
            if fields:
                self._send(fields)

    def report(self) -> None:
        """Report the latest iteration, unless it is reported already."""
        if self._reported != self._iteration:
            self._reported = self._iteration
            self._send({})

    def _send(self, fields: Mapping[str, object]) -> None:
        iteration = self._iteration
        self._launcher.send("progress", iteration=iteration, **self._more(iteration), **fields)


class TrainingWork(Work[Training]):
    """The work of one worker that exchanges gradients."""

    def open_trace(self) -> Tracer:
        """Open the worker's trace, if the job writes any."""
        document = self.document
        return open_trace(Path(document.output), document.rank) if document.trace else NO_TRACE

    def membership(self) -> Membership:
        """Return the place of this worker in its job; the launcher may end all waits of its
        exchange.
        """
        member = self.document.member
        network = replace(member.network, interruption=self.launcher.interruption)
        return replace(member, network=network)

    def own_time(self) -> OwnTime:
        """Return what measures and reports the times of iterations."""
        launcher = self.launcher
        return OwnTime(
            launcher.send, lambda: launcher.heartbeat.watchdog.read().waited_s, self.device
        )

    @property
    def newest_kept(self) -> Snapshot[Any] | None:
        """The newest memory snapshot that this worker can start others from."""
        return None

    def prepare(self) -> None:
        """Do beside a job what its next start would wait for."""

    def lost(self, error: Exception) -> ServerError | None:
        """Return the error of an exchange that ended the work; None: it ended otherwise."""
        return error if isinstance(error, ServerError) else None

    def has_ended(self, work: Callable[[], None]) -> bool:
        """Do this worker's part of a start; return whether this is the end. Otherwise the document
        of the next start is here.

        Args:
            work: the part. Its exceptions are raised unchanged where no other start mends them.
        """
        if self.document.aside:
            self.prepare()
            self.pause()
            return False
        message, regrouped = "", False
        try:
            work()
        except Regrouped:
            regrouped = True
        except Exception as error:
            lost = self.lost(error)
            if lost is None or not self.pauses_after(lost):
                raise
            LOGGER.info("paused: %s", lost)
            message = "" if self.launcher.is_asked_to_pause else str(lost)
        else:
            return True
        self.pause(message, regrouped=regrouped)
        return False

    def pauses_after(self, error: ServerError) -> bool:
        """Return whether an error ends this worker's part of a start, but not the worker: it has
        lost others, in a job that continues from memory. After a start from disk that could not
        connect it ends: there is nothing in memory.
        """
        lost = isinstance(error, PeerLost | StalenessTimeout)
        lost &= self.document.rewind >= 0 or not isinstance(error, PeerUnreachable)
        return self.document.copies > 0 and (lost or self.launcher.is_asked_to_pause)

    def pause(self, message: str = "", *, regrouped: bool = False) -> None:
        """Wait for the document of the next start; see `LauncherConnection.pause`."""
        newest = self.newest_kept
        iteration, is_part = (None, False) if newest is None else (newest.iteration, newest.is_part)
        found = self.launcher.pause(iteration, message, regrouped=regrouped, is_part=is_part)
        self.document = document_of(type(self.document), found)
        glog.move_file(self.document.log_file)

    def report_snapshot(self, written: WrittenSnapshot) -> None:
        """Report a snapshot that is complete on disk."""
        self.launcher.send(
            "snapshot",
            state=str(written.state.absolute()),
            iteration=written.iteration,
            seconds=round(written.seconds, 3),
        )

    def report_plan(self, built: Built, number: int = 0) -> None:
        """Log the plan of an exchange, if there is anything to exchange; report one that later starts
        need.

        Args:
            number: of it among the exchanges of the job, from 0.
        """
        if built.recorded:
            self.launcher.send("exchange_plan", plan=RecordedPlan.of_choices(built.plan).to_json())
        if not self.document.member.alone:
            log_plan(built.plan, Path(self.document.output), number)
