"""The job of a script's training loops, in one start of the script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from poseidon.base.call_names import LoopPosition
from poseidon.engine.document import ScriptDocument
from poseidon.engine.logged_values import LoggedValues, Value
from poseidon.engine.observation import Observation, combined_statistics
from poseidon.engine.own_time import OwnTime
from poseidon.engine.snapshot_files import WrittenSnapshot
from poseidon.engine.work import ProgressReporter, TrainingWork
from poseidon.engine.worker_context import LoopJob, Observed
from poseidon.exchange.exchange import Built
from poseidon.exchange.observer import named_layers
from poseidon.exchange.options import Scheme
from ps_server.trace import Tracer

LOGGER = logging.getLogger("poseidon.torch.script")


class StartOfScript(LoopJob):
    """The job of a script's training loops, in one start: it reports to the launcher.

    Args:
        own_time: of the iterations; None: it is not reported.
        on_opened: called with each exchange that is open.
    """

    def __init__(
        self,
        work: TrainingWork[ScriptDocument],
        trace: Tracer,
        own_time: OwnTime | None,
        *,
        on_opened: Callable[[], None],
    ) -> None:
        self.name, self.trace = work.document.job, trace
        self._work, self._launcher, self._own_time = work, work.launcher, own_time
        self._on_opened = on_opened
        self._logged = LoggedValues(work.launcher.send)
        self._progress = ProgressReporter(work.launcher, self._in_memory)
        self._statistics: dict[int, Mapping[str, Any]] = {}
        self._iterations = self._exchanges = 0

    def _in_memory(self, _: int) -> Mapping[str, object]:
        newest = self._work.newest_kept
        return {"in_memory": None if newest is None else newest.iteration}

    def observe(self, built: Built, module: nn.Module) -> Observed:
        number = len(self._statistics)
        self._statistics[number] = {}

        def send(event: str, **fields: Any) -> None:
            self._statistics[number] = fields
            self._launcher.send(event, **combined_statistics(self._statistics))

        return Observation(
            built,
            named_layers(module),
            self.trace,
            send,
            observers=[self._launcher.heartbeat.watchdog],
        )

    def schemes(self, names: Sequence[str]) -> Sequence[Scheme]:
        return self._work.document.schemes(names)

    def say(self, sentence: str) -> None:
        LOGGER.info("%s", self._work.document.named(sentence))

    def log(self, iteration: int, values: Mapping[str, Value]) -> None:
        self._logged.log(iteration, values)

    def saved(self, written: WrittenSnapshot) -> None:
        self._work.report_snapshot(written)

    def opened(self, built: Built) -> None:
        rank, stop_all = self._work.document.rank, self._work.document.ddp
        self._launcher.forward_requests(built.exchange, rank, stop_all=stop_all)
        if self._exchanges == 0:  # its iterations are the job's
            options = self._work.document.member.options
            self._launcher.heartbeat.facts["most_lead"] = options.most_lead
        if rank == 0:
            self._work.report_plan(built, self._exchanges)
        self._exchanges += 1
        self._on_opened()

    def progressed(self, position: LoopPosition) -> None:
        self._launcher.heartbeat.facts["position"] = position
        self._progress(position.steps)
        self._logged.send_copied()
        if position.iterations != self._iterations:
            self._iterations = position.iterations
            if self._own_time is not None:
                self._own_time.end()

    def close(self) -> None:
        """Report the last values and the last iteration."""
        self._logged.close()
        self._progress.report()
