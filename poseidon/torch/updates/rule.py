"""An update rule on the shards: workers receive the new parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from poseidon.engine.leaf import Leaf, LeafStage
from poseidon.engine.loop_table import Applies, LoopEvent, State
from poseidon.errors import UsageError
from poseidon.exchange.base import local_of
from poseidon.torch.divided_states import leaf_of_named
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.masters import under_a_rule
from poseidon.torch.module_watch import SentGradients
from poseidon.torch.tensors import ModuleTensors
from poseidon.torch.update_rules import ShardRules
from poseidon.torch.updates.group_update import GroupUpdate
from ps_server.rules import history_count

SCALED = (
    "a GradScaler has read or changed this worker's gradients after backward() had sent them to "
    "the shards; use bfloat16 autocast, which needs no GradScaler, or a torch.optim optimizer on "
    "the workers"
)


class RuleUpdate(GroupUpdate):
    """See `Update`."""

    applies = Applies.SHARDS

    def __init__(self, rules: ShardRules, tensors: ModuleTensors) -> None:
        trained, shards = tensors.trained, tensors.divided
        member = tensors.context.member
        rules.check_groups([*trained, *(table.spec.name for table in tensors.tables)])
        for name, parameter in trained.items():
            if shards is not None and rules.server_rule(name, parameter.shape).matrix is not None:
                raise UsageError(
                    f"{rules.label} for '{name}' needs the whole matrix, but fully_shard() has "
                    "divided it; use a rule of single elements, such as poseidon.AdamW"
                )
            if not local_of(parameter).is_contiguous():
                raise UsageError(
                    f"'{name}' is not contiguous in memory, so no rule can be applied to it in "
                    "place; make it contiguous, or use a torch.optim optimizer on the workers"
                )
        self.label = rules.label
        self._rules = rules
        self._set_rate: float | None = None
        self._sent = SentGradients(member, SCALED)

        # of its data: a value from the shards does not count as a change by the script (`check_begin`)
        parts = {name: local_of(parameter).data for name, parameter in trained.items()}
        self.plan = tensors.plan(rules, lambda name: under_a_rule(parts[name], member))
        _check_apart(parts)
        self._trained = trained
        self._of_parameters = {i for i, t in enumerate(self.plan.tensors) if not t.statistics}
        self._known: list[tuple[int, int]] = []
        self._has_rule = {id(p) for p in (*trained.values(), *tensors.of_tables)}

    @property
    def lr(self) -> float:
        return self.rates()[0]

    def set_lr(self, rate: float) -> None:
        self.loop.session.check(LoopEvent.SET_RATE, rate=rate)
        self._set_rate = float(rate)

    def rates(self) -> tuple[float, ...]:
        own, *others = self._rules.rates(self.loop.session.steps) or (0.0,)
        return own if self._set_rate is None else self._set_rate, *others

    # What to send.

    def check_begin(self) -> None:
        self._check_unchanged()

    def check_backward(self) -> None:
        if self.loop.session.state is State.COMING and not self.loop.exchanged.hooks.are_taken:
            raise UsageError(
                f"backward() has a loss that was computed before step {self.loop.session.steps} "
                "had ended; compute the loss after step()"
            )

    def pass_ended(self) -> None:
        self._sent.note(reversed(self._trained.values()))
        if self.loop.session.state is State.FULL:  # new values may come before the step ends
            self.loop.exchanged.reads.leave(self._of_parameters)

    def may_leave(self, index: int) -> bool:
        # The graph may have an alias, as of weight.detach(), that a node which is still to run uses.
        # No graph has one of a part.
        return bool(self.plan.shards) or not self.loop.exchanged.reads.aliases.has(index)

    def sent(self, index: int) -> None:
        self.loop.exchanged.reads.leave({index})

    def forget(self) -> None:
        self._sent.forget()

    def check_read(self, index: int) -> None:
        session, when = self.loop.session, ""
        if session.passes >= self.plan.options.passes:
            when = f"after {session.passes} backward pass(es)"
        elif session.state is State.BACKWARD and self.loop.exchanged.hooks.has_left(index):
            when = "in a hook, after its gradient has left,"
        if when:
            raise UsageError(
                f"'{self.plan.tensors[index].name}' is read or written {when} and before step(), "
                "while the shards change it; read or write it before backward() or after step(), "
                "and do not call an optimizer's step() beside a rule"
            )

    # How to apply.

    def step(self, *, zero_grad: bool) -> bool:
        self._check_zero_grad(zero_grad)
        return self._end_step()

    def _check_zero_grad(self, zero_grad: bool) -> None:
        if not zero_grad:
            raise UsageError(
                f"step(zero_grad=False) cannot be used with {self.label}, because the shards "
                "consume the gradients; call step(), or use a torch.optim optimizer on the workers"
            )

    def _end_step(self) -> bool:
        """End the step, or a turn within it. Return whether it was the step."""
        loop, exchanged = self.loop, self.loop.exchanged
        with DisableTorchFunctionSubclass(), exchanged.reads.turn:
            loop.check_step(LoopEvent.STEP)
            exchanged.hooks.check_unchanged()
            self._sent.check()
            self._check_trained()
            self._check_frozen()
            self._check_unchanged()
            if loop.leave_turn():
                return False
            loop.end_step(LoopEvent.STEP, settles=True)
            for parameter in self._trained.values():
                parameter.grad = None  # of one without elements, which is not exchanged
                # a graph of the step before is not to be used again
                torch.autograd.graph.increment_version(parameter)
            self._note_values()
            exchanged.reads.leave()
            exchanged.reads.read_aliased()
        return True

    def _check_unchanged(self) -> None:
        """Refuse what the script has written since the last step, also an optimizer of its own."""
        now = self._values()
        if now == self._known:
            return
        pairs = zip(self._trained, self._known, now, strict=True)
        name = next(name for name, known, value in pairs if value != known)
        raise UsageError(
            f"'{name}' was changed by the script after distribute(), but the shards' value would "
            "replace it; change it before distribute(), or use a torch.optim optimizer on the "
            "workers"
        )

    def _watched(self) -> Iterable[nn.Parameter]:
        """Return the parameters of which none but the trained ones may have a gradient."""
        return self.loop.exchanged.module.parameters()

    def _check_trained(self) -> None:
        """Refuse gradients of parameters that no shard trains."""
        for parameter in self._watched():
            has_rule = id(parameter) in self._has_rule
            if not has_rule and parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{self.name_of(parameter)} has a gradient, but required none, or did not "
                    "exist, when distribute() was called, so no shard trains it; call "
                    "distribute() when the module has all parameters that are ever trained"
                )

    def _check_frozen(self) -> None:
        for name, parameter in self._trained.items():
            if not parameter.requires_grad:
                raise UsageError(
                    f"'{name}' was frozen after distribute(), but the shards would still apply "
                    "momentum and decay; freeze it before distribute(), or use a torch.optim "
                    "optimizer on the workers"
                )

    def _note_values(self) -> None:
        self._known = self._values()

    def _values(self) -> list[tuple[int, int]]:
        """Return for each parameter what changes with the address of its memory, and whenever
        autograd sees a write to it.
        """
        with DisableTorchFunctionSubclass():
            own = self._trained.values()
            parts: Iterable[Tensor] = map(local_of, own) if self.plan.shards else own
            return [
                (part.data_ptr(), whole._version) for part, whole in zip(parts, own, strict=True)
            ]

    # Which state.

    def attach(self, loop: GroupLoop) -> None:
        super().attach(loop)
        self._histories = loop.exchanged.leaves(loop.tree.own, self.label)
        self._note_values()

    def leaves(self) -> Sequence[Leaf]:
        rate = Leaf.shared("lr", lambda: self._set_rate, self._load_rate, stage=LeafStage.UPDATE)
        return [rate, *map(self._of_whole, self._histories.histories())]

    def replicated(self) -> Mapping[str, Tensor]:
        return self._histories.replicated()

    def _of_whole(self, leaf: Leaf) -> Leaf:
        """Return a leaf of histories with whole tensors, where this worker has parts."""
        if not self.plan.shards:
            return leaf
        counts = {t.name: history_count(t.rule.kind) for t in self.plan.shards[0]}
        member = self.loop.context.member
        return leaf_of_named(leaf, self._trained, lambda n, none, _: [none] * counts[n], member)

    def _load_rate(self, rate: float | None) -> None:
        self._set_rate = rate

    def reopen(self) -> None:
        self.loop.exchanged.exchange.open(self._histories.loaded(), self.loop.session.iterations)
        self._note_values()


def _check_apart(parts: Mapping[str, Tensor]) -> None:
    """Refuse parameters that share memory: each has a value of its own on the shards."""
    placed = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parts.items() if p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(placed):
        if start < end:
            raise UsageError(
                f"'{name}' and '{other}' share memory, although they are two parameters; use one "
                "parameter in both places, or a torch.optim optimizer on the workers"
            )
