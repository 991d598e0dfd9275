"""Steps built by nested blocks: nets in order, loops, conditions, stops.

with NetBuilder("example") as builder:
    x = ops.Const(1)
    with ops.loop(10):
        ops.Add([x, x], [x])
plan.AddStep(core.to_execution_step(builder))
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.core.net import _prefixes


class _Builders(threading.local):
    def __init__(self) -> None:
        self.stack: list[NetBuilder] = []


_builders = _Builders()


class NetBuilder:
    """Collects nets and steps; a block of it is a step that runs them in order.

    A blob, the stop blob, ends the step early where an operation asks for it.
    """

    def __init__(
        self,
        name: str | None = None,
        initial_scope: Any = None,
        _stop_blob_required: bool = False,
        _stop_blob: Any = None,
        _fullname: str | None = None,
        _use_control_ops: bool = False,
    ) -> None:
        parent = NetBuilder.current(required=False)
        assert not _fullname or not name, "Cannot set both _fullname and name"
        outer = parent.name if parent else ""
        self.name = _fullname or "/".join(part for part in (outer, name) if part)
        self._children: list[Any] = []
        self._current_net: core.Net | None = None
        self._stop_blob = _stop_blob
        self._stop_blob_required = _stop_blob_required
        self._frozen = False

    @staticmethod
    def current(required: bool = True) -> Any:
        """Return the builder of the innermost block.

        Raises:
            AssertionError: there is none, and one is required.
        """
        assert _builders.stack or not required, "There is no NetBuilder around."
        return _builders.stack[-1] if _builders.stack else None

    def stop_blob(self) -> core.BlobReference:
        """Return the stop blob; it is made, false, where there is none yet."""
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
        self.current_net().Or([blob, stop], [stop])
        self._current_net = None

    def _assert_mutable(self) -> None:
        assert not self._frozen, "This NetBuilder (or one of its parent) has been frozen."

    def add(self, child: Any) -> Any:
        """Append a net or a step."""
        self._assert_mutable()
        self._current_net = child if isinstance(child, core.Net) else None
        if child not in self._children:
            self._children.append(child)
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
        """Return the nets and steps; the builder is frozen."""
        self.freeze()
        return self._children

    def __enter__(self) -> NetBuilder:
        self._assert_mutable()
        _builders.stack.append(self)
        _prefixes.names.append(self.name)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        _builders.stack.pop()
        _prefixes.names.pop()
        if kind is None:
            self.freeze()
            assert self._stop_blob is not None or not self._stop_blob_required, (
                "This NetBuilder needs a stop condition: ops.stop_if() or ops.stop()."
            )
            parent = NetBuilder.current(required=False)
            if parent is not None and getattr(self, "_nested", False):
                parent.add(core.to_execution_step(self, self.name or None))

    def __str__(self) -> str:
        return self.name or "Un-named NetBuilder"


class _Nested(NetBuilder):
    """A builder whose step goes to the builder around."""

    _nested = True


class _Loop(_Nested):
    """A block that is repeated, so many times or until `ops.stop_if`."""

    def __init__(self, iters: Any = None, name: str = "", initial_scope: Any = None) -> None:
        super().__init__(name, initial_scope, _stop_blob_required=True)
        self._num_iters = None
        if iters is not None:
            self._inc, self._iter = ops.Const(1), ops.Const(0)
            self._num_iters = iters if isinstance(iters, core.BlobReference) else ops.Const(iters)

    def iter(self) -> Any:
        """Return the blob of the iteration's number.

        Raises:
            AssertionError: the loop has no number of iterations.
        """
        assert self._num_iters is not None, "This loop does not have a number of iterations."
        return self._iter

    def __enter__(self) -> _Loop:
        super().__enter__()
        if self._num_iters is not None:
            ops.stop_if(ops.GE([self._iter, self._num_iters]))
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None and self._num_iters is not None:
            self.current_net().Add([self._iter, self._inc], [self._iter])
        super().__exit__(kind, *arguments)


class _RunOnce(_Nested):
    """A block that runs once: a step with a stop blob that stops at its end."""

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None and self._stop_blob is not None:
            ops.stop()
        super().__exit__(kind, *arguments)


class _StopGuard(_RunOnce):
    """A block of which one can ask afterwards whether it was stopped."""

    def __init__(self) -> None:
        super().__init__()
        self._ran = ops.Const(True)
        self._done = False

    def __enter__(self) -> _StopGuard:
        super().__enter__()
        ops.Const(True, blob_out=self._ran)
        return self

    def __exit__(self, kind: Any, *arguments: Any) -> None:
        if kind is None:
            ops.Const(False, blob_out=self._ran)
        super().__exit__(kind, *arguments)
        self._done = True

    def has_stopped(self) -> Any:
        """Return the blob that is true where the block was stopped; for use behind it."""
        assert self._done, "has_stopped() must be called after the block"
        return self._ran


class _RunIf(_RunOnce):
    """A block that runs where a blob is true, and no block before it in the chain of conditions has run."""

    def __init__(self, cond_blob: Any = None, _already_ran: Any = None) -> None:
        super().__init__()
        assert cond_blob or _already_ran
        self._is_else = cond_blob is None
        if _already_ran is None:
            self._else_blob = ops.Not(cond_blob)
            self._already_ran = ops.Const(False)
        else:
            self._already_ran = _already_ran
            self._else_blob = (
                _already_ran if cond_blob is None else ops.Or([_already_ran, ops.Not(cond_blob)])
            )

    def __enter__(self) -> _RunIf:
        super().__enter__()
        ops.stop_if(self._else_blob)
        ops.Const(True, blob_out=self._already_ran)
        return self

    def Elif(self, cond: Any) -> _RunIf:
        """Return the block for another condition."""
        assert not self._is_else, "Else not allowed for an Else."
        return _RunIf(cond, self._already_ran)

    def Else(self) -> _RunIf:
        """Return the block for the case that no condition holds."""
        assert not self._is_else, "Else not allowed for an Else."
        return _RunIf(None, self._already_ran)


class SetupOnce:
    """Nets that run at the beginning and the end of a task, by an attribute of the net that needs them."""

    def __init__(self) -> None:
        self.init = NetBuilder(_fullname="init")
        self.exit_builder = NetBuilder(_fullname="exit")

    def setup(self, net: Any) -> Any:
        """Return the builder of what runs at the beginning."""
        return self.init

    def exit(self, net: Any) -> Any:
        """Return the builder of what runs at the end."""
        return self.exit_builder


class Operations:
    """Operators and blocks in the builder of the innermost block: `ops.Add(...)`, `with ops.loop(...)`."""

    def net(self, net: core.Net | None = None, name: str | None = None) -> core.Net:
        """Return the net that operators go to now; a net given is appended, a name begins a new one."""
        builder = NetBuilder.current()
        if net is not None:
            assert name is None, "Cannot set both `net` and `name`."
            builder.add(net)
            return net
        return builder.current_net(name)  # type: ignore[no-any-return]

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("__"):
            raise AttributeError(op_type)
        return getattr(self.net(), op_type)

    def execution_step(self, *args: Any, **kwargs: Any) -> NetBuilder:
        """Return a builder of a step inside."""
        return _Nested(*args, **kwargs)

    def loop(self, num_iters: Any = None, name: str | None = None) -> _Loop:
        """Return a block that is repeated; `num_iters` is a number or a blob."""
        return _Loop(num_iters, name=name or "loop")

    def stop_guard(self, name: str | None = None) -> _StopGuard:
        """Return a block of which one can ask whether it was stopped."""
        return _StopGuard()

    def If(self, cond: Any, name: str | None = None) -> _RunIf:
        """Return a block that runs where a blob is true."""
        return _RunIf(cond)

    def stop(self) -> None:
        """End the step of the innermost block."""
        NetBuilder.current().stop_if(self.Const(True))

    def stop_if(self, blob: Any) -> None:
        """End the step of the innermost block where a blob is true."""
        NetBuilder.current().stop_if(blob)

    def task_init(self) -> Any:
        """Return a block that runs once, before the task around."""
        return self._setup("task_setup", "init")

    def task_exit(self) -> Any:
        """Return a block that runs once, after the task around."""
        return self._setup("task_setup", "exit_builder")

    def task_instance_init(self) -> Any:
        """Return a block that runs before each instance of the task around."""
        return self._setup("task_instance_setup", "init")

    def task_instance_exit(self) -> Any:
        """Return a block that runs after each instance of the task around."""
        return self._setup("task_instance_setup", "exit_builder")

    def local_init(self) -> Any:
        """Return a block that runs once on each node, before its tasks."""
        return self._setup("local_setup", "init")

    def local_exit(self) -> Any:
        """Return a block that runs once on each node, after its tasks."""
        return self._setup("local_setup", "exit_builder")

    @contextmanager
    def _setup(self, key: str, part: str) -> Iterator[NetBuilder]:
        setup = SetupOnce()
        self.net().AddAttribute(key, setup)
        with getattr(setup, part) as builder:
            yield builder


ops = Operations()
