"""`poseidon draw_net`: a picture of a net."""

from __future__ import annotations

import argparse

import pydot

from poseidon.caffe.layers.base import LayerContext, Shape
from poseidon.caffe.net.compile import checked_layers
from poseidon.caffe.proto.definition import NetDefinition, read_net
from poseidon.caffe.proto.phase import filter_net
from poseidon.caffe.tools.preflight import runs_users_code
from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import UsageError
from poseidon.pycaffe.draw import extension_of, get_pydot_graph, render
from poseidon.pycaffe.net_picture import picture_graph

VECTOR_FORMATS = ("svg", "pdf", "ps", "eps")
DPI = 150
"""The resolution of other formats."""


def run(arguments: argparse.Namespace) -> int:
    """Draw and say where; 0 when it is written."""
    definition = read_net(arguments.input_net)
    extension = extension_of(arguments.output_file)
    if arguments.phase == "ALL":
        if arguments.shapes:
            raise UsageError(
                "--shapes needs --phase=TRAIN or TEST: blobs of two phases may have different "
                "shapes"
            )
        graph = get_pydot_graph(
            definition.param, arguments.rankdir or "LR", display_lrm=arguments.display_lrm
        )
    else:
        graph = _phase_graph(definition, arguments)
    if extension not in VECTOR_FORMATS:
        graph.set("dpi", DPI)
    write_atomically(arguments.output_file, render(graph, extension))
    print(f"Drew {definition.param.name or arguments.input_net} into {arguments.output_file}.")
    return 0


def _phase_graph(definition: NetDefinition, arguments: argparse.Namespace) -> pydot.Dot:
    state = definition.state(arguments.phase)
    shapes: dict[str, Shape] | None = None
    if arguments.shapes:
        context = LayerContext(phase=state.phase, seed=0)
        check = checked_layers(definition, context, state=state, leave_out=runs_users_code)
        with check as checked:
            shapes = checked.shapes
    return picture_graph(
        filter_net(definition, state).param.layer,
        rankdir=arguments.rankdir or "TB",
        display_lrm=arguments.display_lrm,
        shapes=shapes,
    )
