"""Operators on blobs of any kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument
from poseidon.caffe2.runtime.blob import Blob
from poseidon.caffe2.runtime.values import strings_of


@operator("Free", blobs=True, inputs=(1, 1 << 30), outputs=(1, 1 << 30))
def free(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Empty its outputs, which are its inputs, so that their memory is free."""
    for blob in outputs:
        blob.value = None


@operator("FeedBlob")
def feed_blob(*, value: Argument) -> bytes:
    """Return a string, which the net has.

    Raises:
        ValueError: the argument has a different type.
    """
    if not value.HasField("s"):
        raise ValueError("FeedBlob: the argument value is not a string")
    return value.s


@operator("GetAllBlobNames")
def get_all_blob_names(*, context: Context, include_shared: bool = True) -> np.ndarray:
    """Return the names of the blobs of the workspace and, unless `include_shared` is 0, of its
    parents.
    """
    workspace, names = context.workspace, list[str]()
    while workspace is not None:
        names += workspace.blobs
        workspace = workspace.parent if include_shared else None
    return strings_of([name.encode() for name in sorted(set(names))])
