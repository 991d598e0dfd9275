"""`poseidon export`: a trained net in another format."""

from __future__ import annotations

import argparse

from poseidon.caffe.export.formats import check_suffix, open_for_inference, write_net
from poseidon.caffe.export.modules import (
    CHECKPOINT,
    names_module,
    write_checkpoint_tensors,
    write_module,
)
from poseidon.caffe2.export.files import is_caffe2, read_predictor
from poseidon.caffe2.export.formats import write_predictor
from poseidon.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Write the net, and print what it takes and returns; 0 when it is written."""
    check_suffix(arguments.output)
    model, weights, shapes = arguments.model, arguments.weights, dict(arguments.input)
    if names_module(model):
        if weights is None:
            raise UsageError(f"the weights of {model} are missing: name a checkpoint after it")
        line = write_module(model, weights, shapes, arguments.output)
    elif weights is None and model.suffix == CHECKPOINT:
        line = write_checkpoint_tensors(model, arguments.output)
    elif is_caffe2(model, weights):
        line = write_predictor(read_predictor(model, weights, shapes), arguments.output)
    else:
        stages = arguments.stage
        net = open_for_inference(model, (weights,), shapes, stages=stages)
        try:
            line = write_net(net, arguments.output)
        finally:
            net.close()
    print(f"Exported {arguments.model} to {arguments.output}: {line}.")
    return 0
