"""What each of several virtual workers of a process has of its own: random streams, values of
buffers, and the state of an optimizer. `enter` puts those of one virtual worker in place. Before the
first step, `bring_rest` gives all workers the same tensors, also those that are not exchanged.

    for each virtual worker of the process, in order:
        its forward and backward passes, then step()
    the last step() ends the iteration

Laws:
* A virtual worker finds the module as it has left it, with the new parameters. Buffers that no
  exchange keeps equal have a value for each virtual worker. Between two iterations the module has
  the first one's.
* A virtual worker finds an optimizer's state as it has left it. The options of parameter groups,
  such as the rate, belong to all: a step begins with those before the first turn, and all turns
  change them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.base.call_names import DISTRIBUTE
from poseidon.engine.loop_collections import LoopCollections
from poseidon.engine.random_streams import RandomStreams, script_seed
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.base import is_sharded
from poseidon.exchange.broadcast import Gather, broadcast_parameters
from poseidon.exchange.membership import Membership
from poseidon.torch.shards import bring_shards
from poseidon.torch.tensors import RUNNING

Options = list[dict[str, Any]]
"""The options of each parameter group."""


class OwnBuffers:
    """The values that buffers of a module have for each of several virtual workers.

    Only buffers that a turn has changed are copied, as autograd sees changes; and running
    statistics, whose changes it does not see.

    Args:
        rest: its tensors that are not exchanged in every step, by name.
    """

    def __init__(self, module: nn.Module, rest: Mapping[str, Tensor], workers: int) -> None:
        self._module = module
        buffers = {name: t for name, t in rest.items() if not isinstance(t, nn.Parameter)}
        self._buffers = buffers if workers > 1 else {}
        self._running = {name for name in self._buffers if name.rpartition(".")[2] in RUNNING}
        self._workers = workers
        self._at = 0
        self.restart()

    def restart(self) -> None:
        """Give all virtual workers the values that the module has."""
        self._first = {name: tensor.detach().clone() for name, tensor in self._buffers.items()}
        self._changing = set(self._running)
        self._own: list[dict[str, Tensor]] = [{} for _ in range(self._workers)]
        self._note()

    def enter(self, at: int) -> None:
        """Put the values of a virtual worker into the module.

        Args:
            at: its place among the virtual workers of this process.

        Raises:
            UsageError: the module has another tensor in place of a buffer.
        """
        if at == self._at:
            return
        self._check_same()
        self._changing |= {n for n, t in self._buffers.items() if t._version != self._versions[n]}
        with torch.no_grad():
            for name in self._changing:
                tensor = self._buffers[name]
                self._own[self._at][name] = tensor.detach().clone()
                tensor.copy_(self._own[at].get(name, self._first[name]))
        self._at = at
        self._note()

    def _note(self) -> None:
        self._versions = {name: tensor._version for name, tensor in self._buffers.items()}

    def _check_same(self) -> None:
        now = dict(self._module.named_buffers(remove_duplicate=False)) if self._buffers else {}
        for name, tensor in self._buffers.items():
            if now.get(name) is not tensor:
                raise UsageError(
                    f"the module has replaced the tensor of its buffer '{name}', but each virtual "
                    "worker has its own value for it; change it in place, for example by copy_()"
                )


class OwnOptimizerStates:
    """The states of an optimizer.

    Args:
        count: of virtual workers. All begin with the optimizer's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        self._optimizer = optimizer
        self._states = [
            optimizer.state,
            *(
                defaultdict(dict, {key: deepcopy(own) for key, own in optimizer.state.items()})
                for _ in range(count - 1)
            ),
        ]
        self._at = 0
        self._before: Options = []
        self._after: Options = []

    def enter(self, at: int) -> None:
        """Give the optimizer the state of a virtual worker.

        Args:
            at: its place among the virtual workers of this process.
        """
        self._states[self._at] = self._optimizer.state
        self._optimizer.state = self._states[at]
        self._at = at

    def before_step(self) -> None:
        """Note the options before the step of a turn."""
        if self._at == 0 and len(self._states) > 1:
            self._before = self._options()

    def after_step(self) -> None:
        """End the step of a turn.

        Raises:
            UsageError: steps of two virtual workers have changed an option differently.
        """
        if len(self._states) == 1:
            return
        found = self._options()
        if self._at == 0:
            self._after = found
        self._check_alike(found)
        if self._at < len(self._states) - 1:
            for group, options in zip(self._optimizer.param_groups, self._before, strict=True):
                _restore(group, options)

    def _options(self) -> Options:
        return [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def _check_alike(self, found: Options) -> None:
        for first, own in zip(self._after, found, strict=True):
            for key, value in own.items():
                if not _is_same(first.get(key), value):
                    raise UsageError(
                        f"{type(self._optimizer).__name__} has set '{key}' to {first.get(key)} for "
                        f"one virtual worker and to {value} for another, but its parameter groups "
                        "have one value; start as many workers as virtual workers"
                    )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _restore(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a parameter group its earlier options. Those that are the same stay as they are."""
    for key in group.keys() - options.keys() - {"params"}:
        del group[key]
    for key, value in options.items():
        if not _is_same(group.get(key), value):
            group[key] = deepcopy(value)


def bring_rest(rest: Mapping[str, Tensor], gather: Gather, member: Membership) -> None:
    """Set tensors that are not exchanged to rank 0's, and shards to the first host's. All workers
    call it together.

    Raises:
        UsageError: the workers have different ones.
    """
    whole = {name: tensor for name, tensor in rest.items() if not is_sharded(tensor)}
    own = [f"'{n}' of {t.dtype}, {tuple(t.shape)}" for n, t in whole.items()]
    first, *others = (part.decode().split("\n") for part in gather("\n".join(own).encode()))
    for number, other in enumerate(others, start=1):
        for theirs, mine in zip_longest(first, other, fillvalue=""):
            if theirs != mine:
                raise UsageError(
                    f"worker 0's module has {theirs or 'no more tensors'}, where worker "
                    f"{number}'s has {mine or 'no more'}; expected the same module on all workers"
                )
    broadcast_parameters(list(whole.values()), gather, rank=member.network.rank)
    bring_shards([tensor for name, tensor in rest.items() if name not in whole], member)


def open_streams(context: WorkerContext, collections: LoopCollections) -> RandomStreams:
    """Return the random streams of this worker, which its groups share. All workers call it
    together.

    Raises:
        UsageError: they are of other virtual workers.
    """
    own, device = context.member.own, context.device
    size, told = context.size, context.member.virtual_workers is not None
    # threads of a process that trains alone would share its generators
    is_one_of_several = size > 1 and context.folder is not None
    if not (told or is_one_of_several):
        return RandomStreams(own, None, device, divided=False)
    seed: int | None = None
    if told:
        given = script_seed().to_bytes(8, "little")
        if size > 1:
            with collections.calling(DISTRIBUTE):
                given = collections.gather(given)[0]
        seed = int.from_bytes(given, "little")
    streams = context.loops.streams
    if streams is None or not streams.groups:
        context.loops.streams = streams = RandomStreams(own, seed, device)
    if streams.own != own:
        raise UsageError(
            f"distribute() gives this worker the virtual workers {_words(own)}, and an "
            f"earlier one {_words(streams.own)}; expected the same virtual_workers in each"
        )
    return streams


def _words(own: range) -> str:
    return ", ".join(map(str, own)) if own.step > 1 or len(own) == 1 else f"{own[0]} to {own[-1]}"
