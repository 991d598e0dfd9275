"""`poseidon draw_net`: a picture of a net."""

from __future__ import annotations

import argparse

from poseidon.proto.caffe_pb2 import Phase
from poseidon.proto.definition import read_net
from poseidon.pycaffe.draw import draw_net_to_file


def run(arguments: argparse.Namespace) -> int:
    """Draw and say where; 0 when it is written."""
    definition = read_net(arguments.input_net)
    phase = None if arguments.phase == "ALL" else Phase.Value(arguments.phase)
    draw_net_to_file(definition.param, arguments.output_file, arguments.rankdir, phase, arguments.display_lrm)
    print(f"Drew {definition.param.name or arguments.input_net} into {arguments.output_file}.")
    return 0
