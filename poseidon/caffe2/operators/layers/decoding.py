"""From scores of each step to labels: decoders of CTC, whose label 0 is the blank, and the best
path (Viterbi).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, operator

Prefix = tuple[int, ...]
SMALLEST = 1e-3
"""Labels less probable than this at a step are not looked at."""


def _steps(scores: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """Return the scores of each example: (its steps, labels)."""
    count = [len(scores)] * scores.shape[1] if lengths is None else lengths.tolist()
    return [scores[:steps, example] for example, steps in enumerate(count)]


@operator("CTCGreedyDecoder", expected="T N D, N")
def ctc_greedy_decoder(
    scores: Tensor, lengths: Tensor | None = None, *, merge_repeated: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the number of labels of each example, and the labels of all, int32.

    The best label of each step counts, but for blanks and, with `merge_repeated`, for one that the
    step before has too.

    Args:
        scores: (steps, examples, labels).
        lengths: the number of steps of each example.
        merge_repeated: see above.
    """
    found = []
    for part in _steps(scores, lengths):
        best = part.argmax(1) if len(part) else part.new_zeros(0, dtype=torch.int64)
        kept = best != 0
        if merge_repeated:
            kept[1:] &= best[1:] != best[:-1]
        found.append(best[kept].to(torch.int32))
    sizes = torch.tensor([len(labels) for labels in found], dtype=torch.int32)
    return sizes, torch.cat(found) if found else torch.zeros(0, dtype=torch.int32)


@operator("CTCBeamSearchDecoder", expected="T N D, N")
def ctc_beam_search_decoder(
    scores: Tensor, lengths: Tensor | None = None, *, beam_width: int = 10, num_candidates: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each example its most probable labelings: their lengths, their labels and their
    probabilities.

    Args:
        scores: (steps, examples, labels): probabilities.
        lengths: the number of steps of each example.
        beam_width: how many labelings are kept after each step.
        num_candidates: how many are returned for each example, from 1 to `beam_width`.

    Raises:
        ValueError: `num_candidates` is not in its range.
    """
    if not 1 <= num_candidates <= beam_width:
        raise ValueError(
            f"num_candidates must be from 1 to the beam_width {beam_width}, not {num_candidates}"
        )
    sizes: list[int] = []
    labels: list[int] = []
    values: list[float] = []
    for part in _steps(scores, lengths):
        best = _best(part.tolist(), beam_width)[:num_candidates]
        best += [((), 0.0)] * (num_candidates - len(best))
        sizes += [len(prefix) for prefix, _ in best]
        labels += [label for prefix, _ in best for label in prefix]
        values += [value for _, value in best]
    return (
        torch.tensor(sizes, dtype=torch.int32),
        torch.tensor(labels, dtype=torch.int32),
        torch.tensor(values),
    )


def _best(steps: list[list[float]], width: int) -> list[tuple[Prefix, float]]:
    """Return the most probable labelings and their probabilities: prefix search (Hannun et al.,
    2014).
    """
    with_blank: dict[Prefix, float] = {(): 1.0}
    without: dict[Prefix, float] = {}
    beam: list[Prefix] = [()]
    for probabilities in steps:
        blank: defaultdict[Prefix, float] = defaultdict(float)
        label: defaultdict[Prefix, float] = defaultdict(float)
        for prefix in beam:
            ended, open_ = with_blank.get(prefix, 0.0), without.get(prefix, 0.0)
            for symbol, p in enumerate(probabilities):
                if p <= SMALLEST:
                    continue
                if symbol == 0:
                    blank[prefix] += p * (ended + open_)
                    continue
                longer = (*prefix, symbol)
                if prefix and symbol == prefix[-1]:
                    label[longer] += p * ended
                    label[prefix] += p * open_
                else:
                    label[longer] += p * (ended + open_)
                if longer not in beam:
                    before = with_blank.get(longer, 0.0), without.get(longer, 0.0)
                    blank[longer] += probabilities[0] * sum(before)
                    label[longer] += p * before[1]
        with_blank, without = blank, label
        total = {prefix: blank[prefix] + label[prefix] for prefix in [*blank, *label]}
        beam = sorted(total, key=lambda prefix: -total[prefix])[:width]
    return [(prefix, with_blank.get(prefix, 0.0) + without.get(prefix, 0.0)) for prefix in beam]


@operator("ViterbiPath", gradient=NO_GRADIENT, shapes="N D, D D")
def viterbi_path(scores: Tensor, transitions: Tensor) -> Tensor:
    """Return the label of each step on the path with the largest sum of scores and transitions,
    int32.

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


@operator("SwapBestPath", gradient=NO_GRADIENT, shapes="N D, N")
def swap_best_path(scores: Tensor, path: Tensor) -> Tensor:
    """Return scores in which the label of the path has the largest score of each step: the two
    change places.
    """
    steps, chosen = torch.arange(len(scores), device=scores.device), path.long()
    most, place = scores.max(1)
    made = scores.clone()
    made[steps, place] = scores[steps, chosen]
    made[steps, chosen] = most
    return made
