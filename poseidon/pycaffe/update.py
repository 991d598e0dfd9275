"""The update of a net's blobs from their diffs, as Caffe's ApplyUpdate.

Law: the formulas come from `ps_server.rules`, the multipliers and rates from `poseidon.caffe.solver`.
This module only applies them in order (clip, divide by iter_size, decay, rule). Values and diffs
are read from the blobs in each step, so changes by the user count. Afterwards a diff holds the
amount subtracted from the value, as in Caffe.

What the virtual workers of a process contribute to an iteration of a solver.

Law: the weights equal the weights of `poseidon train` with as many virtual workers. Their nets
share the parameters. Each net has its own diffs, and its own statistics (BatchNorm), which begin an
iteration with the common values. Diffs and statistics are added in the tree of virtual workers
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.caffe.layers.base import times
from poseidon.caffe.layers.blob import Blob
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.snapshot.caffemodel import read_model, state_beside, write_model
from poseidon.caffe.snapshot.hdf5 import write_model as write_hdf5
from poseidon.caffe.solver.settings import SolverSettings
from poseidon.caffe.solver.state import FrozenHistories
from poseidon.engine.snapshot_files import reseal
from poseidon.errors import UsageError
from poseidon.pycaffe.graph import NetGraph
from ps_server import Rule
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from ps_server.rules import change, clip_factor, history_count, plain_sum, sum_of_squares

Array = NDArray[np.float32]


def load_weights(net: NetGraph, path: Path, *, own: bool = False) -> None:
    """Load saved weights by layer name.

    Args:
        own: this net has written them, for a state whose checksums were verified.

    Raises:
        SnapshotError: the file cannot be read, or the blobs of a layer have other shapes, or are
            missing in its own state. The net is then unchanged.
    """
    saved = read_model(path, is_checked=own)
    for node in net.nodes:
        for blob in node.blobs:
            blob.write_data()  # copies the user's changes first
        node.clear_graph()
    net.compiled.load_blobs(saved, own=own)


def save_weights(net: NetGraph, path: Path, *, hdf5: bool = False, diffs: bool = False) -> None:
    """Write a `.caffemodel`. If a snapshot has it, its checksum follows.

    Args:
        hdf5: write a `.caffemodel.h5`.
        diffs: write the gradients, too.

    Raises:
        SnapshotError: the file cannot be written.
    """
    gradients = _arrays(net, diffs=True) if diffs else None
    if hdf5:
        write_hdf5(path, _arrays(net), owned=net.compiled.owned_blobs(), diffs=gradients)
    else:
        write_model(path, net.compiled.definition.param, _arrays(net), diffs=gradients)
    reseal(state_beside(path), path)


def share_weights(net: NetGraph, other: NetGraph) -> None:
    """Let `net` use the memory of `other`'s weights in layers of the same name.

    Raises:
        UsageError: the blobs of a layer differ in number or shape. Nothing is shared then.
    """
    indices = {name: index for index, (name, _) in enumerate(other.compiled.layer_modules)}
    pairs: list[tuple[nn.Parameter, Blob, Blob]] = []
    for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True):
        if name in indices:
            donated = other.nodes[indices[name]].blobs
            _check_shapes(name, node.blobs, donated)
            pairs += zip(layer.sources(), node.blobs, donated, strict=True)
            node.clear_graph()
    for parameter, blob, shared in pairs:
        blob.share_data(shared)
        parameter.data = shared.write_data().view(parameter.shape)


def _check_shapes(layer: str, own: Sequence[Blob], donated: Sequence[Blob]) -> None:
    found, expected = ([blob.shape for blob in blobs] for blobs in (own, donated))
    if found != expected:
        raise UsageError(
            f"layer '{layer}' has blobs of shape {', '.join(map(times, found)) or 'none'}, "
            "expected "
            f"{', '.join(map(times, expected)) or 'none'} as in the net it shares them with"
        )


def _arrays(net: NetGraph, *, diffs: bool = False) -> list[tuple[str, str, list[Array]]]:
    """Return name, type and copies of the blobs, or of their gradients, of every layer."""
    return [
        (
            name,
            layer.param.type,
            [(blob.diff if diffs else blob.data).copy() for blob in node.blobs],
        )
        for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True)
    ]


@dataclass(slots=True)
class Learned:
    """A learnable tensor with its blob, rule and history."""

    info: ParamInfo
    blob: Blob
    rule: Rule
    history: list[Tensor] = field(default_factory=list)


class Updater:
    """The updater of a net."""

    def __init__(self, net: NetGraph, settings: SolverSettings) -> None:
        self._settings = settings
        self._learned = [_learned(info, blob, settings) for info, blob in net.learned_blobs()]
        self._frozen = FrozenHistories(net.compiled.parameters_info, settings)

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of each tensor, in Caffe's order."""
        return [(learned.info.name, learned.info.shape) for learned in self._learned]

    @property
    def arrays_per_blob(self) -> int:
        return history_count(self._settings.base_rule.kind)

    def apply(self, iteration: int) -> None:
        """Update every tensor that learns."""
        learned = [entry for entry in self._learned if entry.info.parameter.requires_grad]
        gradients = [entry.blob.write_diff().view(-1) for entry in learned]
        settings = self._settings
        scale = 1.0 / settings.iter_size
        if settings.clip is not None:
            scale *= clip_factor(plain_sum(map(sum_of_squares, gradients)), settings.clip)
        rate = settings.rate(iteration)
        for entry, gradient in zip(learned, gradients, strict=True):
            if scale != 1.0:
                gradient.mul_(scale)
            value = entry.blob.write_data().view(-1)
            value.add_(
                change(entry.rule, gradient, entry.history, value, rate=rate, step=iteration)
            )
            gradient.neg_()
        self._frozen.advance(iteration)

    def histories(self) -> tuple[tuple[Array, ...], ...]:
        """Return copies of the history of each tensor."""
        frozen = self._frozen.copies()
        return tuple(
            tuple(
                tensor.cpu().numpy().reshape(entry.info.shape).copy()
                for tensor in frozen.get(entry.info.name, entry.history)
            )
            for entry in self._learned
        )

    def set_histories(self, histories: Sequence[Sequence[Array]]) -> None:
        """Restore histories that `histories` returned."""
        loaded = {
            entry.info.name: [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
            for entry, arrays in zip(self._learned, histories, strict=True)
        }
        for entry in self._learned:
            for tensor, value in zip(entry.history, loaded[entry.info.name], strict=True):
                tensor.copy_(value.reshape(-1))
        self._frozen.restore(loaded)


def _learned(info: ParamInfo, blob: Blob, settings: SolverSettings) -> Learned:
    rule = settings.rule(info.lr_mult, info.decay_mult)
    flat = info.parameter.data.view(-1)
    return Learned(
        info, blob, rule, [torch.zeros_like(flat) for _ in range(history_count(rule.kind))]
    )


Total = Callable[[Mapping[Node, Tensor]], Tensor]
"""Returns the sum over all virtual workers of a job, from the sums of this process's nodes."""


class ReplicaContributions:
    """The diffs and statistics of the virtual workers of a process.

    Args:
        nets: the train net of each, which share the blobs of the first.
        placed: the virtual workers of the job.

    Attributes:
        averaged: whether the first net has the means of this iteration.
        infos: of what is averaged, in the order of `tensors`.
    """

    def __init__(self, nets: Sequence[NetGraph], placed: VirtualWorkers, process: int) -> None:
        self.placed = placed
        self.process = process
        self.averaged = False
        learned = [net.learned_blobs() for net in nets]
        for pairs in learned[1:]:
            for info, blob in pairs:
                if info.statistics:
                    blob.bind(blob.read_data().clone())
                    info.parameter.data = blob.write_data().view(info.parameter.shape)
        infos = [info for info, _ in learned[0]]
        self.infos = [
            *(info for info in infos if info.parameter.requires_grad),
            *(info for info in infos if info.statistics),
        ]
        self._diffs = [[b for info, b in of if info.parameter.requires_grad] for of in learned]
        self._statistics = [[b for info, b in of if info.statistics] for of in learned]

    @property
    def own(self) -> range:
        """The virtual workers of this process."""
        return self.placed.of(self.process)

    def begin(self) -> None:
        """Begin an iteration, with the common statistics."""
        self.averaged = False
        first, *others = self._statistics
        for blobs in others:
            for blob, common in zip(blobs, first, strict=True):
                blob.write_data().copy_(common.read_data())

    def average(self, total: Total) -> None:
        """Set the diffs and statistics of the first net to the means over all virtual workers."""
        tree: TreeSum[Tensor] = TreeSum(self.placed.count)
        for position, number in enumerate(self.own):
            tensors = self.tensors(position)
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in tensors] or [torch.empty(0)])
            tree.put(Node(number, number + 1), flat)
        mean = total(tree.parts).div_(self.placed.count)
        tensors = self.tensors(0)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, mean.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.averaged = True

    def average_alone(self) -> None:
        """Average over the virtual workers of this process, unless a `Gloo` has averaged over all.

        Raises:
            UsageError: the job has others.
        """
        if self.averaged or self.placed.is_one_each:
            return
        if self.placed.processes > 1:
            raise UsageError(
                f"this process computes for {len(self.own)} of {self.placed.count} virtual "
                "workers; add a caffe.Gloo to the callbacks, which adds the diffs of the others"
            )
        self.average(lambda sums: next(iter(sums.values())))

    def tensors(self, position: int) -> list[Tensor]:
        """Return the diffs, then the statistics, of one of the nets: live tensors."""
        return [
            *(blob.write_diff() for blob in self._diffs[position]),
            *(blob.write_data() for blob in self._statistics[position]),
        ]
