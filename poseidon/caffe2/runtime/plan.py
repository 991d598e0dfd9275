"""The running of plans: steps in order or at the same time, over the nets of a workspace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from poseidon.caffe2.proto.caffe2_pb2 import ExecutionStep, NetDef, PlanDef
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.workspace import Workspace

Stop = Callable[[], bool]


def run_plan(plan: PlanDef, workspace: Workspace) -> None:
    """Make the nets of a plan and run its steps.

    Raises:
        RuntimeError: a net cannot be made, or an operator has failed.
    """
    for net in plan.network:
        workspace.create_net(net, overwrite=True)
    definitions = {net.name: net for net in plan.network}
    runner = _Runner(definitions)
    for step in plan.execution_step:
        runner.run(step, workspace, lambda: False)


class _Runner:
    """Runs steps; keeps what the steps of a plan share."""

    def __init__(self, nets: dict[str, NetDef]) -> None:
        self.nets = nets

    def run(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        """Run a step, and copies of it at the same time where it asks for these."""
        copies = step.num_concurrent_instances or 1
        if copies > 1:
            self._together([lambda end: self._run_one(step, workspace, end)] * copies, stopped)
        else:
            self._run_one(step, workspace, stopped)

    def _run_one(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        if step.create_workspace:
            inner = Workspace(workspace.root_folder, parent=workspace)
            for name in _nets_of(step):
                inner.create_net(self.nets[name], overwrite=True)
            workspace = inner
        if step.report_net:
            self._beside(
                step.report_net,
                step.report_interval,
                workspace,
                lambda: self._iterate(step, workspace, stopped),
            )
        else:
            self._iterate(step, workspace, stopped)

    def _iterate(self, step: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        def should_stop() -> bool:
            return stopped() or (bool(step.should_stop_blob) and _is_true(workspace, step.should_stop_blob))

        iteration = 0
        endless = bool(step.should_stop_blob) and not step.HasField("num_iter")
        total = step.num_iter if step.HasField("num_iter") else 1
        while (endless or iteration < total) and not stopped():
            if self._once(step, workspace, iteration, should_stop):
                return
            iteration += 1

    def _once(self, step: ExecutionStep, workspace: Workspace, iteration: int, should_stop: Stop) -> bool:
        """Run the parts of a step once; return whether the iterations end."""
        for name in step.network:
            net = workspace.nets.get(name)
            if net is None:
                raise EnforceNotMet(f"Network {name} not found in the plan")
            net.run()
            if should_stop():
                return True
        parts = [part for part in step.substep if iteration == 0 or not part.only_once]
        if step.concurrent_substeps and len(parts) > 1:
            self._together(
                [lambda end, part=part: self._part(part, workspace, end) for part in parts],  # type: ignore[misc]
                should_stop,
            )
        else:
            for part in parts:
                self.run(part, workspace, should_stop)
                if should_stop():
                    return True
        return should_stop()

    def _part(self, part: ExecutionStep, workspace: Workspace, stopped: Stop) -> None:
        if not part.run_every_ms:
            self.run(part, workspace, stopped)
            return
        while not stopped():
            time.sleep(part.run_every_ms / 1000)
            self.run(part, workspace, stopped)

    def _together(self, parts: list[Callable[[Stop], None]], stopped: Stop) -> None:
        """Run parts on threads; the first that fails ends the others."""
        failed = threading.Event()

        def end() -> bool:
            return failed.is_set() or stopped()

        def guarded(part: Callable[[Stop], None]) -> None:
            try:
                part(end)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(parts)) as pool:
            for future in [pool.submit(guarded, part) for part in parts]:
                future.result()

    def _beside(self, net: str, interval_s: int, workspace: Workspace, work: Callable[[], None]) -> None:
        """Run a net every so many seconds while the work is under way, and once at its end."""
        done = threading.Event()

        def report() -> None:
            while not done.wait(interval_s or 1):
                workspace.nets[net].run()

        thread = threading.Thread(target=report, name=f"report of {net}")
        thread.start()
        try:
            work()
        finally:
            done.set()
            thread.join()
        workspace.nets[net].run()


def _nets_of(step: ExecutionStep) -> Iterable[str]:
    yield from step.network
    for part in step.substep:
        yield from _nets_of(part)


def _is_true(workspace: Workspace, name: str) -> bool:
    value = workspace.get(name).value
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise EnforceNotMet(f"The blob {name} that stops a step is not one boolean")
    return bool(value.item())
