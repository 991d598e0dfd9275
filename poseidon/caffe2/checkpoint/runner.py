"""Jobs, and how they run: epochs until a stop condition holds, with checkpoints in between."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.caffe2 import context, core
from poseidon.caffe2.runtime.errors import sentence
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
        """Bring the groups into the form that a session class runs, and close them to additions."""
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
            f"a stop condition is a blob or an output, not {output!r}"
        )
        self.stop_conditions.append(output)


logger = logging.getLogger("poseidon.caffe2.checkpoint")


class UploadTaskGroupBuilder:
    """The base of what makes the tasks that copy the last checkpoint elsewhere."""

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """Return the tasks.

        Args:
            epoch: the epoch of the checkpoint.
            checkpoint_manager: what has saved it.
        """
        raise NotImplementedError


@dataclass(eq=False)
class JobRunner:
    """Runs a job in a session: what comes first, epochs, what comes behind.

    Args:
        job: the job.
        checkpoint_manager: saves blobs before the first and behind each epoch; None for none.
        resume_from_epoch: the epoch whose checkpoint is loaded; `init_group` then does not run.
        upload_task_group_builder: makes the tasks that copy the last checkpoint.
    """

    job: Job
    checkpoint_manager: Any = None
    resume_from_epoch: int | None = None
    upload_task_group_builder: UploadTaskGroupBuilder | None = None

    def train(self, session: Any) -> int:
        """Run the job; return the number of its last epoch.

        A checkpoint that cannot be written is a warning; the job continues.
        """
        epoch = self._begin(session)
        logger.info("Finished initializing")
        while True:
            epoch += 1
            logger.info("Starting epoch %d", epoch)
            session.run(self.job.epoch_group)
            logger.info("Finished epoch %d", epoch)
            stop = [output.fetch() for output in self.job.stop_conditions]
            if self.checkpoint_manager:
                self.save_checkpoints(epoch, session)
            if any(stop):
                logger.info("Stopping")
                break
        logger.info("Finished training")
        if self.upload_task_group_builder:
            session.run(self.upload_task_group_builder.build(epoch, self.checkpoint_manager))
            logger.info("Finished uploading the checkpoints")
        session.run(self.job.download_group)
        logger.info("Finished downloading the parameters")
        session.run(self.job.exit_group)
        logger.info("Finished running the exit group")
        return epoch

    def _begin(self, session: Any) -> int:
        """Run what comes first, or load a checkpoint; return the epoch that is done."""
        manager = self.checkpoint_manager
        if manager:
            manager.set_params(nodes=self.job.nodes_to_checkpoint())
            self.resume_from_epoch = manager.get_resume_from_epoch_id(self.resume_from_epoch)
        epoch = self.resume_from_epoch
        if epoch is None:
            session.run(self.job.init_group)
        elif manager:
            logger.info("Resuming from epoch %d", epoch)
        if manager:
            logger.info("Preparing checkpoints ...")
            session.run(manager.init(self.job.nodes_to_checkpoint(), retrieve_from_epoch=epoch))
            if epoch is None:
                self.save_checkpoints(0, session)
            else:
                logger.info("Loading checkpoints for epoch %d ...", epoch)
                session.run(manager.load(epoch))
                manager.report_checkpoint_stats("checkpoint_load")
                logger.info("Checkpoint loaded")
        return epoch or 0

    def load_blobs_from_checkpoints(
        self, blob_names: Sequence[str], epoch: int, session: Any
    ) -> bool:
        """Load blobs from all nodes' checkpoints into a session; return False if one is missing.

        Raises:
            ValueError: there is no checkpoint manager.
        """
        if not self.checkpoint_manager:
            raise ValueError("Checkpoint manager is None")
        logger.info("Loading checkpoint for epoch %d ...", epoch)
        loaded = self.checkpoint_manager.load_blobs_locally(
            self.job.nodes_to_checkpoint(), blob_names, epoch, session
        )
        self.checkpoint_manager.report_checkpoint_stats("checkpoint_partial_load")
        return bool(loaded)

    def save_checkpoints(self, epoch: int, session: Any) -> None:
        """Save the checkpoint of an epoch; a failure is a warning.

        Raises:
            ValueError: there is no checkpoint manager.
        """
        manager = self.checkpoint_manager
        if not manager:
            raise ValueError("Checkpoint manager is None")
        try:
            if not manager.cp_accessible(epoch=None):
                logger.warning("Checkpoint files cannot be accessed!")
                return
            logger.info("Saving checkpoints for epoch %d", epoch)
            session.run(manager.save(epoch))
            manager.write_checkpoint_metadata(epoch)
            logger.info("Checkpoints saved")
            manager.report_checkpoint_stats("checkpoint_save")
        except Exception as error:  # noqa: BLE001 (the training is worth more than one of its checkpoints)
            logger.warning("Unable to write checkpoint for epoch %d: %s", epoch, sentence(error))


def epoch_limiter(job: Job, num_epochs: int) -> None:
    """End a job after so many epochs."""
    with job.init_group:
        init_net = core.Net("epoch_counter_init")
        counter = init_net.CreateCounter([], init_count=num_epochs - 1)
        Task(step=init_net)
    with job.epoch_group:
        epoch_net = core.Net("epoch_countdown")
        finished = epoch_net.CountDown(counter)
        output = Task(step=epoch_net, outputs=finished).outputs()[0]
    job.add_stop_condition(output)
