"""Tasks: steps with what runs before and after them, in groups, on nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.net_builder import NetBuilder


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.open: dict[str, list[Any]] = {}


_contexts = _Contexts()


class _Context:
    """An object that is the current one of its kind inside its `with` block."""

    @classmethod
    def current(cls, required: bool = True) -> Any:
        """Return the innermost one of this kind.

        Raises:
            AssertionError: there is none, and one is required.
        """
        stack = _contexts.open.get(cls.__name__, [])
        assert stack or not required, f"There is no {cls.__name__} around."
        return stack[-1] if stack else None

    def __enter__(self) -> Any:
        _contexts.open.setdefault(type(self).__name__, []).append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _contexts.open[type(self).__name__].pop()


class Cluster(_Context):
    """The nodes that tasks are made for."""

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._node_kwargs: dict[str, dict[str, Any]] = {}

    def add_node(self, node: Any) -> None:
        """Add a node by its name."""
        if str(node) not in self._nodes:
            self._nodes.append(str(node))
            self._node_kwargs[str(node)] = getattr(node, "_kwargs", {})

    def nodes(self) -> list[str]:
        """Return the names of the nodes."""
        return self._nodes

    def node_kwargs(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of the nodes by name."""
        return self._node_kwargs


class Node(_Context):
    """A place where tasks run."""

    def __init__(self, node: Any = "local", **kwargs: Any) -> None:
        self._name = str(node)
        self._kwargs = kwargs
        cluster = Cluster.current(required=False)
        if cluster is not None:
            cluster.add_node(self)

    def __str__(self) -> str:
        return self._name

    def kwargs(self) -> dict[str, Any]:
        """Return the node's arguments."""
        return self._kwargs


class WorkspaceType:
    """The workspace of a task: its own, or one that all tasks of a node share."""

    PRIVATE = "private"
    GLOBAL = "global"


def get_setup_nets(key: str, steps_or_nets: Iterable[Any], target: Any) -> tuple[list[Any], list[Any]]:
    """Return what the attributes of nets, under a key, want to run before and after them."""
    before: list[Any] = []
    after: list[Any] = []
    for item in steps_or_nets:
        found = (
            item.get_all_attributes(key) if hasattr(item, "get_all_attributes") else item.get_attributes(key)
        )
        for setup in found:
            for parts, make in (
                (before, getattr(setup, "setup", None)),
                (after, getattr(setup, "exit", None)),
            ):
                made = make(target) if make is not None else None
                if isinstance(made, NetBuilder):
                    made = made.get()
                parts.extend(made if isinstance(made, list) else [] if made is None else [made])
    return before, after


def add_setup_steps(step: Any, init_nets: Sequence[Any], exit_nets: Sequence[Any], name: str) -> Any:
    """Return a step with others before and after it."""
    if not init_nets and not exit_nets:
        return step
    steps = []
    if init_nets:
        steps.append(core.execution_step(f"{name}:init", list(init_nets)))
    steps.append(step)
    if exit_nets:
        steps.append(core.execution_step(f"{name}:exit", list(exit_nets)))
    return core.execution_step(name, steps)


class TaskGroup(_Context):
    """Tasks that run at the same time."""

    LOCAL_SETUP = "local_setup"

    def __init__(self, workspace_type: str | None = None) -> None:
        self._tasks: list[Task] = []
        self._already_used = False
        self._workspace_type = workspace_type
        self._report_steps: list[tuple[Any, Any, int]] = []

    def add(self, task: Task) -> None:
        """Add a task; those of a group share one type of workspace.

        Raises:
            AssertionError: the group was used already, or the types differ.
        """
        assert not self._already_used, "Cannot add Task to an already used TaskGroup."
        assert (
            None in (self._workspace_type, task._workspace_type)
            or self._workspace_type == task._workspace_type
        )
        self._workspace_type = self._workspace_type or task._workspace_type or WorkspaceType.PRIVATE
        task._workspace_type = self._workspace_type
        task._notify_used()
        self._tasks.append(task)

    def tasks(self) -> list[Task]:
        """Return the tasks; none can be added from now on."""
        for task in self._tasks:
            task.get_step()
        self._already_used = True
        return self._tasks

    def num_registered_tasks(self) -> int:
        """Return the number of tasks so far."""
        return len(self._tasks)

    def used_nodes(self) -> list[str]:
        """Return the nodes of the tasks, each once."""
        return list(dict.fromkeys(task.node for task in self._tasks))

    def report_step(self, step: Any = None, node: Any = None, interval_ms: int = 1000) -> None:
        """Run a step beside the tasks, every so many milliseconds."""
        self._report_steps.append((step, node, interval_ms))

    def workspace_type(self) -> str | None:
        """Return the type of workspace."""
        return self._workspace_type

    def tasks_by_node(self, node_remap: Any = None) -> TaskGroup:
        """Return a group with one task for each node."""
        by_node: dict[str, list[Task]] = {}
        for task in self.tasks():
            by_node.setdefault(node_remap(task.node) if node_remap else task.node, []).append(task)
        made = TaskGroup(self.workspace_type())
        for node, tasks in by_node.items():
            steps = [task.get_step() for task in tasks]
            before, after = get_setup_nets(TaskGroup.LOCAL_SETUP, steps, self)
            step = core.execution_step(f"{node}:body", steps, concurrent_substeps=len(steps) > 1 or None)
            step = add_setup_steps(step, before, after, node)
            outputs = [output for task in tasks for output in task.outputs()]
            Task(step=step, node=node, outputs=outputs, name=f"grouped_by_node:{node}", group=made)
        return made

    def to_task(self, node: Any = None) -> Task:
        """Return one task that runs all tasks of a node."""
        return self.tasks_by_node((lambda _: str(node)) if node is not None else None).tasks()[0]


class TaskOutput:
    """The blobs that a task hands out."""

    def __init__(self, names: Any) -> None:
        self._single = not isinstance(names, (list, tuple))
        self.names = [names] if self._single else list(names)
        self._values: list[Any] | None = None

    def set(self, values: Sequence[Any], _fetch_func: Any = None) -> None:
        """Set the values."""
        self._values = list(values)
        self._fetch_func = _fetch_func

    def get(self) -> Any:
        """Return the value, or the values.

        Raises:
            AssertionError: the task has not run.
        """
        assert self._values is not None, "Output value not set yet."
        return self.fetch()

    def fetch(self) -> Any:
        """Return the value, or the values."""
        assert self._values is not None, "Output value not set yet."
        values = [
            self._fetch_func(value) if getattr(self, "_fetch_func", None) else value for value in self._values
        ]
        return values[0] if self._single else values


def final_output(blob_or_record: Any) -> TaskOutput:
    """Add an output to the current task; return it."""
    task = Task.current(required=True)
    return task.add_output(blob_or_record)  # type: ignore[no-any-return]


class Task(_Context):
    """A step, built by its `with` block or given, with what its nets want to run before and after it."""

    TASK_SETUP = "task_setup"
    TASK_INSTANCE_SETUP = "task_instance_setup"
    REPORT_STEP = "report_step"

    def __init__(
        self,
        step: Any = None,
        outputs: Any = None,
        workspace_type: str | None = None,
        group: TaskGroup | None = None,
        node: Any = None,
        name: str | None = None,
        num_instances: int | None = None,
    ) -> None:
        """Make a task and add it to the current group.

        Args:
            step: a step or a net; without it the block makes it.
            outputs: blobs that it hands out.
            workspace_type: see `WorkspaceType`.
            group: in place of the current one.
            node: where it runs; by default the current node.
            name: of the task.
            num_instances: how many copies of it run at the same time.
        """
        node = Node.current(required=False) if node is None else node
        self.node = str(node) if node is not None else "local"
        self.group: TaskGroup | None = TaskGroup.current(required=False) if group is None else group
        prefix = f"{self.node}/" if Node.current(required=False) is not None else ""
        self.name = f"{prefix}{name or f'task_{self.group.num_registered_tasks() if self.group else 0}'}"
        self._step = core.to_execution_step(step) if step is not None else None
        self._with_setup: Any = None
        self._outputs: list[Any] = []
        for output in outputs if isinstance(outputs, (list, tuple)) else [] if outputs is None else [outputs]:
            self.add_output(output)
        self._workspace_type = workspace_type
        self._num_instances = num_instances
        self._builder: NetBuilder | None = None
        self._already_used = False
        if self.group is not None:
            self.group.add(self)

    def _notify_used(self) -> None:
        self._already_used = self._step is not None

    def __enter__(self) -> Task:
        assert self._step is None, "This Task already has an execution step."
        super().__enter__()
        self._builder = NetBuilder(_fullname=self.name)
        self._builder.__enter__()
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        assert self._builder is not None
        self._builder.__exit__(kind, *arguments)
        super().__exit__(kind, *arguments)
        if kind is None:
            self._step = core.to_execution_step(self._builder, self.name)

    def workspace_type(self) -> str | None:
        """Return the type of workspace."""
        return self._workspace_type

    def add_output(self, output: Any) -> TaskOutput:
        """Add an output."""
        made = output if isinstance(output, TaskOutput) else TaskOutput(output)
        self._outputs.append(made)
        return made

    def add_outputs(self, outputs: Any) -> Any:
        """Add one output or several."""
        if not isinstance(outputs, (list, tuple)):
            return self.add_output(outputs)
        return [self.add_output(output) for output in outputs]

    def outputs(self) -> list[TaskOutput]:
        """Return the outputs."""
        return self._outputs

    def output_names(self) -> list[Any]:
        """Return the blobs of all outputs."""
        return [name for output in self._outputs for name in output.names]

    def get_step(self) -> Any:
        """Return the step, with what runs before and after the task and each of its instances."""
        if self._with_setup is None:
            step = self._step if self._step is not None else core.execution_step(self.name, [])
            before, after = get_setup_nets(Task.TASK_INSTANCE_SETUP, [step], self)
            instance = add_setup_steps(step, before, after, f"{self.name}:instance")
            if self._num_instances and self._num_instances > 1:
                instance = core.execution_step(f"{self.name}:parallel", [instance], create_workspace=True)
                instance.SetNumConcurrentInstances(self._num_instances)
            before, after = get_setup_nets(Task.TASK_SETUP, [step], self)
            self._with_setup = add_setup_steps(instance, before, after, self.name)
        return self._with_setup

    def get_step_with_setup(self) -> Any:
        """Return what `get_step` does."""
        return self.get_step()

    def __repr__(self) -> str:
        return f"Task(name={self.name}, node={self.node}, outputs={self.output_names()})"
