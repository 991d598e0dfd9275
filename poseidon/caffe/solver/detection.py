"""Detections over a test set: their mean average precision, as SSD's solver
computes it with eval_type "detection", and files.

Law: rows are taken in the order of batches, whichever worker had them, so that
W workers have the scores of one process.

Source: TestDetection in solver.cpp and ComputeAP in util/bbox_util.cpp of SSD's branch of Caffe
(Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.layers.base import times
from poseidon.caffe.layers.detection_output import EVALUATED_ROW, NONE, DetectionOutput
from poseidon.caffe.layers.saved_results import pack_batches, unpack_batches
from poseidon.caffe.net.net import Net
from poseidon.caffe.solver.averages import join, parts
from poseidon.errors import DataError, UsageError
from poseidon.observe.metrics.record import Output

Floats = NDArray[np.float64]
# Columns of a row in a tally: output, batch, and the row of DetectionEvaluate.
COLUMNS = 2 + EVALUATED_ROW
# Smaller steps of the recall do not count.
LEAST_STEP = 1e-6
Classes = tuple[tuple[int, float], ...]
"""The average precision of each class that has detections, by label."""


class DetectionTally:
    """The rows of DetectionEvaluate layers over the batches of a test set."""

    def __init__(self) -> None:
        self._parts: list[Floats] = []

    def add(self, batch: int, outputs: Mapping[str, Tensor]) -> None:
        """Add the outputs of a batch.

        Raises:
            DataError: an output does not come from a DetectionEvaluate layer.
        """
        for index, (name, tensor) in enumerate(outputs.items()):
            check_rows(name, tensor.shape)
            rows = tensor.detach().double().reshape(-1, EVALUATED_ROW).cpu().numpy()
            head = np.full((len(rows), 2), (index, batch), np.float64)
            self._parts.append(np.concatenate((head, rows), 1))

    def pack(self) -> bytes:
        return np.concatenate([np.zeros((0, COLUMNS)), *self._parts]).astype("<f8").tobytes()

    def unpack(self, payloads: Iterable[bytes]) -> None:
        """Replace the rows by the rows of several workers, in the order of batches."""
        found = [np.frombuffer(payload, "<f8").reshape(-1, COLUMNS) for payload in payloads]
        rows = np.concatenate([np.zeros((0, COLUMNS)), *found])
        self._parts = [rows[np.argsort(rows[:, 1], kind="stable")]]

    def scores(
        self, names: Sequence[str], version: str
    ) -> tuple[tuple[Output, ...], tuple[Classes, ...]]:
        """Return the mean average precision of each of these outputs, and of its classes.

        Args:
            names: the outputs, in the order of `add`.
            version: one of VERSIONS.
        """
        rows = np.concatenate([np.zeros((0, COLUMNS)), *self._parts])
        found = [_score(rows[rows[:, 0] == index, 2:], version) for index in range(len(names))]
        means = (mean for mean, _ in found)
        return (
            tuple(Output(name=n, value=mean) for n, mean in zip(names, means, strict=True)),
            tuple(classes for _, classes in found),
        )


def check_rows(name: str, shape: Sequence[int]) -> None:
    """Raise DataError unless an output has the shape of a DetectionEvaluate layer's top."""
    if len(shape) != 4 or shape[-1] != EVALUATED_ROW:
        raise DataError(
            f"output '{name}' has shape {times(shape)}, but eval_type is 'detection': expected "
            f"1x1xRx{EVALUATED_ROW}, the top of a "
            "DetectionEvaluate layer; other outputs can be hidden with a Silence layer"
        )


def _score(rows: Floats, version: str) -> tuple[float, Classes]:
    counts, found = rows[rows[:, 0] == NONE], rows[rows[:, 0] != NONE]
    # A detection that is neither true nor false belongs to a difficult object.
    found = found[found[:, 3:].any(1)]
    classes = []
    labels = sorted({int(label) for label in counts[:, 1]})
    for label in labels:
        positives = float(counts[counts[:, 1] == label, 2].sum())
        own = found[found[:, 1] == label]
        if len(own):
            classes.append(
                (label, average_precision(own[:, 2], own[:, 3], own[:, 4], positives, version))
            )
    mean = sum(value for _, value in classes) / len(labels) if labels else 0.0
    return mean, tuple(classes)


def average_precision(
    scores: Floats, right: Floats, wrong: Floats, positives: float, version: str
) -> float:
    """Return the average precision of the detections of a class.

    Args:
        right: 1 for a true detection, else 0.
        wrong: 1 for a false detection, else 0.
        positives: the number of objects.
        version: 11point: the mean of the largest precisions at recalls from 0, 0.1, ... on (PASCAL
            VOC 2007); MaxIntegral: the integral of the largest precision from a detection on (as
            VOC 2012, but the step to the next recall counts with the precision before it);
            Integral: the integral of the precision.
    """
    if not len(scores) or positives <= 0:
        return 0.0
    order = np.argsort(-scores, kind="stable")
    true, false = right[order].cumsum(), wrong[order].cumsum()
    # In single precision, as SSD compares recalls with tenths.
    precision = (true.astype(np.float32) / (true + false).astype(np.float32)).astype(np.float64)
    recall = (true.astype(np.float32) / np.float32(positives)).astype(np.float64)
    if version == "11point":
        at = [precision[recall >= point / 10] for point in range(11)]
        return float(sum(values.max() for values in at if len(values)) / len(at))
    if version == "MaxIntegral":
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        steps = np.diff(recall)
        inner = (precision[:-1] * steps)[steps > LEAST_STEP].sum()
        return float(inner + recall[0] * precision[0])
    steps = np.diff(recall, prepend=0.0)
    return float((precision * steps)[steps > LEAST_STEP].sum())


def discard_results(net: Net) -> None:
    """Discard detections that an interrupted test pass has left."""
    for layer in _keeping(net):
        layer.kept = []


def save_results(
    nets: Sequence[Net], collect: Callable[[bytes], Sequence[bytes]], *, begin: int, count: int
) -> None:
    """Write the detections of all virtual workers, as save_output_param of
    DetectionOutput layers asks. Every process calls this.

    Args:
        nets: the test net of each virtual worker of this process, in order.
        collect: returns the payloads of all processes by rank. Virtual worker 0's net writes.
        begin: the first batch of the pass; batch n belongs to virtual worker n mod V.

    Raises:
        DataError: the files cannot be written.
    """
    for layers in zip(*map(_keeping, nets), strict=True):
        own = join(pack_batches(layer.kept or []) for layer in layers)
        found = [iter(unpack_batches(part)) for part in parts(collect(own))]
        for layer in layers:
            layer.kept = []
            if layer.results is not None:
                for number in range(begin, begin + count):
                    layer.save(next(found[number % len(found)]))


def _keeping(net: Net) -> list[DetectionOutput]:
    layers = (layer for _, layer in net.layer_modules)
    return [
        layer for layer in layers if isinstance(layer, DetectionOutput) and layer.kept is not None
    ]


def evaluates_detections(net: Net) -> bool:
    """Return True if all outputs of a net are tops of DetectionEvaluate layers."""
    of_layers = {
        top
        for layer in net.definition.param.layer
        if layer.type == "DetectionEvaluate"
        for top in layer.top
    }
    names = {name for name, _ in net.plan.outputs}
    return bool(names) and names <= of_layers


def check_outputs(net: Net, index: int) -> None:
    """Raise UsageError unless a test net has outputs for eval_type "detection"."""
    try:
        for name, _ in net.plan.outputs:
            check_rows(name, net.blob_shapes[name])
    except DataError as error:
        raise UsageError(f"test net #{index}: {error}") from error
