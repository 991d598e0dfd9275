"""A job of which no process is started."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from poseidon.cluster.job_plan import WorkerPlan
from poseidon.engine.document import TrainingDocument, WorkKind
from poseidon.launcher.job import Job
from poseidon.launcher.processes import Start


class FakeJob(Job):
    """A job that has no work of its own."""

    kind = WorkKind.SOLVER
    restarts_by_itself = True

    def document(self, role: WorkerPlan, start: Start) -> TrainingDocument:
        return self.worker_document(role, start)

    def import_ahead(self) -> Sequence[threading.Event]:
        return ()
