"""One layer of a net that keeps its blobs: forward and backward by themselves, on what the blobs hold now.

Law: Caffe's. `forward` reads its bottoms' data, whoever wrote them, and overwrites its tops'; `backward` reads its tops'
diffs, overwrites its bottoms' and adds to its parameters'. A top that weighs in the loss has its weight as diff from
the start. A layer whose bottoms have other shapes than last time is set up for them first.

The graph of the forward pass is kept until the next one, and shows the blobs' own memory, so backward may run twice, or
on data that were changed in between; without a forward pass it makes the graph first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.layers.base import Layer
from poseidon.layers.blob import Blob, Blobs
from poseidon.layers.common.combine import Split
from poseidon.layers.inputs.sources import DummyData, Input
from poseidon.layers.python_layer import Python
from poseidon.pycaffe.need import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A layer and what it is joined to.

    Attributes:
        layer: the layer, set up.
        bottoms: blobs read.
        tops: blobs written; one of `bottoms` where it runs in place.
        blobs: its learnable blobs.
        need: whether it runs backward, and to which bottoms.
        weights: what each top weighs in the loss.
    """

    layer: Layer
    bottoms: list[Blob]
    tops: list[Blob]
    blobs: Blobs
    need: Need
    weights: tuple[float, ...]


class Node:
    """A layer that torch computes."""

    def __init__(self, joined: Joined) -> None:
        self.layer, self.blobs = joined.layer, joined.blobs
        self.bottoms, self.tops = joined.bottoms, joined.tops
        self.need, self.weights = joined.need, joined.weights
        self.layer.overwrites_bottom = False
        self._fitted = self._bottom_shapes()
        self._weighed: list[int | None] = [None] * len(self.tops)
        self._leaves: list[Tensor] = []
        self._results: list[Tensor] = []
        self.weigh_tops()

    def fit(self) -> None:
        """Set the layer up for its bottoms' shapes, and shape its tops, where these have changed."""
        shapes = self._bottom_shapes()
        if shapes == self._fitted or not self.bottoms:
            return
        for blob, shape in zip(self.tops, self.layer.setup(shapes), strict=False):
            blob.reshape(*shape)
        self._fitted = shapes
        self.weigh_tops()

    def forward(self) -> float:
        """Run the layer; gives what it adds to the loss."""
        self.fit()
        self._compute()
        for blob, value in zip(self.tops, self._results, strict=True):
            blob.reshape(*value.shape)
            blob.write_data().copy_(value.detach())
        if not self.need.backward:
            self.forget()
        return self._loss()

    def backward(self) -> None:
        """Propagate the tops' diffs to the bottoms and the parameters that want one."""
        if not self._leaves and not self._results:
            self.fit()
            self._compute()
        for blob in (*self.bottoms, *self.tops, *self.blobs):
            blob.read_data()  # what was written on the host since then is to count
        parameters = self.layer.sources()
        wanted: list[Tensor] = [leaf for leaf in self._leaves if leaf.requires_grad]
        wanted += [parameter for parameter in parameters if parameter.requires_grad]
        gradients = iter(self._gradients(wanted))
        for place, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                _put(self.bottoms[place].write_diff(), next(gradients))
        for blob, parameter in zip(self.blobs, parameters, strict=True):
            if parameter.requires_grad:
                gradient = next(gradients)
                if gradient is not None:
                    blob.write_diff().add_(gradient.view(blob.shape))

    def forget(self) -> None:
        """Let go of the last pass's graph; a backward pass makes a new one."""
        self._leaves, self._results = [], []

    def weigh_tops(self) -> None:
        """Give the tops that weigh in the loss their weight as diff, where they are new or of another size."""
        for place, (blob, weight) in enumerate(zip(self.tops, self.weights, strict=True)):
            if weight and self._weighed[place] != blob.count:
                blob.write_diff().fill_(weight)
                self._weighed[place] = blob.count

    def _compute(self) -> None:
        """Make results from the bottoms as they are, with their graph if backward is to come."""
        self._leaves = [self._leaf(place) for place in range(len(self.bottoms))]
        for blob in self.blobs:
            blob.write_data()  # the layer may move it (BatchNorm)
        with torch.set_grad_enabled(self.need.backward):
            result: Tensor | Sequence[Tensor] | None = self.layer(*self._leaves)
        if isinstance(result, Tensor):
            self._results = [result]
        else:
            self._results = list(result or ())[: len(self.tops)]

    def _leaf(self, place: int) -> Tensor:
        """Return a bottom for torch: its own memory, unless the top is to overwrite that."""
        blob = self.bottoms[place]
        # `.data`: what is written later, by users or by other layers, is seen and does not spoil the graph.
        leaf = blob.read_data().data
        if any(blob is top for top in self.tops):
            leaf = leaf.clone()
        return leaf.requires_grad_() if self.need.backward and self.need.bottoms[place] else leaf

    def _gradients(self, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        joined = [
            (value, blob.read_diff())
            for value, blob in zip(self._results, self.tops, strict=True)
            if value.requires_grad
        ]
        if not joined or not wanted:
            return [None] * len(wanted)
        values, diffs = zip(*joined, strict=True)
        return torch.autograd.grad(values, wanted, diffs, retain_graph=True, allow_unused=True)

    def _loss(self) -> float:
        self.weigh_tops()
        return sum(
            float(torch.dot(blob.read_data().flatten(), blob.read_diff().flatten()))
            for blob, weight in zip(self.tops, self.weights, strict=True)
            if weight
        )

    def _bottom_shapes(self) -> list[tuple[int, ...]]:
        return [blob.shape for blob in self.bottoms]


class InputNode(Node):
    """Input: its tops are the user's."""

    def forward(self) -> float:
        return 0.0

    def backward(self) -> None:
        pass


class DummyDataNode(Node):
    """DummyData: constant tops are filled once, when the layer is made, and are the user's from then on."""

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined)
        assert isinstance(self.layer, DummyData)
        for place, constant in self.layer.constants.items():
            self.tops[place].write_data().copy_(constant)
        self._kept = frozenset(self.layer.constants)

    def forward(self) -> float:
        if len(self._kept) == len(self.tops):
            return 0.0
        self._compute()
        for place, (blob, value) in enumerate(zip(self.tops, self._results, strict=True)):
            if place not in self._kept:
                blob.write_data().copy_(value)
        return self._loss()

    def backward(self) -> None:
        pass


class SplitNode(Node):
    """Split: its tops are its bottom's own memory; their diffs add up."""

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined)
        self.fit()

    def fit(self) -> None:
        for top in self.tops:
            top.reshape(*self.bottoms[0].shape)
            top.share_data(self.bottoms[0])
        self.weigh_tops()

    def forward(self) -> float:
        self.fit()
        return self._loss()

    def backward(self) -> None:
        if self.need.bottoms[0]:
            first, *others = [top.read_diff() for top in self.tops]
            total = first.clone()
            for other in others:
                total += other
            self.bottoms[0].write_diff().copy_(total)


class PythonNode(Node):
    """Python: the user's code works on the net's blobs; nothing of torch is between."""

    def __init__(self, joined: Joined) -> None:
        assert isinstance(joined.layer, Python)
        self._python = joined.layer
        self._python.use_blobs(joined.bottoms, joined.tops)
        super().__init__(joined)

    def fit(self) -> None:
        self._python.reshape_tops()
        self.weigh_tops()

    def forward(self) -> float:
        self._python.run_forward()
        return self._loss()

    def backward(self) -> None:
        self._python.run_backward(list(self.need.bottoms))


def make_node(joined: Joined) -> Node:
    """Return the node of a layer's type."""
    kinds: dict[type[Layer], type[Node]] = {
        Input: InputNode,
        DummyData: DummyDataNode,
        Split: SplitNode,
        Python: PythonNode,
    }
    return kinds.get(type(joined.layer), Node)(joined)


def _put(target: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        target.zero_()
    else:
        target.copy_(gradient)
