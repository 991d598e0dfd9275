"""Tasks: steps with what runs before and after them, in groups, on nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from poseidon.caffe2 import context, core, schema
from poseidon.caffe2.building.blocks import NetBuilder

__all__ = [
    "Cluster",
    "Node",
    "SetupNets",
    "Task",
    "TaskGroup",
    "TaskOutput",
    "TaskOutputList",
    "WorkspaceType",
    "add_setup_steps",
    "final_output",
    "get_setup_nets",
]


class TaskOutput:
    """What a task hands out: a blob, blobs, or a record."""

    def __init__(self, names: Any) -> None:
        self._schema = names if isinstance(names, schema.Field) else None
        if self._schema is not None:
            names = self._schema.field_blobs()
        self._is_scalar = not isinstance(names, (list, tuple))
        self.names = [names] if self._is_scalar else list(names)
        self._values: list[Any] | None = None
        self._fetch_func: Callable[[Any], Any] | None = None

    def set(self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None) -> None:
        assert len(values) == len(self.names)
        self._values = list(values)
        self._fetch_func = _fetch_func

    def _formed(self, values: list[Any]) -> Any:
        if self._is_scalar:
            return values[0]
        return values if self._schema is None else schema.from_blob_list(self._schema, values)

    def get(self) -> Any:
        """Return the value, the values or the record.

        Raises:
            AssertionError: the task has not run.
        """
        assert self._values is not None, "Output value not set yet."
        return self._formed(self._values)

    def fetch(self) -> Any:
        """Return what the session fetches for the value, the values or the record."""
        assert self._fetch_func is not None, "Cannot fetch value for this output."
        assert self._values is not None, "Output value not set yet."
        return self._formed([self._fetch_func(value) for value in self._values])


class TaskOutputList:
    """The outputs of a task in one list."""

    def __init__(self, outputs: list[TaskOutput] | None = None) -> None:
        self.outputs = outputs or []

    def names(self) -> list[Any]:
        """Return the blobs of all outputs."""
        return [name for output in self.outputs for name in output.names]

    def set_values(
        self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None
    ) -> None:
        """Set the values of all outputs, in the order of `names`."""
        assert len(values) == len(self.names()), "Wrong number of output values."
        left = list(values)
        for output in self.outputs:
            output.set(left[: len(output.names)], _fetch_func)
            del left[: len(output.names)]


class SetupNets:
    """An attribute of a net: nets that run before and after its task or its group."""

    def __init__(self, init_nets: Any = None, exit_nets: Any = None) -> None:
        self.init_nets = init_nets
        self.exit_nets = exit_nets

    def setup(self, init_net: Any) -> Any:
        """Return the nets that run before."""
        return self.init_nets

    def exit(self, exit_net: Any) -> Any:
        """Return the nets that run after."""
        return self.exit_nets


def get_setup_nets(
    key: str, steps_or_nets: Iterable[Any], target: Any
) -> tuple[list[Any], list[Any]]:
    """Return what the attributes of nets, under a key, want to run before and after them.

    An attribute has methods `setup(net)` and `exit(net)`, or one of them: they add operators to the
    net, or return a net, a step or a list of these. Each attribute is used once; one with a
    `_setup_target` for that target only.

    Raises:
        TypeError: a method returns something else.
    """
    nets = {"setup": core.Net(f"{key}/init"), "exit": core.Net(f"{key}/exit")}
    found: dict[str, list[Any]] = {"setup": [], "exit": []}
    attributes = [attribute for item in steps_or_nets for attribute in _attributes(item, key)]
    for attribute in attributes:
        if getattr(attribute, "_setup_used", False):
            continue
        if getattr(attribute, "_setup_target", target) != target:
            continue
        for method, net in nets.items():
            if hasattr(attribute, method):
                found[method] += _listed(getattr(attribute, method)(net))
                attribute._setup_used = True
    for method, net in nets.items():
        if net.Proto().op:
            found[method].insert(0, net)
    return found["setup"], found["exit"]


def _attributes(item: Any, key: str) -> list[Any]:
    if hasattr(item, "get_all_attributes"):
        return list(item.get_all_attributes(key))
    return list(item.get_attributes(key)) if hasattr(item, "get_attributes") else []


def _listed(made: Any) -> list[Any]:
    if isinstance(made, (list, tuple)):
        return list(made)
    if made is None or isinstance(made, (core.Net, core.ExecutionStep)):
        return [] if made is None else [made]
    raise TypeError(f"setup is a {type(made).__name__}, expected a net, a step or a list")


def add_setup_steps(
    step: Any, init_nets: Sequence[Any], exit_nets: Sequence[Any], name: str
) -> Any:
    """Return a step with others before and after it."""
    if not init_nets and not exit_nets:
        return step
    steps = [step]
    if init_nets:
        steps.insert(0, core.execution_step(f"{name}:init", list(init_nets)))
    if exit_nets:
        steps.append(core.execution_step(f"{name}:exit", list(exit_nets)))
    return core.execution_step(name, steps)


class Cluster(context.DefaultManaged):
    """The nodes that tasks are made for; there is always one."""

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._node_kwargs: dict[str, dict[str, Any]] = {}

    def add_node(self, node: Any) -> None:
        """Add a node, or further arguments of one."""
        if str(node) not in self._nodes:
            self._nodes.append(str(node))
        self._node_kwargs[str(node)] = {**node.kwargs(), **self._node_kwargs.get(str(node), {})}

    def nodes(self) -> list[str]:
        return self._nodes

    def node_kwargs(self) -> dict[str, dict[str, Any]]:
        return self._node_kwargs


class Node(context.DefaultManaged):
    """A place where tasks run; `local` is the default."""

    def __init__(self, node: Any = "local", **kwargs: Any) -> None:
        self._name = str(node)
        self._kwargs = kwargs
        Cluster.current().add_node(self)

    def __str__(self) -> str:
        return self._name

    def kwargs(self) -> dict[str, Any]:
        return self._kwargs


class WorkspaceType:
    """The workspace of a task: one inside the session's for each run, or the session's itself."""

    PRIVATE = "private"
    GLOBAL = "global"


class TaskGroup(context.Managed):
    """Tasks that run at the same time; the tasks of a node share a workspace.

    It ends when all have ended.
    """

    LOCAL_SETUP = "local_setup"

    def __init__(self, workspace_type: str | None = None) -> None:
        self._tasks: list[Task] = []
        self._tasks_to_add: list[Task] = []
        self._already_used = False
        self._report_nets: dict[str, tuple[core.Net, int]] = {}
        self._report_steps: list[tuple[str, Any]] = []
        self._workspace_type = workspace_type
        self._tasks_by_node: tuple[TaskGroup, dict[str, str]] | None = None

    def add(self, task: Task) -> None:
        """Add a task; the tasks of a group share one type of workspace.

        Raises:
            AssertionError: the group was used already, or the types differ.
        """
        assert not self._already_used, "Cannot add Task to an already used TaskGroup."
        types = {self._workspace_type, task._workspace_type} - {None}
        assert len(types) <= 1, f"The tasks of a group have different types of workspace: {types}"
        task._workspace_type = task._workspace_type or self._workspace_type or WorkspaceType.PRIVATE
        self._workspace_type = self._workspace_type or task._workspace_type
        task._notify_used()
        self._tasks.append(task)

    def tasks(self) -> list[Task]:
        """Return the tasks; none can be added from now on."""
        if not self._already_used:
            for task in self._tasks_to_add:
                self.add(task)
            self._tasks_to_add = []
            self._already_used = True
        return self._tasks

    def num_registered_tasks(self) -> int:
        return len(self._tasks_to_add) + len(self._tasks)

    def used_nodes(self) -> list[str]:
        """Return the nodes of the tasks, each once."""
        return list(dict.fromkeys(task.node for task in [*self._tasks, *self._tasks_to_add]))

    def report_step(self, step: Any = None, node: Any = None, interval_ms: int = 1000) -> None:
        """Run a step on a node beside its tasks, every so many milliseconds, and at the end."""
        step = core.to_execution_step(step)
        step.RunEveryMillis(interval_ms)
        self._report_steps.append((str(node or Node.current(node)), step))

    def report_net(self, net: Any = None, node: Any = None, report_interval: int = 5) -> core.Net:
        """Return the net that runs on a node every so many seconds, by default a new one."""
        name = str(node or Node.current(node))
        assert net is None or name not in self._report_nets, f"{name} has a report net already"
        if name not in self._report_nets:
            self._report_nets[name] = (net or core.Net(f"{name}/reporter"), report_interval)
        return self._report_nets[name][0]

    def tasks_by_node(self, node_remap: Callable[[str], str] | None = None) -> TaskGroup:
        """Return a group with one task for each node; `node_remap` gives other names to nodes.

        Raises:
            AssertionError: it was called before with other names.
        """
        names = {node: node_remap(node) if node_remap else node for node in self.used_nodes()}
        if self._tasks_by_node is not None:
            made, before = self._tasks_by_node
            assert before == names, "Cannot call tasks_by_node multiple times."
            return made
        for node, (net, interval) in self._report_nets.items():
            self.report_step(net, node=node, interval_ms=interval * 1000)
        self._report_nets = {}
        by_node: dict[str, list[Task]] = {}
        for task in self.tasks():
            by_node.setdefault(names[task.node], []).append(task)
        made = TaskGroup()
        for node, tasks in by_node.items():
            reports = [step for original, step in self._report_steps if names[original] == node]
            self._group_node(made, node, tasks, reports)
        self._tasks_by_node = (made, names)
        return made

    def _group_node(
        self, made: TaskGroup, node: str, tasks: list[Task], reports: list[Any]
    ) -> None:
        """Add the task that runs all tasks of a node."""
        steps = list(reports)
        kinds = {task.workspace_type() for task in tasks}
        for task in tasks:
            step = task.get_step()
            step.SetCreateWorkspace(task.workspace_type() == WorkspaceType.PRIVATE)
            steps.append(step)
        step = steps[0]
        if len(steps) > 1:
            step = core.execution_step(f"{node}:body", steps, concurrent_substeps=True)
        before, after = get_setup_nets(
            self.LOCAL_SETUP, [*(task.get_step() for task in tasks), *reports], self
        )
        Task(
            node=node,
            step=add_setup_steps(step, before, after, node),
            outputs=[output for task in tasks for output in task.outputs()],
            name="grouped_by_node",
            group=made,
            workspace_type=WorkspaceType.GLOBAL
            if WorkspaceType.GLOBAL in kinds
            else WorkspaceType.PRIVATE,
        )

    def to_task(self, node: Any = None) -> Task:
        """Return one task, on a node, that runs all tasks."""
        name = str(Node.current(node))
        tasks = self.tasks_by_node(lambda _: name).tasks()
        return tasks[0] if tasks else Task()

    def workspace_type(self) -> str | None:
        return self._workspace_type


def final_output(blob_or_record: Any) -> TaskOutput:
    """Add an output to the current task, or to a new one; return it.

    It has the value at the end of the last task of the node.
    """
    task = Task.current(required=False) or Task()
    return task.add_output(blob_or_record)


class Task(context.Managed):
    """A step, given or of a `with` block, with what its nets run before and after it."""

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
            outputs: blobs or records that it hands out.
            workspace_type: see `WorkspaceType`.
            group: in place of the current one.
            node: where it runs; by default the current node.
            name: of the task; by default the step's.
            num_instances: how many copies of it run at the same time.
        """
        if not name and isinstance(step, core.ExecutionStep):
            name = step.Name()
        self.node = str(Node.current(None if node is None else Node(node)))
        self.group: TaskGroup | None = TaskGroup.current(group, required=False)
        self.name = self._free_name(f"{self.node}/{name or 'task'}")
        if self.group is not None:
            self.group._tasks_to_add.append(self)
        self._already_used = False
        self._step: Any = None
        self._step_with_setup: Any = None
        self._outputs: list[TaskOutput] = []
        self._builder: NetBuilder | None = None
        self._workspace_type = workspace_type
        self._num_instances = num_instances
        if step is not None:
            self.set_step(step)
        if outputs is not None:
            self.add_outputs(outputs)

    def _free_name(self, name: str) -> str:
        used = {task.name for task in self.group._tasks_to_add} if self.group is not None else set()
        made, index = name, 0
        while made in used:
            index += 1
            made = f"{name}:{index}"
        return made

    def __enter__(self) -> Task:
        super().__enter__()
        if self.group is not None:
            # Tasks are in the order in which their blocks end.
            self.group._tasks_to_add.remove(self)
        self._assert_not_used()
        assert self._step is None, "This Task already has an execution step."
        self._builder = NetBuilder(_fullname=self.name)
        self._builder.__enter__()
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        super().__exit__(kind, *arguments)
        assert self._builder is not None
        self._builder.__exit__(kind, *arguments)
        if kind is None:
            self.set_step(self._builder)
        if self.group is not None:
            self.group._tasks_to_add.append(self)
        self._builder = None

    def workspace_type(self) -> str | None:
        return self._workspace_type

    def _assert_not_used(self) -> None:
        assert not self._already_used, "This task has been used already and cannot be modified"

    def _notify_used(self) -> None:
        self.get_step()
        self._already_used = True

    def add_output(self, output: Any) -> TaskOutput:
        self._assert_not_used()
        made = output if isinstance(output, TaskOutput) else TaskOutput(output)
        self._outputs.append(made)
        return made

    def add_outputs(self, outputs: Any) -> Any:
        if not isinstance(outputs, (list, tuple)):
            return self.add_output(outputs)
        return [self.add_output(output) for output in outputs]

    def set_step(self, step: Any) -> None:
        """Set the step: a step, a net or a builder."""
        self._assert_not_used()
        self._step = core.to_execution_step(step)

    def outputs(self) -> list[TaskOutput]:
        return self._outputs

    def output_list(self) -> TaskOutputList:
        return TaskOutputList(self._outputs)

    def output_names(self) -> list[Any]:
        return self.output_list().names()

    def get_step(self) -> Any:
        """Return the step with what runs before, beside and after the task and its instances.

        A task without outputs gets one, as in Caffe2: a zero, by a net that runs after the task.
        """
        if self._step_with_setup is not None:
            return self._step_with_setup
        if self._step is None:
            self._step_with_setup = core.execution_step(self.name, [])
            return self._step_with_setup
        reports = self._report_steps()
        parts = [self._step, *reports]
        around_task = get_setup_nets(self.TASK_SETUP, parts, self)
        around_instance = get_setup_nets(self.TASK_INSTANCE_SETUP, parts, self)
        if not self._outputs:
            output_net = core.Net(f"{self.name}:output")
            self.add_output(output_net.ConstantFill([], 1, dtype=core.DataType.INT32, value=0))
            around_task[1].append(output_net)
        body = self._step
        if reports:
            body = core.execution_step(f"{self.name}:body", [*reports, self._step])
        instance = add_setup_steps(body, *around_instance, f"{self.name}:instance")
        if self._num_instances and self._num_instances > 1:
            instance.SetCreateWorkspace(True)
            instance = core.execution_step(
                f"{self.name}:parallel", [instance], num_concurrent_instances=self._num_instances
            )
        self._step_with_setup = add_setup_steps(instance, *around_task, self.name)
        return self._step_with_setup

    def _report_steps(self) -> list[Any]:
        steps = [
            step
            for step in self._step.get_all_attributes(self.REPORT_STEP)
            if not hasattr(step, "_report_step_used")
        ]
        for step in steps:
            step._report_step_used = True
            if not step.Proto().run_every_ms:
                step.RunEveryMillis(1000)
        return steps

    def __repr__(self) -> str:
        return f"Task(name={self.name}, node={self.node}, outputs={self.output_names()})"
