"""Conditions and loops: `If`, `While`, and `Do`, which runs a net in a workspace of its own.

Their gradients are in `core.control_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import ANY, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.net import Net
from poseidon.caffe2.runtime.values import Blob
from poseidon.caffe2.runtime.workspace import Workspace


@dataclass(eq=False)
class InnerWorkspace:
    """The workspace of a `Do`, and the nets compiled in it, by the operator that runs them.

    Attributes:
        owner: the operator that made it.
        workspace: its blobs; outside ones are there under their inner names.
        nets: the forward net, and the nets of gradients.
        copies: for each kept outside blob, a blob with the value at the end of the run.
    """

    owner: Do
    workspace: Workspace
    nets: dict[Do, Net] = field(default_factory=dict)
    copies: dict[str, Blob] = field(default_factory=dict)


class WorkspaceStack:
    """The workspaces of the runs of a `Do`; gradients take them in reverse order.

    They are used again in the next pass, so that nets are compiled once.
    """

    def __init__(self) -> None:
        self._made: list[InnerWorkspace] = []
        self._depth = 0

    def clear(self) -> None:
        """Begin a new pass."""
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def last(self) -> InnerWorkspace | None:
        """Return the workspace of the last run, None where there is none."""
        return self._made[self._depth - 1] if self._depth else None

    def push(self, owner: Do) -> InnerWorkspace:
        """Return a workspace for one more run of an operator."""
        if self._depth < len(self._made) and self._made[self._depth].owner is not owner:
            del self._made[self._depth :]
        if self._depth == len(self._made):
            self._made.append(InnerWorkspace(owner, Workspace()))
        self._depth += 1
        return self._made[self._depth - 1]

    def pop(self) -> InnerWorkspace:
        """Return the workspace of the last run that no gradient has taken.

        Raises:
            RuntimeError: there is none.
        """
        if not self._depth:
            raise EnforceNotMet("There is no workspace of a forward run for the gradient")
        self._depth -= 1
        return self._made[self._depth]


@operator("CreateScope", blobs=True, inputs=(0, 0), outputs=(1, 1))
def create_scope(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Make the stack of the workspaces of a `Do`, or empty it."""
    if not isinstance(outputs[0].value, WorkspaceStack):
        outputs[0].value = WorkspaceStack()
    outputs[0].value.clear()


@operator("HasScope")
def has_scope(stack: Any) -> Tensor:
    """Return whether a stack has a workspace, a scalar."""
    if not isinstance(stack, WorkspaceStack):
        raise ValueError("the input is not a stack of workspaces; CreateScope makes one")
    return torch.tensor(bool(stack))


@operator("Do", blobs=True, inputs=(1, ANY), outputs=(1, ANY))
class Do:
    """Runs a net in its own workspace; the last input and output is the stack of these.

    Args of the operator:
        net: the net. inner_blobs, outer_blobs_idx: names of the net, and for each the index of its
        blob among inputs and outputs. saved_fwd_blobs: the blobs of the forward run that a gradient
        needs. reuse_workspace: whether all runs have one workspace. copy_external_blobs: whether
        the values that outside blobs have at the end of a run are kept for its gradient.
    """

    def __init__(
        self,
        *,
        context: Context,
        net: NetDef,
        inner_blobs: list[str],
        outer_blobs_idx: list[int],
        saved_fwd_blobs: list[str] = [],  # noqa: B006
        reuse_workspace: bool = False,
        copy_external_blobs: bool = False,
    ) -> None:
        definition = context.definition
        if definition.input[-1] != definition.output[-1]:
            raise ValueError("Do: the last input and output must be one blob, the workspaces")
        outside = [*definition.input[:-1], *definition.output[:-1]]
        if len(inner_blobs) != len(outer_blobs_idx) or len(set(inner_blobs)) != len(inner_blobs):
            raise ValueError("Do: inner_blobs must differ, each with one of outer_blobs_idx")
        if any(not 0 <= index < len(outside) for index in outer_blobs_idx):
            raise ValueError(f"Do: outer_blobs_idx must be from 0 to {len(outside) - 1}")
        self.net = net
        self.is_gradient = definition.is_gradient_op
        self.places = dict(zip(inner_blobs, outer_blobs_idx, strict=True))
        self.saved = saved_fwd_blobs
        self.reuse, self.copies = reuse_workspace, copy_external_blobs

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        stack = outputs[-1].value
        if not isinstance(stack, WorkspaceStack):
            raise EnforceNotMet("Do: the last input must be a stack that CreateScope made")
        outside = [*inputs[:-1], *outputs[:-1]]
        blobs = {name: outside[place] for name, place in self.places.items()}
        if self.is_gradient:
            self._run(stack.pop(), blobs)
            return
        inner = stack.last() if self.reuse else None
        inner = inner or stack.push(self)
        self._run(inner, blobs)
        if self.copies:
            for name, blob in blobs.items():
                if isinstance(blob.value, Tensor):
                    inner.copies.setdefault(name, Blob()).value = blob.value.clone()

    def _run(self, inner: InnerWorkspace, blobs: dict[str, Blob]) -> None:
        net = inner.nets.get(self)
        if net is None:
            if self.is_gradient:
                # What the forward run has, its copies first, is not replaced by an outside blob of
                # the name.
                inner.workspace.blobs = {**blobs, **inner.workspace.blobs, **inner.copies}
                missing = [name for name in self.saved if inner.workspace.find(name) is None]
                if missing:
                    raise EnforceNotMet(f"Do: the forward run has no blob {', '.join(missing)}")
            else:
                inner.workspace.blobs.update(blobs)
            net = inner.nets[self] = Net(self.net, inner.workspace)
        net.run()


class _Branches:
    """An operator with nets of the same workspace."""

    def __init__(self, context: Context, *nets: NetDef | None) -> None:
        self.nets = [None if net is None else Net(net, context.workspace) for net in nets]


def _holds(condition: Blob) -> bool:
    value = condition.value
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise EnforceNotMet("The condition is not one boolean")
    return bool(value.item())


@operator("If", "AsyncIf", blobs=True, inputs=(1, ANY))
class If(_Branches):
    """Runs `then_net` where the first input is true, else `else_net`, if there is one."""

    def __init__(
        self, *, context: Context, then_net: NetDef, else_net: NetDef | None = None
    ) -> None:
        super().__init__(context, then_net, else_net)

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        net = self.nets[0 if _holds(inputs[0]) else 1]
        if net is not None:
            net.run()


@operator("While", blobs=True, inputs=(1, ANY))
class While(_Branches):
    """Runs `loop_net` while the first input is true; `cond_net` sets it before each iteration."""

    def __init__(
        self, *, context: Context, loop_net: NetDef, cond_net: NetDef | None = None
    ) -> None:
        super().__init__(context, loop_net, cond_net)

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        body, condition = self.nets
        assert body is not None
        while True:
            if condition is not None:
                condition.run()
            if not _holds(inputs[0]):
                return
            body.run()
