"""One net in one process, for commands that do not train: built from its definition, filled from
models.

Law: as in `caffe test` and `caffe time`: Net(file, phase, level, stages) and CopyTrainedLayersFrom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from poseidon.caffe.layers.base import CPU, LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.load import LoadReport, in_order
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.errors import SnapshotError


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
        context = LayerContext(phase=request.phase, seed=1, device=request.device)
    net = compile_net(definition, context, state=state)
    try:
        load_models(net, request.weights)
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


def load_models(
    net: Net, models: Sequence[Path], *, own: bool = False
) -> list[tuple[Path, LoadReport]]:
    """Copy the weights of models by layer name, later ones over earlier ones.

    Args:
        own: the net has written them, for a state. Layers of one name each get their own blobs.

    Returns:
        What was and was not copied from each.

    Raises:
        SnapshotError: a model cannot be read, or a layer's blobs have other shapes; the text names
            the model.
    """
    reports = []
    for path in models:
        try:
            saved = read_model(path)
            reports.append((path, net.load_blobs(in_order(saved) if own else saved)))
        except SnapshotError as error:
            raise SnapshotError(
                str(error) if str(path) in str(error) else f"{path}: {error}"
            ) from error
    return reports
