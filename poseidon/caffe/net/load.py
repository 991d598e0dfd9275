"""Loading of saved blobs into the layers of the same names.

Law: the rules are Caffe's (Net::CopyTrainedLayersFrom). A saved layer that is not in the net is
ignored. A layer of the net that is not saved keeps its values. The blobs of a layer that is in both
must match in number and shape, except that a shared blob may be missing (as in Caffe's HDF5
models). The net is changed only if everything matches. If layers have one name, each saved one goes
to the net's first, so the last stays. A net's own state has blobs for each layer: where two layers
have one name, the second gets the second blobs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, times
from poseidon.caffe.net.params import DistinctNames
from poseidon.caffe.proto.blob import to_array
from poseidon.errors import SnapshotError

LOGGER = logging.getLogger(__name__)

# Old files give every blob four axes, with leading ones.
LEGACY_AXES = 4
Arrays = Sequence[NDArray[Any] | None]
"""The saved blobs of a layer; None for a missing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of loading saved layers.

    Attributes:
        ignored: the saved layers that are not in the net.
        kept: the layers of the net whose blobs were not saved.
    """

    copied: tuple[str, ...]
    ignored: tuple[str, ...]
    kept: tuple[str, ...]

    def summary(self) -> str:
        """Return a summary for the log: `weights of 2 layers loaded (conv, ip);
        unchanged: fc8; not in this net: fc9`.
        """
        layers = "1 layer" if len(self.copied) == 1 else f"{len(self.copied)} layers"
        parts = [f"weights of {layers} loaded" + (f" ({some(self.copied)})" if self.copied else "")]
        parts += [f"unchanged: {some(self.kept)}"] if self.kept else []
        parts += [f"not in this net: {some(self.ignored)}"] if self.ignored else []
        return "; ".join(parts)


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def load_blobs(
    layers: Mapping[str, Layer],
    saved: Iterable[tuple[str, Arrays]],
    *,
    shared: Collection[str] = (),
    own: bool = False,
) -> LoadReport:
    """Copy saved blobs to the layers of the same names.

    Args:
        layers: the net's layers by distinct name (`DistinctNames`).
        shared: the name `<layer>.<index>` of each blob that another layer owns.
        own: the net has saved them, for a state.

    Raises:
        SnapshotError: the blobs of a layer differ in number or shape, or are missing in the net's
            own state. The net is then unchanged.
    """
    pairs: list[tuple[Tensor, NDArray[Any]]] = []
    copied: dict[str, Arrays] = {}
    ignored = []
    for name, arrays in _in_order(saved) if own else saved:
        if name not in layers:
            ignored.append(name)
        elif arrays:
            pairs += _match(name, layers[name].blobs(), arrays, shared)
            if name in copied and not _equal(copied[name], arrays):
                LOGGER.warning(
                    "the model has two layers '%s' with different blobs; as in Caffe, the later "
                    "one's go to the net's first layer of this name, and to no other; give layers "
                    "different names before training",
                    name,
                )
            copied[name] = arrays
    kept = tuple(name for name, layer in layers.items() if layer.blob_specs and name not in copied)
    lacking = [
        name
        for name in kept
        if any(f"{name}.{index}" not in shared for index in range(len(layers[name].blob_specs)))
    ]
    if own and lacking:
        raise SnapshotError(
            f"the model has no weights for {some(lacking)}: a solver resumes with the net that has "
            "written it, or starts anew from its weights"
        )
    with torch.no_grad():
        for blob, array in pairs:
            blob.copy_(
                torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).reshape(blob.shape)
            )
    return LoadReport(copied=tuple(copied), ignored=tuple(ignored), kept=kept)


def _in_order(saved: Iterable[tuple[str, Arrays]]) -> list[tuple[str, Arrays]]:
    """Return a net's own saved blobs by distinct name, so that the second layer of a name gets
    the blobs of the second.
    """
    names = DistinctNames()
    return [(names.add(name), arrays) for name, arrays in saved if arrays]


def _equal(one: Arrays, two: Arrays) -> bool:
    pairs: Iterable[tuple[Any, Any]] = zip(one, two, strict=False)
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in pairs)


def _match(
    name: str, blobs: Sequence[Tensor], arrays: Arrays, shared: Collection[str]
) -> list[tuple[Tensor, NDArray[Any]]]:
    present = {index: array for index, array in enumerate(arrays) if array is not None}
    missing = set(range(len(blobs))) - present.keys()
    if len(arrays) > len(blobs) or any(f"{name}.{index}" not in shared for index in missing):
        raise SnapshotError(
            f"layer '{name}': the file has {len(present)} blobs, expected {len(blobs)}"
        )
    for index, array in present.items():
        blob = blobs[index]
        if not same_shape(tuple(array.shape), tuple(blob.shape)):
            raise SnapshotError(
                f"layer '{name}': blob {index} has shape {times(array.shape)} in the file, "
                f"expected {times(blob.shape)}; to keep the layer's initial weights, rename the "
                "layer"
            )
    return [(blobs[index], array) for index, array in present.items()]


def first_values(layer: Layer) -> list[Tensor]:
    """Return the values that a layer's definition has for its blobs; an empty list: none.

    Raises:
        LayerError: they differ from the blobs in number or shape.
    """
    if not layer.param.blobs:
        return []
    try:
        arrays = [to_array(blob) for blob in layer.param.blobs]
    except ValueError as error:
        raise LayerError(str(error)) from error
    found = [tuple(array.shape) for array in arrays]
    wanted = [spec.shape for spec in layer.blob_specs]
    if len(found) != len(wanted) or not all(map(same_shape, found, wanted)):
        raise LayerError(
            f"the definition has blobs of shape {', '.join(map(times, found))}, expected "
            f"{', '.join(map(times, wanted)) or 'none'}"
        )
    return [
        torch.from_numpy(array).view(shape) for array, shape in zip(arrays, wanted, strict=True)
    ]


def same_shape(saved: Shape, wanted: Shape) -> bool:
    """Return whether shapes are equal, or equal after leading ones of an old file."""
    if saved == wanted:
        return True
    missing = LEGACY_AXES - len(wanted)
    return len(saved) == LEGACY_AXES and missing > 0 and saved == (1,) * missing + wanted
