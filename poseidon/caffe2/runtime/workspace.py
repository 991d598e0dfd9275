"""A workspace: blobs by name, nets over them, plans whose steps run nets in turn or at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch

from poseidon.caffe2.proto.caffe2_pb2 import ExecutionStep, NetDef, OperatorDef, PlanDef
from poseidon.caffe2.runtime.dag import Stop, cancellable, is_cancelled
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.net import Net, compile_operator, failure
from poseidon.caffe2.runtime.values import Blob


class Workspace:
    """Blobs and nets by name.

    Attributes:
        blobs: the workspace's own blobs.
        nets: its compiled nets.
        root_folder: the folder that operators with files start from.
        parent: the workspace whose blobs are seen too, where this one has none of the name.
    """

    def __init__(self, root_folder: str = ".", parent: Workspace | None = None) -> None:
        self.blobs: dict[str, Blob] = {}
        self.nets: dict[str, Net] = {}
        self.root_folder = root_folder
        self.parent = parent

    def find(self, name: str) -> Blob | None:
        """Return the blob of a name, None where there is none."""
        blob = self.blobs.get(name)
        if blob is None and self.parent is not None:
            return self.parent.find(name)
        return blob

    def get(self, name: str) -> Blob:
        """Return the blob of a name.

        Raises:
            RuntimeError: there is none.
        """
        blob = self.find(name)
        if blob is None:
            raise EnforceNotMet(f"Can't find blob: {name}")
        return blob

    def create(self, name: str) -> Blob:
        """Return the blob of a name; an empty one is made where there is none."""
        blob = self.find(name)
        if blob is None:
            blob = self.blobs[name] = Blob()
        return blob

    def create_net(self, definition: NetDef, overwrite: bool = False) -> Net:
        """Compile a net and keep it under its name.

        Raises:
            RuntimeError: there is a net of this name and `overwrite` is not set.
            RuntimeError: an operator cannot be made.
        """
        if definition.name in self.nets and not overwrite:
            raise EnforceNotMet(f"net {definition.name} exists; overwrite=True replaces it")
        self.nets[definition.name] = net = Net(definition, self)
        return net

    def run_once(self, definition: NetDef) -> None:
        """Compile a net, run it, and forget it."""
        Net(definition, self).run()

    def run_operator(self, definition: OperatorDef) -> None:
        call = compile_operator(definition, self)
        try:
            call()
        except Exception as error:
            raise failure(
                error, definition, [self.get(name) for name in definition.input]
            ) from error

    def reset(self, root_folder: str | None = None) -> None:
        """Drop all blobs and nets; the root folder stays unless one is given."""
        self.nets.clear()
        self.blobs.clear()
        if root_folder is not None:
            self.root_folder = root_folder


def run_plan(plan: PlanDef, workspace: Workspace) -> None:
    """Make the nets of a plan and run its steps.

    Raises:
        RuntimeError: a net cannot be made, or an operator has failed.
    """
    runner = _Runner({net.name: net for net in plan.network})
    for step in plan.execution_step:
        runner.run(step, workspace, lambda: False)


class _Runner:
    """Runs steps, and makes nets at their first run: a step may have its own workspace."""

    def __init__(self, nets: dict[str, NetDef]) -> None:
        self.nets = nets
        self._made: WeakKeyDictionary[Workspace, dict[str, Net]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def _net(self, name: str, workspace: Workspace) -> Net:
        with self._lock:
            made = self._made.setdefault(workspace, {})
            if name not in made:
                if name in self.nets:
                    made[name] = workspace.create_net(self.nets[name], overwrite=True)
                elif name in workspace.nets:
                    made[name] = workspace.nets[name]
                else:
                    raise EnforceNotMet(f"Network {name} not found in the plan")
            return made[name]

    def run(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        """Run a step, and copies of it at the same time where it asks for these."""
        copies = step.num_concurrent_instances or 1
        if copies > 1:
            self._together([partial(self._run_one, step, workspace)] * copies, stopped)
        else:
            self._run_one(step, workspace, stopped)

    def _run_one(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        if step.create_workspace:
            workspace = Workspace(workspace.root_folder, parent=workspace)
        with ExitStack() as beside:
            if step.report_net:
                net = self._net(step.report_net, workspace)
                beside.enter_context(_repeated(net.run, step.report_interval or 1, step.report_net))
            self._iterate(step, workspace, stopped)

    def _iterate(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        endless = (
            bool(step.should_stop_blob) and not step.HasField("num_iter") and not step.only_once
        )
        total = step.num_iter if step.HasField("num_iter") else 1
        iteration = 0
        while (endless or iteration < total) and not stopped():
            if self._once(step, workspace, stopped):
                return
            iteration += 1

    def _once(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> bool:
        """Run the parts of a step once; return whether the iterations end.

        A step looks at its own blob, and behind each part only: the blob may be an old one before.
        """

        def should_stop() -> bool:
            return stopped() or (
                bool(step.should_stop_blob) and _is_true(workspace, step.should_stop_blob)
            )

        for name in step.network:
            self._net(name, workspace).run()
            if should_stop():
                return True
        parts = step.substep
        with ExitStack() as beside:
            for part in parts:
                if part.run_every_ms:
                    often = partial(self.run, part, workspace, stopped)
                    beside.enter_context(_repeated(often, part.run_every_ms / 1000, part.name))
            own = [part for part in parts if not part.run_every_ms]
            workers = [partial(self.run, part, workspace) for part in own]
            if step.concurrent_substeps and len(workers) > 1:
                self._together(workers, stopped)
            else:
                for work in workers:
                    work(stopped)
                    if should_stop():
                        return True
        return should_stop()

    def _together(self, parts: Sequence[Callable[[Stop], None]], stopped: Stop) -> None:
        """Run parts on threads; the first that fails ends the others."""
        failed = threading.Event()

        def end() -> bool:
            return failed.is_set() or stopped()

        def guarded(part: Callable[[Stop], None]) -> None:
            try:
                with cancellable(end):
                    part(end)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(parts)) as pool:
            futures = [pool.submit(guarded, part) for part in parts]
            errors = [error for error in (future.exception() for future in futures) if error]
        # A wait that was cancelled is not the cause.
        for error in sorted(errors, key=is_cancelled):
            raise error


@contextmanager
def _repeated(call: Callable[[], None], interval_s: float, name: str) -> Iterator[None]:
    """Make a call every so many seconds while the block is under way, and once at its end.

    Raises:
        BaseException: what the first call that failed has raised.
    """
    done = threading.Event()
    errors: list[BaseException] = []

    def repeat() -> None:
        try:
            while not done.wait(interval_s):
                call()
        except BaseException as error:  # noqa: BLE001 (the thread of the block raises it)
            errors.append(error)

    label = f"caffe2-every-{interval_s}-s-{name}"
    thread = threading.Thread(target=repeat, name=label, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
    call()


def _is_true(workspace: Workspace, name: str) -> bool:
    value = workspace.get(name).value
    if value is None:
        return False
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise EnforceNotMet(f"The blob {name} that stops a step is not one boolean")
    return bool(value.item())
