"""Recurrent networks: a step net that runs once for each element of a sequence, and its gradient.

Links say which blob of the step net is which part of a tensor outside: of a sequence (element t),
or of a state, which has one element more than the sequence: the initial one, then one for each
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import ANY, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.chains import first_reads, made_by
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.net import Net
from poseidon.caffe2.runtime.values import Blob, strings_of
from poseidon.caffe2.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Link:
    """A blob of the step net, and its value's place at step t: t + offset, `window` of them."""

    internal: str
    external: str
    offset: int
    window: int = 1

    def part(self, step: int) -> slice:
        """Return the elements that the blob is at a step."""
        return slice(step + self.offset, step + self.offset + self.window)


def _links(
    internal: list[str], external: list[str], offset: list[int], window: list[int]
) -> list[Link]:
    return [
        Link(*parts)
        for parts in zip(internal, external, offset, window or [1] * len(internal), strict=True)
    ]


@dataclass(eq=False)
class StepWorkspaces:
    """The workspaces of the steps of a recurrent network; they are used again in its next run.

    Attributes:
        owner: the operator that made them.
        workspaces: one for each step, or a single one where no gradient is wanted.
        nets: the nets compiled in them, by the operator that runs them.
        states: the states after the last run, with the initial ones: T + 1 elements each.
    """

    owner: RecurrentNetwork
    workspaces: list[Workspace] = field(default_factory=list)
    nets: dict[Any, list[Net]] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)

    def net(
        self, runner: Any, definition: NetDef, step: int, shared: Callable[[str, bool], Blob | None]
    ) -> Net:
        """Return the net of a step, compiled where this step is run for the first time.

        Args:
            runner: the operator that runs it.
            definition: the net.
            step: the number of the workspace.
            shared: returns the blob of a name that all steps share, None for a blob of the step; an
                operator must have what it reads, while an external input that no operator reads may
                be absent.
        """
        if step == len(self.workspaces):
            self.workspaces.append(Workspace())
        made = self.nets.setdefault(runner, [])
        while len(made) <= step:
            blobs = self.workspaces[len(made)].blobs
            read = {name for op in definition.op for name in op.input}
            for name in (*definition.external_input, *sorted(read)):
                if name not in blobs:
                    blobs[name] = shared(name, name in read) or Blob()
            made.append(Net(definition, self.workspaces[len(made)]))
        return made[step]


def _sharing(net: NetDef, links: Sequence[Link]) -> tuple[NetDef, dict[str, str]]:
    """Return a step net in which windows of a state have the element that the step itself writes.

    In Caffe2 such a window and the element share memory. Here an operator joins both.

    Args:
        net: the step net.
        links: its links.

    Returns:
        the net, and for each such window the blob of its earlier elements.
    """
    written, earlier, made = set(made_by(net.op)), {}, copy.deepcopy(net)
    for window in (link for link in links if link.internal not in written):
        for new in (
            link for link in links if link.internal in written and link.external == window.external
        ):
            if not window.offset <= new.offset < window.offset + window.window:
                continue
            if new.offset + new.window != window.offset + window.window:
                raise ValueError(f"{new.internal} is not the end of the window {window.internal}")
            before = earlier[window.internal] = f"{window.internal}_before"
            joined = OperatorDef(
                type="Concat", input=[before, new.internal], output=[window.internal]
            )
            joined.arg.add(name="axis", i=0)
            place = max(index for index, op in enumerate(made.op) if new.internal in op.output) + 1
            operators = [*made.op[:place], joined, *made.op[place:]]
            made.ClearField("op")
            made.op.extend(operators)
            made.external_input.append(before)
    return made, earlier


def _recurrent_rule(maker: GradientMaker) -> None:
    """Give the gradient operator all inputs and outputs of sequence, parameters, first states."""
    forward = maker.forward
    given = [maker.GO(index) for index in maker.argument("outputs_with_grads") or [0]]
    wanted = [0, *(maker.argument("param") or []), *maker.argument("initial_recurrent_state_ids")]
    inputs = [*given, *forward.input, *forward.output]
    maker.op("RecurrentNetworkGradient", inputs, [maker.GI(index) for index in wanted])


@operator(
    "RecurrentNetwork", gradient=_recurrent_rule, blobs=True, inputs=(1, ANY), outputs=(2, ANY)
)
class RecurrentNetwork:
    """Runs a step net along the first dimension of its first input.

    The inputs are the sequence, the first states and what the steps read beside these (parameters).
    The outputs are parts of the states, and last the workspaces of the steps.

    Args of the operator:
        step_net: the net. recurrent_states, initial_recurrent_state_ids: names of the states, and
        the inputs that they begin with. link_internal, link_external, link_offset, link_window: see
        `Link`. alias_src, alias_dst, alias_offset: for an output (dst) the state, and where its
        part begins; -1 is the last
            element. An output with the name of a state is all of that.
        timestep: the blob of the step's number.
        backward_step_net: the gradient of a step; without it no values are kept for one.
        recompute_blobs_on_backward: blobs that the gradient computes again; they are not kept.
    """

    def __init__(
        self,
        *,
        context: Context,
        step_net: NetDef,
        recurrent_states: list[str],
        initial_recurrent_state_ids: list[int],
        link_internal: list[str],
        link_external: list[str],
        link_offset: list[int],
        alias_src: list[str],
        alias_dst: list[str],
        alias_offset: list[int],
        link_window: list[int] = [],  # noqa: B006
        timestep: str = "timestep",
        backward_step_net: NetDef | None = None,
        recompute_blobs_on_backward: list[str] = [],  # noqa: B006
    ) -> None:
        links = _links(link_internal, link_external, link_offset, link_window)
        self.net, self.earlier = _sharing(step_net, links)
        self.context, self.timestep = context, timestep
        self.initial = dict(zip(recurrent_states, initial_recurrent_state_ids, strict=True))
        self.parts = {name: (name, 0) for name in recurrent_states}
        self.parts.update(zip(alias_dst, zip(alias_src, alias_offset, strict=True), strict=True))
        self.keeps = backward_step_net is not None and bool(backward_step_net.op)
        self.dropped = recompute_blobs_on_backward
        written = set(made_by(step_net.op))
        self.reads = [link for link in links if link.internal not in written or link.offset == 0]
        self.writes = [
            link for link in links if link.internal in written and link.external in self.initial
        ]
        self.own = {timestep, *link_internal, *written, *self.earlier.values()}

    def _shared(self, name: str, required: bool) -> Blob | None:
        if name in self.own:
            return None
        found: Blob | None = (
            self.context.workspace.get(name) if required else self.context.workspace.find(name)
        )
        return found

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        sequence = inputs[0].value
        length = len(sequence)
        places = {name: index for index, name in enumerate(self.context.definition.input)}
        first = {
            name: _first_states(inputs[index].value, sequence)
            for name, index in self.initial.items()
        }
        states = {name: list(values.unsqueeze(1).unbind(0)) for name, values in first.items()}
        begins = {name: len(values) for name, values in first.items()}
        steps = outputs[-1].value
        if not isinstance(steps, StepWorkspaces) or steps.owner is not self:
            steps = StepWorkspaces(self)
        for step in range(length):
            number = step if self.keeps else 0
            net = steps.net(self, self.net, number, self._shared)
            blobs = steps.workspaces[number].blobs
            blobs.setdefault(self.timestep, Blob()).value = torch.tensor([step], dtype=torch.int32)
            for link in self.reads:
                part = link.part(step)
                blob = blobs.setdefault(self.earlier.get(link.internal, link.internal), Blob())
                if link.external in states:
                    elements = states[link.external][part]
                    blob.value = torch.cat(elements) if elements else sequence.new_zeros(0)
                else:
                    blob.value = inputs[places[link.external]].value[part]
            net.run()
            for link in self.writes:
                if link.offset >= begins[link.external]:
                    states[link.external].append(blobs[link.internal].value)
            for name in self.dropped:
                blobs[name].value = None
        steps.states = {
            name: torch.cat([values, *states[name][begins[name] :]])
            for name, values in first.items()
        }
        for name, blob in zip(self.context.definition.output[:-1], outputs, strict=False):
            state, offset = self.parts[name]
            blob.value = steps.states[state][offset:]
        outputs[-1].value = steps


def _first_states(value: Tensor, sequence: Tensor) -> Tensor:
    """Return a state's first elements, (elements, N, D); a vector holds for each sequence."""
    if value.dim() == 1:
        return value.expand(1, sequence.shape[1], value.shape[-1])
    return value if value.dim() == 3 else value.reshape(1, -1, value.shape[-1])


@operator("RecurrentNetworkGradient", blobs=True, inputs=(3, ANY), outputs=(1, ANY))
class RecurrentNetworkGradient:
    """Runs the gradients of the steps in reverse order; the gradients of parameters are summed."""

    def __init__(
        self,
        *,
        context: Context,
        backward_step_net: NetDef,
        recurrent_states: list[str],
        initial_recurrent_state_ids: list[int],
        backward_link_internal: list[str],
        backward_link_external: list[str],
        backward_link_offset: list[int],
        param: list[int] = [],  # noqa: B006
        param_grads: list[str] = [],  # noqa: B006
        outputs_with_grads: list[int] = [0],  # noqa: B006
        backward_link_window: list[int] = [],  # noqa: B006
    ) -> None:
        self.context, self.net = context, backward_step_net
        self.states, self.initial = recurrent_states, initial_recurrent_state_ids
        self.given = outputs_with_grads
        names = context.definition.input[len(outputs_with_grads) :]
        self.param_grads = param_grads or [f"{names[index]}_grad" for index in param]
        links = _links(
            backward_link_internal,
            backward_link_external,
            backward_link_offset,
            backward_link_window,
        )
        operators = backward_step_net.op
        read, written = set(first_reads(operators)), set(made_by(operators))
        self.reads = [
            link for link in links if link.internal in read or link.internal not in written
        ]
        self.writes = [link for link in links if link.internal in written - read]
        self.own = {*backward_link_internal, *written}

    def _shared(self, name: str, required: bool) -> Blob | None:
        return None if name in self.own else self.context.workspace.find(name)

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        steps = inputs[-1].value
        if not isinstance(steps, StepWorkspaces):
            raise EnforceNotMet("The last input is not what RecurrentNetwork has kept of its steps")
        sequence = inputs[len(self.given)].value
        outer = {f"{name}_grad": torch.zeros_like(steps.states[name]) for name in self.states}
        of_outputs = steps.owner.context.definition.output
        for blob, index in zip(inputs, self.given, strict=False):
            state, offset = steps.owner.parts[of_outputs[index]]
            outer[f"{state}_grad"][offset:] += blob.value
        inner = {name: torch.zeros_like(value) for name, value in outer.items()}
        of_sequence = torch.zeros_like(sequence)
        totals: dict[str, Tensor] = {}
        for step in reversed(range(len(sequence))):
            net = steps.net(self, self.net, step, self._shared)
            blobs = steps.workspaces[step].blobs
            for link in self.reads:
                part = link.part(step)
                blobs[link.internal].value = outer[link.external][part] + inner[link.external][part]
            net.run()
            for link in self.writes:
                target = inner.get(link.external, of_sequence)
                target[link.part(step)] += blobs[link.internal].value
            for name in self.param_grads:
                value = blobs[name].value
                totals[name] = totals[name] + value if name in totals else value
        self._give(
            inputs,
            outputs,
            of_sequence,
            totals,
            {name: outer[name] + inner[name] for name in outer},
        )

    def _give(
        self,
        inputs: Sequence[Blob],
        outputs: Sequence[Blob],
        of_sequence: Tensor,
        totals: dict[str, Tensor],
        of_states: dict[str, Tensor],
    ) -> None:
        """Set the outputs: gradients of the sequence, the parameters and the first states."""
        outputs[0].value = of_sequence
        count = len(self.param_grads)
        for name, blob in zip(self.param_grads, outputs[1:], strict=False):
            blob.value = totals.get(name, torch.zeros(()))
        for state, index, blob in zip(self.states, self.initial, outputs[1 + count :], strict=True):
            first = inputs[len(self.given) + index].value
            gradient = of_states[f"{state}_grad"][: len(first) if first.dim() == 3 else 1]
            blob.value = gradient.sum((0, 1)) if first.dim() == 1 else gradient.reshape(first.shape)


@operator("RecurrentNetworkBlobFetcher", blobs=True, inputs=(1, 1), outputs=(1, 1))
class RecurrentNetworkBlobFetcher:
    """Copies the blobs of all steps to `<prefix>_<name><step>` in the workspace; has the names."""

    def __init__(
        self,
        *,
        context: Context,
        prefix: str = "rnn",
        blob_names: list[str] = [],  # noqa: B006
    ) -> None:
        self.workspace, self.prefix, self.names = context.workspace, prefix, blob_names

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        found: list[bytes] = []
        for step, inner in enumerate(inputs[0].value.workspaces):
            for name in self.names or _tensors(inner.blobs):
                made = f"{self.prefix}_{name}{step}"
                self.workspace.create(made).value = inner.get(name).value.clone()
                found.append(made.encode())
        outputs[0].value = strings_of(found)


def _tensors(blobs: dict[str, Blob]) -> Iterable[str]:
    return sorted(name for name, blob in blobs.items() if isinstance(blob.value, Tensor))
