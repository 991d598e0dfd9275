"""Drawings of nets, with a box for each layer and an octagon for each blob.

Law: a drawing needs only the upgraded definition. The net is not compiled, so its data and layer
types may be missing. Graphviz's `dot` does the layout.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pydot

from poseidon.caffe.proto.caffe_pb2 import (
    ConvolutionParameter,
    LayerParameter,
    NetParameter,
    NetState,
    Phase,
    PoolingParameter,
)
from poseidon.caffe.proto.definition import is_included
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import UsageError

LAYER_STYLE: dict[str, Any] = {"shape": "record", "fillcolor": "#6495ED", "style": "filled"}
NEURON_STYLE: dict[str, Any] = {"shape": "record", "fillcolor": "#90EE90", "style": "filled"}
BLOB_STYLE: dict[str, Any] = {"shape": "octagon", "fillcolor": "#E0E0E0", "style": "filled"}
COLORS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
DEFAULT_COLOR = "#6495ED"
RANKDIRS = ("LR", "TB", "BT", "RL")


def draw_net_to_file(
    caffe_net: NetParameter,
    filename: str | Path,
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Draw a net to a file.

    Its suffix determines the format: png, svg, pdf or any other format of Graphviz.

    Args:
        caffe_net: the net in the current format.
        rankdir: the direction of the data flow: LR, TB, BT or RL.
        phase: draw only the layers of this phase; None: all layers.
        display_lrm: show the learning-rate multipliers of each layer.

    Raises:
        UsageError: the file has no suffix, or Graphviz is not installed or does not know the
            format.
    """
    path = Path(filename)
    write_atomically(path, draw_net(caffe_net, rankdir, extension_of(path), phase, display_lrm))


def extension_of(path: Path) -> str:
    """Return the format that the suffix of a file names.

    Raises:
        UsageError: the file has no suffix.
    """
    extension = path.suffix.removeprefix(".")
    if not extension:
        raise UsageError(f"{path}: missing extension, expected .png, .svg or .pdf")
    return extension


def draw_net(
    caffe_net: NetParameter,
    rankdir: str,
    ext: str = "png",
    phase: int | None = None,
    display_lrm: bool = False,
) -> bytes:
    """Draw a net and return the content of the file.

    Raises:
        UsageError: Graphviz is not installed or does not know the format.
    """
    return render(get_pydot_graph(caffe_net, rankdir, phase=phase, display_lrm=display_lrm), ext)


def render(graph: pydot.Dot, ext: str) -> bytes:
    """Run `dot` on a graph and return the content of the file.

    Raises:
        UsageError: Graphviz is not installed or does not know the format.
    """
    try:
        with redirect_stdout(io.StringIO()):  # pydot prints the output of dot
            picture: Any = graph.create(format=ext)
    except FileNotFoundError as error:
        raise UsageError(
            "drawing needs Graphviz's program dot on the PATH; install the package graphviz (apt "
            "install graphviz)"
        ) from error
    except AssertionError as error:  # dot has failed
        raise UsageError(f"dot cannot draw format '{ext}', expected png, svg or pdf") from error
    return bytes(picture)


def get_pydot_graph(
    caffe_net: NetParameter,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
) -> pydot.Dot:
    """Return the graph of a net for Graphviz."""
    if rankdir not in RANKDIRS:
        raise UsageError(f"rankdir is '{rankdir}', expected one of {', '.join(RANKDIRS)}")
    graph = pydot.Dot(_quoted(caffe_net.name or "Net"), graph_type="digraph", rankdir=rankdir)
    blobs: set[str] = set()
    edges: list[pydot.Edge] = []
    for index, layer in enumerate(caffe_net.layer):
        if phase is not None and not is_included(layer, NetState(phase=Phase.Name(phase))):
            continue
        # Layers of different phases may share a name.
        node = _quoted(f"layer {index}: {layer.name}")
        label = get_layer_label(layer, rankdir, display_lrm)
        graph.add_node(pydot.Node(node, label=_quoted(label), **_style(layer)))
        blobs.update([*layer.bottom, *layer.top])
        edge_label = _quoted(get_edge_label(layer) if label_edges else "")
        edges += [pydot.Edge(_blob_node(name), node, label='""') for name in layer.bottom]
        edges += [pydot.Edge(node, _blob_node(name), label=edge_label) for name in layer.top]
    for name in sorted(blobs):
        graph.add_node(pydot.Node(_blob_node(name), label=_quoted(name), **BLOB_STYLE))
    for edge in edges:
        graph.add_edge(edge)
    return graph


def get_layer_label(layer: LayerParameter, rankdir: str, display_lrm: bool = False) -> str:
    """Return the label of a layer: name, type, window, and with `display_lrm` the learning-rate
    multipliers.
    """
    # Lines for vertical data flow, columns for horizontal.
    separator = "\\n" if rankdir in ("TB", "BT") else " | "
    parts = [layer.name, f"({layer.type})"]
    if layer.type in ("Convolution", "Deconvolution"):
        parts += _convolution_lines(layer.convolution_param)
    elif layer.type == "Pooling":
        parts += _pooling_lines(layer.pooling_param)
    if display_lrm and layer.param:
        parts.append(get_layer_lr_mult(layer))
    return separator.join(part.replace("|", "/") for part in parts)


def get_layer_lr_mult(layer: LayerParameter) -> str:
    """Return the learning-rate multipliers as `lr mult: 1, 2`."""
    return "lr mult: " + ", ".join(f"{param.lr_mult:g}" for param in layer.param)


def get_edge_label(layer: LayerParameter) -> str:
    """Return the label of a layer's output: the batch size of a Data layer, num_output of a
    learned one.
    """
    if layer.type == "Data":
        return f"Batch {layer.data_param.batch_size}"
    if layer.type in ("Convolution", "Deconvolution"):
        return str(layer.convolution_param.num_output)
    if layer.type == "InnerProduct":
        return str(layer.inner_product_param.num_output)
    return ""


def choose_color_by_layertype(layertype: str) -> str:
    """Return the color of a layer's box."""
    return COLORS.get(layertype, DEFAULT_COLOR)


def _convolution_lines(param: ConvolutionParameter) -> list[str]:
    kernel = list(param.kernel_size) or [side for side in (param.kernel_h, param.kernel_w) if side]
    return [
        f"kernel size: {'x'.join(map(str, kernel)) or 1}",
        f"stride: {'x'.join(map(str, param.stride)) or param.stride_h or 1}",
        f"pad: {'x'.join(map(str, param.pad)) or param.pad_h}",
    ]


def _pooling_lines(param: PoolingParameter) -> list[str]:
    name = PoolingParameter.PoolMethod.Name(param.pool)
    kernel = (
        "all" if param.global_pooling else param.kernel_size or f"{param.kernel_h}x{param.kernel_w}"
    )
    return [
        f"{name} pool",
        f"kernel size: {kernel}",
        f"stride: {param.stride}",
        f"pad: {param.pad}",
    ]


def _style(layer: LayerParameter) -> dict[str, Any]:
    if len(layer.bottom) == 1 and list(layer.bottom) == list(layer.top):
        return NEURON_STYLE
    return {**LAYER_STYLE, "fillcolor": choose_color_by_layertype(layer.type)}


def _blob_node(name: str) -> str:
    return _quoted(f"blob: {name}")


def _quoted(text: str) -> str:
    """Quote a string for dot, with braces, angle brackets and quotes escaped."""
    for sign in '"{}<>':
        text = text.replace(sign, "\\" + sign)
    return f'"{text}"'
