"""Jobs: what runs before, in each epoch, and after a training."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.task import Task, TaskGroup, WorkspaceType


class Job:
    """Groups of tasks: `init_group` runs once, `epoch_group` in each epoch, `exit_group` at the end.

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
        self.init_group = init_group or TaskGroup(workspace_type=WorkspaceType.GLOBAL)
        self.epoch_group = epoch_group or TaskGroup()
        self.download_group = download_group or TaskGroup()
        self.exit_group = exit_group or TaskGroup()
        self.stop_conditions = stop_conditions or []
        self._nodes_to_checkpoint = nodes_to_checkpoint

    def nodes_to_checkpoint(self) -> list[str]:
        """Return the nodes whose blobs a checkpoint has: by default those of the first group."""
        return self._nodes_to_checkpoint or self.init_group.used_nodes()

    def __enter__(self) -> Job:
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        self.epoch_group.__exit__(*arguments)

    def add_stop_condition(self, output: Any) -> None:
        """End the job after an epoch in which a blob is true."""
        if isinstance(output, core.BlobReference):
            task = Task(outputs=output, group=self.epoch_group)
            output = task.outputs()[0]
        self.stop_conditions.append(output)
