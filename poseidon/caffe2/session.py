"""Sessions: they run nets, steps, plans and tasks, and keep the workspace between."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.task import Cluster, Task, TaskGroup, WorkspaceType


class CompiledRunnable(NamedTuple):
    """What `Session.compile` returns: the compiled object, and its class of sessions."""

    obj: Any
    session_class: type


class Session:
    """The base of sessions: an implementation compiles and runs a group of tasks."""

    _compiled_cache: ClassVar[WeakKeyDictionary[Any, CompiledRunnable]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._open = True

    def is_open(self) -> bool:
        return self._open

    @classmethod
    def compile(
        cls, runnable: Any, workspace_type: str | None = None, setup_net_list: Any = None
    ) -> CompiledRunnable:
        """Return a runnable in the form that the session runs; each is compiled once.

        Args:
            runnable: a group of tasks, a task, a step, a plan, a net or a list of nets.
            workspace_type: see `WorkspaceType`.
            setup_net_list: nets for sessions that have use for them.

        Raises:
            AssertionError: it was compiled for a different class of sessions or workspaces.
        """
        if isinstance(runnable, CompiledRunnable):
            assert cls == runnable.session_class, (
                f"Runnable was compiled for different session type. Need: {cls.__name__}, "
                f"got: {runnable.session_class.__name__}"
            )
            return runnable
        hashable = not isinstance(runnable, (list, tuple))
        if hashable and runnable in cls._compiled_cache:
            return cls._compiled_cache[runnable]
        group = _group_of(runnable, workspace_type)
        compiled = CompiledRunnable(cls._compile_task_group(group, setup_net_list), cls)
        if hashable:
            cls._compiled_cache[runnable] = compiled
        return compiled

    def run(
        self, runnable: Any, workspace_type: str | None = None, setup_net_list: Any = None
    ) -> None:
        """Run a runnable; see `compile`.

        Raises:
            AssertionError: the session is closed.
        """
        assert self.is_open(), "Session is closed."
        assert runnable is not None, "The runnable is None"
        self._run_compiled(self.compile(runnable, workspace_type, setup_net_list).obj)

    def close(self) -> None:
        """End the session; what it has is dropped."""
        if self.is_open():
            self._do_close()
            self._open = False

    def fetch_output(self, output: Any) -> Any:
        raise NotImplementedError

    def _run_compiled(self, compiled: Any) -> None:
        raise NotImplementedError

    @classmethod
    def _compile_task_group(cls, task_group: TaskGroup, setup_net_list: Any = None) -> Any:
        return task_group

    def _do_close(self) -> None:
        """Drop nothing."""

    def __enter__(self) -> Session:
        assert self._open, "Session already closed."
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()


def _group_of(runnable: Any, workspace_type: str | None) -> TaskGroup:
    if isinstance(runnable, TaskGroup):
        if workspace_type:
            known = runnable.workspace_type()
            assert known in (None, workspace_type), f"needs {workspace_type}, has {known}"
            runnable._workspace_type = workspace_type
        return runnable
    group = TaskGroup(workspace_type or WorkspaceType.GLOBAL)
    if isinstance(runnable, Task):
        group.add(runnable)
    elif isinstance(runnable, core.Plan):
        steps = runnable.Steps()
        assert steps, "The plan has no steps."
        group.add(Task(step=steps[0] if len(steps) == 1 else steps, group=TaskGroup()))
    else:
        step = (
            runnable
            if isinstance(runnable, core.ExecutionStep)
            else core.execution_step("runnable", runnable)
        )
        group.add(Task(step=step, group=TaskGroup()))
    return group


class LocalSession(Session):
    """Runs the tasks of all nodes in this process, at the same time, over one workspace."""

    def __init__(self, ws: Any = None) -> None:
        """Open a session.

        Args:
            ws: its workspace, as `workspace.C` gives them; by default the current one.
        """
        super().__init__()
        self._ws = ws or workspace.C.Workspace.current

    @classmethod
    def _compile_task_group(cls, task_group: TaskGroup, setup_net_list: Any = None) -> Any:
        with Cluster():
            task = task_group.to_task()
        plan = core.Plan("task_group_plan")
        plan.AddStep(task.get_step())
        return plan, task.output_list(), task.workspace_type()

    def _run_compiled(self, compiled: Any) -> None:
        plan, output_list, workspace_type = compiled
        outputs = [core.BlobReference(str(name)) for name in output_list.names()]
        for output in outputs:
            self._ws.create_blob(str(output))
        output_list.set_values(
            outputs, _fetch_func=lambda output: self._ws.blobs[str(output)].fetch()
        )
        private = workspace_type == WorkspaceType.PRIVATE
        with workspace.WorkspaceGuard(
            workspace.C.Workspace(self._ws) if private else self._ws
        ) as inside:
            inside.run(plan)
