"""Operators on sequences: recurrent units, and decoding of what they return."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import NO_GRADIENT, operator


def _valid(rest: tuple[Tensor, ...], sequence_lengths: bool) -> Tensor | bool:
    """Return as a column which sequences are not over at this step: the last input is the step."""
    if not sequence_lengths:
        return True
    lengths, step = rest
    check_count("the number of the step", step, 1)
    return (step.reshape(()) < lengths).reshape(-1, 1)


def _chosen(valid: Tensor | bool, new: Tensor, old: Tensor, drop: bool) -> Tensor:
    """Return `new` for sequences that are not over, else `old`, or 0 where states are dropped."""
    if isinstance(valid, bool):
        return new
    return torch.where(valid, new, 0) if drop else torch.where(valid, new, old)


def _lstm_gates(gates: Tensor, forget_bias: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, f, o, g = gates.chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f + forget_bias), torch.sigmoid(o), torch.tanh(g)


@operator(
    "LSTMUnit",
    gradient="LSTMUnitGradient(I*, O0, O1, GO0, GO1) -> GI0, GI1, GI2",
    inputs=(4, 5),
    shapes="1 N D, 1 N D, 1 N 4D",
)
def lstm_unit(
    hidden: Tensor,
    cell: Tensor,
    gates: Tensor,
    *rest: Tensor,
    forget_bias: float = 0.0,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the hidden state and the cell after one step.

    Args:
        hidden, cell: states of shape (1, sequences, D).
        gates: shape (1, sequences, 4 D): input, forget, output, new.
        rest: the lengths of the sequences (with `sequence_lengths`) and the number of the step.
        forget_bias: added to the forget gate.
        sequence_lengths: whether sequences have lengths.
        drop_states: whether the states of a sequence that is over are 0; else they stay.
    """
    i, f, o, g = _lstm_gates(gates, forget_bias)
    valid = _valid(rest, sequence_lengths)
    new = f * cell + i * g
    return (
        _chosen(valid, o * torch.tanh(new), hidden, drop_states),
        _chosen(valid, new, cell, drop_states),
    )


@operator("LSTMUnitGradient", inputs=(8, 9), expected="1 N D, 1 N D, 1 N 4D")
def lstm_unit_gradient(
    hidden: Tensor,
    cell: Tensor,
    gates: Tensor,
    *rest: Tensor,
    forget_bias: float = 0.0,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden state, cell and gates of `LSTMUnit`."""
    *steps, old, new, dhidden, dnew = rest
    for name, value in (
        ("hidden state", old),
        ("cell", new),
        ("gradient", dhidden),
        ("gradient", dnew),
    ):
        check_tensor(f"the {name} after the step", value, tuple(hidden.shape))
    i, f, o, g = _lstm_gates(gates, forget_bias)
    valid = _valid(tuple(steps), sequence_lengths)
    squashed = torch.tanh(new)
    dcell = dnew + dhidden * o * (1 - squashed * squashed)
    dgates = torch.cat(
        [
            dcell * g * i * (1 - i),
            dcell * cell * f * (1 - f),
            dhidden * squashed * o * (1 - o),
            dcell * i * (1 - g * g),
        ],
        -1,
    )
    nothing = torch.zeros_like(dhidden)
    return (
        _chosen(valid, nothing, dhidden, drop_states),
        _chosen(valid, dcell * f, dnew, drop_states),
        _chosen(valid, dgates, dgates, True),
    )


@operator(
    "GRUUnit",
    gradient="GRUUnitGradient(I*, O0, GO0) -> GI0, GI1",
    inputs=(3, 4),
    shapes="1 N D, 1 N 3D",
)
def gru_unit(
    hidden: Tensor,
    gates: Tensor,
    *rest: Tensor,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> Tensor:
    """Return the hidden state after one step.

    Args:
        hidden: shape (1, sequences, D).
        gates: shape (1, sequences, 3 D): reset (used before this operator), update, new state.
        rest: the lengths of the sequences (with `sequence_lengths`) and the number of the step.
        sequence_lengths: whether sequences have lengths.
        drop_states: whether the state of a sequence that is over is 0; else it stays.
    """
    _, update, new = gates.chunk(3, -1)
    update, new = torch.sigmoid(update), torch.tanh(new)
    valid = _valid(rest, sequence_lengths)
    return _chosen(valid, hidden * update + new * (1 - update), hidden, drop_states)


@operator("GRUUnitGradient", inputs=(5, 6), expected="1 N D, 1 N 3D")
def gru_unit_gradient(
    hidden: Tensor,
    gates: Tensor,
    *rest: Tensor,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden state and gates of `GRUUnit`."""
    *steps, new, dy = rest
    for name, value in (("hidden state", new), ("gradient", dy)):
        check_tensor(f"the {name} after the step", value, tuple(hidden.shape))
    reset, update, new = gates.chunk(3, -1)
    update, new = torch.sigmoid(update), torch.tanh(new)
    valid = _valid(tuple(steps), sequence_lengths)
    dgates = torch.cat(
        [
            torch.zeros_like(reset),
            (hidden - new) * dy * update * (1 - update),
            (1 - new * new) * dy * (1 - update),
        ],
        -1,
    )
    return _chosen(valid, dy * update, dy, drop_states), _chosen(valid, dgates, dgates, True)


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

    Each step's best label counts, except blanks and, with `merge_repeated`, repeats.

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
    """Return each example's likeliest labelings: their lengths, labels and probabilities.

    Args:
        scores: (steps, examples, labels): probabilities.
        lengths: the number of steps of each example.
        beam_width: how many labelings are kept after each step.
        num_candidates: how many are returned for each example, from 1 to `beam_width`.

    Raises:
        ValueError: `num_candidates` is not in its range.
    """
    if not 1 <= num_candidates <= beam_width:
        raise ValueError(f"num_candidates={num_candidates}, expected 1 to beam_width={beam_width}")
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
    """Return the likeliest labelings with probabilities: prefix search (Hannun et al., 2014)."""
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
    """Return each step's label on the path with the largest sum of scores and transitions, int32.

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
    """Return scores in which the path's label has each step's largest score: the two swap."""
    steps, chosen = torch.arange(len(scores), device=scores.device), path.long()
    most, place = scores.max(1)
    made = scores.clone()
    made[steps, place] = scores[steps, chosen]
    made[steps, chosen] = most
    return made
