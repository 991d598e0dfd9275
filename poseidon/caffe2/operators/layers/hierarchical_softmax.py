"""Hierarchical softmax: a tree whose leaves are words; a word is as probable as its path.

Each inner node has a fully connected layer of its own, all stacked in one matrix: the rows of a
node begin at its offset, one row for each of its children and words.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.proto.hsm_pb2 import HierarchyProto, NodeProto, PathNodeProto, TreeProto
from poseidon.caffe2.runtime.values import strings_of

LEAST = 1e-20
"""The least probability of which a logarithm is taken."""


def _parsed(message: Any, text: bytes, argument: str) -> Any:
    """Return a message of the text of an argument."""
    try:
        message.ParseFromString(text)
    except DecodeError as error:
        raise ValueError(f"the argument {argument} is not a {type(message).__name__}") from error
    return message


class _Paths:
    """The paths of the labels of a batch, and where their intermediate values lie.

    An example's intermediate values are, for each node of its path, outputs and softmax.
    """

    def __init__(self, hierarchy: bytes, labels: Tensor) -> None:
        parsed = _parsed(HierarchyProto(), hierarchy, "hierarchy")
        paths = {path.word_id: list(path.path_nodes) for path in parsed.paths}
        words = labels.reshape(-1).tolist()
        unknown = sorted(set(words) - set(paths))
        if unknown:
            raise ValueError(f"HSoftmax: the hierarchy has no path for the labels {unknown}")
        sizes = [2 * sum(node.length for node in paths[word]) for word in words]
        self._starts = torch.tensor([0, *itertools.accumulate(sizes)])
        self.size = sum(sizes)
        self._examples: dict[int, list[int]] = {}
        for example, word in enumerate(words):
            self._examples.setdefault(word, []).append(example)
        self._nodes = paths

    def __iter__(self) -> Iterator[tuple[Tensor, PathNodeProto, Tensor]]:
        """Yield for each word and node on its path the examples, the node, its layer's outputs."""
        for word, examples in self._examples.items():
            rows = torch.tensor(examples)
            begin = self._starts[rows]
            for node in self._nodes[word]:
                yield rows, node, begin[:, None] + torch.arange(node.length)
                begin = begin + 2 * node.length


def _examples(x: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    """Return x as a matrix with a row for each label."""
    check_count("the input of the examples", x, labels.numel() * w.shape[1])
    return x.reshape(labels.numel(), w.shape[1])


def _rule(maker: GradientMaker) -> None:
    given = maker.given[1]
    kept = given if isinstance(given, str) else f"{maker.O(1)}_grad"
    inputs = [*maker.forward.input, maker.O(1), maker.GO(0)]
    maker.op("HSoftmaxGradient", inputs, [*map(maker.GI, range(3)), kept])


@operator("HSoftmax", gradient=_rule, expected="N *, R D, R")
def h_softmax(
    x: Tensor, w: Tensor, b: Tensor, labels: Tensor, *, hierarchy: bytes
) -> tuple[Tensor, Tensor]:
    """Return the negative logarithm of the probability of each label, and the intermediate values.

    Args:
        x: examples, shape (batch, features).
        w: the weights of all nodes, shape (rows, features).
        b: the biases of all nodes.
        labels: words.
        hierarchy: a HierarchyProto, which `hsm_util.create_hierarchy` makes of a tree.
    """
    x = _examples(x, labels, w)
    if x.is_meta:
        return x.new_empty(len(x)), x.new_empty(0)
    paths = _Paths(hierarchy, labels)
    loss, kept = x.new_zeros(len(x)), x.new_zeros(paths.size)
    for rows, node, places in paths:
        part = slice(node.index, node.index + node.length)
        logits = x[rows] @ w[part].T + b[part]
        chances = torch.softmax(logits, 1)
        kept[places], kept[places + node.length] = logits, chances
        loss[rows] -= chances[:, node.target].clamp(min=LEAST).log()
    return loss, kept


@operator("HSoftmaxGradient", expected="N *, R D, R, ?, K, N")
def h_softmax_gradient(
    x: Tensor, w: Tensor, b: Tensor, labels: Tensor, kept: Tensor, dy: Tensor, *, hierarchy: bytes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `HSoftmax` by x, w, b and the intermediate values."""
    dx, dw, db, dkept = (torch.zeros_like(value) for value in (x, w, b, kept))
    flat, dflat = _examples(x, labels, w), dx.reshape(labels.numel(), -1)
    for rows, node, places in _Paths(hierarchy, labels):
        part = slice(node.index, node.index + node.length)
        chances = kept[places + node.length]
        dchances = torch.zeros_like(chances)
        dchances[:, node.target] = -dy[rows] / chances[:, node.target].clamp(min=LEAST)
        dlogits = (dchances - (chances * dchances).sum(1, keepdim=True)) * chances
        dkept[places], dkept[places + node.length] = dlogits, dchances
        dw[part] += dlogits.T @ flat[rows]
        db[part] += dlogits.sum(0)
        dflat[rows] += dlogits @ w[part]
    return dx, dw, db, dkept


def _search(
    node: NodeProto, score: float, costs: Callable[[NodeProto], list[float]], beam: float
) -> list[tuple[str, float]]:
    """Return names and costs of what is below a node and cheaper than its parent and the beam."""
    found: list[tuple[str, float]] = []
    deeper: list[tuple[str, float]] = []
    names = [*node.children, *node.word_ids]
    for child, cost in zip(names, costs(node), strict=True):
        total = cost + score
        if total >= score + beam:
            continue
        if isinstance(child, NodeProto):
            found.append((child.name, total))
            deeper += _search(child, total, costs, beam)
        else:
            found.append((str(child), total))
    return found + deeper


@operator("HSoftmaxSearch", expected="N *, R D, R")
def h_softmax_search(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    *,
    tree: bytes,
    beam: float = 0.01,
    top_n: int = 5,
    topN: int | None = None,
) -> tuple[np.ndarray, Tensor]:
    """Return each example's likeliest nodes and words: names, and negative log probabilities.

    Args:
        x, w, b: see `HSoftmax`.
        tree: a TreeProto whose nodes have offsets and names.
        beam: what a node may cost at most beside its parent.
        top_n, topN: the number of names of each example; missing ones are empty, with the cost 0.
    """
    count = top_n if topN is None else topN
    root = _parsed(TreeProto(), tree, "tree").root_node
    x = x.reshape(len(x), -1) if x.dim() > 1 else x.reshape(1, -1)
    check_tensor("the input of the examples", x, (len(x), w.shape[1]))
    names = np.full((len(x), count), b"", dtype=object)
    scores = x.new_zeros(len(x), count)
    for example, features in enumerate(x):

        def costs(node: NodeProto, features: Tensor = features) -> list[float]:
            part = slice(node.offset, node.offset + len(node.children) + len(node.word_ids))
            chances = torch.softmax(w[part] @ features + b[part], 0)
            return (-chances.clamp(min=LEAST).log()).tolist()

        best = sorted(_search(root, 0.0, costs, beam), key=lambda pair: pair[1])[:count]
        for place, (name, score) in enumerate(best):
            names[example, place] = name.encode()
            scores[example, place] = score
    return names, scores


@operator("HuffmanTreeHierarchy")
def huffman_tree_hierarchy(labels: Tensor, *, num_classes: int) -> np.ndarray:
    """Return the Huffman tree of labels: a TreeProto, as a tensor of one string.

    Args:
        labels: a vector.
        num_classes: the number of classes; labels are less than it.
    """
    if labels.dim() != 1 or (labels.numel() and int(labels.max()) >= num_classes):
        raise ValueError(f"the labels must be a vector of numbers below {num_classes}")
    counts = torch.bincount(labels.long(), minlength=num_classes).tolist()
    order = itertools.count()
    waiting: list[tuple[int, int, NodeProto | int]] = [
        (size, next(order), word) for word, size in enumerate(counts)
    ]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        (left, _, first), (right, _, second) = heapq.heappop(waiting), heapq.heappop(waiting)
        node = NodeProto()
        for child in (first, second):
            if isinstance(child, NodeProto):
                node.children.append(child)
            else:
                node.word_ids.append(child)
        heapq.heappush(waiting, (left + right, next(order), node))
    root = waiting[0][2] if waiting else NodeProto()
    tree = TreeProto(root_node=root if isinstance(root, NodeProto) else NodeProto(word_ids=[root]))
    _number(tree.root_node, itertools.count(0, 2))
    return strings_of([tree.SerializeToString()])


def _number(node: NodeProto, offsets: Iterator[int]) -> None:
    node.offset = next(offsets)
    for child in node.children:
        _number(child, offsets)
