"""A module and its exchange: where the values of its tensors are, and how they get there.

A value is on its way (`reads.py`), in the exchange's memory in float32 (`masters.py`), among the rows
of a table (`tables`), or in the module. Hooks send gradients and wait for values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from poseidon.engine.exchange_leaves import ExchangeLeaves
from poseidon.errors import UsageError
from poseidon.exchange.alone import AloneRowTables
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.module_hooks import OfOneModule, OutsideOfGraphs, uncompiled
from poseidon.exchange.observer import ObservedCall
from poseidon.torch.masters import Masters
from poseidon.torch.module_watch import OutputWatch
from poseidon.torch.reads import Reads
from poseidon.torch.shards import call_before_gathering, copies_before_hooks, views_of_fsdp
from poseidon.torch.tables.group import TableGroup
from poseidon.torch.tables.link import Callbacks
from poseidon.torch.tensors import GroupPlan
from poseidon.torch.updates.update import Update
from ps_server import ServerError


class ExchangedModule:
    """A module with an exchange of its own.

    Args:
        on_read: called with the index of a tensor that the script reads before its value has come.
            It calls `bring`, or raises.

    Attributes:
        hooks: between autograd and the exchange, from `put_hooks` on.
    """

    hooks: Hooks

    def __init__(self, plan: GroupPlan, on_read: Callable[[int], None]) -> None:
        self.module = uncompiled(plan.entry)
        self._kind, self._is_alone = type(self.module), plan.context.size == 1
        self.plan = plan
        held = [trained.tensor for trained in plan.tensors]
        if plan.shards:
            held += views_of_fsdp(self.module)
        self.reads = Reads(self.module, plan.values, on_read, held)
        settings = ExchangeSettings(clip=plan.options.clip)
        self.observed = plan.context.build(plan.tensors, settings, plan.entry, plan.shards)
        self.masters = Masters(plan.tensors, plan.sources)
        self.tables = TableGroup()
        self._removal = ExitStack()

    @property
    def exchange(self) -> Exchange:
        return self.observed.exchange

    @property
    def local_steps(self) -> int:
        """Steps of a round of local steps; 0: there are no rounds."""
        return self.observed.built.plan.local_steps

    def leaves(self, own: range, label: str) -> ExchangeLeaves:
        """Return the state of the exchange; see `ExchangeLeaves`."""
        return ExchangeLeaves(
            self.plan.tensors, self.exchange, own=own, local_steps=self.local_steps, label=label
        )

    def is_copied(self) -> bool:
        """Return whether this is a forked process, where the module is a copy.

        Raises:
            UsageError: the module has a different class, or the copy has no values.
        """
        is_fork = self.reads.is_fork
        if is_fork:
            self.reads.check_process()
        elif type(self.module) is not self._kind:
            raise UsageError(
                f"the module became a {type(self.module).__name__} after distribute(); call "
                "fully_shard() before distribute()"
            )
        return is_fork

    def check_process(self, call: str) -> None:
        """Refuse a call in a fork of this worker, which has no connections to the others."""
        if self.reads.is_fork and not self._is_alone:
            raise UsageError(
                f"{call}() was called in a process that this worker has started, which takes no "
                "part in the job; call it in the worker, or train a copy.deepcopy() of the module"
            )

    def open(self) -> None:
        """Open the exchange with the values of the module."""
        self.exchange.open(None)
        self.masters.publish_all()

    def put_hooks(
        self,
        update: Update,
        *,
        passes_left: Callable[[], int],
        on_forward: Callable[..., None],
        on_gradient: Callable[..., None],
    ) -> None:
        """Put hooks on the module and its tables.

        Hooks that begin an iteration come before hooks that use it. The hooks of a compiled module
        are on its entry alone.

        Args:
            passes_left: see `Callbacks`.
            on_forward: called before a forward pass of the module, or of a part with tensors.
            on_gradient: called when a backward pass has reached the module, or once more.
        """
        module, plan, client = self.module, self.plan, self.observed.built.client
        entry, member = plan.entry, plan.context.member
        callbacks = Callbacks(
            on_forward=partial(on_forward, module),
            on_gradient=on_gradient,
            passes_left=passes_left,
            around_wait=lambda: self.exchange.observing(ObservedCall.GATHER),
        )
        rows = AloneRowTables() if client is None else client.rows
        self.tables.open(plan.tables, rows, callbacks, root=member.network.rank == 0)
        is_compiled, sources = entry is not module, set(plan.sources)
        trained = [source for source in plan.sources if source.requires_grad]
        with ExitStack() as removal:
            if plan.shards:
                removal.callback(copies_before_hooks(module))
            for source in sources:
                if source.requires_grad:
                    handle = source.register_post_accumulate_grad_hook(on_gradient)
                    removal.callback(handle.remove)
            self.hooks = Hooks(
                [] if plan.shards else [module],  # FSDP gathers parts before layers run
                plan.tensors,
                self.exchange,
                passes=plan.options.passes,
                wait_free=member.options.wait_free,
                sources=plan.sources,
                entry=entry if is_compiled else None,
                on_backward=on_gradient,
                sender=update if plan.sends_gradients else None,
                on_value=self._came,
                turn=self.reads.turn,
            )
            removal.callback(self.hooks.close)
            if plan.shards:
                removal.callback(call_before_gathering(module, self.hooks.wait_before_use))
            self.observed.watch()
            of_layers = OutsideOfGraphs if is_compiled else OfOneModule
            for child in module.modules():
                own = {*child.parameters(recurse=False), *child.buffers(recurse=False)}
                if child is module or own & sources:
                    # Each has an object of its own: torch 2.11 looks up prepended hooks in the
                    # wrong order, and its compiler fails where two modules have the same object.
                    begins = of_layers(on_forward)
                    removal.callback(child.register_forward_pre_hook(begins, prepend=True).remove)
            if is_compiled:
                begins = OfOneModule(on_forward)
                removal.callback(entry.register_forward_pre_hook(begins, prepend=True).remove)
            removal.callback(OutputWatch(entry, trained, on_gradient).close)
            self._removal = removal.pop_all()
        self.reads.aliases.note_own()

    def start(self, iterations: int, rates: Sequence[float], *, present: bool) -> None:
        """Begin an iteration; see `Exchange.start` and `Hooks.start`."""
        with self.reads.turn:
            self.exchange.start(iterations, *rates)
            self.hooks.start(present=present)

    def next_virtual_worker(self) -> None:
        """End the turn of a virtual worker."""
        self.reads.all_came()
        self.masters.take_statistics()
        self.hooks.next_virtual_worker()
        if self.local_steps:  # the next virtual worker has values of its own
            self.masters.publish_all()
        else:
            self.masters.publish_statistics()

    def finish(self) -> None:
        """End an iteration."""
        self.masters.take_statistics()
        with self.reads.turn:
            self.exchange.finish()

    def settle(self) -> None:
        """Bring the values after all workers' steps."""
        with self.reads.turn:
            self.exchange.settle()

    def _came(self, index: int) -> None:
        """Give the module a value that has come."""
        self.reads.came(index)
        self.masters.publish(index)

    def bring(self, index: int) -> None:
        """Bring a value that the script reads: what the next forward pass would see."""
        self.hooks.wait_for(index)
        self.reads.came(index)

    def all_came(self) -> None:
        """Give the module all values, which have come."""
        self.reads.all_came()
        self.masters.publish_all()
        self.tables.settle()

    def wait_last(self) -> None:
        """Wait for the values of the last step, unless an error is on its way."""
        if not sys.exc_info()[0]:
            with suppress(ServerError):  # after the last step its values are on their way
                self.hooks.wait()

    def remove_hooks(self) -> None:
        """Remove the hooks, and bring the rows of tables unless an error is on its way."""
        if not sys.exc_info()[0]:
            with suppress(ServerError):
                self.tables.settle()
        self.reads.all_came()
        self._removal.close()
