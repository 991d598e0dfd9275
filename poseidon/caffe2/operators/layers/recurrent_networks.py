"""Recurrent networks: a net that runs once for each step of a sequence, and its gradient.

The arguments describe how the blobs of the step net and those outside go together:

* Links (`link_internal`, `link_external`, `link_offset`): at step t the step net's blob is entry t + offset of the
  outer one, a sequence or a state.
* States (`recurrent_states`, `initial_recurrent_state_ids`): sequences of T + 1 entries; the first is an input of the
  operator, the others are made step by step.
* Aliases (`alias_src`, `alias_dst`, `alias_offset`): the outputs are states from an entry on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf import text_format
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import ANY, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, NetDef
from poseidon.caffe2.runtime.blob import Blob
from poseidon.caffe2.runtime.net import Net
from poseidon.caffe2.runtime.workspace import Workspace

RENAME = ".rename"


@dataclass(frozen=True, slots=True)
class Link:
    """At step t the blob `internal` of the step net is entry t + offset of `external`."""

    internal: str
    external: str
    offset: int


@dataclass(slots=True)
class Steps:
    """What the steps of a sequence have left for the gradient.

    Attributes:
        values: the blobs of the step net, by step.
        states: the entries of each state.
    """

    values: list[dict[str, Any]]
    states: dict[str, list[Tensor]]


def net_of(argument: Argument) -> NetDef:
    """Return the net of an argument: a message, or its text."""
    if argument.HasField("n"):
        return argument.n
    return text_format.Parse(argument.s.decode(), NetDef())


def _links(
    context: Context, internal: Sequence[str], external: Sequence[str], offsets: Sequence[int]
) -> list[Link]:
    new = {
        a.name.removesuffix(RENAME): a.s.decode() for a in context.definition.arg if a.name.endswith(RENAME)
    }
    parts = zip(internal, external, offsets, strict=True)
    return [Link(new.get(inner, inner), new.get(outer, outer), offset) for inner, outer, offset in parts]


class _StepNet:
    """A net that runs for one step after the other in a workspace of its own; it sees the blobs outside."""

    def __init__(self, context: Context, definition: NetDef, own: Sequence[str]) -> None:
        self.context = context
        self.definition = NetDef()
        self.definition.CopyFrom(definition)
        self.definition.type = "simple"
        self.made = {name for op in definition.op for name in op.output}
        self.names = {*own, *self.made}
        self.workspace: Workspace | None = None
        self.net: Net | None = None

    def blobs(self) -> dict[str, Blob]:
        """Return the blobs of its own, at first empty."""
        if self.workspace is None:
            outer = self.context.workspace
            self.workspace = Workspace(outer.root_folder, parent=outer)
            self.workspace.blobs.update((name, Blob()) for name in self.names)
        return self.workspace.blobs

    def run(self) -> None:
        """Run it once; it is compiled first."""
        if self.net is None:
            self.blobs()
            assert self.workspace is not None
            self.net = Net(self.definition, self.workspace)
        self.net.run()


def _rule(maker: GradientMaker) -> None:
    given = maker.argument("outputs_with_grads", [0])
    inputs = [maker.GO(index) for index in given]
    wanted = [0, *maker.argument("param", []), *maker.argument("initial_recurrent_state_ids", [])]
    maker.op(
        "RecurrentNetworkGradient",
        [*inputs, *maker.forward.input, *maker.forward.output],
        [maker.GI(index) for index in wanted],
    )


@operator("RecurrentNetwork", gradient=_rule, blobs=True, inputs=(1, ANY), outputs=(2, ANY))
class RecurrentNetwork:
    """Runs a net for each step of the sequences that are its inputs, each of T entries along the first dimension.

    The outputs are those of the aliases, and at the end what the gradient needs of each step.
    """

    def __init__(
        self,
        *,
        context: Context,
        step_net: Argument,
        recurrent_states: list[str],
        initial_recurrent_state_ids: list[int],
        link_internal: list[str],
        link_external: list[str],
        link_offset: list[int],
        alias_src: list[str],
        alias_dst: list[str],
        alias_offset: list[int],
        timestep: str = "timestep",
        backward_step_net: Argument | None = None,
    ) -> None:
        self.context = context
        self.links = _links(context, link_internal, link_external, link_offset)
        self.initial = dict(zip(recurrent_states, initial_recurrent_state_ids, strict=True))
        self.aliases = _links(context, alias_dst, alias_src, alias_offset)
        self.timestep = timestep
        self.keep = backward_step_net is not None
        self.step = _StepNet(context, net_of(step_net), [timestep, *(link.internal for link in self.links)])

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        """Run all steps."""
        names = list(self.context.definition.input)
        steps, batch = inputs[0].value.shape[:2]
        states = {name: [_initial(inputs[index].value, batch)] for name, index in self.initial.items()}
        blobs = self.step.blobs()
        values: list[dict[str, Any]] = []
        for t in range(steps):
            blobs[self.timestep].value = torch.tensor([t], dtype=torch.int32)
            for link in self.links:
                if link.internal in self.step.made:
                    continue
                place = t + link.offset
                blobs[link.internal].value = (
                    states[link.external][place]
                    if link.external in states
                    else inputs[names.index(link.external)].value[place : place + 1]
                )
            self.step.run()
            for link in self.links:
                if link.internal in self.step.made:
                    states[link.external].append(blobs[link.internal].value)
            if self.keep:
                values.append({name: blobs[name].value for name in self.step.names})
        whole = {name: torch.cat(entries) for name, entries in states.items()}
        for name, value in whole.items():
            self.context.workspace.create(name).value = value
        for alias, output in zip(self.aliases, outputs, strict=False):
            output.value = whole[alias.external][alias.offset :]
        outputs[-1].value = Steps(values, states)


def _initial(value: Tensor, batch: int) -> Tensor:
    """Return the first entry of a state, shape (1, batch, D): one vector is that of the whole batch."""
    if value.dim() == 1:
        return value.expand(1, batch, -1)
    return value if value.dim() > 2 else value.unsqueeze(0)


@operator("RecurrentNetworkGradient", blobs=True, inputs=(1, ANY), outputs=(1, ANY))
class RecurrentNetworkGradient:
    """Runs the backward net for each step, the last first.

    The inputs are the gradients of the outputs `outputs_with_grads`, and inputs and outputs of the forward operator; the
    outputs are the gradients of the first sequence, of the parameters and of the initial states.
    """

    def __init__(
        self,
        *,
        context: Context,
        backward_step_net: Argument,
        recurrent_states: list[str],
        initial_recurrent_state_ids: list[int],
        backward_link_internal: list[str],
        backward_link_external: list[str],
        backward_link_offset: list[int],
        alias_src: list[str],
        alias_dst: list[str],
        alias_offset: list[int],
        outputs_with_grads: list[int] = [0],  # noqa: B006 (it is not changed)
        param: list[int] = [],  # noqa: B006
        param_grads: list[str] = [],  # noqa: B006
    ) -> None:
        self.links = _links(context, backward_link_internal, backward_link_external, backward_link_offset)
        self.states = recurrent_states
        self.initial = initial_recurrent_state_ids
        self.aliases = _links(context, alias_dst, alias_src, alias_offset)
        self.given = outputs_with_grads
        self.params = dict(zip(param, param_grads, strict=True))
        definition = net_of(backward_step_net)
        read = {name for op in definition.op for name in op.input}
        self.read = read
        self.step = _StepNet(context, definition, [link.internal for link in self.links])

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        """Run all steps."""
        forward = inputs[len(self.given) : len(inputs) - len(self.aliases) - 1]
        steps: Steps = inputs[-1].value
        grads = {name: [torch.zeros_like(entry) for entry in steps.states[name]] for name in self.states}
        for index, blob in zip(self.given, inputs, strict=False):
            alias = self.aliases[index]
            entries = grads[alias.external]
            begin = alias.offset % len(entries)
            for place, part in enumerate(blob.value.split(1), begin):
                entries[place] = entries[place] + part
        whole: list[Tensor] = [torch.zeros_like(part) for part in forward[0].value.split(1)]
        params: dict[str, Tensor] = {}
        for t in reversed(range(len(steps.values))):
            self._run_step(t, steps, grads, whole)
            blobs = self.step.blobs()
            for name in self.params.values():
                value = blobs[name].value
                params[name] = params[name] + value if name in params else value
        outputs[0].value = torch.cat(whole)
        made = iter(outputs[1:])
        for name in self.params.values():
            next(made).value = params[name]
        for state, index in zip(self.states, self.initial, strict=True):
            start = forward[index].value
            first = grads[state][0]
            next(made).value = first.sum((0, 1)) if start.dim() == 1 else first.reshape(start.shape)

    def _run_step(self, t: int, steps: Steps, grads: dict[str, list[Tensor]], whole: list[Tensor]) -> None:
        """Run the backward net for step t: from the gradients of its results to those of what it started from."""
        blobs = self.step.blobs()
        for name, value in steps.values[t].items():
            if name not in blobs and name in self.read:
                blobs[name] = Blob()
            if name in blobs:
                blobs[name].value = value
        for link in self.links:
            state = link.external.removesuffix("_grad")
            if state in grads and link.offset == 1:
                blobs[link.internal].value = grads[state][t + 1]
        self.step.run()
        for link in self.links:
            if link.offset == 0 and link.internal in self.step.made:
                state = link.external.removesuffix("_grad")
                entries = grads.get(state, whole)
                entries[t] = entries[t] + blobs[link.internal].value
