"""Blocks that are operators: `If` with its `Else`, `While` with its condition."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.building.builder import NetBuilder
from poseidon.caffe2.control_ops_util import add_if_op, add_while_op


class ControlBlock(NetBuilder):
    """A block whose nets become the inner net of an operator."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name, _use_control_ops=True)

    def _merged(self) -> core.Net | None:
        """Return the nets of the block as one; None for an empty block."""
        return self.merge_nets(self._take_children(), self._lexical_scope)

    def _become(self, net: core.Net) -> None:
        """Replace the nets of the block by one."""
        self._current_net = net
        self._children = [net]


class IfNet(ControlBlock):
    """A block that runs where a blob is true: the operator `If`."""

    def __init__(self, cond_blob: Any, name: str | None = None) -> None:
        super().__init__(name)
        assert cond_blob, "Conditional blob is not specified for an If net"
        self._cond_blob = cond_blob
        self._then_net: core.Net | None = None

    def add_operator(self, else_net: core.Net | None = None) -> None:
        """Make the operator of the block and of its `Else`."""
        assert self._then_net is not None
        net = core.Net(f"{self.name}/{'if_net' if else_net is None else 'if_else_net'}")
        add_if_op(net, self._cond_blob, self._lexical_scope, self._then_net, else_net)
        self._become(net)

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            self._then_net = self._merged() or core.Net("empty_then_net")
            self.add_operator()
        super().__exit__(kind, *arguments)


class ElseNet(ControlBlock):
    """A block that runs where the condition of the `IfNet` before it is false."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        parent = NetBuilder.current(required=False)
        before = parent._children[-1] if parent and parent._children else None
        assert isinstance(before, IfNet), "Else must follow IfNet."
        self._if = before

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            net = self._merged()
            if net is not None:
                self._if.add_operator(net)
        super().__exit__(kind, *arguments)


class WhileNet(ControlBlock):
    """A block that is repeated while its `Condition` is true: the operator `While`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.condition: Condition | None = None

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            condition = self.condition
            assert condition is not None, "Condition builder must be specified in While op"
            body = self._merged() or core.Net("empty_loop_body_net")
            net = core.Net(f"{self.name}/while_net")
            add_while_op(net, condition.blob, self._lexical_scope, body, condition.net)
            self._become(net)
        super().__exit__(kind, *arguments)


class Condition(ControlBlock):
    """The condition of a `WhileNet`, at its start: the output of the last operator, one boolean."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        parent = NetBuilder.current(required=False)
        assert isinstance(parent, WhileNet), "Use of Condition outside of WhileNet"
        assert parent.condition is None, "Multiple loop condition builders specified"
        assert not parent._children, "Condition definition must be specified before the loop's body"
        parent.condition = self
        self.net: core.Net | None = None
        self.blob: core.BlobReference | None = None

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            self.net = self._merged()
            assert self.net is not None and self.net.Proto().op, "Invalid loop condition specified"
            outputs = self.net.Proto().op[-1].output
            assert len(outputs) == 1, "The last operator of a loop condition must have one output"
            self.blob = core.BlobReference(outputs[0])
            self._become(self.net)
        super().__exit__(kind, *arguments)
