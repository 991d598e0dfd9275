"""The turns of the virtual workers of a process in each iteration of a group.

    for each virtual worker of the process, in order:
        its forward and backward passes, then step()
    the last step() ends the iteration

Law: a virtual worker finds the module as it has left it, with the new parameters. Buffers that no
exchange keeps equal have a value for each virtual worker. Between two iterations the module has the
first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from poseidon.engine.random_streams import RandomStreams
from poseidon.engine.worker_context import ThisWorker
from poseidon.errors import UsageError, counted
from poseidon.torch.tensors import RUNNING, GroupPlan
from ps_server.protocol.virtual_workers import VirtualWorkers


def turns_of(
    module: nn.Module, plan: GroupPlan, virtual: VirtualWorkers | None, worker: ThisWorker
) -> GroupTurns:
    """Return the turns of a group.

    Args:
        virtual: the virtual workers of the job, and the workers that compute for them; None: each
            for one.

    Raises:
        UsageError: the module needs as many workers as virtual workers.
    """
    own = range(worker.rank, worker.rank + 1) if virtual is None else virtual.of(worker.rank)
    several = not (virtual is None or virtual.is_one_each)
    if virtual is not None and several:
        _check_several(module, plan, virtual)
    return GroupTurns(
        own,
        worker.size if virtual is None else virtual.count,
        several=several,
        buffers=OwnBuffers(module, plan.rest, len(own)),
    )


def _check_several(module: nn.Module, plan: GroupPlan, virtual: VirtualWorkers) -> None:
    reason = ""
    if plan.tables:
        reason = f"table '{plan.tables[0].spec.name}' has one sum of gradients a worker"
    elif any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        reason = "nn.SyncBatchNorm normalizes over batches that run at the same time"
    if reason:
        raise UsageError(
            f"{reason}, and {virtual.count} virtual workers on "
            f"{counted(virtual.processes, 'worker')} run one after another; expected as many "
            "workers as virtual workers"
        )


def _words(own: range) -> str:
    return f"{own.start} to {own.stop - 1}" if len(own) > 1 else str(own.start)


class GroupTurns:
    """The turns of one group.

    Args:
        own: the virtual workers of this process.
        count: of the job's virtual workers.
        several: whether a process of the job has several; the same on every process.
        buffers: the values of the group's own buffers.

    Attributes:
        streams: the random streams of the process; None: the job has no virtual workers of its own,
            and the generators are the script's.
    """

    def __init__(self, own: range, count: int, *, several: bool, buffers: OwnBuffers) -> None:
        self.own = own
        self.count = count
        self.several = several
        self.buffers = buffers
        self.streams: RandomStreams | None = None

    def begin(self, at: int) -> None:
        """Begin a turn, where it has not begun.

        Args:
            at: the place of its virtual worker among those of this process.

        Raises:
            UsageError: the loader's batch is another virtual worker's.
        """
        if self.streams is None:
            return
        delivered, virtual_worker = self.streams.delivered, self.own[at]
        if delivered is not None and delivered != virtual_worker:
            raise UsageError(
                f"the module runs on the batch of virtual worker {delivered}, and the next step() "
                f"of its group is of virtual worker {virtual_worker}; expected all forward "
                "passes of a batch before the first step(), one step() of each group for each "
                "virtual worker's batches, and torch.no_grad() for other forward passes"
            )
        self.streams.begin(virtual_worker)

    def enter(self, at: int) -> None:
        """End a turn, and enter the one at a place; 0: the next iteration's first."""
        self.buffers.enter(at)
        if self.streams is not None:
            self.streams.end_step(ends_iteration=at == 0)

    def each(self) -> Iterator[int]:
        """Yield each virtual worker of this process, with its buffers in the module.

        Between two iterations.
        """
        for at, virtual_worker in enumerate(self.own):
            self.buffers.enter(at)
            yield virtual_worker
        self.buffers.enter(0)

    def pause(self) -> None:
        """Let the script draw from no virtual worker's stream, until the next turn begins."""
        if self.streams is not None:
            self.streams.enter(None)

    def open(self, streams: RandomStreams) -> None:
        """Take turns with the random streams of this process, which its groups share.

        Raises:
            UsageError: they are of other virtual workers.
        """
        if streams.own != self.own:
            raise UsageError(
                f"distribute() gives this worker the virtual workers {_words(self.own)}, and an "
                f"earlier one {_words(streams.own)}; expected the same virtual_workers in each"
            )
        streams.groups.add(self)
        self.streams = streams

    def close(self) -> None:
        """Give the generators back to the script."""
        if self.streams is not None:
            self.streams.groups.discard(self)
            self.streams.enter(None)
            self.streams = None


class OwnBuffers:
    """The values that buffers of a module have for each of several virtual workers.

    Only buffers that a turn has changed are copied, as autograd sees changes; and running
    statistics, whose changes it does not see.

    Args:
        rest: its tensors that are not exchanged in every step, by name.
        workers: number of virtual workers.
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
