"""MemoryData."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from poseidon.caffe.layers.base import LayerContext, LayerError
from poseidon.caffe.layers.inputs.memory_data import MemoryData
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter, MemoryDataParameter
from poseidon.errors import PoseidonError
from tests.support.nets import build, layer

RECORDS = np.arange(4 * 6, dtype=np.float32).reshape(4, 1, 2, 3)
LABELS = np.array([3, 1, 2, 0])


def memory(batch: int = 2) -> MemoryData:
    param = MemoryDataParameter(batch_size=batch, channels=1, height=2, width=3)
    made = MemoryData(
        LayerParameter(type="MemoryData", top=["data", "label"], memory_data_param=param),
        LayerContext(phase=TRAIN, seed=1),
    )
    assert made.setup([]) == [(batch, 1, 2, 3), (batch,)]
    return made


def test_batches_go_round_and_a_reset_begins_anew() -> None:
    made = memory()
    made.reset(RECORDS, LABELS)
    for first in (0, 2, 0):
        data, labels = made()
        assert data.numpy().tolist() == RECORDS[first : first + 2].tolist()
        assert labels.tolist() == LABELS[first : first + 2].tolist()
    made.reset(RECORDS + 1, LABELS)
    data, _ = made()
    assert data.numpy().tolist() == (RECORDS[:2] + 1).tolist()


def test_writing_into_a_top_leaves_the_records() -> None:
    made = memory()
    records = RECORDS.copy()
    made.reset(records, LABELS)
    made()[0].zero_()
    assert np.array_equal(records, RECORDS)


@pytest.mark.parametrize(
    ("records", "labels", "message"),
    [
        (RECORDS[:3], LABELS[:3], "got 3 records, expected a multiple of batch_size 2"),
        (RECORDS[:0], LABELS[:0], "got 0 records"),
        (RECORDS, LABELS[:2], "4 records and 2 labels"),
        (RECORDS[..., :2], LABELS, "records have shape 4x1x2x2, expected Nx1x2x3"),
    ],
)
def test_records_that_do_not_fit(
    records: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        memory().reset(records, labels)


def test_a_pass_before_reset() -> None:
    with pytest.raises(LayerError, match="has no records"):
        memory()()


def test_extents_must_be_positive() -> None:
    with pytest.raises(PoseidonError, match="2x1x0x3, expected all four to be positive"):
        build(
            layer(
                "MemoryData", "", "a b", "memory_data_param { batch_size: 2 channels: 1 width: 3 }"
            )
        )
