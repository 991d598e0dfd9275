"""Plans: steps that run nets in turn or at once, once, several times or until a blob is true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from poseidon.caffe2 import scope
from poseidon.caffe2.core.blobs import BlobReference
from poseidon.caffe2.core.net import Net
from poseidon.caffe2.proto import caffe2_pb2


def get_net_name(netlike: Any) -> str | None:
    """Return the name of a net, given as a name, a Net or a NetDef."""
    if isinstance(netlike, Net):
        return netlike.Proto().name  # type: ignore[no-any-return]
    return netlike.name if isinstance(netlike, caffe2_pb2.NetDef) else netlike


class ExecutionStep:
    """A step of a plan: nets, or other steps."""

    _step_names_used: ClassVar[set[str]] = set()

    @staticmethod
    def _get_next_step_name(basename: str) -> str:
        name, index = basename, 0
        while name in ExecutionStep._step_names_used:
            index += 1
            name = f"{basename}_{index}"
        ExecutionStep._step_names_used.add(name)
        return name

    def __init__(self, name: Any, nets: Any = None, num_iter: int | None = None) -> None:
        """Make a step.

        Args:
            name: of the step, or an ExecutionStep message to wrap.
            nets: one net or several, which run in order.
            num_iter: how often.
        """
        self._step = caffe2_pb2.ExecutionStep()
        self._substeps: list[ExecutionStep] = []
        self._nets: list[Net] = []
        self._report_nets: list[Net] = []
        if isinstance(name, caffe2_pb2.ExecutionStep):
            self._step.CopyFrom(name)
            return
        self._step.name = name or ExecutionStep._get_next_step_name("step")
        for net in [nets] if isinstance(nets, (Net, str)) else nets or []:
            self.AddNet(net)
        if num_iter is not None:
            self._step.num_iter = num_iter

    def get_net(self, name: str) -> Net | None:
        return next((net for net in self._nets if net.Name() == name), None)

    def Name(self) -> str:
        return self._step.name

    def __str__(self) -> str:
        return self._step.name

    def Proto(self) -> caffe2_pb2.ExecutionStep:
        """Return the message itself."""
        return self._step

    def HasNets(self) -> bool:
        return bool(self._step.network)

    def HasSubsteps(self) -> bool:
        return bool(self._step.substep)

    def Nets(self) -> list[Net]:
        return self._nets

    def AllNets(self) -> list[Net]:
        """Return the nets of the step and of the steps inside, each once, reporters included."""
        nets: list[Net] = []
        add_nets_in_order(self, nets)
        return nets

    def Substeps(self) -> list[ExecutionStep]:
        return self._substeps

    def SetIter(self, num_iter: int) -> None:
        """Set how often the step runs."""
        self._step.num_iter = num_iter

    def SetCreateWorkspace(self, create_workspace: bool) -> None:
        """Set whether the step has a workspace of its own, inside the current one."""
        self._step.create_workspace = create_workspace

    def SetNumConcurrentInstances(self, num_concurrent_instances: int) -> None:
        """Set how many copies of the step run at the same time."""
        self._step.num_concurrent_instances = num_concurrent_instances

    def SetOnlyOnce(self, only_once: bool) -> None:
        """Set whether a step with a stop blob has one iteration only."""
        self._step.only_once = only_once

    def SetShouldStopBlob(self, should_stop_blob: BlobReference) -> None:
        """Set the blob, a boolean, that ends the iterations."""
        assert isinstance(should_stop_blob, BlobReference), (
            "should_stop_blob must be a BlobReference"
        )
        self._step.should_stop_blob = str(should_stop_blob)

    def RunEveryMillis(self, interval: int) -> None:
        """Run the step every so many milliseconds, beside the other steps, until they end."""
        self._step.run_every_ms = interval

    def SetReportNet(self, report_net: Any, report_interval: int) -> None:
        """Set a net that runs every so many seconds while the step runs."""
        if isinstance(report_net, Net):
            self._report_nets.append(report_net)
        self._step.report_net = str(get_net_name(report_net))
        self._step.report_interval = report_interval

    def AddSubstep(self, substep: Any) -> ExecutionStep:
        """Add a step inside; return this step.

        Raises:
            AssertionError: the step runs nets.
        """
        assert not self.HasNets(), "Cannot have both network and substeps."
        step = substep if isinstance(substep, ExecutionStep) else ExecutionStep(substep)
        self._step.substep.add().CopyFrom(step.Proto())
        self._substeps.append(step)
        return self

    def SetConcurrentSubsteps(self, concurrent_substeps: bool) -> None:
        """Set whether the steps inside run at the same time.

        Raises:
            AssertionError: the step runs nets.
        """
        assert not self.HasNets(), "Cannot have both network and substeps."
        self._step.concurrent_substeps = concurrent_substeps

    def AddNet(self, net: Any) -> ExecutionStep:
        """Add a net; return this step.

        Raises:
            AssertionError: the step has steps inside, or this is not a net.
        """
        assert not self.HasSubsteps(), "Cannot have both network and substeps."
        assert isinstance(net, (Net, str)), f"AddNet: expected a net or its name, found {net!r}"
        self._step.network.append(str(get_net_name(net)))
        if isinstance(net, Net):
            self._nets.append(net)
        return self

    def get_all_attributes(self, name: str) -> list[Any]:
        """Return the values of an attribute of all nets of the step and of the steps inside."""
        values = [value for net in self._nets for value in net.get_attributes(name)]
        return values + [one for step in self._substeps for one in step.get_all_attributes(name)]

    @classmethod
    def create_from_proto(
        cls, step_proto: Any, net_obj_dict: dict[str, Net], net_proto_dict: dict[str, Any]
    ) -> Any:
        """Return a step for a message with nets by name; missing nets are made of their NetDefs."""
        assert isinstance(step_proto, caffe2_pb2.ExecutionStep)
        if step_proto.network and step_proto.substep:
            raise ValueError("Found both network and substep in ExecutionStep")
        step = cls(step_proto.name)
        for name in step_proto.network:
            if name not in net_obj_dict:
                net_obj_dict[name] = Net(net_proto_dict[name])
            step.AddNet(net_obj_dict[name])
        for sub in step_proto.substep:
            step.AddSubstep(cls.create_from_proto(sub, net_obj_dict, net_proto_dict))
        names, substeps = list(step._step.network), list(step._step.substep)
        step._step.CopyFrom(step_proto)
        del step._step.network[:], step._step.substep[:]
        step._step.network.extend(names)
        step._step.substep.extend(substeps)
        return step


def add_nets_in_order(step: ExecutionStep, net_list: list[Net]) -> None:
    """Append the nets of a step and of the steps inside to a list, each once."""
    for substep in step.Substeps():
        add_nets_in_order(substep, net_list)
    for net in [*step.Nets(), *step._report_nets]:
        if net not in net_list:
            net_list.append(net)


class Plan:
    """Steps that run one after the other, and their nets."""

    def __init__(self, name_or_step: Any) -> None:
        """Make a plan, empty under a name, or of one step."""
        self._plan = caffe2_pb2.PlanDef()
        self._net_dict: dict[str, Net] = {}
        self._steps: list[ExecutionStep] = []
        if isinstance(name_or_step, ExecutionStep):
            self._plan.name = name_or_step.Name()
            self.AddStep(name_or_step)
        elif isinstance(name_or_step, str):
            self._plan.name = name_or_step
        else:
            raise ValueError("name_or_step must be a string or ExecutionStep")

    def __str__(self) -> str:
        return self._plan.name

    def Proto(self) -> caffe2_pb2.PlanDef:
        return self._plan

    def AddNets(self, nets: Iterable[Net]) -> None:
        """Add nets.

        Raises:
            AssertionError: another net has the same name.
        """
        for net in nets:
            if net.Name() in self._net_dict:
                assert net is self._net_dict[net.Name()], f"two nets have the name {net.Name()}"
            else:
                self._net_dict[net.Name()] = net
                self._plan.network.add().CopyFrom(net.Proto())

    def Nets(self) -> list[Net]:
        return list(self._net_dict.values())

    def AddStep(self, step: ExecutionStep) -> None:
        assert isinstance(step, ExecutionStep), f"AddStep: expected a step, found {step!r}"
        if not step.HasNets() and not step.HasSubsteps():
            return
        self._plan.execution_step.add().CopyFrom(step.Proto())
        self._steps.append(step)
        self.AddNets(step.AllNets())

    def Steps(self) -> list[ExecutionStep]:
        return self._steps

    def get_all_attributes(self, name: str) -> list[Any]:
        return [value for net in self.Nets() for value in net.get_attributes(name)]

    @classmethod
    def create_from_proto(cls, plan_proto: Any) -> Plan:
        assert isinstance(plan_proto, caffe2_pb2.PlanDef)
        plan = cls(plan_proto.name)
        nets: dict[str, Net] = {}
        protos = {proto.name: proto for proto in plan_proto.network}
        for step in plan_proto.execution_step:
            plan.AddStep(ExecutionStep.create_from_proto(step, nets, protos))
        return plan


def to_execution_step(step_or_nets: Any, default_name: str | None = None) -> ExecutionStep:
    """Return a step for a step, a net, a list of these, a net builder, or a group of tasks."""
    if isinstance(step_or_nets, ExecutionStep):
        return step_or_nets
    if hasattr(step_or_nets, "to_task"):
        made: ExecutionStep = step_or_nets.to_task().get_step()
        return made
    if not default_name and hasattr(step_or_nets, "name"):
        default_name = step_or_nets.name
    stop_blob = getattr(step_or_nets, "_stop_blob", None)
    if hasattr(step_or_nets, "get"):
        step_or_nets = step_or_nets.get()
    return execution_step(default_name, step_or_nets, should_stop_blob=stop_blob)


def execution_step(
    default_name: Any,
    steps_or_nets: Any,
    num_iter: int | None = None,
    report_net: Any = None,
    report_interval: int | None = None,
    concurrent_substeps: bool | None = None,
    should_stop_blob: Any = None,
    only_once: bool | None = None,
    num_concurrent_instances: int | None = None,
    create_workspace: bool = False,
    run_every_ms: int | None = None,
) -> ExecutionStep:
    """Return a step of a net, of a step, or of several of one kind.

    Raises:
        AssertionError: the blob that stops it stands beside a net and is not a reference.
    """
    assert should_stop_blob is None or num_iter is None, (
        "Cannot set both should_stop_blob and num_iter."
    )
    step = ExecutionStep(default_name or "step")
    if should_stop_blob is not None:
        step.SetShouldStopBlob(should_stop_blob)
    for value, apply in (
        (num_iter, step.SetIter),
        (only_once, step.SetOnlyOnce),
        (concurrent_substeps, step.SetConcurrentSubsteps),
        (num_concurrent_instances, step.SetNumConcurrentInstances),
        (create_workspace or None, step.SetCreateWorkspace),
        (run_every_ms, step.RunEveryMillis),
    ):
        if value is not None:
            apply(value)  # type: ignore[arg-type]
    if report_net is not None:
        assert report_interval is not None
        step.SetReportNet(report_net, report_interval)
    if isinstance(steps_or_nets, ExecutionStep):
        step.AddSubstep(steps_or_nets)
    elif isinstance(steps_or_nets, Net):
        step.AddNet(steps_or_nets)
    elif isinstance(steps_or_nets, (list, tuple)):
        if all(isinstance(item, Net) for item in steps_or_nets):
            for net in steps_or_nets:
                step.AddNet(net)
        else:
            for item in steps_or_nets:
                step.AddSubstep(to_execution_step(item))
    elif steps_or_nets:
        raise ValueError(f"expected a step, a net, or a list of these, found {steps_or_nets}")
    return step


def scoped_execution_step(default_name: str | None, *args: Any, **kwargs: Any) -> ExecutionStep:
    """Return an execution step whose name has the current scope before it."""
    default_name = scope.CurrentNameScope() + (default_name or "step")
    return execution_step(default_name, *args, **kwargs)
