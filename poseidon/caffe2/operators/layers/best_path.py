"""The most probable path of labels through scores and transitions (Viterbi)."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, operator


@operator("ViterbiPath", gradient=NO_GRADIENT)
def viterbi_path(scores: Tensor, transitions: Tensor) -> Tensor:
    """Return the label of each step on the path with the largest sum of scores and transitions, int32.

    Args:
        scores: (steps, labels).
        transitions: (labels, labels): from the first to the second.
    """
    total, back = scores[0], []
    for row in scores[1:]:
        best, source = (total[:, None] + transitions).max(0)
        total = best + row
        back.append(source)
    path = [total.argmax()]
    for source in reversed(back):
        path.append(source[path[-1]])
    return torch.stack(path[::-1]).to(torch.int32)


@operator("SwapBestPath")
def swap_best_path(scores: Tensor, path: Tensor) -> Tensor:
    """Return scores in which the label of the path has the largest score of each step: the two change places."""
    steps, chosen = torch.arange(len(scores), device=scores.device), path.long()
    most, place = scores.max(1)
    made = scores.clone()
    made[steps, place] = scores[steps, chosen]
    made[steps, chosen] = most
    return made
