"""Tasks that save and load the blobs of a node, or of several, each in a file of an epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.net_builder import ops
from poseidon.caffe2.task import Node, Task, TaskGroup, WorkspaceType, final_output

logger = logging.getLogger("poseidon.caffe2.checkpoint")

TIMER = "TimerBegin"
"""The operator that begins to measure the time of a checkpoint; its blob cannot be saved."""


def get_ckpt_filename(node_name: str, epoch: int) -> str:
    """Return the name of the file of a node and an epoch."""
    return f"{node_name}.{epoch}"


def db_name(epoch: int, node_name: str, db_prefix: str, path_prefix: str | None = None) -> str:
    """Return the path of the file of a node and an epoch.

    Args:
        epoch: its number.
        node_name: the node.
        db_prefix: the folder.
        path_prefix: what the path begins with, in place of the folder.
    """
    name = get_ckpt_filename(node_name, epoch)
    return path_prefix + name if path_prefix else os.path.join(db_prefix, name)


class _Manager:
    """What managers of one node and of several have in common: the metadata handler.

    A handler has `write(epoch=)`, `report(action, stats)`, `last_epoch(user_epoch=)`,
    `cp_accessible(epoch)` and `set_params(db_prefix=, db_type=, node_names=, path_prefix=,
    path_type=)`.
    """

    def __init__(self, db_prefix: str, db_type: str, metadata_handler: Any = None) -> None:
        self._db_prefix = db_prefix
        self._db_type = db_type
        self._metadata_handler = metadata_handler
        self._path_prefix: str | None = None
        self._path_type: str | None = None

    def collect_checkpoint_stats(self, stats: dict[str, Any]) -> None:
        """Add the nanoseconds of the last operation, by the name of its file."""
        raise NotImplementedError

    def _handled_nodes(self, nodes: Sequence[Any]) -> list[str]:
        return [str(node) for node in nodes]

    def report_checkpoint_stats(self, action_name: str) -> None:
        """Hand the time of the last operation to the handler.

        Args:
            action_name: "checkpoint_save", "checkpoint_load" or "checkpoint_partial_load".
        """
        stats: dict[str, Any] = {}
        self.collect_checkpoint_stats(stats)
        logger.debug("checkpoint stats: %s", stats)
        if self._metadata_handler:
            self._metadata_handler.report(action_name, stats)

    def write_checkpoint_metadata(self, epoch: int) -> None:
        """Let the handler note that an epoch is saved."""
        if self._metadata_handler is not None:
            self._metadata_handler.write(epoch=epoch)

    def get_resume_from_epoch_id(self, user_epoch: int | None = None) -> int | None:
        """Return the epoch to continue after: the handler's, by default the user's, or None."""
        if self._metadata_handler is not None:
            return self._metadata_handler.last_epoch(user_epoch=user_epoch)  # type: ignore[no-any-return]
        return user_epoch

    def set_params(
        self, nodes: Sequence[Any], path_prefix: str | None = None, path_type: str | None = None
    ) -> None:
        """Set what paths begin with and the type of the databases; the handler gets them too."""
        self._path_prefix = path_prefix or self._path_prefix
        self._path_type = path_type or self._path_type
        if self._metadata_handler:
            self._metadata_handler.set_params(
                db_prefix=self._db_prefix,
                db_type=self._db_type,
                node_names=self._handled_nodes(nodes),
                path_prefix=self._path_prefix,
                path_type=self._path_type,
            )

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return whether the files (of an epoch) can be reached, by the handler, else True."""
        if self._metadata_handler is None:
            return True
        return bool(self._metadata_handler.cp_accessible(epoch))


class CheckpointManager(_Manager):
    """Makes the tasks that save and load the blobs of one node."""

    def __init__(
        self, db_prefix: str, node_name: str, db_type: str, metadata_handler: Any = None
    ) -> None:
        """Describe the files.

        Args:
            db_prefix: their folder.
            node_name: the node.
            db_type: their type, e.g. "minidb".
            metadata_handler: notes and finds the epochs; see `_Manager`.
        """
        super().__init__(db_prefix, db_type, metadata_handler)
        self._node_name = node_name
        self._net = core.Net("!!checkpoint_mngr")  # the name puts the list of blobs first
        self._blob_names = self._net.AddExternalInput("blob_names")
        self._names_output: Any = None
        self._current_db_name: str | None = None
        self._current_checkpoint_duration: Any = None

    def _handled_nodes(self, nodes: Sequence[Any]) -> list[str]:
        return [str(self._node_name)]

    def init(
        self,
        nodes: Sequence[Any] | None = None,
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> Task:
        """Return the task that finds the blobs to save: the workspace's, or an epoch's file's.

        Args:
            nodes: at most one.
            retrieve_from_epoch: the epoch.
            path_prefix, path_type: of that file, where they differ from the manager's.
        """
        assert nodes is None or len(nodes) == 1, "CheckpointManager only supports single node."
        with Task(outputs=[self._blob_names]) as task:
            if retrieve_from_epoch is None:
                ops.GetAllBlobNames([], self._blob_names, include_shared=False)
            else:
                path = db_name(retrieve_from_epoch, self._node_name, self._db_prefix, path_prefix)
                logger.info("Initializing checkpoints from = %s", path)
                self._load(self._blob_names, path, path_type, keep_device=True)
        self._names_output = task.outputs()[0]
        return task

    def blob_list(self) -> list[str]:
        """Return the names of the blobs to save; the task of `init` must have run."""
        assert self._names_output, "init must be called and run first."
        names = self._names_output.fetch().tolist()
        texts = [name.decode() if isinstance(name, bytes) else name for name in names]
        return [name for name in texts if not name.rpartition("/")[2].startswith(TIMER)]

    def _timed_task(self, name: str, add: Callable[[], Any]) -> Task:
        """Return a task of what a function adds, whose time is known afterwards."""
        with Task(name=name) as task:
            with ops.task_init():
                timer = ops.TimerBegin([], counter_name=self._node_name)
            add()
            with ops.task_exit():
                duration = ops.TimerGetAndEnd(timer)
            self._current_checkpoint_duration = final_output(duration)
        return task

    def _load(self, blobs: Any, path: str, path_type: str | None = None, **how: Any) -> None:
        kind = path_type or self._db_type
        ops.Load([], blobs, db=path, db_type=kind, absolute_path=True, **how)

    def collect_checkpoint_stats(self, stats: dict[str, Any]) -> None:
        if self._current_db_name and self._current_checkpoint_duration:
            stats[self._current_db_name] = self._current_checkpoint_duration.fetch().item()
        else:
            logger.info("Failed to collect checkpoint stats: %s", self._current_db_name)

    def load(
        self, epoch: int, path_prefix: str | None = None, path_type: str | None = None
    ) -> Task:
        """Return the task that loads all blobs of an epoch.

        Args:
            epoch: its number.
            path_prefix, path_type: of the file, where they differ from the manager's.
        """
        self._current_db_name = path = db_name(epoch, self._node_name, self._db_prefix, path_prefix)
        logger.info("Loading checkpoints from = %s", path)
        return self._timed_task(
            "checkpoint_load",
            lambda: self._load(self.blob_list(), path, path_type, keep_device=True),
        )

    def load_blobs_from_checkpoint(self, blob_names: Sequence[str], epoch: int) -> Task:
        """Return the task that loads the given blobs, as far as the file of the epoch has them."""
        self._current_db_name = path = db_name(epoch, self._node_name, self._db_prefix)
        logger.info("Load from %s", path)
        return self._timed_task(
            "checkpoint_partial_load",
            lambda: self._load(list(blob_names), path, allow_incomplete=True),
        )

    def check_db_exists(self, epoch: int) -> Task:
        """Return the task whose output tells whether there is a file of an epoch."""
        path = db_name(epoch, self._node_name, self._db_prefix)
        logger.info("Check existence of %s", path)
        with Task() as task:
            existence = ops.Const(False)
            ops.DBExists([], [existence], db_name=path, db_type=self._db_type, absolute_path=True)
            task.add_output(existence)
        return task

    def save(self, epoch: int) -> Task:
        """Return the task that saves all blobs in the file of an epoch."""
        self._current_db_name = path = db_name(epoch, self._node_name, self._db_prefix)
        logger.info("Saving to %s", path)
        return self._timed_task(
            "checkpoint_save",
            lambda: ops.Save(
                self.blob_list(), [], db=path, db_type=self._db_type, absolute_path=True
            ),
        )


class MultiNodeCheckpointManager(_Manager):
    """Makes the tasks that save and load the blobs of several nodes, each in a file of its own."""

    def __init__(self, db_prefix: str, db_type: str, metadata_handler: Any = None) -> None:
        """Describe the files; see `CheckpointManager`."""
        super().__init__(db_prefix, db_type, metadata_handler)
        self._node_managers: list[tuple[str, CheckpointManager]] | None = None

    def _managers(self) -> list[tuple[str, CheckpointManager]]:
        assert self._node_managers is not None, "init must be called first."
        return self._node_managers

    def _task_group(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> TaskGroup:
        group = TaskGroup(WorkspaceType.GLOBAL)
        with group:
            for node, manager in self._managers():
                with Node(node):
                    make(manager, *args, **kwargs)
        return group

    def _make_managers(self, nodes: Sequence[str]) -> bool:
        """Make a manager for each node; return False where they are there already.

        Raises:
            AssertionError: they are there for different nodes.
        """
        if self._node_managers is not None:
            known = [node for node, _ in self._node_managers]
            assert known == list(nodes), f"The manager has the nodes {known}, not {nodes}"
            return False
        self._node_managers = []
        for node in nodes:
            with Node(node):
                manager = CheckpointManager(self._db_prefix, str(node), self._db_type)
                self._node_managers.append((node, manager))
        return True

    def init(
        self,
        nodes: Sequence[str],
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> TaskGroup:
        """Return the tasks that find the blobs to save; none where it was called before.

        Args:
            nodes: the nodes.
            retrieve_from_epoch, path_prefix, path_type: see `CheckpointManager.init`.
        """
        if not self._make_managers(nodes):
            return TaskGroup(WorkspaceType.GLOBAL)
        return self._task_group(
            CheckpointManager.init,
            nodes=[nodes[-1]],
            retrieve_from_epoch=retrieve_from_epoch,
            path_prefix=path_prefix,
            path_type=path_type,
        )

    def load(
        self, epoch: int, path_prefix: str | None = None, path_type: str | None = None
    ) -> TaskGroup:
        """Return the tasks that load all blobs of an epoch; see `CheckpointManager.load`."""
        return self._task_group(
            CheckpointManager.load, epoch, path_prefix=path_prefix, path_type=path_type
        )

    def load_blobs_locally(
        self, nodes: Sequence[str], blob_names: Sequence[str], epoch: int, session: Any
    ) -> bool:
        """Load blobs from all nodes' files into a session; return False if a file is missing."""
        self._make_managers(nodes)
        for _, manager in self._managers():
            exists = manager.check_db_exists(epoch)
            session.run(exists)
            if not exists.outputs()[0].fetch():
                logger.info(
                    "DB %s does not exist!", db_name(epoch, manager._node_name, manager._db_prefix)
                )
                return False
            session.run(manager.load_blobs_from_checkpoint(blob_names, epoch))
        logger.info("Successfully loaded from checkpoints.")
        return True

    def get_ckpt_db_name(self, node_name: str, epoch: int) -> str | None:
        """Return the path of the file of a node and an epoch, None where there is no such node."""
        for node, manager in self._managers():
            if str(node) == node_name:
                return db_name(epoch, manager._node_name, manager._db_prefix)
        return None

    def collect_checkpoint_stats(self, stats: dict[str, Any]) -> None:
        for _, manager in self._managers():
            manager.collect_checkpoint_stats(stats)

    def save(self, epoch: int) -> TaskGroup:
        """Return the tasks that save all blobs in the files of an epoch."""
        return self._task_group(CheckpointManager.save, epoch)
