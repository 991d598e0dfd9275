"""Jobs in epochs, their checkpoints, and continuing from one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.checkpoint import (
    CheckpointManager,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    UploadTaskGroupBuilder,
    db_name,
    epoch_limiter,
)
from poseidon.caffe2.dataio import ReaderWithLimit
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.net_builder import ops
from poseidon.caffe2.pipeline import pipe
from poseidon.caffe2.runtime import databases
from poseidon.caffe2.schema import ConstRecord, Struct
from poseidon.caffe2.session import LocalSession
from poseidon.caffe2.task import Cluster, Node, Task, TaskGroup, WorkspaceType

TOTALS = [7, 18, 20]
"""1 and the sums of 1, 2, 3 | 5, 6 ... in epochs of three records: see `summing`."""
VALUES = [1, 2, 3, 5, 6, 0, 2]


def summing(number: int = 0) -> Any:
    """A node that adds three values to a total in each epoch; the job ends with the values.

    The total is returned.
    """
    with Node(f"trainer_{number}"):
        with Job.current().init_group, Task():
            data = ConstRecord(ops, Struct(("value", np.array(VALUES))))
            reader = Dataset(data, name=f"set_{number}").reader(ops)
            total = ops.Const([1])

        def add(record: Any) -> None:
            ops.Add([total, record.value()], [total])

        limited = ReaderWithLimit(reader, num_iter=3)
        pipe(limited, processor=add)
        Job.current().add_stop_condition(limited.data_finished())
    return total


def new_session() -> Any:
    return LocalSession(workspace.C.Workspace())


def job_of(numbers: tuple[int, ...] = (0,)) -> tuple[Job, list[Any]]:
    with Job() as job:
        totals = [summing(number) for number in numbers]
    job.compile(LocalSession)
    return job, totals


Make = Callable[[Path], Any]
MANAGERS: list[Make] = [
    lambda folder: CheckpointManager(str(folder), "node", "minidb"),
    lambda folder: MultiNodeCheckpointManager(str(folder), "minidb"),
]


@pytest.mark.parametrize("make", MANAGERS, ids=["one", "several"])
def test_each_epoch_can_be_gone_on_from(make: Make, tmp_path: Path) -> None:
    with Cluster():
        job, (total,) = job_of()
        fetcher = Task(step=core.Net("empty"), outputs=total)

        def fetch(session: Any) -> int:
            session.run(fetcher)
            return int(fetcher.outputs()[0].fetch().item())

        session, manager = new_session(), make(tmp_path)
        assert JobRunner(job, manager).train(session) == len(TOTALS)
        assert fetch(session) == TOTALS[-1]
        for epoch in range(1, len(TOTALS)):
            again, other = new_session(), make(tmp_path)
            assert JobRunner(job, other, resume_from_epoch=epoch).train(again) == len(TOTALS)
            assert fetch(again) == TOTALS[-1]
        for epoch, expected in enumerate([1, *TOTALS]):
            session.run(manager.load(epoch))
            assert fetch(session) == expected


def test_a_manager_can_be_used_again(tmp_path: Path) -> None:
    job, (total,) = job_of()
    session, manager = new_session(), MultiNodeCheckpointManager(str(tmp_path), "minidb")
    assert JobRunner(job, manager).train(session) == len(TOTALS)
    for epoch in range(1, len(TOTALS)):
        JobRunner(job, manager, resume_from_epoch=epoch).train(session)
        assert session._ws.fetch_blob(str(total)).tolist() == [TOTALS[-1]]
    with pytest.raises(AssertionError, match="has the nodes"):
        manager.init(["other"])


def test_a_second_job_of_a_session_saves_its_checkpoints_too(tmp_path: Path) -> None:
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        job, _ = job_of()
        JobRunner(job, CheckpointManager(str(tmp_path / run), "node", "minidb")).train(
            LocalSession()
        )
        assert len(list((tmp_path / run).iterdir())) > 1


def test_files_of_several_nodes(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(str(tmp_path), "minidb")
    with Cluster():
        job, totals = job_of((0, 1))
        manager.init(job.nodes_to_checkpoint())
        assert manager.get_ckpt_db_name("trainer_1", 5) == f"{tmp_path}/trainer_1.5"
        assert manager.get_ckpt_db_name("trainer_2", 5) is None
        assert db_name(5, "n", "/a", "/b/c_") == "/b/c_n.5"
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        session = new_session()
        JobRunner(job, MultiNodeCheckpointManager(str(tmp_path), "minidb")).train(session)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"trainer_{node}.{epoch}" for node in range(2) for epoch in range(len(TOTALS) + 1)
        ]
        elsewhere = new_session()
        runner = JobRunner(job, MultiNodeCheckpointManager(str(tmp_path), "minidb"))
        names = [str(total) for total in totals]
        for epoch, expected in enumerate(TOTALS, 1):
            assert runner.load_blobs_from_checkpoints(names, epoch, elsewhere)
            assert [elsewhere._ws.fetch_blob(name).item() for name in names] == [expected] * 2
        assert not runner.load_blobs_from_checkpoints(names, 9, elsewhere)


def test_only_blobs_of_the_first_group_are_saved(tmp_path: Path) -> None:
    job, (total,) = job_of()
    session = new_session()
    JobRunner(job, CheckpointManager(str(tmp_path), "node", "minidb")).train(session)
    keys = [
        key.decode().partition("#")[0]
        for key, _ in databases.records(f"{tmp_path}/node.1", "minidb")
    ]
    # the output of the task among them
    assert len(keys) == 5 and {"blob_names", str(total)} <= set(keys)
    timers = [name for name in session._ws.blobs if "/checkpoint_save" in name]
    assert len(timers) == 2 * (len(TOTALS) + 1)  # a timer of each checkpoint, and its time
    others = set(session._ws.blobs) - set(timers) - set(keys)
    assert len(others) == 2  # the outputs of the stop condition and of the epoch's task


def test_a_checkpoint_that_fails_is_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    job, _ = job_of()
    (tmp_path / "file").touch()
    manager = CheckpointManager(str(tmp_path / "file"), "node", "minidb")
    with caplog.at_level(logging.WARNING):
        assert JobRunner(job, manager).train(new_session()) == len(TOTALS)
    (said,) = [
        text
        for text in caplog.messages
        if text.startswith("Unable to write checkpoint for epoch 0: ")
    ]
    assert "\n" not in said


class Upload(UploadTaskGroupBuilder):
    """Copies the files of all nodes to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        group = TaskGroup(WorkspaceType.GLOBAL)
        with group:
            for node, manager in checkpoint_manager._node_managers:
                source = db_name(epoch, manager._node_name, manager._db_prefix)
                with Node(str(node)), Task():
                    copy = lambda inputs, outputs, source=source: shutil.copy(source, self.folder)  # noqa: E731
                    ops.Python(copy)([], [])
        return group


def test_the_last_checkpoint_is_uploaded(tmp_path: Path) -> None:
    job, _ = job_of((0, 1))
    (tmp_path / "up").mkdir()
    manager = MultiNodeCheckpointManager(str(tmp_path), "minidb")
    JobRunner(job, manager, upload_task_group_builder=Upload(tmp_path / "up")).train(new_session())
    names = [path.name for path in (tmp_path / "up").iterdir()]
    assert sorted(names) == ["trainer_0.3", "trainer_1.3"]


class Metadata:
    """A handler that remembers the epochs."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.params: dict[str, Any] = {}

    def write(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def report(self, action: str, stats: dict[str, Any]) -> None:
        self.reports.append((action, stats))

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        return user_epoch if user_epoch is not None else self.epochs[-1] if self.epochs else None

    def cp_accessible(self, epoch: int | None) -> bool:
        return True

    def set_params(self, **params: Any) -> None:
        self.params = params


@pytest.mark.parametrize("several", [False, True])
def test_a_handler_of_metadata(several: bool, tmp_path: Path) -> None:
    job, _ = job_of()
    handler = Metadata()
    make: Any = (
        (lambda: MultiNodeCheckpointManager(str(tmp_path), "minidb", handler))
        if several
        else lambda: CheckpointManager(str(tmp_path), "trainer_0", "minidb", handler)
    )
    JobRunner(job, make()).train(new_session())
    assert handler.epochs == [0, 1, 2, 3]
    assert handler.params["node_names"] == ["trainer_0"] and handler.params["db_type"] == "minidb"
    action, stats = handler.reports[-1]
    assert action == "checkpoint_save" and stats[f"{tmp_path}/trainer_0.3"] > 0
    handler.epochs = [0, 1]
    JobRunner(job, make()).train(new_session())
    assert handler.epochs == [0, 1, 2, 3]


def test_a_download_group_runs_behind_the_epochs() -> None:
    nets = [core.Net(name) for name in ("init", "epoch", "download", "exit")]
    nets[0].ConstantFill([], "x", shape=[1], value=1.0)
    nets[1].Add(["x", "x"], "x")
    nets[2].Copy("x", "downloaded")
    nets[3].Add(["downloaded", "x"], "at_the_end")
    with Job() as job, Node("trainer:0"):
        for group, net in zip(
            (job.init_group, job.epoch_group, job.download_group, job.exit_group), nets, strict=True
        ):
            if group is job.epoch_group:
                with group, Task(), ops.loop(2):
                    ops.net(net)
            else:
                with group:
                    Task(step=net, workspace_type=WorkspaceType.GLOBAL)
        epoch_limiter(job, 2)
    ws = workspace.C.Workspace()
    assert JobRunner(job).train(LocalSession(ws)) == 2
    assert ws.fetch_blob("downloaded").tolist() == [16]
    assert ws.fetch_blob("at_the_end").tolist() == [32]
