"""What all workers of a group bring to one state before the first step: tensors that are not
exchanged, and random streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from torch import Tensor

from poseidon.engine.loop_collections import LoopCollections
from poseidon.engine.random_streams import RandomStreams, script_seed
from poseidon.engine.worker_context import DISTRIBUTE, WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.broadcast import Gather, broadcast_parameters


def bring_rest(rest: Mapping[str, Tensor], gather: Gather, *, rank: int) -> None:
    """Set tensors that are not exchanged to rank 0's. All workers call it together.

    Args:
        rest: by name.

    Raises:
        UsageError: the workers have different ones.
    """
    own = [f"'{n}' of {t.dtype}, {tuple(t.shape)}" for n, t in rest.items()]
    first, *others = (part.decode().split("\n") for part in gather("\n".join(own).encode()))
    for number, other in enumerate(others, start=1):
        for theirs, mine in zip_longest(first, other, fillvalue=""):
            if theirs != mine:
                raise UsageError(
                    f"worker 0's module has {theirs or 'no more tensors'}, where worker "
                    f"{number}'s has {mine or 'no more'}; expected the same module on all workers"
                )
    broadcast_parameters(list(rest.values()), gather, rank=rank)


def open_streams(context: WorkerContext, collections: LoopCollections) -> RandomStreams:
    """Return the random streams of this worker, which its groups share. All workers call it
    together.

    Raises:
        UsageError: they are of other virtual workers.
    """
    own, device = context.member.own, context.worker.device
    size, told = context.worker.size, context.member.virtual_workers is not None
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
