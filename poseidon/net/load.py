"""Saved blobs into a net, layer by layer, by name.

Law: Caffe's (Net::CopyTrainedLayersFrom). A saved layer that the net has not is ignored; a layer of the net that was
not saved keeps its values; blobs of a layer that is in both must match in number and shape, save that a blob which
another layer owns may be left out (Caffe's HDF5 models do so). Nothing is written unless everything matches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.layers.base import Layer, Shape, times

# Old files give every blob four axes, filled up with ones in front.
LEGACY_AXES = 4
Arrays = Sequence[NDArray[Any] | None]
"""Saved blobs of a layer; None for one that was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of a set of saved layers.

    Attributes:
        copied: layers whose blobs were taken.
        ignored: saved layers that the net has not.
        kept: layers of the net with blobs that were not saved.
    """

    copied: tuple[str, ...]
    ignored: tuple[str, ...]
    kept: tuple[str, ...]

    def in_words(self) -> str:
        """For the log: `weights of 2 layers taken (conv, ip); left as they were: fc8; not in this net: fc9`."""
        layers = "1 layer" if len(self.copied) == 1 else f"{len(self.copied)} layers"
        parts = [f"weights of {layers} taken" + (f" ({_some(self.copied)})" if self.copied else "")]
        parts += [f"left as they were: {_some(self.kept)}"] if self.kept else []
        parts += [f"not in this net: {_some(self.ignored)}"] if self.ignored else []
        return "; ".join(parts)


def _some(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def load_blobs(
    layers: Mapping[str, Layer], saved: Iterable[tuple[str, Arrays]], *, shared: Collection[str] = ()
) -> LoadReport:
    """Copy saved blobs into the layers of their names.

    Args:
        layers: the net's layers by name.
        saved: name and blobs of each saved layer.
        shared: `<layer>.<index>` of each blob that another layer owns.

    Raises:
        SnapshotError: a layer's blobs differ in number or shape; the net is then unchanged.
    """
    pairs: list[tuple[Tensor, NDArray[Any]]] = []
    copied, ignored = [], []
    for name, arrays in saved:
        if name not in layers:
            ignored.append(name)
        elif arrays:
            pairs += _match(name, layers[name].blobs(), arrays, shared)
            copied.append(name)
    with torch.no_grad():
        for blob, array in pairs:
            blob.copy_(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).reshape(blob.shape))
    kept = tuple(name for name, layer in layers.items() if layer.blob_specs and name not in copied)
    return LoadReport(copied=tuple(copied), ignored=tuple(ignored), kept=kept)


def _match(
    name: str, blobs: Sequence[Tensor], arrays: Arrays, shared: Collection[str]
) -> list[tuple[Tensor, NDArray[Any]]]:
    present = {index: array for index, array in enumerate(arrays) if array is not None}
    missing = set(range(len(blobs))) - present.keys()
    if len(arrays) > len(blobs) or any(f"{name}.{index}" not in shared for index in missing):
        raise SnapshotError(f"layer '{name}': {len(present)} blobs are saved, expected {len(blobs)}")
    for index, array in present.items():
        blob = blobs[index]
        if not same_shape(tuple(array.shape), tuple(blob.shape)):
            raise SnapshotError(
                f"layer '{name}': blob {index} is saved with shape {times(array.shape)}, expected {times(blob.shape)}; "
                "to leave this layer as it is, give it another name"
            )
    return [(blobs[index], array) for index, array in present.items()]


def same_shape(saved: Shape, wanted: Shape) -> bool:
    """Return whether a saved blob fits: the same shape, or the old form of it with ones in front."""
    if saved == wanted:
        return True
    lacking = LEGACY_AXES - len(wanted)
    return len(saved) == LEGACY_AXES and lacking > 0 and saved == (1,) * lacking + wanted
