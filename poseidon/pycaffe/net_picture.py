"""A drawing of one phase of a net on a page, for `poseidon draw_net`.

Law: a drawing needs only the definition, as in `poseidon.pycaffe.draw`; the caller provides shapes.
A box is a layer with those that run in place on its top. An arrow is a blob. A deep net is divided
into sections side by side, with boundaries that cut few arrows. A cut arrow ends at a letter and
continues at the same letter in the next section.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pydot

from poseidon.caffe.layers.base import Shape, times
from poseidon.caffe.proto.caffe_pb2 import ConvolutionParameter, LayerParameter, PoolingParameter
from poseidon.pycaffe.draw import choose_color_by_layertype, get_layer_lr_mult

LINE_LETTERS = 24
"""The maximum number of letters in a line of a box."""
PAGE = math.sqrt(2.0)
"""The aspect ratio of a page (ISO 216)."""
LONGEST_DATA_ARROW = 6
"""The maximum length of an arrow from a data layer, in levels. A longer one is
replaced by the blob's name at its reader.
"""
ONE_SECTION_LEVELS = 12
"""Nets of up to this many levels have one section."""
NEAR_CUT = 3
"""The number of levels by which a section boundary may be moved to cut fewer arrows."""
GRAPH: dict[str, Any] = {"nodesep": 0.1, "ranksep": 0.15, "margin": 0.1, "fontname": "Helvetica"}
BOX: dict[str, Any] = {
    "shape": "box",
    "style": "filled",
    "fontname": "Helvetica",
    "fontsize": 9,
    "margin": "0.05,0.03",
    "height": 0.2,
    "width": 0.3,
}
NOTE: dict[str, Any] = {
    "shape": "plaintext",
    "fontname": "Helvetica",
    "fontsize": 8,
    "margin": "0.02,0.01",
    "height": 0.1,
}
LETTER: dict[str, Any] = {
    "shape": "circle",
    "fontname": "Helvetica",
    "fontsize": 9,
    "margin": 0.01,
    "width": 0.2,
}
ARROW: dict[str, Any] = {"arrowsize": 0.5, "fontname": "Helvetica", "fontsize": 8}


@dataclass(slots=True, kw_only=True)
class PictureBox:
    """A layer, and those that run in place on its top.

    Attributes:
        layers: the layers; the first one gives the box its name.
        level: the length of the longest path from a box without inputs.
    """

    layers: list[LayerParameter]
    inputs: list[tuple[int, str]] = field(default_factory=list)
    level: int = 0


def picture_graph(
    layers: Iterable[LayerParameter],
    *,
    rankdir: str = "TB",
    display_lrm: bool = False,
    shapes: Mapping[str, Shape] | None = None,
    columns: int | None = None,
) -> pydot.Dot:
    """Return the graph of a net for Graphviz.

    Args:
        layers: of one phase, in order.
        rankdir: where the data flows: TB, BT, LR or RL.
        shapes: of blobs by name, shown in the boxes that make them; None: none.
        columns: the number of sections; None: see `columns_for`.
    """
    boxes = boxes_of(layers)
    section_of = sections(boxes, columns or columns_for(boxes))
    graph = pydot.Dot("net", graph_type="digraph", rankdir=rankdir, **GRAPH)
    drawer = _Drawer(graph, boxes, section_of)
    for number, box in enumerate(boxes):
        drawer.add_box(number, _label(box, display_lrm, shapes or {}))
    drawer.add_arrows()
    drawer.finish()
    return graph


def boxes_of(layers: Iterable[LayerParameter]) -> list[PictureBox]:
    """Return the boxes of a net, in the order of its layers."""
    boxes: list[PictureBox] = []
    producer: dict[str, int] = {}  # blob -> the box that wrote it last
    read: set[str] = set()  # blobs that have been read since
    for layer in layers:
        in_place = len(layer.bottom) == 1 and list(layer.bottom) == list(layer.top)
        if in_place and layer.bottom[0] in producer and layer.bottom[0] not in read:
            boxes[producer[layer.bottom[0]]].layers.append(layer)
            continue
        inputs = [(producer[name], name) for name in layer.bottom if name in producer]
        level = max((boxes[number].level + 1 for number, _ in inputs), default=0)
        read.update(layer.bottom)
        for name in layer.top:
            producer[name] = len(boxes)
            read.discard(name)
        boxes.append(PictureBox(layers=[layer], inputs=inputs, level=level))
    return boxes


def columns_for(boxes: Sequence[PictureBox]) -> int:
    """Return the number of sections that gives the drawing the proportions of a page in
    landscape format.
    """
    levels = max((box.level for box in boxes), default=0) + 1
    if levels <= ONE_SECTION_LEVELS:
        return 1
    per_level = [0] * levels
    for box in boxes:
        per_level[box.level] += 1
    # A box is about four times as wide as high, with its arrow.
    wide, tall = max(per_level) * 3.0, float(levels)
    return max(1, min(levels, round(math.sqrt(tall * PAGE / wide))))


def sections(boxes: Sequence[PictureBox], columns: int) -> list[int]:
    """Return the section of each box, 0 to columns - 1: an even division by levels
    with boundaries moved to cut few arrows.
    """
    levels = max((box.level for box in boxes), default=0) + 1
    # [k]: the blobs that cross the boundary below level k
    crossing: list[set[tuple[int, str]]] = [set() for _ in range(levels + 1)]
    for box in boxes:
        for source, blob in box.inputs:
            if boxes[source].inputs:  # arrows from data layers are replaced by names
                for cut in range(boxes[source].level + 1, box.level + 1):
                    crossing[cut].add((source, blob))
    cuts = []
    for column in range(1, columns):
        middle = levels * column // columns
        near = range(max(1, middle - NEAR_CUT), min(levels, middle + NEAR_CUT + 1))
        cuts.append(
            min(near, key=lambda cut: (len(crossing[cut]), abs(cut - middle)), default=middle)
        )
    return [sum(box.level >= cut for cut in cuts) for box in boxes]


class _Drawer:
    """A builder of the graph, section by section."""

    def __init__(
        self,
        graph: pydot.Dot,
        boxes: Sequence[PictureBox],
        section_of: Sequence[int],
    ) -> None:
        self._graph = graph
        self._boxes = boxes
        self._section_of = section_of
        self._parts = [
            pydot.Cluster(f"s{number}", peripheries=0, margin=2)
            for number in range(max(section_of, default=0) + 1)
        ]
        self._first: dict[int, str] = {}  # section -> its first node
        self._letters: dict[tuple[int, str], str] = {}  # the letter of each cut blob

    def add_box(self, number: int, label: str) -> None:
        color = choose_color_by_layertype(self._boxes[number].layers[0].type)
        self._add(self._section_of[number], f"b{number}", label=label, fillcolor=color, **BOX)

    def add_arrows(self) -> None:
        for number, box in enumerate(self._boxes):
            for source, blob in box.inputs:
                self._add_arrow(source, number, blob)

    def finish(self) -> None:
        """Add the sections to the graph, with their first nodes side by side."""
        for part in self._parts:
            self._graph.add_subgraph(part)  # type: ignore[arg-type]
        heads = [self._first[number] for number in sorted(self._first)]
        if len(heads) > 1:
            row = pydot.Subgraph(rank="same")
            for head in heads:
                row.add_node(pydot.Node(head))
            for left, right in pairwise(heads):
                row.add_edge(pydot.Edge(left, right, style="invis"))
            self._graph.add_subgraph(row)

    def _add_arrow(self, source: int, target: int, blob: str) -> None:
        producer, reader = self._boxes[source], self._boxes[target]
        here = self._section_of[target]
        note = self._note(source, blob)
        if not producer.inputs and reader.level - producer.level > LONGEST_DATA_ARROW:
            name = f"{blob}_to_{target}"
            self._add(here, name, label=_quoted(blob), **NOTE)
            self._graph.add_edge(pydot.Edge(_quoted(name), f"b{target}", **ARROW))
        elif self._section_of[source] == here:
            self._graph.add_edge(pydot.Edge(f"b{source}", f"b{target}", **_labelled(note), **ARROW))
        else:
            self._graph.add_edge(
                pydot.Edge(self._entry(source, here, blob, note), f"b{target}", **ARROW)
            )

    def _entry(self, source: int, section: int, blob: str, note: str) -> str:
        """Add the two nodes with the letter of a cut arrow.

        Return the one in the section that it enters.
        """
        if (source, blob) not in self._letters:
            letter = _letter(len(self._letters))
            self._letters[source, blob] = letter
            self._add(self._section_of[source], f"out_{letter}", label=letter, **LETTER)
            self._graph.add_edge(
                pydot.Edge(f"b{source}", f"out_{letter}", **_labelled(note), **ARROW)
            )
        letter = self._letters[source, blob]
        name = f"in_{letter}_{section}"
        if not self._parts[section].get_node(name):
            self._add(section, name, label=letter, **LETTER)
            if not self._first.get(section, "b").startswith("in_"):
                self._first[section] = name
        return name

    def _add(self, section: int, name: str, **settings: Any) -> None:
        self._parts[section].add_node(
            pydot.Node(_quoted(name) if not name.isidentifier() else name, **settings)
        )
        self._first.setdefault(section, name)

    def _note(self, source: int, blob: str) -> str:
        """Return the label of an arrow: the blob's name if the layer has several tops."""
        return blob if len(self._boxes[source].layers[0].top) > 1 else ""


def _labelled(note: str) -> dict[str, Any]:
    """Return the settings of an arrow with a label.

    An `xlabel` makes no levels of its own, as a `label` does.
    """
    return {"xlabel": _quoted(note), "minlen": 2} if note else {}


def _label(box: PictureBox, display_lrm: bool, shapes: Mapping[str, Shape]) -> str:
    """Return the lines of a box as dot's HTML, with the name in bold."""
    first = box.layers[0]
    name = "".join(f"<b>{html.escape(line)}</b><br/>" for line in _wrapped(first.name, "/_-"))
    lines = _wrapped(
        ", ".join(" ".join([layer.type, *details(layer)]) for layer in box.layers), " "
    )
    if display_lrm:
        lines += [get_layer_lr_mult(layer) for layer in box.layers if layer.param]
    named = len(first.top) > 1
    lines += [
        f"{blob} {times(shapes[blob])}" if named else times(shapes[blob])
        for blob in first.top
        if blob in shapes
    ]
    return f"<{name}{'<br/>'.join(map(html.escape, lines))}>"


def details(layer: LayerParameter) -> list[str]:
    """Return the main settings of a layer."""
    found: list[str] = []
    if layer.type in ("Convolution", "Deconvolution"):
        found = _convolution(layer.convolution_param)
    elif layer.type == "Pooling":
        found = _pooling(layer.pooling_param)
    elif layer.type == "InnerProduct":
        found = [str(layer.inner_product_param.num_output)]
    elif layer.type == "Dropout":
        found = [f"{layer.dropout_param.dropout_ratio:g}"]
    elif layer.type == "Data":
        found = [f"batch {layer.data_param.batch_size}"]
    elif layer.type == "LRN":
        found = [f"size {layer.lrn_param.local_size}"]
    return found + [f"weight {weight:g}" for weight in layer.loss_weight if weight != 1]


def _convolution(param: ConvolutionParameter) -> list[str]:
    kernel = list(param.kernel_size) or [side for side in (param.kernel_h, param.kernel_w) if side]
    window = "x".join(map(str, kernel * (2 if len(kernel) == 1 else 1))) or "1x1"
    stride = max([*param.stride, param.stride_h, param.stride_w, 1])
    found = [f"{window} x {param.num_output}"]
    found += [f"stride {stride}"] if stride > 1 else []
    found += [f"dilation {param.dilation[0]}"] if param.dilation and param.dilation[0] > 1 else []
    return found + ([f"group {param.group}"] if param.group > 1 else [])


def _pooling(param: PoolingParameter) -> list[str]:
    name = PoolingParameter.PoolMethod.Name(param.pool)
    if param.global_pooling:
        return [name, "all"]
    kernel = (param.kernel_h or param.kernel_size, param.kernel_w or param.kernel_size)
    return [f"{name} {times(kernel)}", *([f"stride {param.stride}"] if param.stride > 1 else [])]


def _wrapped(text: str, signs: str) -> list[str]:
    """Break a text into lines of a maximum length, preferably after one of the given signs."""
    if len(text) <= LINE_LETTERS:
        return [text] if text else []
    if signs == " ":
        return textwrap.wrap(text, LINE_LETTERS)
    ends = [index + 1 for index, sign in enumerate(text[:LINE_LETTERS]) if sign in signs]
    end = ends[-1] if ends else LINE_LETTERS
    return [text[:end], *_wrapped(text[end:], signs)]


def _letter(number: int) -> str:
    """Return the letter of a number: A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
