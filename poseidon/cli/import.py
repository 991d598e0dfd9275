"""`poseidon import`: tensors of a torch file as a model of a net."""

from __future__ import annotations

import argparse
import logging

from poseidon.caffe.export.formats import import_weights, read_tensors
from poseidon.caffe.export.net import inference_definition
from poseidon.caffe.net.compile import filter_phase
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.proto.definition import read_net
from poseidon.errors import counted

LOGGER = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Write the model, and print how many tensors it has; 0 when it is written."""
    definition = read_net(arguments.model)
    definition = filter_phase(definition, definition.state(TEST))
    definition = inference_definition(definition, dict(arguments.input))
    taken, unused = import_weights(
        definition, read_tensors(arguments.weights), dict(arguments.name), arguments.output
    )
    if unused:
        LOGGER.warning(
            "%s of %s not used: %s",
            counted(len(unused), "tensor"),
            arguments.weights,
            ", ".join(unused),
        )
    print(f"Imported {counted(taken, 'tensor')} of {arguments.weights} to {arguments.output}.")
    return 0
