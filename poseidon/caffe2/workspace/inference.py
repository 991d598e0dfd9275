"""What is known of nets without running them: shapes, types, costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto.caffe2_pb2 import TensorProto
from poseidon.caffe2.runtime import shapes
from poseidon.caffe2.runtime.data_types import NUMBER_OF, TORCH_OF
from poseidon.caffe2.workspace.current import current
from poseidon.caffe2.workspace.nets import _net_def


def InferShapesAndTypes(
    nets: Iterable[Any],
    blob_dimensions: dict[Any, Sequence[int]] | None = None,
    nets_proto: bool = False,
    blob_types: dict[Any, int] | None = None,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return shapes and data types of the blobs of nets, those that follow without running.

    Args:
        nets: in the order in which they run.
        blob_dimensions: shapes of the inputs; by default the shapes of the workspace's blobs.
        nets_proto: whether `nets` are NetDefs.
        blob_types: data types of these inputs; by default FLOAT.
    """
    known: dict[str, torch.Tensor] = {}
    if blob_dimensions is None:
        for name, blob in current().blobs.items():
            if isinstance(blob.value, torch.Tensor):
                known[name] = blob.value.to("meta")
    else:
        types = {str(name): TORCH_OF[number] for name, number in (blob_types or {}).items()}
        for key, dims in blob_dimensions.items():
            known[str(key)] = torch.empty(
                list(dims), dtype=types.get(str(key), torch.float32), device="meta"
            )
    found = shapes.infer([_net_def(net) for net in nets], known)
    return (
        {name: list(value.shape) for name, value in found.items()},
        {name: int(NUMBER_OF[value.dtype]) for name, value in found.items()},
    )


def data_type_of(dtype: Any) -> int:
    """Return the number of `TensorProto.DataType` for a numpy type; strings and objects are
    STRING.
    """
    kind = np.dtype(dtype)
    if kind.kind in "SUO":
        return int(TensorProto.STRING)
    return int(NUMBER_OF[torch.from_numpy(np.empty(0, dtype=kind)).dtype])
