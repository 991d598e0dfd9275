"""The blocks of a `NetBuilder`: the builder itself, its operators, and loops and branches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import context, core
from poseidon.caffe2.control_ops_util import add_if_op, add_while_op
from poseidon.caffe2.core.net import _prefixes


class NetBuilder(context.Managed):
    """Collects nets and builders; a block of it is a step that runs them in order.

    A blob, the stop blob, ends the step early where an operation asks for it. A builder with
    control operators is one net instead: its blocks are operators `If` and `While`.
    """

    def __init__(
        self,
        name: str | None = None,
        initial_scope: Iterable[Any] | None = None,
        _stop_blob_required: bool = False,
        _stop_blob: Any = None,
        _fullname: str | None = None,
        _use_control_ops: bool = False,
    ) -> None:
        """Make a builder inside the current one.

        Args:
            name: of its nets, behind the name of the builder around.
            initial_scope: blobs that exist before.
            _stop_blob_required: whether a block without a stop condition is an error.
            _stop_blob: the blob that stops it; by default it is made where it is needed.
            _fullname: the name without the name of the builder around it.
            _use_control_ops: see the class.
        """
        assert not _fullname or not name, "Cannot set both _fullname and name"
        assert not _use_control_ops or not (_stop_blob_required or _stop_blob), (
            "Stop blobs are not used with control operators"
        )
        parent = NetBuilder.current(required=False)
        outer = parent.name if parent else ""
        self.name = _fullname or "/".join(part for part in (outer, name) if part)
        self._frozen = False
        self._current_net: core.Net | None = None
        self._children: list[Any] = []
        outside = parent._update_lexical_scope() if parent else set()
        self._init_lexical_scope = outside | {str(blob) for blob in initial_scope or ()}
        self._lexical_scope = set(self._init_lexical_scope)
        self._stop_blob = _stop_blob
        self._stop_blob_required = _stop_blob_required
        self._use_control_ops = _use_control_ops
        self._depth = 0

    def stop_blob(self) -> core.BlobReference:
        """Return the stop blob; it is made, false, where there is none yet."""
        assert not self._use_control_ops, "Stop blobs are not used with control operators"
        if self._stop_blob is None:
            net = self.current_net()
            self._stop_blob = core.BlobReference(net.NextName("stop_blob"), net=net)
            net.Const(False, blob_out=self._stop_blob)
            if self._current_net is not self._children[0]:
                first = core.Net("stop_blob_init")
                first.Const(False, blob_out=self._stop_blob)
                self._children.insert(0, first)
        return self._stop_blob  # type: ignore[no-any-return]

    def stop_if(self, blob: Any) -> None:
        """End the step where a boolean is true."""
        stop = self.stop_blob()
        self.current_net().Or([stop, blob], [stop])
        self._current_net = None

    def _assert_mutable(self) -> None:
        assert not self._frozen, f"This NetBuilder ({self.name}) has been built already."

    def _update_lexical_scope(self) -> set[str]:
        """Return the blobs that exist now: the initial ones and the outputs of the nets so far."""
        self._lexical_scope = set(self._init_lexical_scope)
        for child in self._children:
            if isinstance(child, core.Net):
                self._lexical_scope |= child.UsedBlobNames()
            elif isinstance(child, NetBuilder) and child._use_control_ops:
                self._lexical_scope |= child._lexical_scope
        return set(self._lexical_scope)

    def _take_children(self) -> list[Any]:
        children, self._children, self._current_net = self._children, [], None
        self._lexical_scope = set(self._init_lexical_scope)
        return children

    def add(self, child: Any) -> Any:
        """Append a net, a step, a builder or a task group; return it.

        Raises:
            AssertionError: the builder is frozen, or has control operators and takes no child.
        """
        self._assert_mutable()
        assert (
            not self._use_control_ops
            or isinstance(child, core.Net)
            or (isinstance(child, NetBuilder) and child._use_control_ops)
        ), "Expected Net or NetBuilder with control ops"
        self._current_net = child if isinstance(child, core.Net) else None
        self._children.append(child)
        self._update_lexical_scope()
        return child

    def current_net(self, name: str | None = None) -> core.Net:
        """Return the net that operators go to now; a name begins a new one."""
        self._assert_mutable()
        if self._current_net is None or name is not None:
            self.add(core.Net(name or ""))
        assert self._current_net is not None
        return self._current_net

    def freeze(self) -> None:
        """Allow no more changes."""
        for child in self._children:
            if hasattr(child, "freeze"):
                child.freeze()
        self._current_net = None
        self._frozen = True

    def get(self) -> list[Any]:
        """Return the nets, steps and builders; this one is frozen."""
        self.freeze()
        return self._children

    def __enter__(self) -> NetBuilder:
        super().__enter__()
        self._depth = len(_prefixes.names)
        _prefixes.names.append(self.name)
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        super().__exit__(kind, *arguments)
        del _prefixes.names[self._depth :]
        if self._use_control_ops and self._children and kind is None:
            net = self.merge_nets(self._take_children(), self._lexical_scope)
            assert net is not None
            self._children = [net]
        self.freeze()
        assert kind is not None or self._stop_blob is not None or not self._stop_blob_required, (
            f"This NetBuilder ({self.name}) requires a stop condition: ops.stop() or ops.stop_if()"
        )

    @staticmethod
    def merge_nets(
        nets_or_builders: Iterable[Any], outer_blob_names: Iterable[str]
    ) -> core.Net | None:
        """Return one net of nets and of builders with control operators; None where there are none.

        Its external outputs exist outside: a blob between two children is local.
        """
        merged: core.Net | None = None
        for part in nets_or_builders:
            if isinstance(part, NetBuilder):
                assert part._use_control_ops, "Merging of NetBuilder supported only for control ops"
                (net,) = part.get()
            else:
                net = part
            merged = net if merged is None else merged.AppendNet(net)
        if merged is not None:
            outside = set(outer_blob_names)
            kept = [name for name in merged.Proto().external_output if name in outside]
            merged.Proto().external_output[:] = kept
        return merged

    def __str__(self) -> str:
        return self.name or "Un-named NetBuilder"


def _current_net() -> core.Net:
    return NetBuilder.current().current_net()  # type: ignore[no-any-return]


class Loop(NetBuilder):
    """A block that is repeated, so many times or until `ops.stop_if`."""

    def __init__(self, iters: Any = None, name: str | None = None) -> None:
        super().__init__(name, _stop_blob_required=True)
        self._num_iters: Any = None
        if iters is not None:
            net = _current_net()
            self._inc, self._iter = net.Const(1), net.Const(0)
            self._num_iters = iters if isinstance(iters, core.BlobReference) else net.Const(iters)

    def iter(self) -> Any:
        """Return the blob of the iteration's number.

        Raises:
            AssertionError: the loop has no number of iterations.
        """
        assert self._num_iters is not None, "This loop does not have a number of iterations."
        return self._iter

    def __enter__(self) -> Loop:
        super().__enter__()
        if self._num_iters is not None:
            self.stop_if(self.current_net().GE([self._iter, self._num_iters]))
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None and self._num_iters is not None:
            self.current_net().Add([self._iter, self._inc], [self._iter])
        super().__exit__(kind, *arguments)


class RunOnce(NetBuilder):
    """A block that runs once: a step with a stop blob that stops at its end."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None and self._stop_blob is not None:
            self.stop_if(self.current_net().Const(True))
        super().__exit__(kind, *arguments)


class StopGuard(RunOnce):
    """A block of which one can ask afterwards whether it was stopped."""

    def __init__(self, has_stopped_blob: Any = None, name: str | None = None) -> None:
        super().__init__(name)
        self._stopped = has_stopped_blob
        self._done = False

    def __enter__(self) -> StopGuard:
        super().__enter__()
        self._stopped = self.current_net().Const(True, blob_out=self._stopped)
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            self._done = True
            self.current_net().Const(False, blob_out=self._stopped)
        super().__exit__(kind, *arguments)

    def has_stopped(self) -> Any:
        """Return the blob that is true where the block was stopped; for use behind it."""
        assert self._done, "has_stopped() must be called after the block"
        return self._stopped


class RunIf(RunOnce):
    """A block that runs where a blob is true and no earlier block of the chain has run."""

    def __init__(
        self, cond_blob: Any = None, name: str | None = None, _already_ran: Any = None
    ) -> None:
        super().__init__(name)
        assert cond_blob or _already_ran
        self._is_else = cond_blob is None
        net = _current_net()
        if _already_ran is None:
            self._else_blob = net.Not(cond_blob)
            self._already_ran = net.Const(False)
        else:
            self._already_ran = _already_ran
            self._else_blob = (
                _already_ran if cond_blob is None else net.Or([_already_ran, net.Not(cond_blob)])
            )

    def __enter__(self) -> RunIf:
        super().__enter__()
        self.stop_if(self._else_blob)
        self.current_net().Const(True, blob_out=self._already_ran)
        return self

    def Elif(self, cond: Any, name: str | None = None) -> RunIf:
        """Return the block for another condition."""
        assert not self._is_else, "Elif not allowed for an Else."
        return self._next(cond, name)

    def Else(self, name: str | None = None) -> RunIf:
        """Return the block for the case that no condition holds."""
        assert not self._is_else, "Else not allowed for an Else."
        return self._next(None, name)

    def _next(self, cond: Any, name: str | None) -> RunIf:
        made = RunIf(cond, name=name, _already_ran=self._already_ran)
        return NetBuilder.current().add(made)  # type: ignore[no-any-return]


class SetupBuilder(NetBuilder):
    """A block before or after a task: an attribute of its net; see `task.get_setup_nets`."""

    INIT = "init"
    EXIT = "exit"

    def __init__(self, kind: str, name: str | None = None) -> None:
        super().__init__(name)
        self.type = kind

    def setup(self, net: Any) -> Any:
        """Return the step that runs before, None for a block that runs after."""
        return core.to_execution_step(self) if self.type == self.INIT else None

    def exit(self, net: Any) -> Any:
        """Return the step that runs after, None for a block that runs before."""
        return core.to_execution_step(self) if self.type == self.EXIT else None


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
