"""MemoryData: batches of the caller's arrays.

Law: batch b since the last `reset` holds records b*K to b*K + K - 1, modulo the number of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.layers.base import LayerError, Shape, times
from poseidon.caffe.layers.inputs.sources import Source
from poseidon.caffe.layers.registry import register


@register("MemoryData")
class MemoryData(Source):
    """Records and labels in memory, set by `reset`.

    Tops: data and label.

    Fields (memory_data_param): batch_size, channels, height and width, all positive. As in Caffe,
    the records are not transformed.
    """

    TOPS = (2, 2)
    KEEPS_STATE = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.memory_data_param
        shape = (param.batch_size, param.channels, param.height, param.width)
        if min(shape) < 1:
            raise LayerError(
                f"memory_data_param has batch_size x channels x height x width = {times(shape)}, "
                "expected all four to be positive"
            )
        self.shape = shape
        return [shape, shape[:1]]

    def reset(self, data: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
        """Use these records from now on, starting with the first. float32 arrays are not copied.

        Args:
            data: (N, C, H, W), N a positive multiple of the batch size.
            labels: N values.

        Raises:
            LayerError: the shape or the number of records is wrong.
        """
        if data.ndim != 4 or data.shape[1:] != self.shape[1:]:
            raise LayerError(
                f"records have shape {times(data.shape)}, expected Nx{times(self.shape[1:])}"
            )
        if not len(data) or len(data) % self.shape[0]:
            raise LayerError(
                f"got {len(data)} records, expected a multiple of batch_size {self.shape[0]}"
            )
        if labels.size != len(data):
            raise LayerError(
                f"got {len(data)} records and {labels.size} labels, expected the same number"
            )
        self._data = torch.from_numpy(np.ascontiguousarray(data, np.float32))
        self._labels = torch.from_numpy(np.ascontiguousarray(labels.reshape(-1), np.float32))
        self._position = 0

    def forward(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_data"):
            raise LayerError("has no records; call reset before the first forward pass")
        batch = slice(self._position, self._position + self.shape[0])
        self._position = batch.stop % len(self._data)
        device = self.context.device
        # Copies, so that layers that overwrite a top do not change the caller's arrays.
        return self._data[batch].clone().to(device), self._labels[batch].clone().to(device)
