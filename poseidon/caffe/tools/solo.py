"""One net in one process, for commands that do not train: built, filled from models, scored; and
scores of single pictures.

Law: as in `caffe test` and `caffe time`: Net(file, phase, level, stages) and CopyTrainedLayersFrom.

Scores of single pictures: the results of Caffe's `classification.bin`, with the pictures prepared
as a data layer of the phase TEST prepares them.

Law: (pixel - mean) * scale on the picture at the mean file's size, then the central crop, as in
`poseidon.caffe.data.batches.transform`. Caffe's tool subtracts the mean file's mean pixel instead.

Scores of a trained net: the results and log lines of `caffe test`.

Law: a score is the mean over batches of each number of each output, in double precision as in a
training job's tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.batches.images import read_image
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.data.staging import TESTING, Report, silent
from poseidon.caffe.layers.base import CPU, LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.load import LoadReport, some
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe.solver.averages import accumulate, named_values
from poseidon.caffe.solver.detection import DetectionTally, evaluates_detections
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.compute_options import DEFAULT_COMPUTE, ComputeOptions
from poseidon.exchange.device import TYPES
from poseidon.observe.metrics.glog_lines import GlogLine, batch_line, interrupted, score_lines
from poseidon.observe.metrics.record import Output

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetRequest:
    """A net to build, and the models to fill it from.

    Attributes:
        weights: models, later ones over earlier ones; empty: the values of the fillers stay.
        phase: TRAIN or TEST of the schema.
        level: for rules of the definition.
        stages: for rules of the definition.
    """

    model: Path
    phase: int
    weights: tuple[Path, ...] = ()
    level: int = 0
    stages: tuple[str, ...] = ()
    device: torch.device = CPU
    compute: ComputeOptions = DEFAULT_COMPUTE


def open_net(request: NetRequest, context: LayerContext | None = None) -> Net:
    """Build and fill a net. The caller closes it.

    Args:
        context: this worker of a job; None: a single process. Phase and device are the request's,
            and the seed is 1.

    Raises:
        DefinitionError: a mistake in the definition.
        DataError: its data is missing or broken.
        SnapshotError: a model cannot be read, or does not fit.
    """
    definition = read_net(request.model)
    state = definition.state(request.phase, level=request.level, stages=request.stages)
    if context is None:
        context = LayerContext(
            phase=request.phase,
            seed=1,
            device=request.device,
            autocast=TYPES.get(request.compute.precision),
            channels_last=request.compute.channels_last,
        )
    net = compile_net(definition, context, state=state)
    try:
        fill(net, request.weights)
    except BaseException:
        net.close()
        raise
    return net


def zero_inputs(net: Net) -> dict[str, Tensor]:
    """Return zeros for the inputs of a net, as Caffe's memory starts; empty for a net without
    inputs.
    """
    return {
        name: torch.zeros(shape, device=net.context.device)
        for name, shape in net.input_shapes.items()
    }


def fill(net: Net, models: Sequence[Path]) -> None:
    """Copy the weights of models into a net that is not trained, and warn of layers that none of
    them has. What it raises is as for `load_models`.
    """
    reports = [report for _, report in load_models(net, models)]
    kept = [
        name
        for name in (reports[0].kept if reports else ())
        if all(name in report.kept for report in reports)
    ]
    if kept:
        LOGGER.warning(
            "%s: there are no weights for %s in %s; the values of the fillers stay",
            net.definition.source,
            some(kept),
            ", ".join(map(str, models)),
        )


def load_models(
    net: Net, models: Sequence[Path], *, own: bool = False
) -> list[tuple[Path, LoadReport]]:
    """Copy the weights of models by layer name, later ones over earlier ones. Return what was and
    was not copied from each.

    Args:
        own: the net has written them, for a state whose checksums were verified.

    Raises:
        SnapshotError: a model cannot be read, or a layer's blobs have other shapes; the text names
            the model.
    """
    reports = []
    for path in models:
        try:
            reports.append((path, net.load_blobs(read_model(path, is_checked=own), own=own)))
        except SnapshotError as error:
            raise SnapshotError(
                str(error) if str(path) in str(error) else f"{path}: {error}"
            ) from error
    return reports


class PictureScores:
    """Scores of pictures by a deploy net, one at a time.

    Args:
        net: with one input N x C x H x W, C 1 or 3; its first output is the scores.
        mean: a mean file, or values, one or one a channel; None: nothing is subtracted.
        scale: of the pixels, after the mean.
        size: height and width to which a picture is resized before the crop to H x W; None: of the
            mean file, else H x W.
        rgb: whether the net takes the channels as R, G, B; otherwise B, G, R.

    Raises:
        UsageError: the net does not take one picture, or the mean has another number of channels.
        DataError: the mean file is wrong.
    """

    def __init__(
        self,
        net: Net,
        *,
        mean: Path | tuple[float, ...] | None = None,
        scale: float = 1.0,
        size: tuple[int, int] | None = None,
        rgb: bool = False,
    ) -> None:
        shapes = net.input_shapes
        if [len(shape) for shape in shapes.values()] != [4]:
            found = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
            raise UsageError(
                f"the net's inputs are {found}; expected one of N x C x H x W (`poseidon deploy` "
                "makes a deploy net of one with data layers)"
            )
        ((self._input, (_, channels, *extents)),) = shapes.items()
        param = TransformationParameter(scale=scale, crop_h=extents[0], crop_w=extents[1])
        self._size = size or (extents[0], extents[1])
        if isinstance(mean, Path):
            param.mean_file = str(mean)
            self._size = size or read_mean(mean).shape[1:]
        elif mean is not None:
            if len(mean) not in (1, channels):
                raise UsageError(
                    f"the mean has {len(mean)} values, but the net takes {channels} channels; "
                    f"expected 1 or {channels}"
                )
            param.mean_value.extend(mean)
        self._net, self._color, self._step = net, channels == 3, -1 if rgb else 1
        self._transform = Transform(param, train=False, resolve=Path)

    def of(self, path: Path) -> npt.NDArray[np.float32]:
        """Return the scores of a picture, the net's first output without its batch: one a class.

        Raises:
            DataError: the file is missing or no picture, or the mean or the crop does not fit it.
        """
        image = read_image(path, color=self._color, size=self._size)[:: self._step]
        data = np.empty((1, *self._transform.output_shape(image.shape)), np.float32)
        numbers = self._transform.draws(0, np.zeros(1, np.int64))
        self._transform.batch(image[None], numbers, data)
        with torch.no_grad():
            given = torch.from_numpy(data).to(self._net.context.device)
            outputs = self._net({self._input: given})
        scores: npt.NDArray[np.float32] = outputs[self._net.plan.outputs[0][0]].cpu().numpy()
        return scores.reshape(-1)


# SSD's default.
AP_VERSION = "Integral"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Means over the batches: the loss, and every number of every output in Caffe's order.

    Attributes:
        batches: their number.
    """

    batches: int
    loss: float
    outputs: tuple[Output, ...]


def score(
    net: Net,
    iterations: int,
    log: Callable[[GlogLine], None],
    *,
    report: Report = silent,
    stopped: Callable[[], bool] = lambda: False,
) -> Scores:
    """Run batches through a net and average its outputs.

    Of detections, compute the mean average precision.

    Args:
        net: one that reads its own data; inputs are filled with zeros.
        iterations: batches, 1 or more.
        log: receives the log lines of `caffe test`, a batch's as soon as it is finished.
        stopped: asked after each batch; True: the scores are those of the batches so far.
    """
    weights, detects = net.plan.loss_weights, evaluates_detections(net)
    inputs = None if detects else zero_inputs(net)
    if inputs:
        LOGGER.warning(
            "the net has inputs that nothing fills (%s): they are zeros, as in Caffe",
            ", ".join(inputs),
        )
    sums: dict[str, Tensor] = {}
    tally, loss = DetectionTally(), 0.0
    report(TESTING, 0, iterations)
    for batch in range(iterations):
        with torch.no_grad():
            outputs = net(inputs)
        loss += float(net.loss)
        if detects:
            tally.add(batch, outputs)
        else:
            accumulate(sums, outputs)
            for output in named_values(outputs, weights):
                log(batch_line(batch, output))
        report(TESTING, batch + 1, iterations)
        if stopped():
            break
    batches = batch + 1
    if batches < iterations:
        log(interrupted(batches, iterations))
    if detects:
        means, _ = tally.scores([name for name, _ in net.plan.outputs], AP_VERSION)
    else:
        means = named_values({name: total / batches for name, total in sums.items()}, weights)
    for line in score_lines(loss / batches, means):
        log(line)
    return Scores(batches=batches, loss=loss / batches, outputs=means)
