"""The steps of a module that all workers of a job train together.

One step of the user's loop, and what happens in it:

    module(x)            the first forward pass begins an iteration; each layer waits for its own tensors
    loss.backward()      each gradient leaves as soon as it is complete
    step()               the iteration ends

A process with several virtual workers runs the loop once for each of them in an iteration; only the
last `step` ends it (`group_turns.py`).

Laws:
* All workers call `step`, `settle` and the collections of `Group` equally often and in the same
  order.
* Between `step` and the next use of a tensor the exchange owns it (`reads.py`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import zip_longest
from types import TracebackType
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from poseidon.engine.random_streams import Generators, RandomStreams, script_seed
from poseidon.errors import UsageError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.broadcast import broadcast_parameters
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.module_hooks import uncompiled
from poseidon.exchange.observe.observer import Call
from poseidon.exchange.replicas import NO_CHECK, ReplicaCheck
from poseidon.exchange.row_tables import AloneRowTables, RowTables
from poseidon.torch.group_collections import GroupCollections
from poseidon.torch.group_turns import turns_of
from poseidon.torch.masters import Masters
from poseidon.torch.module_watch import ModuleWatch
from poseidon.torch.reads import Reads
from poseidon.torch.tables.group import TableGroup
from poseidon.torch.tables.link import Callbacks
from poseidon.torch.tensors import GroupPlan
from poseidon.torch.worker_context import DISTRIBUTE, LEAVING, LoopPosition, WorkerContext
from ps_server import ServerError

Self = TypeVar("Self", bound="StepLoop")
CLOSED = "{}() after close(), or after the `with` block of the group; expected it before"


class StepLoop(ABC):
    """The state machine of a step, between the module's hooks and the exchange.

    Args:
        module: the module, or `torch.compile` of it.
        plan: the tensors to exchange.
        context: this worker.
    """

    def __init__(self, module: nn.Module, plan: GroupPlan, context: WorkerContext) -> None:
        self._module = uncompiled(module)
        self._context = context
        self._plan = plan
        self._turns = turns_of(self._module, plan, context.member.virtual_workers, context.worker)
        context.on_progress(LoopPosition(collection=DISTRIBUTE))
        self._reads = Reads(
            self._module, plan.values, self._bring, [trained.tensor for trained in plan.tensors]
        )
        built, self._observed = context.build(
            plan.tensors, ExchangeSettings(clip=plan.clip), module
        )
        self._recorded = RecordedPlan.of_choices(built.plan) if built.recorded else None
        self._local_steps = built.local_steps
        self._exchange = self._observed.exchange
        self._collections = GroupCollections(
            self._exchange.control, context.on_progress, rank=self.rank, place=self._place
        )
        self._watch: ModuleWatch | None = None
        self._tables = TableGroup()
        self._masters = Masters(plan.tensors, plan.sources)
        self._check = ReplicaCheck(
            context.member.options if self.size > 1 else NO_CHECK,
            state=self._replicated,
            collect=self._collections.gather,
            rank=self.rank,
        )
        self._passes = 0  # backward passes of this step that have ended
        self._in_backward = False
        self._steps_before_pass = -1
        self._begun = False
        self._settled = True
        self._closed = False
        try:
            self._exchange.open(None)
            self._masters.publish_all()
            if self.size > 1:
                with self._collections.calling(DISTRIBUTE):
                    self._check_rest()
                    rest = list(plan.rest.values())
                    broadcast_parameters(rest, self._collections.gather, rank=self.rank)
            self._turns.buffers.restart()
            self._open_streams()
            self._open_tables(AloneRowTables() if built.client is None else built.client.rows)
            self._watch = ModuleWatch(
                module,
                plan,
                self._observed,
                wait_free=context.member.options.wait_free,
                on_forward=self._on_forward,
                on_gradient=self._on_gradient,
                may_leave=self._may_leave,
                on_sent=self._on_sent,
                on_value=self._on_value,
                turn=self._reads.turn,
            )
            self._reads.note_own_aliases()
        except BaseException:
            self.close()
            raise
        if context.folder is not None:  # in a job a group may be used without its `with` block
            context.loops.add(self)
        context.on_open(built, self._exchange)
        self._collections.report()

    def _open_streams(self) -> None:
        """Give each virtual worker of the job a random stream."""
        told = self._context.member.virtual_workers is not None
        # threads of a process that trains alone would share its generators
        is_one_of_several = self.size > 1 and self._context.folder is not None
        if not (told or is_one_of_several):
            return
        seed: int | None = None
        if told:
            own = script_seed().to_bytes(8, "little")
            if self.size > 1:
                with self._collections.calling(DISTRIBUTE):
                    own = self._collections.gather(own)[0]
            seed = int.from_bytes(own, "little")
        streams = self._context.loops.streams
        if streams is None or not streams.groups:
            streams = RandomStreams(self._turns.own, seed, Generators(self.device))
            self._context.loops.streams = streams
        self._turns.open(streams)

    def _open_tables(self, tables: RowTables) -> None:
        callbacks = Callbacks(
            on_forward=self._on_lookup,
            on_gradient=self._on_gradient,
            passes_left=lambda: self._plan.passes - self._passes,
            around_wait=lambda: self._exchange.observing(Call.GATHER),
        )
        self._tables.open(self._plan.tables, tables, callbacks, root=self.rank == 0)
        if self._plan.tables and self.size > 1:
            with self._collections.calling(DISTRIBUTE):
                self._collections.gather(b"")

    def _check_rest(self) -> None:
        """Check that all workers have the same tensors that are not exchanged."""
        own = [f"'{n}' of {t.dtype}, {tuple(t.shape)}" for n, t in self._plan.rest.items()]
        parts = self._collections.gather("\n".join(own).encode())
        first, *others = (part.decode().split("\n") for part in parts)
        for rank, other in enumerate(others, start=1):
            for theirs, mine in zip_longest(first, other, fillvalue=""):
                if theirs != mine:
                    raise UsageError(
                        f"worker 0's module has {theirs or 'no more tensors'}, where worker "
                        f"{rank}'s has {mine or 'no more'}; expected the same module on all workers"
                    )

    @property
    def rank(self) -> int:
        """The rank of this worker, 0..size-1."""
        return self._context.worker.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._context.worker.size

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._context.worker.device

    @property
    def virtual_worker(self) -> int:
        """The virtual worker whose turn it is, 0..virtual_workers-1; by default the rank."""
        return self._turns.virtual_worker

    @property
    def virtual_workers(self) -> int:
        """Number of virtual workers of the job; by default the number of workers."""
        return self._turns.count

    @property
    def steps(self) -> int:
        """Steps finished; with a quorum of the workers, the job's: a late worker leaves out what
        the others have made without it.
        """
        return self._collections.steps

    @property
    def _last_step(self) -> int:
        """The step that is under way since its forward pass, else the last one that has ended; the
        first one is 1.
        """
        return max(self.steps, self._steps_before_pass + 1)

    @property
    def pending(self) -> int:
        """Backward passes since the last step: `step` would apply them, and `drop` would discard
        them.
        """
        return self._passes

    @property
    def stopping(self) -> bool:
        """True once the job was asked to stop, after a step that all workers have reached together.

        A loop that continues regardless is ended by a KeyboardInterrupt in its next `step`.
        """
        return any(loop.is_asked_to_stop() for loop in (self, *self._context.loops.open))

    def is_asked_to_stop(self) -> bool:
        """Return whether this loop's exchange has brought the request, and its step has ended."""
        return self._exchange.control.is_asked_to_stop(self._collections.iterations)

    @property
    def snapshot_wanted(self) -> bool:
        """True if the job was asked, after this very step, to save its state."""
        return any(loop.is_asked_for_snapshot() for loop in (self, *self._context.loops.open))

    def is_asked_for_snapshot(self) -> bool:
        """Return whether this loop's exchange has brought the request for its last step, and no
        turn of the next one has ended.
        """
        iterations = self._collections.iterations
        return self._turns.is_first and self._exchange.control.is_asked_for_snapshot(iterations)

    @abstractmethod
    def step(self, *, zero_grad: bool = True) -> bool:
        """End the step, or the turn of a virtual worker within it.

        It applies the gradients of all backward passes since the last step, at most `passes=` of
        each virtual worker.

        Args:
            zero_grad: clear the gradients of the module afterwards. False: under a torch.optim
                optimizer they stay, as means over the workers, and the next pass adds to them.

        Returns:
            Whether the step has ended. If not, another virtual worker of this process is next, and
            parameters keep their values.

        Raises:
            UsageError: there was no backward pass, or gradients of a rule are to stay.
            KeyboardInterrupt: the job was asked to stop, and the loop has continued.
        """

    def drop(self) -> None:
        """Discard the backward passes since the last step, and their gradients.

        A step applies those that follow.

        All workers do it alike, under a rule after fewer passes than `passes=`. Running
        statistics keep what these passes have changed.

        Raises:
            UsageError: the last pass of the step has ended under a rule, so the shards have its
                gradients.
        """
        if not self._passes:
            return
        if self._in_backward:
            raise UsageError("drop() within a backward pass; expected after it")
        self._forget_passes()
        self._hooks.clear()

    def _forget_passes(self) -> None:
        """Forget the backward passes since the last step, whose gradients the script has cleared,
        or need not clear.

        Raises:
            UsageError: they have left, and cannot be taken back.
        """
        if self._passes >= self._plan.passes and self._plan.sends_gradients:
            self._take_back()
        else:
            self._hooks.forget()
        self._tables.drop()
        self._passes = 0

    def _take_back(self) -> None:
        """Make gradients that have left count for nothing."""
        raise UsageError(
            f"drop(), or another backward(), comes before step(), and the gradients of pass "
            f"{self._passes} have left for the shards, which cannot take them back; expected step(), or "
            "requires_grad_(False) on the module while the loss of another one passes through it"
        )

    def _forget_stale(self) -> None:  # noqa: B027 - the shards take no gradient back
        """Forget passes that belong to no step, where the loss of another module may have made
        them.
        """

    def settle(self) -> None:
        """Bring parameters and statistics to the state after all workers' steps: with staleness or
        local steps before evaluating or saving.

        All workers call it together.

        Raises:
            UsageError: a step is under way.
        """
        self._check_open("settle")
        self._check_between("settle")
        with self._collections.calling("settle"):
            self._settle("settle()")

    def _check_between(self, call: str) -> None:
        """Refuse a call within a step, and let no virtual worker's stream be drawn from."""
        if self._passes or self._in_backward:
            raise UsageError(
                f"{call}() stands between a backward pass and its step(); expected after step()"
            )
        if not self._turns.is_first:
            raise UsageError(
                f"{call}() comes after the step() of virtual worker "
                f"{self._turns.virtual_worker - 1}, and this worker computes for virtual worker "
                f"{self._turns.virtual_worker} in the same step; expected {call}() where step() "
                "has returned True"
            )
        self._turns.pause()

    def _settle(self, what: str) -> None:
        """See `settle`; `what` is the script's call, for messages."""
        staleness = self._context.member.options.staleness
        if not self._begun:
            if staleness or self._local_steps:
                self._collections.gather(b"")  # a different call of another worker is found here
            with self._reads.turn:
                self._exchange.settle()
        elif staleness or self._local_steps:
            raise UsageError(
                f"{what} comes after a forward pass of the next step; expected right after step()"
            )
        else:
            for index in range(len(self._plan.tensors)):
                self._exchange.wait(index)
        self._reads.all_came()
        self._masters.publish_all()
        self._tables.settle()
        self._settled = True

    def close(self) -> None:
        """Leave the job and remove the hooks from the module. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None and not sys.exc_info()[0]:
            with suppress(ServerError):  # after the last step its values are on their way
                if not (self._settled or self._begun):
                    self._hooks.wait()
                self._tables.settle()
        self._reads.all_came()
        if self in self._context.loops.open:
            self._context.loops.open.remove(self)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._turns.close()
        self._tables.close()
        self._observed.close()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(
            "a group is not a module; expected the one that distribute() was given, which stays as "
            "it was: group = poseidon.distribute(model, ...), then model(x)"
        )

    def __enter__(self: Self) -> Self:
        self._context.loops.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.end_waits(error)
        try:
            if error is None and not self._closed:
                self._context.check_start()
                self._end_block()
        except ServerError as lost:
            self._context.end_waits(lost)
            raise
        finally:
            self.close()

    def _end_block(self) -> None:
        """Settle at the end of a `with` block that has no error."""
        with self._collections.calling(LEAVING):
            self._forget_stale()
            if not self._turns.is_first:
                raise UsageError(
                    f"worker {self.rank} leaves the `with` block within step {self.steps + 1}, "
                    f"before the turn of virtual worker {self.virtual_worker}; expected the end of "
                    "the loop where step() has returned True"
                )
            if self._passes or self._in_backward:
                or_drop = "" if self._passes >= self._plan.passes else " or drop()"
                raise UsageError(
                    f"worker {self.rank} leaves the `with` block {self._place()}; expected "
                    f"step(){or_drop} before `break`, `return` or the end of the block"
                )
            self._settle("the end of the `with` block")

    def _replicated(self) -> dict[str, Tensor]:
        """Return the tensors that are equal on all workers after a step, by name: live tensors."""
        values = {trained.name: trained.tensor for trained in self._plan.tensors}
        return {**values, **self._exchange.state.replicated()}

    def _rates(self) -> tuple[float, ...]:
        return (0.0,)

    def _before_begin(self) -> None:  # noqa: B027 - nothing to check where an optimizer owns the parameters
        """Check what the script has done since the last step."""

    def _before_run(self) -> None:  # noqa: B027 - an optimizer's parameters change in its step alone
        """Check that the module may be used now."""

    def _begin(self) -> None:
        hooks = self._hooks
        self._before_begin()
        with self._reads.turn:
            self._begun = True
            self._exchange.start(self._collections.iterations, *self._rates())
            hooks.start(present=self._settled)

    def _backward_is_over(self) -> None:
        """Count the backward pass that has ended."""
        self._in_backward = False
        self._passes += 1
        self._hooks.next_pass()

    def _end_iteration(self) -> None:
        """Send the gradients that have not left, and end the iteration.

        Raises:
            UsageError: there was no backward pass.
            KeyboardInterrupt: the job was asked to stop, and the loop has continued.
        """
        self._end_passes()
        self._finish_iteration()

    def _end_passes(self) -> None:
        """Send the gradients that have not left. Raises as `_end_iteration`."""
        self._check_passes()
        self._hooks.finish()

    def _check_passes(self) -> None:
        self._context.check_start()
        if self._watch is None:
            raise UsageError(CLOSED.format("step"))
        if self.is_asked_to_stop():
            raise KeyboardInterrupt(f"the job was asked to stop after step {self.steps}")
        if self._in_backward:
            raise UsageError(
                "step() or average_gradients() within a backward pass, for example in a hook of a "
                "parameter; expected after backward()"
            )
        if not self._passes:
            raise UsageError(
                "step() or average_gradients() without a backward pass before it; expected "
                "backward(), or torch.autograd.backward(parameters, gradients) for gradients that "
                "the script has computed itself"
            )

    def _finish_iteration(self) -> None:
        with self._collections.ending_iteration(lambda: self._exchange.finished):
            if self._is_left_out():
                self._tables.drop()
            self._tables.push(lambda: self._rates()[0], self.steps)
            self._masters.take_statistics()
            with self._reads.turn:
                self._exchange.finish()
        self._begun = self._settled = False
        self._end_turn()

    def _end_turn(self) -> None:
        """End the turn of a virtual worker, whose gradients the exchange has."""
        self._passes = 0
        self._turns.next()

    def _leave_turn(self) -> bool:
        """End the turn of a virtual worker that is not the last of this process. Return whether
        it was not.
        """
        if self._turns.is_last:
            return False
        self._reads.all_came()
        self._masters.take_statistics()
        self._hooks.next_virtual_worker()
        if self._local_steps:  # the next virtual worker has values of its own
            self._masters.publish_all()
        else:
            self._masters.publish_statistics()
        self._end_turn()
        return True

    def _place(self) -> str:
        """Return where in its loop this worker is, for messages."""
        if self._passes or self._in_backward or not self._turns.is_first:
            return f"in step {self.steps + 1}, after backward()"
        return f"after step {self.steps}" if self.steps else "before step 1"

    def _check_open(self, call: str) -> None:
        """Refuse a call that needs the other workers after `close`. One worker alone needs none."""
        self._context.check_start()
        if self._closed and self.size > 1:
            raise UsageError(CLOSED.format(call))

    def _name(self, parameter: Tensor) -> str:
        names = [f"'{name}'" for name, own in self._module.named_parameters() if own is parameter]
        return names[0] if names else "a parameter that is not the module's"

    @property
    def _hooks(self) -> Hooks:
        assert self._watch is not None
        return self._watch.hooks

    def _on_forward(self, module: nn.Module, arguments: object) -> None:
        self._context.check_start()
        self._before_run()
        if torch.is_grad_enabled():
            self._steps_before_pass = self.steps
            self._turns.begin()
            if not self._begun:
                self._begin()
        elif not (module.training or self._settled):
            # torch may take another path in an evaluation, if a tensor's class is not its usual one
            self._hooks.wait()

    def _is_left_out(self) -> bool:
        """Return whether this worker's gradients of the step have no weight: then its rows count as
        without a gradient.
        """
        return False

    def _on_lookup(self) -> None:
        """Begin an iteration where a row table runs the first of its forward passes."""
        self._on_forward(self._module, ())

    def _may_leave(self, index: int) -> bool:
        """Return whether the gradient of a tensor may leave before the backward pass has ended."""
        return True

    def _on_sent(self, index: int) -> None:  # noqa: B027 - an optimizer's parameters stay meanwhile
        """Note that the gradient of a tensor has left."""

    def _on_value(self, index: int) -> None:
        """Give the module a value that has come."""
        self._reads.came(index)
        self._masters.publish(index)

    def _bring(self, index: int) -> None:
        """Bring a value that the script reads: what the next forward pass would see."""
        self._hooks.wait_for(index)
        self._reads.came(index)

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        if self._in_backward:
            return
        self._steps_before_pass = self.steps
        if self._passes and self._hooks.are_cleared(besides=parameter):
            self._forget_passes()
            if not self._begun:  # what they have sent is awaited before more is sent
                self._begin()
                self._hooks.wait()
        if not self._begun:
            self._begin()
        if self._passes >= self._plan.passes:
            raise UsageError(
                f"backward() has run more than {self._plan.passes} time(s) without step(); "
                "expected step() after it, or passes= for the number of passes that a step adds up"
            )
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
