"""`poseidon run`: start a script of the user's on every worker of a machinefile, and stay with the job.

poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py --epochs=2

In the script `poseidon.distribute` brings the workers together.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from poseidon.cluster.plan import WorkerPlan, devices_from_flag
from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.engine.document import ScriptDocument
from poseidon.engine.module.checkpoint_file import ENDING, steps_of
from poseidon.errors import UsageError
from poseidon.launch.closing import near, resume_command, without_flags
from poseidon.launch.job import Job, run_from_flags
from poseidon.launch.job_flags import leaves_this_machine
from poseidon.launch.snapshot_list import snapshot_of
from poseidon.launch.ssh_site import Shipment
from poseidon.launch.terminal import Shown
from poseidon.snapshot.checksums import sums_path


def run(arguments: argparse.Namespace) -> int:
    """Run a script on every worker.

    Raises:
        PoseidonError: a mistake in the flags, or the job failed.
    """
    return run_from_flags(arguments, _ScriptJob)


class _ScriptJob(Job):
    """A job that runs a script; see `Job`."""

    worker_module = "poseidon.engine.module.script"
    resumes = True

    def __init__(self, flags: argparse.Namespace) -> None:
        self._script = Path(flags.script)
        if not self._script.is_file():
            raise UsageError(f"there is no script {self._script}")
        available = None if leaves_this_machine(flags) else torch.cuda.device_count()
        devices = devices_from_flag(flags.gpu, available=available)
        self._origin = _origin(flags.snapshot)
        super().__init__(flags, title=self._script.name, stem=self._script.stem, devices=devices)

    @property
    def origin(self) -> StartingPoint:
        """See `Job`."""
        return self._origin

    def closing(
        self, result: JobResult, newest: StartingPoint, reached: Sequence[str]
    ) -> list[tuple[str, str]]:
        """See `Job`."""
        resume = [self._resume_words(result, newest)] if newest.state else []
        return [*resume, *super().closing(result, newest, reached)]

    def _resume_words(self, result: JobResult, newest: StartingPoint) -> tuple[str, str]:
        """How to go on from the script's newest checkpoint."""
        where = "" if newest.iteration == result.iteration else f" from iteration {newest.iteration}"
        state = Path(newest.state)
        if getattr(self._flags, "site", None) is not None:
            return "go on" + where, f"the same tasks with --snapshot={near(state)}"
        own, of_script = self._words()
        return "go on" + where, " ".join((resume_command(own, state), shlex.join(of_script)))

    def _words(self) -> tuple[list[str], list[str]]:
        """This command's own words, and the script with its words."""
        words, kept = list(self._flags.words), len(self._flags.arguments) + 1
        return words[:-kept], words[-kept:]

    def _usual_restarts(self) -> int:
        return 0  # a script that saves nothing would start from its own beginning

    def document(self, role: WorkerPlan) -> ScriptDocument:
        """See `Job`."""
        return ScriptDocument(
            **self.worker_document(role).to_fields(),
            script=self.brought(self._script.absolute(), role),
            arguments=tuple(self._flags.arguments),
            shows_prints=self._flags.show_logs == Shown.ALL.value,
            snapshot=self.brought(Path(self._point.state), role) if self._point.state else "",
        )

    def shipments(self) -> Sequence[Shipment]:
        """See `Job`. The script itself travels; modules of its own that it imports must be there."""
        script = Shipment(files=(self._script.absolute(),))
        if not self._point.state:
            return [script]
        state = Path(self._point.state)
        return [script, Shipment(files=(*(path for path in (sums_path(state),) if path.exists()), state))]

    def background_words(self, added: Sequence[str]) -> list[str]:
        """See `Job`. The script and its own words stay last, and as they are."""
        own, of_script = self._words()
        return [*without_flags(own, ["background"], bare=["background"]), *added, *of_script]


def _origin(snapshot: str) -> StartingPoint:
    """Where --snapshot has the job begin."""
    if not snapshot:
        return StartingPoint()
    path = snapshot_of(snapshot, ENDING).absolute()
    return StartingPoint(state=str(path), iteration=steps_of(path))
