"""Drawings of nets: a box a layer, an octagon a blob.

Law: a drawing is made from the definition alone, upgraded but never compiled, so that also nets whose data or layer
types are absent here can be drawn. Graphviz's `dot` lays it out.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pydot

from poseidon.errors import UsageError
from poseidon.proto.caffe_pb2 import (
    ConvolutionParameter,
    LayerParameter,
    NetParameter,
    NetState,
    Phase,
    PoolingParameter,
)
from poseidon.proto.phase import is_included
from poseidon.snapshot.files import write_atomically

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
    """Draw a net into a file whose extension says the format: png, svg, pdf or another of Graphviz.

    Args:
        caffe_net: today's grammar.
        filename: what to write.
        rankdir: where the data flows: LR, TB, BT or RL.
        phase: draw the layers of this phase only; None: all.
        display_lrm: show each layer's learning rate multipliers.

    Raises:
        UsageError: no extension, or Graphviz is absent or does not know the format.
    """
    path = Path(filename)
    write_atomically(path, draw_net(caffe_net, rankdir, extension_of(path), phase, display_lrm))


def extension_of(path: Path) -> str:
    """Return the format that a picture's name says.

    Raises:
        UsageError: it says none.
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
    """Return the drawing as the bytes of a file.

    Raises:
        UsageError: Graphviz is absent or does not know the format.
    """
    return laid_out(get_pydot_graph(caffe_net, rankdir, phase=phase, display_lrm=display_lrm), ext)


def laid_out(graph: pydot.Dot, ext: str) -> bytes:
    """Return a graph as the bytes of a file.

    Raises:
        UsageError: Graphviz is absent or does not know the format.
    """
    try:
        with redirect_stdout(io.StringIO()):  # pydot prints what dot said, as bytes
            picture: Any = graph.create(format=ext)
    except FileNotFoundError as error:
        raise UsageError(
            "drawing needs Graphviz's program dot on the PATH; install the package graphviz (apt install graphviz)"
        ) from error
    except AssertionError as error:  # dot ended with an error
        raise UsageError(f"dot cannot draw format '{ext}', expected png, svg or pdf") from error
    return bytes(picture)


def get_pydot_graph(
    caffe_net: NetParameter,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
) -> pydot.Dot:
    """Return the graph to be laid out."""
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
    """Name and type of a layer, its window, and its learning rate multipliers if asked for."""
    # Lines where the data flows sideways, else columns.
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
    """`lr mult: 1, 2`."""
    return "lr mult: " + ", ".join(f"{param.lr_mult:g}" for param in layer.param)


def get_edge_label(layer: LayerParameter) -> str:
    """What leaves a layer: the batch of a Data layer, the outputs of a learned one."""
    if layer.type == "Data":
        return f"Batch {layer.data_param.batch_size}"
    if layer.type in ("Convolution", "Deconvolution"):
        return str(layer.convolution_param.num_output)
    if layer.type == "InnerProduct":
        return str(layer.inner_product_param.num_output)
    return ""


def choose_color_by_layertype(layertype: str) -> str:
    """Return the colour of a layer's box."""
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
    kernel = "all" if param.global_pooling else param.kernel_size or f"{param.kernel_h}x{param.kernel_w}"
    return [f"{name} pool", f"kernel size: {kernel}", f"stride: {param.stride}", f"pad: {param.pad}"]


def _style(layer: LayerParameter) -> dict[str, Any]:
    if len(layer.bottom) == 1 and list(layer.bottom) == list(layer.top):
        return NEURON_STYLE
    return {**LAYER_STYLE, "fillcolor": choose_color_by_layertype(layer.type)}


def _blob_node(name: str) -> str:
    return _quoted(f"blob: {name}")


def _quoted(text: str) -> str:
    """Return a string of the dot language; braces, angles and quotes mean nothing in it."""
    for sign in '"{}<>':
        text = text.replace(sign, "\\" + sign)
    return f'"{text}"'
