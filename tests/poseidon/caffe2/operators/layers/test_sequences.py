"""Steps of an LSTM and a GRU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, numbers, run

HIDDEN, CELL = numbers(1, 3, 2), numbers(1, 3, 2, seed=1)
LENGTHS, STEP = np.array([1, 2, 3], np.int32), np.array([1], np.int32)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def scores(*best: list[int]) -> np.ndarray:
    """Return scores whose best labels of each example are these."""
    made = np.random.RandomState(0).rand(len(best[0]), len(best), 4).astype("f4")
    for example, labels in enumerate(best):
        made[np.arange(len(labels)), example, labels] += 2
    return made


@pytest.mark.parametrize(("merge", "first"), [(1, [1, 1, 3]), (0, [1, 1, 1, 3])])
def test_the_best_label_of_each_step(merge: int, first: list[int]) -> None:
    x = scores([1, 1, 0, 1, 3], [0, 2, 2, 0, 0])
    sizes, labels = run("CTCGreedyDecoder", [x], 2, merge_repeated=merge)
    second = [2] if merge else [2, 2]
    np.testing.assert_array_equal(sizes, [len(first), len(second)])
    np.testing.assert_array_equal(labels, first + second)
    sizes, labels = run("CTCGreedyDecoder", [x, np.array([1, 0], "i4")], 2)
    np.testing.assert_array_equal(sizes, [1, 0])
    np.testing.assert_array_equal(labels, [1])


def all_labelings(p: np.ndarray) -> dict[tuple[int, ...], float]:
    total: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(p.shape[1]), repeat=len(p)):
        labels = tuple(label for label, _ in itertools.groupby(path) if label)
        total[labels] = total.get(labels, 0.0) + float(np.prod(p[np.arange(len(p)), path]))
    return total


def test_the_most_probable_labelings() -> None:
    p = np.random.RandomState(1).rand(4, 2, 3).astype("f4") + 0.1
    p /= p.sum(2, keepdims=True)
    sizes, labels, values = run("CTCBeamSearchDecoder", [p], 3, beam_width=50, num_candidates=3)
    parts = np.split(labels, np.cumsum(sizes)[:-1])
    for example in range(2):
        wanted = sorted(all_labelings(p[:, example]).items(), key=lambda pair: -pair[1])[:3]
        found = slice(3 * example, 3 * example + 3)
        assert [tuple(part.tolist()) for part in parts[found]] == [prefix for prefix, _ in wanted]
        np.testing.assert_allclose(values[found], [value for _, value in wanted], rtol=1e-4)


def test_too_many_candidates_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="num_candidates="):
        run("CTCBeamSearchDecoder", [scores([1])], 3, beam_width=2, num_candidates=3)


def test_the_path_with_the_largest_sum() -> None:
    random = np.random.RandomState(3)
    x, steps = random.randn(4, 3).astype("f4"), random.randn(3, 3).astype("f4")

    def total(path: tuple[int, ...]) -> float:
        return float(
            x[np.arange(4), path].sum() + sum(steps[a, b] for a, b in itertools.pairwise(path))
        )

    best = max(itertools.product(range(3), repeat=4), key=total)
    (path,) = run("ViterbiPath", [x, steps])
    np.testing.assert_array_equal(path, best)
    assert path.dtype == np.int32
    (swapped,) = run("SwapBestPath", [x, path])
    np.testing.assert_array_equal(swapped.argmax(1), best)
    np.testing.assert_array_equal(np.sort(swapped, 1), np.sort(x, 1))
