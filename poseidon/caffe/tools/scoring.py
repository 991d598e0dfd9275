"""Scores of a trained net: the results and log lines of `caffe test`.

Law: a score is the mean over batches of each number of each output, in double precision as in a
training job's tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe.data.progress_reports import TESTING, Report, silent
from poseidon.caffe.net.net import Net
from poseidon.caffe.solver.averages import accumulate, named_values
from poseidon.caffe.solver.detection import DetectionTally, evaluates_detections
from poseidon.caffe.tools.solo import zero_inputs
from poseidon.observe.metrics.caffe_lines import batch_line, interrupted, score_lines
from poseidon.observe.metrics.glog_lines import GlogLine
from poseidon.observe.metrics.record import Output

LOGGER = logging.getLogger(__name__)
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
    weights, detects = net.loss_weights, evaluates_detections(net)
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
