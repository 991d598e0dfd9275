"""The environment of the layers of one worker. The process of a script does not import it."""

from __future__ import annotations

import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.engine.document import WorkerDocument
from poseidon.exchange.device import TYPES


def layer_context(document: WorkerDocument, *, phase: int, seed: int) -> LayerContext:
    place = document.member.host_place
    return LayerContext(
        phase=phase,
        seed=seed,
        rank=document.rank,
        workers=document.workers,
        client=place.host,
        clients=place.host_count,
        local_rank=place.local_rank,
        local_workers=place.local_workers,
        device=torch.device(document.device),
        autocast=TYPES.get(document.precision),
        channels_last=document.channels_last,
    )
