"""The environment of the layers of one worker. The process of a script does not import it."""

from __future__ import annotations

import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.engine.document import WorkerDocument


def layer_context(document: WorkerDocument, *, phase: int, seed: int) -> LayerContext:
    return LayerContext(
        phase=phase,
        seed=seed,
        rank=document.rank,
        workers=document.workers,
        client=document.client,
        clients=document.clients,
        local_rank=document.local_rank,
        local_workers=document.local_workers,
        device=torch.device(document.device),
    )
