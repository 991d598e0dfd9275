"""Nodes: the layers of a pycaffe net, each with forward and backward passes on the current
values of its blobs.

Law: the semantics are Caffe's. `forward` reads the data of its bottoms and overwrites the data of
its tops. `backward` reads the diffs of its tops, overwrites the diffs of its bottoms and adds to
the diffs of its parameters. A top with a loss weight has that weight as its initial diff. A layer
whose bottoms have changed shape is set up again first.

The autograd graph of a forward pass is kept until the next one and uses the memory of the blobs, so
backward can run twice, or on data that were changed in between. Without a forward pass, backward
creates the graph.

The layers that run backward follow from the second half of Caffe's Net::Init: a layer runs backward
if it or a layer below it learns, and it or a layer above it contributes to a loss. `propagate_down`
forces or stops single bottoms; `force_backward` runs all layers that can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.blob import Blob, BlobVec, RawBlobVec
from poseidon.caffe.layers.combine import Split
from poseidon.caffe.layers.python_layer import Python
from poseidon.caffe.layers.sources import DummyData, Input

# Bottoms, such as labels, that force_backward does not affect (Caffe's AllowForceBackward).
NEVER_FORCED: dict[str, frozenset[int]] = {
    "ContrastiveLoss": frozenset({2}),
    "HingeLoss": frozenset({1}),
    "InfogainLoss": frozenset({1}),
    "LSTM": frozenset({1}),
    "LSTMUnit": frozenset({2}),
    "MultinomialLogisticLoss": frozenset({1}),
    "RNN": frozenset({1}),
    "Recurrent": frozenset({1}),
    "SigmoidCrossEntropyLoss": frozenset({1}),
    "SoftmaxWithLoss": frozenset({1}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """The properties of a layer that decide about gradients.

    Attributes:
        tops: the names of the tops, including those that Caffe adds automatically.
        propagate_down: the setting in the definition, possibly empty.
        learns: whether any of its blobs has a learning rate.
        in_loss: for each top, whether it has a loss weight.
    """

    kind: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    propagate_down: tuple[bool, ...]
    learns: bool
    in_loss: tuple[bool, ...]


@dataclass(slots=True)
class BackwardFlags:
    """The flags of a layer: whether it runs backward, and which bottoms get a gradient."""

    backward: bool
    bottoms: list[bool]


def backward_flags(layers: Sequence[LayerInfo], *, force: bool) -> list[BackwardFlags]:
    """Return the flags of every layer, in order.

    Args:
        layers: the layers in the order of the net, including splits.
        force: the net's force_backward.
    """
    found = _forward(layers)
    _clear_outside_loss(layers, found)
    if force:
        for layer, flags in zip(layers, found, strict=True):
            flags.backward = True
            never = NEVER_FORCED.get(layer.kind, frozenset())
            flags.bottoms = [flag or index not in never for index, flag in enumerate(flags.bottoms)]
    return found


def _forward(layers: Sequence[LayerInfo]) -> list[BackwardFlags]:
    """Set the flags of layers that learn, and of all layers above them, from the first layer to
    the last.
    """
    blobs: dict[str, bool] = {}
    found = []
    for layer in layers:
        below = [blobs.get(name, False) for name in layer.bottoms]
        backward = any(below) or layer.learns
        bottoms = list(layer.propagate_down) or below
        found.append(BackwardFlags(backward, bottoms))
        blobs |= dict.fromkeys(layer.tops, backward)
    return found


def _clear_outside_loss(layers: Sequence[LayerInfo], found: list[BackwardFlags]) -> None:
    """Clear the flags of layers that contribute to no loss or whose tops get no
    gradient, from the last layer to the first.
    """
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for layer, flags in zip(reversed(layers), reversed(found), strict=True):
        contributes, skip = False, True
        for name, in_loss in zip(layer.tops, layer.in_loss, strict=True):
            contributes |= in_loss or name in under_loss
            skip &= name in skipped
            if contributes and not skip:
                break
        if flags.backward and skip:
            flags.backward = False
            flags.bottoms = [False] * len(flags.bottoms)
        if contributes:
            under_loss.update(layer.bottoms)
        else:
            flags.backward = False
            flags.bottoms = [False] * len(flags.bottoms)
        skipped.update(
            name for name, flag in zip(layer.bottoms, flags.bottoms, strict=True) if not flag
        )


@dataclass(eq=False, kw_only=True)
class LayerNode:
    """A layer that is computed by torch, and its connections.

    Attributes:
        layer: the layer, set up.
        tops: the blobs written; in place, one of `bottoms`.
        flags: whether it runs backward, and for which bottoms.
        weights: the loss weight of each top.
    """

    layer: Layer
    bottoms: RawBlobVec
    tops: RawBlobVec
    blobs: BlobVec
    flags: BackwardFlags
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        self.layer.overwrites_bottom = False
        self._setup_shapes = self._bottom_shapes()
        self._sizes_with_weight: list[int | None] = [None] * len(self.tops)
        self._leaves: list[Tensor] = []
        self._results: list[Tensor] = []
        self.set_loss_diffs()

    def reshape(self) -> None:
        """Set the layer up and reshape its tops if the shapes of its bottoms have changed."""
        shapes = self._bottom_shapes()
        if shapes == self._setup_shapes or not self.bottoms:
            return
        self.set_up(self.bottoms, self.tops)

    def set_up(self, bottoms: Sequence[Blob], tops: Sequence[Blob]) -> None:
        """Set the layer up for these bottoms and reshape these tops. A layer without bottoms
        stays as it is.
        """
        shapes = [blob.shape for blob in bottoms]
        if shapes:
            for blob, shape in zip(tops, self.layer.checked_setup(shapes), strict=False):
                blob.reshape(*shape)
            self._setup_shapes = shapes
            self.set_loss_diffs()

    def forward(self) -> float:
        """Run the layer. Return its contribution to the loss."""
        self.reshape()
        self._compute()
        self.layer.check_in_place(
            self._setup_shapes, [tuple(value.shape) for value in self._results]
        )
        for blob, value in zip(self.tops, self._results, strict=True):
            blob.reshape(*value.shape)
            blob.write_data().copy_(value.detach())
        if not self.flags.backward:
            self.clear_graph()
        return self._loss()

    def backward(self) -> None:
        """Propagate the diffs of the tops to the bottoms and parameters that need one."""
        if not self._leaves and not self._results:
            self.reshape()
            self._compute()
        for blob in (*self.bottoms, *self.tops, *self.blobs):
            blob.read_data()  # copies values that were written on the host since then
        parameters = self.layer.sources()
        wanted: list[Tensor] = [leaf for leaf in self._leaves if leaf.requires_grad]
        wanted += [parameter for parameter in parameters if parameter.requires_grad]
        gradients = iter(self._gradients(wanted))
        for index, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                _copy_or_zero(self.bottoms[index].write_diff(), next(gradients))
        for blob, parameter in zip(self.blobs, parameters, strict=True):
            if parameter.requires_grad:
                gradient = next(gradients)
                if gradient is not None:
                    blob.write_diff().add_(gradient.view(blob.shape))

    def clear_graph(self) -> None:
        """Free the autograd graph of the last pass. A backward pass creates a new one."""
        self._leaves, self._results = [], []

    def set_loss_diffs(self) -> None:
        """Set the diff of tops with a loss weight to that weight, if they are new or their size
        has changed.
        """
        for index, (blob, weight) in enumerate(zip(self.tops, self.weights, strict=True)):
            if weight and self._sizes_with_weight[index] != blob.count:
                blob.write_diff().fill_(weight)
                self._sizes_with_weight[index] = blob.count

    def _compute(self) -> None:
        """Compute results from the current bottoms, with the autograd graph if the layer runs
        backward.
        """
        self._leaves = [self._leaf(index) for index in range(len(self.bottoms))]
        for blob in self.blobs:
            blob.write_data()  # the layer may update it (BatchNorm)
        with torch.set_grad_enabled(self.flags.backward):
            result: Tensor | Sequence[Tensor] | None = self.layer(*self._leaves)
        if isinstance(result, Tensor):
            self._results = [result]
        else:
            self._results = list(result or ())[: len(self.tops)]

    def _leaf(self, index: int) -> Tensor:
        """Return a bottom as a tensor on its own memory, or a copy if a top overwrites it."""
        blob = self.bottoms[index]
        # `.data`: later writes of users or other layers are visible and do not invalidate the
        # graph.
        leaf = blob.read_data().data
        if any(blob is top for top in self.tops):
            leaf = leaf.clone()
        return leaf.requires_grad_() if self.flags.backward and self.flags.bottoms[index] else leaf

    def _gradients(self, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        pairs = [
            (value, blob.read_diff())
            for value, blob in zip(self._results, self.tops, strict=True)
            if value.requires_grad
        ]
        if not pairs or not wanted:
            return [None] * len(wanted)
        values, diffs = zip(*pairs, strict=True)
        return torch.autograd.grad(values, wanted, diffs, retain_graph=True, allow_unused=True)

    def _loss(self) -> float:
        self.set_loss_diffs()
        return sum(
            float(torch.dot(blob.read_data().flatten(), blob.read_diff().flatten()))
            for blob, weight in zip(self.tops, self.weights, strict=True)
            if weight
        )

    def _bottom_shapes(self) -> list[tuple[int, ...]]:
        return [blob.shape for blob in self.bottoms]


class InputNode(LayerNode):
    """Input, whose tops the user writes."""

    def forward(self) -> float:
        return 0.0

    def backward(self) -> None:
        pass


class DummyDataNode(LayerNode):
    """DummyData, whose constant tops are filled only at creation, so that the user can change
    them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.layer, DummyData)
        for index, constant in self.layer.constants.items():
            self.tops[index].write_data().copy_(constant)
        self._kept = frozenset(self.layer.constants)

    def forward(self) -> float:
        if len(self._kept) == len(self.tops):
            return 0.0
        self._compute()
        for index, (blob, value) in enumerate(zip(self.tops, self._results, strict=True)):
            if index not in self._kept:
                blob.write_data().copy_(value)
        return self._loss()

    def backward(self) -> None:
        pass


class SplitNode(LayerNode):
    """Split, whose tops share the memory of its bottom, and whose diffs add up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reshape()

    def reshape(self) -> None:
        for top in self.tops:
            top.reshape(*self.bottoms[0].shape)
            top.share_data(self.bottoms[0])
        self.set_loss_diffs()

    def forward(self) -> float:
        self.reshape()
        return self._loss()

    def backward(self) -> None:
        if self.flags.bottoms[0]:
            # in autograd's order, so that `poseidon train` gives the same bits
            *others, last = [top.read_diff() for top in self.tops]
            total = last.clone()
            for other in reversed(others):
                total += other
            self.bottoms[0].write_diff().copy_(total)


class PythonNode(LayerNode):
    """Python, whose code works directly on the blobs of the net, without torch."""

    def __post_init__(self) -> None:
        assert isinstance(self.layer, Python)
        self._python = self.layer
        self._python.use_blobs(self.bottoms, self.tops)
        super().__post_init__()

    def reshape(self) -> None:
        shapes = self._bottom_shapes()
        self._python.reshape_tops()
        self._check_in_place(shapes)
        self.set_loss_diffs()

    def forward(self) -> float:
        shapes = self._bottom_shapes()
        self._python.run_forward()
        self._check_in_place(shapes)
        return self._loss()

    def backward(self) -> None:
        self._python.run_backward(list(self.flags.bottoms))

    def _check_in_place(self, bottoms: list[tuple[int, ...]]) -> None:
        self._python.check_in_place(bottoms, [blob.shape for blob in self.tops])


NODES: dict[type[Layer], type[LayerNode]] = {
    Input: InputNode,
    DummyData: DummyDataNode,
    Split: SplitNode,
    Python: PythonNode,
}
"""The class of the node of each layer that is not computed by torch alone."""


def _copy_or_zero(target: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        target.zero_()
    else:
        target.copy_(gradient)
