"""Blocks that are steps: loops, conditions, guards, and what runs around a task."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.building.builder import NetBuilder


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
    """A block that runs where a blob is true, and no block before it in the chain of conditions
    has run.
    """

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
    """A block that runs before or after a task: an attribute of the net in
    which it stands; see `task.get_setup_nets`.
    """

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
