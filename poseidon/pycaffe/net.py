"""Net: pycaffe's net, whose blobs users can read and write, and whose layers they can run in parts.

Law: the semantics are pycaffe's. A layer computes on the current values of blobs and parameters.
`poseidon.caffe.net.net.Net` is the fast net for training; this one keeps all blobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from poseidon.caffe.layers.base import LayerContext, times
from poseidon.caffe.layers.database_data import MemoryData
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetState
from poseidon.caffe.proto.definition import NetDefinition, read_net
from poseidon.errors import DefinitionError, SnapshotError, UsageError, unknown
from poseidon.pycaffe.net_base import NetBase
from poseidon.pycaffe.update import load_weights, save_weights, share_weights

Array = NDArray[Any]
Arrays = dict[str, Array]


class UnknownLayer(UsageError, ValueError):
    """The net has no layer of this name."""


class FileMissing(DefinitionError, RuntimeError):
    """The file does not exist."""


class ModelMissing(SnapshotError, RuntimeError):
    """The model does not exist."""


class Net(NetBase):
    """A net with accessible blobs.

    The calls are pycaffe's: `Net(file, phase)`, `Net(file, weights, phase)`, or with keywords.

    Args:
        network_file: the definition, in any format.
        phase: `TRAIN` or `TEST`; in the old form of the call, the weights.
        level: the level for `include` and `exclude` rules; in the old form, the phase.
        stages: the stages for these rules.
        weights: a `.caffemodel` or `.caffemodel.h5` to load.

    Attributes:
        blobs: the blobs by name.
        params: the learnable blobs by layer name, for layers that have some; of two layers of one
            name, the later one's, as in pycaffe.
        layers: all layers, including Caffe's Split layers. A Python layer is the user's object.
        layer_dict: the layers by name.
        bottom_names: the bottoms by layer name.
        top_names: the tops by layer name.
        inputs: the tops of Input layers.
        outputs: the blobs that no layer reads.
        blob_loss_weights: the loss weight of each blob.
    """

    def __init__(
        self,
        network_file: str | os.PathLike[str],
        phase: Any = None,
        level: int = 0,
        stages: Sequence[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(phase, (str, os.PathLike)):
            phase, level, weights = level, 0, phase
        if phase not in (TRAIN, TEST):
            raise UsageError(
                f"phase is {phase}: expected Net(file, phase) or Net(file, weights, phase), the "
                "phase TRAIN or TEST"
            )
        path = Path(network_file)
        if not path.is_file():
            raise FileMissing("there is no such net definition", source=str(path))
        if weights is not None and not Path(weights).is_file():
            raise ModelMissing(f"{weights}: there is no such model")
        definition = read_net(path)
        self._build(definition, definition.state(phase, level=level, stages=stages or ()))
        if weights is not None:
            self.copy_from(weights)

    @classmethod
    def from_definition(
        cls, definition: NetDefinition, state: NetState, context: LayerContext
    ) -> Net:
        """Create a net from a definition."""
        net = cls.__new__(cls)
        net._build(definition, state, context)
        return net

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: ArrayLike,
    ) -> Arrays:
        """Run the layers from `start` to `end`, inclusive.

        Args:
            blobs: the names of additional blobs to return.
            start: the name of the first layer; None: the net's first.
            end: the name of the last layer; None: the net's last.
            inputs: data for the net's inputs, for all of them or none.

        Returns:
            the data of the net's outputs, or of `end`'s tops, by name, as views.

        Raises:
            UsageError: a layer, blob or input is unknown, or an input has a wrong shape.
        """
        first = 0 if start is None else self._index(start)
        last = len(self.layers) - 1 if end is None else self._index(end)
        wanted = self._wanted(self.outputs if end is None else self.top_names[end], blobs)
        self._fill(inputs, self.inputs, "input", lambda name: self.blobs[name].data)
        self._forward(first, last)
        return {name: self.blobs[name].data for name in wanted}

    def backward(
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **tops: ArrayLike,
    ) -> Arrays:
        """Run the layers backward from `start` down to `end`, inclusive.

        The diffs of parameters accumulate until `clear_param_diffs`.

        Args:
            diffs: the names of additional blobs whose diffs to return.
            start: the name of the first layer; None: the net's last.
            end: the name of the last layer; None: the net's first.
            tops: diffs for the net's outputs, for all of them or none.

        Returns:
            the diffs of the net's inputs, or of `end`'s bottoms, by name, as views.

        Raises:
            UsageError: a layer or blob is unknown, or a diff has a wrong shape.
        """
        first = len(self.layers) - 1 if start is None else self._index(start)
        last = 0 if end is None else self._index(end)
        wanted = self._wanted(self.inputs if end is None else self.bottom_names[end], diffs)
        self._fill(tops, self.outputs, "output", lambda name: self.blobs[name].diff)
        self._backward(first, last)
        return {name: self.blobs[name].diff for name in wanted}

    def forward_all(self, blobs: Sequence[str] | None = None, **inputs: ArrayLike) -> Arrays:
        """Run any number of records through the net, batch by batch.

        Args:
            blobs: the names of additional blobs to return.
            inputs: data for all inputs of the net.

        Returns:
            copies of the outputs and of `blobs`, with a row for each record.
        """
        data = {name: np.asarray(array) for name, array in inputs.items()}
        count = count_of(data)
        found: dict[str, list[Array]] = {name: [] for name in self._wanted(self.outputs, blobs)}
        for batch in self._batch(data):
            for name, rows in self.forward(blobs, None, None, **batch).items():
                found[name].extend(rows.copy())
        return join_batches(found, count)

    def forward_backward_all(
        self,
        blobs: Sequence[str] | None = None,
        diffs: Sequence[str] | None = None,
        **arrays: ArrayLike,
    ) -> tuple[Arrays, Arrays]:
        """Run any number of records forward and backward, batch by batch.

        Args:
            blobs: the names of additional blobs to return.
            diffs: the names of additional diffs to return.
            arrays: data for the net's inputs, and diffs for its outputs, by name.

        Returns:
            copies of the outputs and of the inputs' diffs, with a row for each record.
        """
        data = {name: np.asarray(array) for name, array in arrays.items()}
        count = count_of(data) if data else None
        datas: dict[str, list[Array]] = {name: [] for name in self._wanted(self.outputs, blobs)}
        grads: dict[str, list[Array]] = {name: [] for name in self._wanted(self.inputs, diffs)}
        inputs = {name: data[name] for name in self.inputs if name in data}
        tops = {name: data[name] for name in self.outputs if name in data}
        batches = self._batch(inputs), self._batch(tops)
        for forward, backward in zip_longest(*batches, fillvalue=Arrays()):
            for name, rows in self.forward(blobs, None, None, **forward).items():
                datas[name].extend(rows.copy())
            for name, rows in self.backward(diffs, None, None, **backward).items():
                grads[name].extend(rows.copy())
        return join_batches(datas, count), join_batches(grads, count)

    def clear_param_diffs(self) -> None:
        """Set the diffs of all parameters to zero."""
        for layer in self.layers:
            for blob in layer.blobs:
                blob.write_diff().zero_()

    def copy_from(self, weights: str | os.PathLike[str]) -> None:
        """Load weights by layer name from a `.caffemodel` or a `.caffemodel.h5`.

        Raises:
            SnapshotError: the file cannot be read, or the blobs of a layer have other shapes.
        """
        load_weights(self._built, Path(weights))

    def load_hdf5(self, weights: str | os.PathLike[str]) -> None:
        """Load weights that `save_hdf5` has written."""
        self.copy_from(weights)

    def save(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write a `.caffemodel`.

        Args:
            write_diff: write the diffs, too.

        Raises:
            SnapshotError: the file cannot be written.
        """
        save_weights(self._built, Path(path), diffs=write_diff)

    def save_hdf5(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write a `.caffemodel.h5`.

        Args:
            write_diff: write the diffs, too.

        Raises:
            SnapshotError: the file cannot be written.
        """
        save_weights(self._built, Path(path), hdf5=True, diffs=write_diff)

    def share_with(self, other: Net) -> None:
        """Share the memory of another net's weights in layers of the same name.

        Raises:
            UsageError: the blobs of a layer differ in number or shape.
        """
        share_weights(self._built, other._built)

    def set_input_arrays(self, data: ArrayLike, labels: ArrayLike) -> None:
        """Set the records of a net whose first layer is MemoryData.

        Args:
            data: N x C x H x W, N a multiple of the batch size.
            labels: N values.

        Raises:
            UsageError: the first layer is not MemoryData.
        """
        layer = self._built.nodes[0].layer
        if not isinstance(layer, MemoryData):
            raise UsageError(
                f"set_input_arrays: the first layer is {layer.param.type}, expected a MemoryData "
                "layer"
            )
        records, numbers = np.asarray(data, np.float32), np.asarray(labels, np.float32).reshape(-1)
        if len(records) != len(numbers):
            raise UsageError(
                f"set_input_arrays: {len(records)} records and {len(numbers)} labels, expected "
                "the same number"
            )
        self._guarded(0, lambda: layer.reset(records, numbers))

    def _batch(self, arrays: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        return batches(arrays, next(iter(self.blobs.values())).shape[0]) if arrays else iter(())

    def _index(self, layer: str) -> int:
        if layer not in self.layer_dict:
            raise UnknownLayer(unknown("layer", str(layer), self.layer_dict))
        return self._layer_names.index(layer)

    def _wanted(self, names: Sequence[str], more: Sequence[str] | None) -> list[str]:
        for name in more or ():
            if name not in self.blobs:
                raise UsageError(unknown("blob", name, self.blobs))
        return list(dict.fromkeys([*names, *(more or ())]))

    def _fill(
        self,
        values: Mapping[str, ArrayLike],
        expected: Sequence[str],
        what: str,
        of: Callable[[str], Array],
    ) -> None:
        if values and set(values) != set(expected):
            raise UsageError(
                f"got {', '.join(values)}, expected every {what} of the net: "
                f"{', '.join(expected) or 'none'}"
            )
        for name, value in values.items():
            array, target = np.asarray(value), of(name)
            if array.shape[:1] != target.shape[:1]:
                raise UsageError(
                    f"{what} '{name}' has shape {times(array.shape)}, expected a batch: "
                    f"{times(target.shape)}"
                )
            try:
                target[...] = array
            except ValueError as error:
                raise UsageError(
                    f"{what} '{name}' has shape {times(array.shape)}, expected "
                    f"{times(target.shape)}"
                ) from error


def count_of(arrays: Mapping[str, Array]) -> int:
    """Return the number of records, which must be the same in all arrays.

    Raises:
        UsageError: there is no array, or the numbers differ.
    """
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1:
        found = ", ".join(f"{name} {len(array)}" for name, array in arrays.items()) or "nothing"
        raise UsageError(f"expected arrays with the same number of records, found {found}")
    return counts.pop()


def batches(arrays: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    """Yield batches of `size` records. The last one is padded with zeros."""
    count = count_of(arrays)
    for start in range(0, count, size):
        batch = {name: np.asarray(array[start : start + size]) for name, array in arrays.items()}
        missing = start + size - count
        if missing > 0:
            batch = {
                name: np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
                for name, array in batch.items()
            }
        yield batch


def join_batches(parts: Mapping[str, Iterable[Array]], count: int | None) -> dict[str, Array]:
    """Join the rows of all batches, without the padding: at most `count` rows."""
    return {name: np.asarray(list(rows))[:count] for name, rows in parts.items()}
