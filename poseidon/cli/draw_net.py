"""`poseidon draw_net`: a picture of a net."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.proto.caffe_pb2 import Phase
from poseidon.proto.definition import read_net
from poseidon.pycaffe.draw import RANKDIRS, draw_net_to_file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "draw_net",
        help="draw a net as PNG, SVG or PDF",
        description="Draws the layers and blobs of a net definition of any grammar. Needs Graphviz's program dot.",
    )
    parser.add_argument("input_net", metavar="INPUT_NET", type=Path, help="net definition")
    parser.add_argument("output_file", metavar="OUTPUT_FILE", type=Path, help="picture: .png, .svg or .pdf")
    parser.add_argument(
        "--rankdir", "-rankdir", type=str.upper, choices=RANKDIRS, default="LR", help="where the data flows"
    )
    parser.add_argument(
        "--phase",
        "-phase",
        type=str.upper,
        choices=("TRAIN", "TEST", "ALL"),
        default="ALL",
        help="whose layers are drawn",
    )
    parser.add_argument(
        "--display_lrm",
        "--display-lrm",
        action="store_true",
        help="show each layer's learning rate multipliers",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw and say where; 0 when it is written."""
    definition = read_net(arguments.input_net)
    phase = None if arguments.phase == "ALL" else Phase.Value(arguments.phase)
    draw_net_to_file(definition.param, arguments.output_file, arguments.rankdir, phase, arguments.display_lrm)
    print(f"Drew {definition.param.name or arguments.input_net} into {arguments.output_file}.")
    return 0
