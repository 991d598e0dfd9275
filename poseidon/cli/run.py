"""`poseidon run`: start a script of the user's on every worker of a machinefile, and stay with the job.

poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py --epochs=2

In the script `poseidon.distribute` brings the workers together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from poseidon.cli.closing import without_flags
from poseidon.cli.job import Job, run_from_flags
from poseidon.cli.job_flags import leaves_this_machine
from poseidon.cli.ssh_site import Shipment
from poseidon.cli.terminal import Shown
from poseidon.cluster.plan import WorkerPlan, devices_from_flag
from poseidon.engine.document import ScriptDocument
from poseidon.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Run a script on every worker.

    Raises:
        PoseidonError: a mistake in the flags, or the job failed.
    """
    return run_from_flags(arguments, _ScriptJob)


class _ScriptJob(Job):
    """A job that runs a script; see `Job`."""

    worker_module = "poseidon.engine.script"

    def __init__(self, flags: argparse.Namespace) -> None:
        self._script = Path(flags.script)
        if not self._script.is_file():
            raise UsageError(f"there is no script {self._script}")
        available = None if leaves_this_machine(flags) else torch.cuda.device_count()
        devices = devices_from_flag(flags.gpu, available=available)
        super().__init__(flags, title=self._script.name, stem=self._script.stem, devices=devices)

    def document(self, role: WorkerPlan) -> ScriptDocument:
        """See `Job`."""
        return ScriptDocument(
            **asdict(self.worker_document(role)),
            script=self.brought(self._script.absolute(), role),
            arguments=tuple(self._flags.arguments),
            shows_prints=self._flags.show_logs == Shown.ALL.value,
        )

    def shipments(self) -> Sequence[Shipment]:
        """See `Job`. The script itself travels; modules of its own that it imports must be there."""
        return [Shipment(files=(self._script.absolute(),))]

    def background_words(self, added: Sequence[str]) -> list[str]:
        """See `Job`. The script and its own words stay last, and as they are."""
        words, kept = list(self._flags.words), len(self._flags.arguments) + 1
        own = without_flags(words[:-kept], ["background"], bare=["background"])
        return [*own, *added, *words[-kept:]]
