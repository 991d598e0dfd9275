"""Mean average precision: by hand, against SSD's loops, over workers, in a solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.engine.detection import DetectionTally, average_precision
from poseidon.errors import DataError


def loops(scores: list[float], right: list[int], positives: int, version: str) -> float:
    """ComputeAP of SSD's bbox_util.cpp."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    true = np.cumsum([right[i] for i in order]).astype(np.float32)
    false = np.cumsum([1 - right[i] for i in order]).astype(np.float32)
    prec, rec = true / (true + false), true / np.float32(positives)
    count, total = len(prec), 0.0
    if version == "11point":
        largest, start = [0.0] * 11, count - 1
        for j in range(10, -1, -1):
            for i in range(start, -1, -1):
                if float(rec[i]) < j / 10:
                    start = i
                    if j > 0:
                        largest[j - 1] = largest[j]
                    break
                largest[j] = max(largest[j], float(prec[i]))
        return sum(largest) / 11
    if version == "MaxIntegral":
        recall, precision = rec[-1], prec[-1]
        for i in range(count - 2, -1, -1):
            precision = max(precision, prec[i])
            total += precision * (recall - rec[i])
            recall = rec[i]
        return float(total + recall * precision)
    before = 0.0
    for i in range(count):
        total += prec[i] * (rec[i] - before)
        before = rec[i]
    return float(total)


def precision(scores: list[float], right: list[int], positives: int, version: str) -> float:
    hits = np.array(right, float)
    return average_precision(np.array(scores), hits, 1 - hits, positives, version)


@pytest.mark.parametrize(
    ("version", "expected"),
    # Precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1.
    [
        ("11point", (6 * 1 + 5 * 2 / 3) / 11),
        ("MaxIntegral", 0.5 + 0.5 * 2 / 3),
        ("Integral", 0.5 + 0.5 * 2 / 3),
    ],
)
def test_worked_out_by_hand(version: str, expected: float) -> None:
    assert precision([0.5, 0.9, 0.7], [1, 1, 0], 2, version) == pytest.approx(expected)
    assert precision([], [], 2, version) == 0
    assert precision([0.5], [0], 0, version) == 0


@pytest.mark.parametrize("version", ["11point", "MaxIntegral", "Integral"])
def test_against_loops(version: str) -> None:
    random = np.random.default_rng(1)
    for _ in range(60):
        count = int(random.integers(1, 30))
        right = (random.random(count) < random.uniform(0.2, 0.9)).astype(int).tolist()
        scores = random.permutation(count).astype(float).tolist()
        positives = max(1, sum(right) + int(random.integers(0, 5)))
        expected = loops(scores, right, positives, version)
        assert precision(scores, right, positives, version) == pytest.approx(expected, abs=1e-6)


def rows(*found: tuple[float, ...]) -> torch.Tensor:
    """A batch with two objects of class 1 and one of class 2."""
    head = [(-1, 1, 2, -1, -1), (-1, 2, 1, -1, -1), (-1, 3, 0, -1, -1)]
    return torch.tensor([*head, *found], dtype=torch.float32)[None, None]


BATCHES = [
    rows((0, 1, 0.9, 1, 0), (0, 1, 0.8, 0, 1), (0, 2, 0.5, 1, 0)),
    rows((0, 1, 0.9, 0, 1), (1, 1, 0.7, 0, 0), (1, -1, -1, 0, 1)),
]


def test_a_set_of_batches() -> None:
    tally = DetectionTally()
    for number, batch in enumerate(BATCHES):
        tally.add(number, {"eval": batch})
    (score,) = tally.scores(["eval"], "Integral")
    # Of four objects of class 1 one was found, first among equals; of two of class 2 one. Class 3 has no object.
    assert score.classes == ((1, pytest.approx(0.25)), (2, pytest.approx(0.5)))
    assert score.mean == pytest.approx((0.25 + 0.5 + 0) / 3)


def test_workers_have_the_scores_of_one_process() -> None:
    whole = DetectionTally()
    parts = [DetectionTally(), DetectionTally()]
    for number, batch in enumerate([*BATCHES, *BATCHES[::-1]]):
        outputs = {"a": batch, "b": BATCHES[0]}
        whole.add(number, outputs)
        parts[number % 2].add(number, outputs)
    merged = DetectionTally()
    merged.unpack([parts[1].pack(), parts[0].pack(), DetectionTally().pack()])
    assert merged.scores(["a", "b"], "11point") == whole.scores(["a", "b"], "11point")


def test_other_outputs_are_refused() -> None:
    with pytest.raises(DataError, match=r"output 'loss' has shape scalar, but eval_type is 'detection'"):
        DetectionTally().add(0, {"loss": torch.zeros(())})
