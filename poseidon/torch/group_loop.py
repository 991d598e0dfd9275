"""The loop of a group: the session of a module that all workers of a job train together.

One step of the user's loop, and what happens in it:

    module(x)            the first forward pass begins an iteration; each layer waits for its own tensors
    loss.backward()      each gradient leaves as soon as it is complete
    step()               the iteration ends

A process with several virtual workers runs the loop once for each of them in an iteration; only the
last `step` ends it (`own_states.py`).

Laws:
* All workers call `step`, `settle` and the collections of `Group` equally often and in the same
  order.
* Between `step` and the next use of a tensor the exchange owns it (`reads.py`).
* What is legal when, and what follows, is in the session's table (`poseidon/engine/loop_table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from poseidon.base.call_names import DISTRIBUTE, LEAVING, MEANS, STEP, VALUES, LoopPosition
from poseidon.engine.loop_collections import LoopCollections
from poseidon.engine.loop_table import Act, Applies, LoopEvent, State
from poseidon.engine.memory import StopRequested
from poseidon.engine.random_streams import RandomStreams
from poseidon.engine.session import TrainingSession
from poseidon.engine.state_tree import StateTree
from poseidon.exchange.broadcast import Gather
from poseidon.torch.exchanged_module import ExchangedModule
from poseidon.torch.own_states import bring_rest, open_streams
from poseidon.torch.updates.update import Update
from poseidon.torch.weights import BatchWeights


class GroupLoop:
    """Reports events of a module and a script to a session, and does its acts."""

    def __init__(self, update: Update) -> None:
        self.update, plan = update, update.plan
        self.context = context = plan.context
        member, options = context.member, context.member.options
        self.streams = RandomStreams(member.own, None, context.device, divided=False)
        context.report(LoopPosition(collection=DISTRIBUTE))
        self.exchanged = ExchangedModule(plan, self._on_read)
        self.session = TrainingSession(
            update.applies,
            passes=plan.options.passes,
            turns=len(member.own),
            behind=bool(options.staleness or self.exchanged.local_steps),
            alone=context.size == 1,
            rank=context.rank,
            words=self._words,
        )
        self.collections = LoopCollections(
            self.session, self.exchanged.exchange.control, context.report
        )
        self.tree = StateTree(member)
        self.weights = BatchWeights(self.tree.count)
        self.check = update.replica_check(self.collections.gather)
        try:
            self._open()
        except BaseException:
            self.on(LoopEvent.CLOSE)
            raise

    def _open(self) -> None:
        context, exchanged = self.context, self.exchanged
        exchanged.open()
        if context.size > 1:
            with self.collections.calling(DISTRIBUTE):
                bring_rest(self.update.plan.rest, self.collections.gather, context.member)
        self.streams = open_streams(context, self.collections)
        self.streams.groups.add(self)
        exchanged.put_hooks(
            self.update,
            passes_left=lambda: self.update.plan.options.passes - self.session.passes,
            on_forward=self._on_forward,
            on_gradient=self._on_gradient,
        )
        if self.update.plan.tables and context.size > 1:
            with self.collections.calling(DISTRIBUTE):
                self.collections.gather(b"")
        self.session.on(LoopEvent.OPEN)
        if context.folder is not None:  # in a job a group may be used without its `with` block
            context.loops.add(self)
        context.job.opened(exchanged.observed.built)
        self.collections.report()

    # What happens.

    def on(self, event: LoopEvent) -> None:
        """Let an event happen.

        Raises:
            UsageError: it is not legal now.
        """
        acts = self.session.check(event)
        if Act.START in acts or Act.START_PRESENT in acts:
            self.update.check_begin()
        self.session.on(event)
        for act in acts:
            if event is LoopEvent.AVERAGE and act is Act.WAIT:
                self.collections.report(MEANS)
            _ACTS[act](self)
        if event is LoopEvent.AVERAGE:
            self.collections.report()

    def _on_forward(self, module: nn.Module, *_: object) -> None:
        self.context.check_start()
        if self.exchanged.is_copied():
            return
        if torch.is_grad_enabled():
            self.session.check(LoopEvent.FORWARD)
            self.streams.begin(self.virtual_worker)
            if self.session.state is not State.BEGUN:  # where it changes nothing
                self.on(LoopEvent.FORWARD)
        elif module.training:
            self.session.check(LoopEvent.EVALUATE)
        else:
            # torch may take another path in an evaluation, if a tensor's class is not its usual one
            self.on(LoopEvent.EVALUATE)
        self._report_use()

    def _report_use(self) -> None:
        """Report that the script uses values next, for which it may wait: others may use another
        module's.
        """
        if self.context.loops.several and self.context.member.options.most_lead == 0:
            self.collections.report(VALUES)

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        session = self.session
        if session.state is State.BACKWARD:
            return
        self.exchanged.check_process("backward")
        self.update.check_backward()
        self.weights.check_weighed()
        if session.passes and self.exchanged.hooks.are_cleared(besides=parameter):
            self.forget_passes()
            if not session.has_begun:  # what they have sent is awaited before more is sent
                self.on(LoopEvent.FORWARD)
                self.exchanged.hooks.wait()
        self.on(LoopEvent.BACKWARD)
        if self.context.loops.several:
            self.collections.report()
        torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)

    def _words(self) -> dict[str, object]:
        """Return words for the sentences of the session."""
        return {
            "virtual_worker": self.virtual_worker,
            "before": self.virtual_worker - 1,
            "source": self.context.checkpoint,
            "group": "first.keep(NAME=this) and first" if self.context.number else "group",
        }

    def _pass_ended(self) -> None:
        self.session.on(LoopEvent.PASS)
        self.exchanged.hooks.next_pass()
        self.update.pass_ended()

    def _on_read(self, index: int) -> None:
        self.update.check_read(index)
        self._report_use()
        self.exchanged.bring(index)

    # What the script calls.

    def forget_passes(self) -> None:
        """Forget the backward passes since the last step, whose gradients the script has cleared,
        or need not clear.
        """
        with self.collections.calling(STEP):
            self.on(LoopEvent.DROP)
        self.exchanged.tables.drop()
        self.update.forget()

    def check_step(self, event: LoopEvent) -> None:
        """Check that a step may end.

        Raises:
            UsageError: it may not.
            KeyboardInterrupt: the job was asked to stop, and the loop has continued.
        """
        self.context.check_start()
        self.exchanged.check_process("step")
        if self.session.state is not State.CLOSED and self.is_asked_to_stop():
            raise StopRequested(f"the job was asked to stop after step {self.session.steps}")
        self.session.check(event, call="step()")

    def leave_turn(self) -> bool:
        """End the turn of a virtual worker that is not the last of this process. Return whether
        it was not.
        """
        if self.session.is_last_turn:
            return False
        self.on(LoopEvent.TURN)
        return True

    def forget_stale(self) -> None:
        """Forget passes that belong to no step, where the loss of another module may have made
        them. Shards take no gradient back, and an optimizer has used its own.
        """
        takes_means = self.update.applies in (Applies.WORKERS, Applies.TURNS)
        if takes_means and self.session.passes and self.context.loops.several:
            self.forget_passes()

    def end_step(
        self, event: LoopEvent, *, settles: bool = False, also_first: bool = False
    ) -> None:
        """End the step, and compare the replicas if it is time to.

        Args:
            settles: bring the values before they are compared.
            also_first: see `ReplicaCheck.is_due`.
        """
        with self.collections.calling(STEP):
            self.on(event)
            self.collections.finish_step()
            if self.check.is_due(self.session.steps, also_first=also_first):
                if settles:
                    self.exchanged.exchange.settle()
                self.check.run(self.session.steps)

    @contextmanager
    def collecting(self, call: str) -> Iterator[Gather]:
        """Yield what makes the collections of a script's call, which is legal now."""
        self.check_open(call)
        with self.collections.calling(call):
            yield self.collections.gather

    @contextmanager
    def settled(self, call: str) -> Iterator[Gather]:
        """As `collecting`, after a step, with all values; no virtual worker's stream is drawn from."""
        with self.collecting(call) as gather:
            self.session.check(LoopEvent.SETTLE, call=f"{call}()")
            self.streams.enter(None)
            self._bring_all(LoopEvent.SETTLE)
            yield gather

    def _bring_all(self, event: LoopEvent) -> None:
        """Bring the values that an event needs."""
        self.on(event)
        self.exchanged.all_came()

    def check_open(self, call: str) -> None:
        """Refuse a call that needs the other workers after `close`. One worker alone needs none."""
        self.context.check_start()
        self.exchanged.check_process(call)
        self.session.check(LoopEvent.COLLECT, call=f"{call}()")

    def leave(self) -> None:
        """Settle at the end of a `with` block that has no error."""
        with self.collections.calling(LEAVING):
            self.forget_stale()
            self._bring_all(LoopEvent.LEAVE)

    @property
    def virtual_worker(self) -> int:
        return self.tree.own[self.session.turn]

    def is_asked_to_stop(self) -> bool:
        """Return whether this loop's exchange has brought the request, and its step has ended."""
        return self.exchanged.exchange.control.is_asked_to_stop(self.session.iterations)

    def is_asked_for_snapshot(self) -> bool:
        """Return whether this loop's exchange has brought the request for its last step, and no
        turn of the next one has ended.
        """
        control = self.exchanged.exchange.control
        return self.session.is_first_turn and control.is_asked_for_snapshot(self.session.iterations)

    # The acts of the session.

    def _start(self, *, present: bool = False) -> None:
        self.exchanged.start(self.session.iterations, self.update.rates(), present=present)

    def _send(self) -> None:
        if self.session.state is State.APPLYING and not self.session.is_last_turn:
            self.exchanged.hooks.wait_for_rest()
        else:
            self.exchanged.hooks.finish()

    def _finish(self) -> None:
        exchanged, exchange = self.exchanged, self.exchanged.exchange
        if self.weights.records is not None:
            exchange.note_records(self.weights.records)
        with self.collections.ending_iteration(lambda: exchange.finished):
            if self.weights.is_left_out:  # its rows count as without a gradient
                exchanged.tables.drop()
            exchanged.tables.push(lambda: self.update.rates()[0], self.session.steps)
            exchanged.finish()
        self._enter_turn()

    def _next_turn(self) -> None:
        self.exchanged.next_virtual_worker()
        self._enter_turn()

    def _enter_turn(self) -> None:
        self.tree.enter(self.session.turn)
        self.streams.end_step(ends_iteration=self.session.is_first_turn)
        self.weights.end_step()

    def _settle(self) -> None:
        if self.context.member.options.staleness or self.exchanged.local_steps:
            self.collections.gather(b"")  # a different call of another worker is found here
        self.exchanged.settle()

    def _leave(self) -> None:
        self.exchanged.remove_hooks()
        self.context.loops.remove(self)
        self.streams.groups.discard(self)
        self.streams.enter(None)
        self.streams = RandomStreams(self.tree.own, None, self.context.device, divided=False)
        self.exchanged.tables.close()
        self.exchanged.observed.close()


_ACTS: dict[Act, Callable[[GroupLoop], None]] = {
    Act.START: GroupLoop._start,
    Act.START_PRESENT: lambda loop: loop._start(present=True),
    Act.SEND: GroupLoop._send,
    Act.FINISH: GroupLoop._finish,
    Act.NEXT_TURN: GroupLoop._next_turn,
    Act.FORGET: lambda loop: loop.exchanged.hooks.forget(),
    Act.ABANDON: lambda loop: loop.exchanged.hooks.abandon(),
    Act.WAIT: lambda loop: loop.exchanged.hooks.wait(),
    Act.WAIT_LAST: lambda loop: loop.exchanged.wait_last(),
    Act.SETTLE: GroupLoop._settle,
    Act.CLOSE: GroupLoop._leave,
}
