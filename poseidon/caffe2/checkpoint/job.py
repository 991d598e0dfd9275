"""Jobs: what runs before, in each epoch, and after a training."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import context, core
from poseidon.caffe2.task import Task, TaskGroup, TaskOutput, WorkspaceType


class Job(context.Managed):
    """Groups of tasks: one runs first, one in each epoch, one behind the epochs, one at the end.

    A `with` block of the job is one of its `epoch_group`.
    """

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: list[Any] | None = None,
        nodes_to_checkpoint: list[str] | None = None,
    ) -> None:
        """Make a job.

        Args:
            init_group: runs once; its blobs are global, and a checkpoint has them.
            epoch_group: runs in each epoch.
            download_group: runs once behind the epochs.
            exit_group: runs once at the end.
            stop_conditions: outputs of tasks of an epoch; the job ends where one is true.
            nodes_to_checkpoint: by default the nodes of `init_group`.
        """
        self.init_group: Any = init_group or TaskGroup(workspace_type=WorkspaceType.GLOBAL)
        self.epoch_group: Any = epoch_group or TaskGroup()
        self.download_group: Any = download_group or TaskGroup()
        self.exit_group: Any = exit_group or TaskGroup()
        self.stop_conditions = stop_conditions or []
        self._nodes_to_checkpoint = nodes_to_checkpoint

    def nodes_to_checkpoint(self) -> list[str]:
        """Return the nodes whose blobs a checkpoint has."""
        return self._nodes_to_checkpoint or self.init_group.used_nodes()

    def compile(self, session_class: Any) -> None:
        """Bring the groups into the form that sessions of a class run; nothing can be added from
        now on.
        """
        self._nodes_to_checkpoint = self.nodes_to_checkpoint()
        self.init_group = session_class.compile(self.init_group)
        self.epoch_group = session_class.compile(self.epoch_group)
        self.download_group = session_class.compile(self.download_group)
        self.exit_group = session_class.compile(self.exit_group)

    def __enter__(self) -> Job:
        super().__enter__()
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        self.epoch_group.__exit__(*arguments)
        super().__exit__(*arguments)

    def add_stop_condition(self, output: Any) -> None:
        """End the job after an epoch in which a blob, or an output of a task, is true."""
        if isinstance(output, core.BlobReference):
            output = Task(outputs=[output], group=self.epoch_group).outputs()[0]
        assert isinstance(output, TaskOutput), (
            f"A stop condition is a blob or an output, not {output!r}"
        )
        self.stop_conditions.append(output)
