"""Net: a net whose blobs lie open, to be read, written and run in parts.

Law: pycaffe's. What a blob or a parameter holds now is what the next layer computes on, whoever wrote it. The engine's
own `Net` is the fast path for training; this one keeps every blob for the user's sake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from poseidon.errors import DefinitionError, UsageError, unknown
from poseidon.layers.base import times
from poseidon.proto.caffe_pb2 import TEST, TRAIN, NetState
from poseidon.proto.definition import NetDefinition, read_net
from poseidon.pycaffe.batches import Array, count_of, joined
from poseidon.pycaffe.walk import Walk
from poseidon.pycaffe.weights import load_weights, save_weights, share_weights

Arrays = dict[str, Array]


class UnknownLayer(UsageError, ValueError):
    """A net has no layer of that name."""


class FileMissing(DefinitionError, RuntimeError):
    """There is no such file."""


class Net(Walk):
    """A net.

    Called as pycaffe's: `Net(file, phase)`, `Net(file, weights, phase)`, or by keyword.

    Args:
        network_file: the definition, of any grammar.
        phase: `TRAIN` or `TEST`; in the old form of the call, the weights.
        level: for `include` and `exclude` rules; in the old form, the phase.
        stages: for these rules too.
        weights: a `.caffemodel` or `.caffemodel.h5` to start from.

    Attributes:
        blobs: by name.
        params: the learnable blobs of each layer that has some, by its name.
        layers: all layers, Caffe's Split layers included; a Python layer is the user's own object.
        layer_dict: the same by name.
        bottom_names: each layer's bottoms, by its name.
        top_names: each layer's tops.
        inputs: the tops of Input layers.
        outputs: blobs that no layer uses.
        blob_loss_weights: what each blob weighs in the loss.
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
                f"phase is {phase}: expected Net(file, phase) or Net(file, weights, phase), the phase TRAIN or TEST"
            )
        path = Path(network_file)
        if not path.is_file():
            raise FileMissing("there is no such net definition", source=str(path))
        state = NetState(phase=phase, level=level, stage=list(stages or ()))
        definition = read_net(path)
        # The net may ask for a level and stages itself.
        self._take(definition, _merged(definition, state))
        if weights is not None:
            self.copy_from(weights)

    @classmethod
    def of(cls, definition: NetDefinition, state: NetState, seed: int | None = None) -> Net:
        """Return a net of a definition that is read already, drawn from `seed` if given."""
        net = cls.__new__(cls)
        net._take(definition, state, seed)
        return net

    # -- running -------------------------------------------------------------------------------------------

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: ArrayLike,
    ) -> Arrays:
        """Run the layers from `start` to `end`, both included.

        Args:
            blobs: names of further blobs to give back.
            start: name of the first layer; None: the net's first.
            end: name of the last layer; None: the net's last.
            inputs: data for the net's inputs, all of them if any.

        Returns:
            the data of the net's outputs, or of `end`'s tops, by name; live arrays.

        Raises:
            UsageError: no such layer, blob or input, or an input of another shape.
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
        """Propagate back from layer `start` down to layer `end`, both included.

        Parameters' diffs add up until `clear_param_diffs`.

        Args:
            diffs: names of further blobs whose diffs to give back.
            start: name of the layer to begin at; None: the net's last.
            end: name of the layer to end with; None: the net's first.
            tops: diffs for the net's outputs, all of them if any.

        Returns:
            the diffs of the net's inputs, or of `end`'s bottoms, by name; live arrays.

        Raises:
            UsageError: no such layer or blob, or a diff of another shape.
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
            blobs: names of further blobs to give back.
            inputs: data for all the net's inputs.

        Returns:
            copies of the outputs and of `blobs`, one row a record.
        """
        given = {name: np.asarray(array) for name, array in inputs.items()}
        count = count_of(given)
        found: dict[str, list[Array]] = {name: [] for name in self._wanted(self.outputs, blobs)}
        for batch in self._batch(given):
            for name, rows in self.forward(blobs, None, None, **batch).items():
                found[name].extend(rows.copy())
        return joined(found, count)

    def forward_backward_all(
        self, blobs: Sequence[str] | None = None, diffs: Sequence[str] | None = None, **arrays: ArrayLike
    ) -> tuple[Arrays, Arrays]:
        """Run any number of records forward and backward, batch by batch.

        Args:
            blobs: names of further blobs to give back.
            diffs: names of further diffs to give back.
            arrays: data for the net's inputs, and diffs for its outputs, by name.

        Returns:
            copies of the outputs and of the inputs' diffs, one row a record.
        """
        given = {name: np.asarray(array) for name, array in arrays.items()}
        count = count_of(given) if given else None
        datas: dict[str, list[Array]] = {name: [] for name in self._wanted(self.outputs, blobs)}
        grads: dict[str, list[Array]] = {name: [] for name in self._wanted(self.inputs, diffs)}
        inputs = {name: given[name] for name in self.inputs if name in given}
        tops = {name: given[name] for name in self.outputs if name in given}
        nothing: Arrays = {}
        for forward, backward in zip_longest(self._batch(inputs), self._batch(tops), fillvalue=nothing):
            for name, rows in self.forward(blobs, None, None, **forward).items():
                datas[name].extend(rows.copy())
            for name, rows in self.backward(diffs, None, None, **backward).items():
                grads[name].extend(rows.copy())
        return joined(datas, count), joined(grads, count)

    def clear_param_diffs(self) -> None:
        """Set the parameters' diffs to zero."""
        for blobs in self.params.values():
            for blob in blobs:
                blob.write_diff().zero_()

    # -- weights -------------------------------------------------------------------------------------------

    def copy_from(self, weights: str | os.PathLike[str]) -> None:
        """Take over saved weights by layer name, from a `.caffemodel` or a `.caffemodel.h5`.

        Raises:
            SnapshotError: the file cannot be read, or a layer's blobs have other shapes.
        """
        load_weights(self._built, Path(weights))

    def load_hdf5(self, weights: str | os.PathLike[str]) -> None:
        """Take over weights saved by `save_hdf5`."""
        self.copy_from(weights)

    def save(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write a `.caffemodel`.

        Args:
            path: the file.
            write_diff: the diffs too.

        Raises:
            SnapshotError: it cannot be written.
        """
        save_weights(self._built, Path(path), diffs=write_diff)

    def save_hdf5(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write a `.caffemodel.h5`.

        Args:
            path: the file.
            write_diff: the diffs too.

        Raises:
            SnapshotError: it cannot be written.
        """
        save_weights(self._built, Path(path), hdf5=True, diffs=write_diff)

    def share_with(self, other: Net) -> None:
        """Use another net's weights, layer by layer where names are equal: one memory from now on.

        Raises:
            UsageError: blobs of a layer differ in number or shape.
        """
        share_weights(self._built, other._built)

    def set_input_arrays(self, data: ArrayLike, labels: ArrayLike) -> None:
        """Give a net that begins with a MemoryData layer its records.

        Args:
            data: N x C x H x W, N a multiple of the batch size.
            labels: N numbers.

        Raises:
            UsageError: the first layer is no MemoryData.
        """
        layer = self._built.nodes[0].layer
        if layer.param.type != "MemoryData":
            raise UsageError(
                f"set_input_arrays: the first layer is {layer.param.type}, expected a MemoryData layer"
            )
        records, numbers = np.asarray(data, np.float32), np.asarray(labels, np.float32).reshape(-1)
        if len(records) != len(numbers):
            raise UsageError(
                f"set_input_arrays: {len(records)} records and {len(numbers)} labels, expected as many"
            )
        # The layer keeps both: records N x C x H x W, and N labels.
        reset: Callable[[Array, Array], None] = getattr(layer, "reset")  # noqa: B009 - it has no other face
        self._guarded(0, lambda: reset(records, numbers))

    def _index(self, layer: str) -> int:
        if layer not in self.layer_dict:
            raise UnknownLayer(unknown("layer", layer, self.layer_dict))
        return self._layer_names.index(layer)

    def _wanted(self, names: Sequence[str], more: Sequence[str] | None) -> list[str]:
        for name in more or ():
            if name not in self.blobs:
                raise UsageError(unknown("blob", name, self.blobs))
        return list(dict.fromkeys([*names, *(more or ())]))

    def _fill(
        self, given: Mapping[str, ArrayLike], expected: Sequence[str], what: str, of: Callable[[str], Array]
    ) -> None:
        """Write what the user gives into the blobs' data or diffs."""
        if not given:
            return
        if set(given) != set(expected):
            raise UsageError(
                f"given for {', '.join(given)}, expected every {what} of the net: {', '.join(expected) or 'none'}"
            )
        for name, value in given.items():
            array, target = np.asarray(value), of(name)
            if array.shape[:1] != target.shape[:1]:
                raise UsageError(
                    f"{what} '{name}' has shape {times(array.shape)}, expected a batch: {times(target.shape)}"
                )
            try:
                target[...] = array
            except ValueError as error:
                raise UsageError(
                    f"{what} '{name}' has shape {times(array.shape)}, expected {times(target.shape)}"
                ) from error


def _merged(definition: NetDefinition, state: NetState) -> NetState:
    merged = NetState()
    merged.CopyFrom(definition.param.state)
    merged.MergeFrom(state)
    return merged
