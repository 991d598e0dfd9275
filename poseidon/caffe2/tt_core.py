"""Weights as tensor trains (arXiv 1509.06569): cores drawn at random or of a matrix.

The cores are one vector, the last one first, in the form that the operator `TT` reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def init_tt_cores(
    inp_sizes: Sequence[int], out_sizes: Sequence[int], tt_ranks: Sequence[int], seed: int = 1234
) -> np.ndarray:
    """Return random cores, float32; all but the last drawn one have orthogonal columns.

    Args:
        inp_sizes, out_sizes: the sizes into which inputs and outputs are factored.
        tt_ranks: the ranks between the cores; the first and the last are 1.
        seed: the seed of numpy's generator, which is set.
    """
    np.random.seed(seed)
    parts = []
    carried = np.ones((1, 1))
    for place, (inputs, outputs) in enumerate(zip(inp_sizes, out_sizes, strict=True)):
        rank, following = tt_ranks[place], tt_ranks[place + 1]
        drawn = np.random.normal(0, 1, size=(rank, inputs * outputs * following))
        whole = drawn if place == 0 else carried @ drawn
        core = whole.reshape(rank * inputs * outputs, following)
        if place < len(inp_sizes) - 1:
            core, carried = np.linalg.qr(core)
        parts.append(core.reshape(-1))
    scale = (np.prod(inp_sizes) * np.prod(tt_ranks)) ** (1.0 / len(inp_sizes))
    return ((0.1 / scale) * np.concatenate(parts)).astype(np.float32)


def matrix_to_tt(
    W: np.ndarray, inp_sizes: Sequence[int], out_sizes: Sequence[int], tt_ranks: Sequence[int]
) -> np.ndarray:
    """Return cores for the weights of a fully connected layer, shape (outputs, inputs), float32.

    Args:
        W: the weights.
        inp_sizes, out_sizes: the sizes into which inputs and outputs are factored.
        tt_ranks: the ranks between the cores; smaller ones approximate the weights.

    Raises:
        AssertionError: the sizes do not fit the weights.
    """
    assert W.shape == (np.prod(out_sizes), np.prod(inp_sizes)), "the sizes do not fit W"
    count = len(inp_sizes)
    pairs = [axis for place in range(count) for axis in (count + place, place)]
    factored = W.reshape(*out_sizes, *inp_sizes).transpose(pairs)
    cores = tt_svd(factored, [i * o for i, o in zip(inp_sizes, out_sizes, strict=True)], tt_ranks)
    ordered = []
    for place, core in enumerate(cores):
        shape = (tt_ranks[place], inp_sizes[place], out_sizes[place], tt_ranks[place + 1])
        ordered.append(core.reshape(shape).transpose(1, 3, 0, 2).reshape(-1))
    return np.concatenate(ordered[::-1]).astype(np.float32)


def tt_svd(tensor: np.ndarray, sizes: Sequence[int], tt_ranks: Sequence[int]) -> list[np.ndarray]:
    """Return a tensor's cores, (rank, size, next rank) each, by consecutive SVDs.

    Args:
        tensor: the tensor.
        sizes: its dimensions.
        tt_ranks: how many singular values are kept between the cores; the first and the last are 1.
    """
    cores = []
    rest = np.asarray(tensor, dtype=np.float64)
    for place, size in enumerate(sizes[:-1]):
        rank, following = tt_ranks[place], tt_ranks[place + 1]
        left, values, right = np.linalg.svd(rest.reshape(rank * size, -1), full_matrices=False)
        cores.append(left[:, :following].reshape(rank, size, following))
        rest = values[:following, None] * right[:following]
    return [*cores, rest.reshape(tt_ranks[-2], sizes[-1], tt_ranks[-1])]
