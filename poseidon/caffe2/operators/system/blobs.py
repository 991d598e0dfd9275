"""Operators on blobs of any kind."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.runtime.blob import Blob


@operator("Free", blobs=True, inputs=(1, 1 << 30), outputs=(1, 1 << 30))
def free(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Empty its outputs, which are its inputs, so that their memory is free."""
    for blob in outputs:
        blob.value = None
