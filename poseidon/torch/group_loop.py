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

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from poseidon.base.call_names import DISTRIBUTE, LEAVING, MEANS, STEP, VALUES
from poseidon.engine.exchange_leaves import ExchangeLeaves
from poseidon.engine.loop_collections import LoopCollections
from poseidon.engine.loop_table import Act, Applies, LoopEvent, State
from poseidon.engine.memory import StopRequested
from poseidon.engine.random_streams import RandomStreams
from poseidon.engine.session import LoopPosition, TrainingSession
from poseidon.engine.state_tree import StateTree
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.alone import AloneRowTables, RowTables
from poseidon.exchange.base import ExchangeSettings, is_sharded
from poseidon.exchange.broadcast import Gather
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.module_hooks import uncompiled
from poseidon.exchange.observer import ObservedCall
from poseidon.exchange.options import OnDivergence
from poseidon.exchange.replicas import NO_CHECK, ReplicaCheck
from poseidon.torch.masters import Masters
from poseidon.torch.module_watch import ModuleWatch
from poseidon.torch.own_states import bring_rest, open_streams
from poseidon.torch.reads import Reads
from poseidon.torch.shards import bring_shards, views_of_fsdp
from poseidon.torch.tables.group import TableGroup
from poseidon.torch.tables.link import Callbacks
from poseidon.torch.tensors import GroupPlan
from poseidon.torch.updates.update import Update
from poseidon.torch.weights import BatchWeights
from ps_server import ServerError


class GroupLoop:
    """Reports events of a module and a script to a session, and does its acts.

    Args:
        module: the module, or `torch.compile` of it.
        update: of its parameters.
        context: this worker.
    """

    def __init__(
        self,
        module: nn.Module,
        update: Update,
        context: WorkerContext,
    ) -> None:
        self.module = uncompiled(module)
        self.context = context
        self.update = update
        plan = update.plan
        worker, member, options = context.worker, context.member, context.member.options
        self.streams = RandomStreams(member.own, None, worker.device, divided=False)
        context.report(LoopPosition(collection=DISTRIBUTE))
        held = [trained.tensor for trained in plan.tensors]
        if plan.shards:
            held += views_of_fsdp(self.module)
        self.reads = Reads(self.module, plan.values, self._bring, held)
        settings = ExchangeSettings(clip=plan.options.clip)
        self.observed = context.build(plan.tensors, settings, module, plan.shards)
        self.session = TrainingSession(
            update.applies,
            passes=plan.options.passes,
            turns=len(member.own),
            behind=bool(options.staleness or self.observed.built.plan.local_steps),
            alone=worker.size == 1,
            rank=worker.rank,
        )
        self.collections = LoopCollections(self.session, self.exchange.control, context.report)
        self.watch: ModuleWatch | None = None
        self.tables = TableGroup()
        self.masters = Masters(plan.tensors, plan.sources)
        self.tree = StateTree(member)
        self.weights = BatchWeights(self.tree.count)
        compared: Sequence[int] = range(worker.size)
        if plan.shards:  # a part of one plane cannot be mended by all workers together
            options = replace(options, on_divergence=OnDivergence.STOP)
            compared = member.plane_ranks
        self.check = ReplicaCheck(
            options if worker.size > 1 else NO_CHECK,
            state=update.replicated,
            collect=self._gather_replicas,
            rank=worker.rank,
            ranks=compared,
        )
        try:
            self._open(module)
        except BaseException:
            self.close()
            raise

    def _gather_replicas(self, payload: bytes) -> Sequence[bytes]:
        """Return the payloads of the workers that are to have the same tensors."""
        payloads = self.collections.gather(payload)
        return [payloads[rank] for rank in self.check.ranks]

    @property
    def plan(self) -> GroupPlan:
        return self.update.plan

    @property
    def exchange(self) -> Exchange:
        return self.observed.exchange

    def exchange_leaves(self, label: str) -> ExchangeLeaves:
        """Return the state of the exchange, with the label of its rule."""
        return ExchangeLeaves(
            self.plan.tensors,
            self.exchange,
            own=self.tree.own,
            local_steps=self.observed.built.plan.local_steps,
            label=label,
        )

    @property
    def hooks(self) -> Hooks:
        assert self.watch is not None
        return self.watch.hooks

    def _open(self, module: nn.Module) -> None:
        context, worker, client = self.context, self.context.worker, self.observed.built.client
        self.exchange.open(None)
        self.masters.publish_all()
        if worker.size > 1:
            with self.collections.calling(DISTRIBUTE):
                rest = self.plan.rest
                whole = {name: tensor for name, tensor in rest.items() if not is_sharded(tensor)}
                bring_rest(whole, self.collections.gather, rank=worker.rank)
                divided = {name: tensor for name, tensor in rest.items() if name not in whole}
                bring_shards(divided, context.member)
        self.streams = open_streams(context, self.collections)
        self.streams.groups.add(self)
        self._open_tables(AloneRowTables() if client is None else client.rows)
        self.watch = ModuleWatch(
            module,
            self.update,
            self.observed,
            wait_free=context.member.options.wait_free,
            on_forward=partial(self._on_forward, type(self.module)),
            on_gradient=self._on_gradient,
            on_value=self._on_value,
            turn=self.reads.turn,
        )
        self.reads.aliases.note_own()
        self.session.on(LoopEvent.OPEN)
        if context.folder is not None:  # in a job a group may be used without its `with` block
            context.loops.add(self)
        context.job.opened(self.observed.built)
        self.collections.report()

    def _open_tables(self, tables: RowTables) -> None:
        worker = self.context.worker
        callbacks = Callbacks(
            on_forward=partial(self._on_forward, type(self.module), self.module),
            on_gradient=self._on_gradient,
            passes_left=lambda: self.plan.options.passes - self.session.passes,
            around_wait=lambda: self.exchange.observing(ObservedCall.GATHER),
        )
        self.tables.open(self.plan.tables, tables, callbacks, root=worker.rank == 0)
        if self.plan.tables and worker.size > 1:
            with self.collections.calling(DISTRIBUTE):
                self.collections.gather(b"")

    # What happens.

    def on(self, event: LoopEvent, **words: object) -> None:
        """Let an event happen.

        Raises:
            UsageError: it is not legal now.
        """
        acts = self.session.check(event, **words)
        if Act.START in acts or Act.START_PRESENT in acts:
            self.update.check_begin()
        self.session.on(event, **words)
        for act in acts:
            if event is LoopEvent.AVERAGE and act is Act.WAIT:
                self.collections.report(MEANS)
            _ACTS[act](self)
        if event is LoopEvent.AVERAGE:
            self.collections.report()

    def _on_forward(self, kind: type[nn.Module], module: nn.Module, *_: object) -> None:
        self.context.check_start()
        if self.reads.is_fork:
            self.reads.check_process()
            return
        if type(self.module) is not kind:
            raise UsageError(
                f"the module became a {type(self.module).__name__} after distribute(); call "
                "fully_shard() before distribute()"
            )
        if torch.is_grad_enabled():
            self.session.check(LoopEvent.FORWARD, **self._resumption())
            self.streams.begin(self.virtual_worker)
            self.on(LoopEvent.FORWARD)
        elif module.training:
            self.session.check(LoopEvent.EVALUATE)
        else:
            # torch may take another path in an evaluation, if a tensor's class is not its usual one
            self.on(LoopEvent.EVALUATE)
        self._report_use()

    def _report_use(self) -> None:
        """Report that the script uses values next, which may wait for other workers: they may use
        those of another module.
        """
        if self.context.loops.several and self.context.member.options.most_lead == 0:
            self.collections.report(VALUES)

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        session = self.session
        if session.state is State.BACKWARD:
            return
        self._check_process("backward")
        self.update.check_backward()
        self.weights.check_weighed()
        if session.passes and self.hooks.are_cleared(besides=parameter):
            self.forget_passes()
            if not session.has_begun:  # what they have sent is awaited before more is sent
                self.on(LoopEvent.FORWARD)
                self.hooks.wait()
        self.on(LoopEvent.BACKWARD, **self._resumption())
        if self.context.loops.several:
            self.collections.report()
        torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)

    def _resumption(self) -> dict[str, object]:
        """Return the words about a checkpoint that the script has not loaded."""
        if self.session.state is not State.AWAITING:
            return {}
        kept = "first.keep(NAME=this) and first" if self.context.number else "group"
        return {"source": self.context.checkpoint, "group": kept}

    def _pass_ended(self) -> None:
        self.session.on(LoopEvent.PASS)
        self.hooks.next_pass()
        self.update.pass_ended()

    def _on_value(self, index: int) -> None:
        """Give the module a value that has come."""
        self.reads.came(index)
        self.masters.publish(index)

    def _bring(self, index: int) -> None:
        """Bring a value that the script reads: what the next forward pass would see."""
        self.update.check_read(index)
        self._report_use()
        self.hooks.wait_for(index)
        self.reads.came(index)

    # What the script calls.

    def drop(self) -> None:
        """See `Group.drop`."""
        if self.session.passes:
            self.forget_passes()
            self.hooks.clear()

    def forget_passes(self) -> None:
        """Forget the backward passes since the last step, whose gradients the script has cleared,
        or need not clear.
        """
        with self.collections.calling(STEP):
            self.on(LoopEvent.DROP)
        self.tables.drop()
        self.update.forget()

    def check_step(self, event: LoopEvent) -> None:
        """Check that a step may end.

        Raises:
            UsageError: it may not.
            KeyboardInterrupt: the job was asked to stop, and the loop has continued.
        """
        self.context.check_start()
        self._check_process("step")
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
                    self.exchange.settle()
                self.check.run(self.session.steps)

    @contextmanager
    def collecting(self, call: str) -> Iterator[Gather]:
        """Yield what makes the collections of a script's call, which is legal now."""
        self.check_open(call)
        with self.collections.calling(call):
            yield self.collections.gather

    @contextmanager
    def settled(self, call: str) -> Iterator[Gather]:
        """As `collecting`, for a call after a step, which has all values. No virtual worker's
        stream is drawn from.
        """
        with self.collecting(call) as gather:
            words = {"call": f"{call}()", **self._virtual_words()}
            self.session.check(LoopEvent.SETTLE, **words)
            self.streams.enter(None)
            self._bring_all(LoopEvent.SETTLE, words)
            yield gather

    def _virtual_words(self) -> dict[str, object]:
        current = self.virtual_worker
        return {"virtual_worker": current, "before": current - 1}

    def _bring_all(self, event: LoopEvent, words: Mapping[str, object]) -> None:
        """Bring the values that an event needs."""
        self.on(event, **words)
        self.reads.all_came()
        self.masters.publish_all()
        self.tables.settle()

    def check_open(self, call: str) -> None:
        """Refuse a call that needs the other workers after `close`. One worker alone needs none."""
        self.context.check_start()
        self._check_process(call)
        self.session.check(LoopEvent.COLLECT, call=f"{call}()")

    def _check_process(self, call: str) -> None:
        """Refuse a fork of this worker, which has no connections to the others."""
        if self.reads.is_fork and self.context.worker.size > 1:
            raise UsageError(
                f"{call}() was called in a process that this worker has started, which takes no "
                "part in the job; call it in the worker, or train a copy.deepcopy() of the module"
            )

    def leave(self) -> None:
        """Settle at the end of a `with` block that has no error."""
        with self.collections.calling(LEAVING):
            self.forget_stale()
            self._bring_all(LoopEvent.LEAVE, self._virtual_words())

    def close(self) -> None:
        """Leave the job and remove the hooks from the module. Safe to call twice."""
        self.on(LoopEvent.CLOSE)

    @property
    def virtual_worker(self) -> int:
        return self.tree.own[self.session.turn]

    def is_asked_to_stop(self) -> bool:
        """Return whether this loop's exchange has brought the request, and its step has ended."""
        return self.exchange.control.is_asked_to_stop(self.session.iterations)

    def is_asked_for_snapshot(self) -> bool:
        """Return whether this loop's exchange has brought the request for its last step, and no
        turn of the next one has ended.
        """
        control = self.exchange.control
        return self.session.is_first_turn and control.is_asked_for_snapshot(self.session.iterations)

    def name(self, parameter: Tensor) -> str:
        """Return the name of a parameter, for messages."""
        names = [f"'{name}'" for name, own in self.module.named_parameters() if own is parameter]
        return names[0] if names else "a parameter that is not the module's"

    # The acts of the session.

    def _start(self, *, present: bool = False) -> None:
        with self.reads.turn:
            self.exchange.start(self.session.iterations, *self.update.rates())
            self.hooks.start(present=present)

    def _send(self) -> None:
        if self.session.state is State.APPLYING and not self.session.is_last_turn:
            self.hooks.wait_for_rest()
        else:
            self.hooks.finish()

    def _finish(self) -> None:
        if self.weights.records is not None:
            self.exchange.note_records(self.weights.records)
        with self.collections.ending_iteration(lambda: self.exchange.finished):
            if self.weights.is_left_out:  # its rows count as without a gradient
                self.tables.drop()
            self.tables.push(lambda: self.update.rates()[0], self.session.steps)
            self.masters.take_statistics()
            with self.reads.turn:
                self.exchange.finish()
        self._enter_turn()

    def _next_turn(self) -> None:
        self.reads.all_came()
        self.masters.take_statistics()
        self.hooks.next_virtual_worker()
        if self.observed.built.plan.local_steps:  # the next virtual worker has values of its own
            self.masters.publish_all()
        else:
            self.masters.publish_statistics()
        self._enter_turn()

    def _enter_turn(self) -> None:
        self.tree.enter(self.session.turn)
        self.streams.end_step(ends_iteration=self.session.is_first_turn)
        self.weights.end_step()

    def _settle(self) -> None:
        if self.context.member.options.staleness or self.observed.built.plan.local_steps:
            self.collections.gather(b"")  # a different call of another worker is found here
        with self.reads.turn:
            self.exchange.settle()

    def _wait_last(self) -> None:
        if not sys.exc_info()[0]:
            with suppress(ServerError):  # after the last step its values are on their way
                self.hooks.wait()

    def _leave(self) -> None:
        if self.watch is not None and not sys.exc_info()[0]:
            with suppress(ServerError):
                self.tables.settle()
        self.reads.all_came()
        self.context.loops.remove(self)
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        self.streams.groups.discard(self)
        self.streams.enter(None)
        self.streams = RandomStreams(self.tree.own, None, self.context.worker.device, divided=False)
        self.tables.close()
        self.observed.close()


_ACTS: dict[Act, Callable[[GroupLoop], None]] = {
    Act.START: GroupLoop._start,
    Act.START_PRESENT: lambda loop: loop._start(present=True),
    Act.SEND: GroupLoop._send,
    Act.FINISH: GroupLoop._finish,
    Act.NEXT_TURN: GroupLoop._next_turn,
    Act.FORGET: lambda loop: loop.hooks.forget(),
    Act.ABANDON: lambda loop: loop.hooks.abandon(),
    Act.WAIT: lambda loop: loop.hooks.wait(),
    Act.WAIT_LAST: GroupLoop._wait_last,
    Act.SETTLE: GroupLoop._settle,
    Act.CLOSE: GroupLoop._leave,
}
