"""Sums of blobs over GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, muji, workspace


@pytest.mark.parametrize(("count", "indices"), [(1, None), (3, None), (2, [3, 1]), (5, None)])
def test_each_gpu_has_the_same_sum(count: int, indices: list[int] | None) -> None:
    values = [np.full((2, 3), 0.1 * (i + 1), np.float32) for i in range(count)]
    names = [f"gpu_{i}/w" for i in range(count)]
    for name, value in zip(names, values, strict=True):
        workspace.FeedBlob(name, value)
    net = core.Net("sums")
    found = muji.Allreduce(net, names, reduced_affix="_sum", gpu_indices=indices)
    assert [str(blob) for blob in found] == [f"{name}_sum" for name in names]
    devices = [op.device_option for op in net.Proto().op if op.output[0] in map(str, found)]
    assert devices == [muji.OnGPU(gpu) for gpu in indices or range(count)]
    workspace.RunNetOnce(net)
    total = values[0].copy()
    for value in values[1:]:
        total += value
    for blob in found:
        np.testing.assert_array_equal(workspace.FetchBlob(blob), total)


def test_one_blob_for_each_gpu() -> None:
    with pytest.raises(ValueError, match="got 2 blobs and 1 GPUs"):
        muji.Allreduce(core.Net("sums"), ["a", "b"], gpu_indices=[0])
