"""Nets, steps, plans, tasks and jobs as text; a check that blobs are made before they are read."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from google.protobuf.message import Message

from poseidon.caffe2 import core, utils
from poseidon.caffe2.checkpoint import Job
from poseidon.caffe2.net_builder import NetBuilder
from poseidon.caffe2.task import Task, TaskGroup, WorkspaceType

IGNORED_PREFIXES = ("distributed_ctx_init",)
"""Blobs that come from outside a job."""


def _named_nets(container: Any) -> dict[str, Any]:
    """Return the nets of a step and of the steps inside, by name."""
    nets: list[core.Net] = []
    core.add_nets_in_order(container, nets)
    return {net.Name(): net for net in nets}


# Analysis.


class Analyzer:
    """Follows the blobs of a job through its workspaces."""

    def __init__(self, print_used_blobs: bool = False) -> None:
        self.workspaces: dict[str, dict[str, int]] = collections.defaultdict(dict)
        self._stack: list[dict[str, int]] = []

    @property
    def workspace(self) -> dict[str, int]:
        """How often each blob was made, in the current workspace."""
        return self._stack[-1]

    @contextmanager
    def set_workspace(
        self, node: str | None = None, ws: dict[str, int] | None = None, do_copy: bool = False
    ) -> Iterator[dict[str, int]]:
        """Work in the workspace of a node, in a given one, or in a copy of one."""
        found = (
            ws
            if ws is not None
            else self.workspaces[str(node)]
            if node is not None
            else self.workspace
        )
        found = dict(found) if do_copy else found
        self._stack.append(found)
        yield found
        del self._stack[-1]

    def define_blob(self, blob: str) -> None:
        """Note that a blob is made."""
        self.workspace[blob] = self.workspace.get(blob, 0) + 1

    def need_blob(self, blob: str) -> None:
        """Raise AssertionError when a blob is not there."""
        if not blob.startswith(IGNORED_PREFIXES):
            assert blob in self.workspace, f"Blob undefined: {blob}"

    def net(self, net: Any) -> None:
        """Follow a net; operators inside it, too."""
        proto: Any = net if isinstance(net, Message) else net.Proto()
        for op in proto.op:
            for name in op.input:
                self.need_blob(name)
            for name in op.output:
                self.define_blob(name)

    def step(self, step: core.ExecutionStep, nets: dict[str, Any] | None = None) -> None:
        """Follow a step; what runs at the same time must not make the same blob."""
        nets = _named_nets(step) if nets is None else nets
        proto = step.Proto()
        with self.set_workspace(do_copy=bool(proto.create_workspace)):
            if step.Substeps():
                self._parts(
                    [partial(self.step, part, nets) for part in step.Substeps()],
                    bool(proto.concurrent_substeps),
                )
            else:
                for name in proto.network:
                    self.net(nets[name])
            if proto.report_net:
                self.net(nets[proto.report_net])
            if proto.should_stop_blob:
                self.need_blob(proto.should_stop_blob)

    def _parts(self, parts: list[Callable[[], None]], at_the_same_time: bool) -> None:
        if not at_the_same_time:
            for part in parts:
                part()
            return
        before = dict(self.workspace)
        makers: collections.Counter[str] = collections.Counter()
        for part in parts:
            with self.set_workspace(ws=before, do_copy=True) as after:
                part()
            made = [name for name, count in after.items() if count > before.get(name, 0)]
            makers.update(made)
            self.workspace.update({name: after[name] for name in made})
        several = sorted(name for name, count in makers.items() if count > 1 and name not in before)
        assert not several, f"Error: Blobs created by multiple parallel steps: {', '.join(several)}"

    def task(self, task: Task) -> None:
        private = task.workspace_type() != WorkspaceType.GLOBAL
        with self.set_workspace(task.node, do_copy=private):
            self.step(task.get_step())

    def group(self, group: TaskGroup) -> None:
        """Follow the tasks of a group: the tasks of a node run at the same time."""
        by_node: dict[str, list[Task]] = collections.defaultdict(list)
        for task in group.tasks():
            by_node[task.node].append(task)
        for node, tasks in by_node.items():
            with self.set_workspace(node, do_copy=group.workspace_type() != WorkspaceType.GLOBAL):
                self._parts([partial(self.step, task.get_step()) for task in tasks], True)

    def job(self, job: Job) -> None:
        for group in (job.init_group, job.epoch_group, job.download_group, job.exit_group):
            self.group(group)

    def plan(self, plan: core.Plan) -> None:
        nets = {net.Name(): net for net in plan.Nets()}
        with self.set_workspace("local"):
            for step in plan.Steps():
                self.step(step, nets)


def analyze(obj: Any) -> None:
    """Check that every blob is made before it is read.

    Args:
        obj: a job, a task group, a task, a plan, a step or a net.

    Raises:
        AssertionError: a blob is not there, or is made by two parts that run at the same time.
    """
    analyzer = Analyzer()
    with analyzer.set_workspace("local"):
        _dispatch(analyzer, obj)


def _dispatch(visitor: Any, obj: Any) -> None:
    for kind, name in (
        (Job, "job"),
        (TaskGroup, "group"),
        (Task, "task"),
        (core.Plan, "plan"),
        (core.ExecutionStep, "step"),
        (core.Net, "net"),
        (Message, "net"),
    ):
        if isinstance(obj, kind):
            getattr(visitor, name)(obj)
            return
    if isinstance(obj, NetBuilder):
        visitor.step(core.to_execution_step(obj))
        return
    raise TypeError(f"{type(obj).__name__} cannot be printed or analyzed")


# Text.


class Text:
    """Lines with an indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def add(self, line: str) -> None:
        self.lines.append("  " * self._depth + line)

    @contextmanager
    def context(self, line: str) -> Iterator[None]:
        """Add a line with a block below it."""
        self.add(f"with {line}:")
        self._depth += 1
        yield
        self._depth -= 1

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Printer(Text):
    """Jobs and their parts as lines that look like Python."""

    def __init__(self, factor_prefixes: bool = False) -> None:
        super().__init__()
        self._factor_prefixes = factor_prefixes

    def operator(self, op: Any) -> None:
        reads, makes = list(op.input), list(op.output)
        prefix = _common_prefix([*reads, *makes]) if self._factor_prefixes else ""
        call = (
            f"{op.type}({', '.join([*(name[len(prefix) :] for name in reads), *_arguments(op)])})"
        )
        line = f"{', '.join(name[len(prefix) :] for name in makes)} = {call}" if makes else call
        self.add(f"{prefix}: {line}" if prefix else line)

    def net(self, net: Any) -> None:
        proto: Any = net if isinstance(net, Message) else net.Proto()
        with self.context(f"ops.net('{core.get_net_name(net)}')"):
            for op in proto.op:
                self.operator(op)

    def step(self, step: core.ExecutionStep, nets: dict[str, Any] | None = None) -> None:
        nets = _named_nets(step) if nets is None else nets
        proto = step.Proto()
        options = [
            f"{name}={getattr(proto, name)!r}"
            for name in (
                "num_iter",
                "only_once",
                "concurrent_substeps",
                "should_stop_blob",
                "create_workspace",
            )
            if proto.HasField(name)
        ]
        with self.context(f"ops.execution_step({', '.join([repr(step.Name()), *options])})"):
            for part in step.Substeps():
                self.step(part, nets)
            for name in proto.network:
                self.net(nets[name]) if name in nets else self.add(f"ops.net('{name}')")

    def task(self, task: Task) -> None:
        outputs = ", ".join(map(str, task.output_names()))
        with self.context(f"Task(node='{task.node}', name='{task.name}', outputs=[{outputs}])"):
            self.step(task.get_step())

    def group(self, group: TaskGroup) -> None:
        with self.context("TaskGroup()"):
            for task in group.tasks():
                self.task(task)

    def job(self, job: Job) -> None:
        with self.context("Job()"):
            for name in ("init_group", "epoch_group", "download_group", "exit_group"):
                if getattr(job, name).num_registered_tasks():
                    with self.context(f"job.{name}"):
                        self.group(getattr(job, name))

    def plan(self, plan: core.Plan) -> None:
        nets = {net.Name(): net for net in plan.Nets()}
        with self.context(f"Plan('{plan}')"):
            for step in plan.Steps():
                self.step(step, nets)


def _arguments(op: Any) -> list[str]:
    values = [f"{name}={value!r}" for name, value in utils.ArgsToDict(op.arg).items()]
    device = op.device_option
    return (
        [*values, f"device={device.device_type}:{device.device_id}"]
        if device.device_type
        else values
    )


def _common_prefix(names: list[str]) -> str:
    if not names:
        return ""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), len(first))
    return first[: first.rfind("/", 0, same) + 1]


def to_string(obj: Any, factor_prefixes: bool = False) -> str:
    """Return a job, a task group, a task, a plan, a step or a net as text.

    Args:
        obj: what is printed.
        factor_prefixes: whether the scope that all blobs of an operator share is written once.
    """
    printer = Printer(factor_prefixes)
    _dispatch(printer, obj)
    return str(printer)


def debug_net(net: core.Net) -> core.Net:
    """Return a copy of a net that prints each operator before it runs."""
    made = core.Net(net.Name())
    made.Proto().external_input.extend(net.Proto().external_input)
    for op in net.Proto().op:
        printer = Printer()
        printer.operator(op)
        made.LogInfo(str(printer))
        made.Proto().op.extend([op])
    made.Proto().external_output.extend(net.Proto().external_output)
    return made
