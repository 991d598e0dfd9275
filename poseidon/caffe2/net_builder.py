"""Steps built by nested blocks: nets in order, loops, conditions, stops.

with NetBuilder("example") as builder:
    x = ops.Const(1)
    with ops.loop(10):
        ops.Add([x, x], [x])
plan.AddStep(core.to_execution_step(builder))
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.building.blocks import (
    Condition,
    ElseNet,
    IfNet,
    Loop,
    NetBuilder,
    RunIf,
    SetupBuilder,
    StopGuard,
    WhileNet,
)
from poseidon.caffe2.task import Cluster, Node, Task, TaskGroup

__all__ = ["NetBuilder", "Operations", "ops"]


class ReporterBuilder(NetBuilder):
    """A block that runs every so many milliseconds beside a task, or a group's tasks."""

    def __init__(self, interval_ms: int, net: Any = None, name: str | None = None) -> None:
        super().__init__(name)
        self._net = net
        self.interval_ms = interval_ms

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            step = core.to_execution_step(self)
            step.RunEveryMillis(self.interval_ms)
            if self._net:
                self._net.add_attribute(Task.REPORT_STEP, step)
            else:
                from poseidon.caffe2.task import TaskGroup

                TaskGroup.current().report_step(step, interval_ms=self.interval_ms)
        super().__exit__(kind, *arguments)


class Operations:
    """Operators and blocks of the innermost builder: `ops.Add(...)`, `with ops.loop(...)`."""

    def net(self, net: Any = None, name: str | None = None) -> Any:
        """Return the net that operators go to; a net given is appended, a name begins a new one."""
        assert name is None or net is None, "Cannot provide both `net` and `name`."
        builder = NetBuilder.current()
        if net is not None:
            builder.add(net)
            return net
        return builder.current_net(name)

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("__"):
            raise AttributeError(op_type)
        if NetBuilder.current(required=False) is None:
            raise AttributeError("No active NetBuilder.")
        return getattr(self.net(), op_type)

    def task_group(self) -> Any:
        """Return a group of tasks that runs as the next step."""

        builder = NetBuilder.current()
        with Cluster(), Node("local"):
            return builder.add(TaskGroup())

    def execution_step(self, *args: Any, **kwargs: Any) -> NetBuilder:
        """Return a builder of a step inside."""
        return NetBuilder.current().add(NetBuilder(*args, **kwargs))  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the step of the innermost block."""
        self.stop_if(self.Const(True))

    def stop_if(self, blob: Any) -> None:
        """End the step of the innermost block where a blob is true."""
        NetBuilder.current().stop_if(blob)

    def loop(self, iters: Any = None, name: str | None = None) -> Loop:
        """Return a block repeated `iters` times (a number, a blob), or until `stop`, `stop_if`."""
        return NetBuilder.current().add(Loop(iters, name=name))  # type: ignore[no-any-return]

    def stop_guard(self, has_stopped_blob: Any = None, name: str | None = None) -> StopGuard:
        """Return a block of which one can ask whether it was stopped."""
        return NetBuilder.current().add(StopGuard(has_stopped_blob, name))  # type: ignore[no-any-return]

    def If(self, cond: Any, name: str | None = None) -> RunIf:
        """Return a block that runs where a blob is true; it has `Elif` and `Else`."""
        return NetBuilder.current().add(RunIf(cond, name=name))  # type: ignore[no-any-return]

    def IfNet(self, cond: Any, name: str | None = None) -> IfNet:
        """Return a block that runs where a blob is true: `If`, which has a gradient."""
        return NetBuilder.current().add(IfNet(cond, name=name))  # type: ignore[no-any-return]

    def Else(self, name: str | None = None) -> ElseNet:
        """Return the block for the other case; it stands behind the one of `IfNet`."""
        return ElseNet(name=name)

    def WhileNet(self, name: str | None = None) -> WhileNet:
        """Return a block that is repeated while its `Condition` holds: the operator `While`."""
        return NetBuilder.current().add(WhileNet(name=name))  # type: ignore[no-any-return]

    def Condition(self, name: str | None = None) -> Condition:
        """Return the condition's block of a `WhileNet`; its last operator makes a boolean."""
        return Condition(name=name)

    def task_init(self) -> SetupBuilder:
        """Return a block that runs once, before the task around and all its instances."""
        return self._setup(Task.TASK_SETUP, SetupBuilder.INIT)

    def task_exit(self) -> SetupBuilder:
        """Return a block that runs once, after the task around and all its instances."""
        return self._setup(Task.TASK_SETUP, SetupBuilder.EXIT)

    def task_instance_init(self) -> SetupBuilder:
        """Return a block that runs before each instance of the task around."""
        return self._setup(Task.TASK_INSTANCE_SETUP, SetupBuilder.INIT)

    def task_instance_exit(self) -> SetupBuilder:
        """Return a block that runs after each instance of the task around."""
        return self._setup(Task.TASK_INSTANCE_SETUP, SetupBuilder.EXIT)

    def local_init(self) -> SetupBuilder:
        """Return a block that runs once on each node, before its tasks."""
        return self._setup(TaskGroup.LOCAL_SETUP, SetupBuilder.INIT)

    def local_exit(self, name: str | None = None) -> SetupBuilder:
        """Return a block that runs once on each node, after its tasks."""
        return self._setup(TaskGroup.LOCAL_SETUP, SetupBuilder.EXIT, name)

    def _setup(self, key: str, kind: str, name: str | None = None) -> SetupBuilder:
        setup = SetupBuilder(kind, name)
        self.net().add_attribute(key, setup)
        return setup

    def task_reporter(self, interval_ms: int = 1000, name: str | None = None) -> ReporterBuilder:
        """Return a block that runs every so many milliseconds beside the task, and at its end."""
        return ReporterBuilder(interval_ms, net=self.net(), name=name)

    def local_reporter(self, interval_ms: int = 1000, name: str | None = None) -> ReporterBuilder:
        """Return a block that runs every so many milliseconds beside the group's tasks."""
        return ReporterBuilder(interval_ms, name=name)


ops = Operations()
