"""Scores of single pictures: the results of Caffe's `classification.bin`, with the pictures prepared
as a data layer of the phase TEST prepares them.

Law: (pixel - mean) * scale on the picture at the mean file's size, then the central crop, as in
`poseidon.caffe.data.batches.transform`. Caffe's tool subtracts the mean file's mean pixel instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from poseidon.caffe.data.batches.images import read_image
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import UsageError


class PictureScores:
    """Scores of pictures by a deploy net, one at a time.

    Args:
        net: with one input N x C x H x W, C 1 or 3; its first output is the scores.
        mean: a mean file, or values, one or one a channel; None: nothing is subtracted.
        scale: of the pixels, after the mean.
        size: height and width to which a picture is resized before the crop to H x W; None: of the
            mean file, else H x W.
        rgb: whether the net takes the channels as R, G, B; otherwise B, G, R.

    Raises:
        UsageError: the net does not take one picture, or the mean has another number of channels.
        DataError: the mean file is wrong.
    """

    def __init__(
        self,
        net: Net,
        *,
        mean: Path | tuple[float, ...] | None = None,
        scale: float = 1.0,
        size: tuple[int, int] | None = None,
        rgb: bool = False,
    ) -> None:
        shapes = net.input_shapes
        if [len(shape) for shape in shapes.values()] != [4]:
            found = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"
            raise UsageError(
                f"the net's inputs are {found}; expected one of N x C x H x W (`poseidon deploy` "
                "makes a deploy net of one with data layers)"
            )
        ((self._input, (_, channels, *extents)),) = shapes.items()
        param = TransformationParameter(scale=scale, crop_h=extents[0], crop_w=extents[1])
        self._size = size or (extents[0], extents[1])
        if isinstance(mean, Path):
            param.mean_file = str(mean)
            self._size = size or read_mean(mean).shape[1:]
        elif mean is not None:
            if len(mean) not in (1, channels):
                raise UsageError(
                    f"the mean has {len(mean)} values, but the net takes {channels} channels; "
                    f"expected 1 or {channels}"
                )
            param.mean_value.extend(mean)
        self._net, self._color, self._step = net, channels == 3, -1 if rgb else 1
        self._transform = Transform(param, train=False, resolve=Path)

    def of(self, path: Path) -> npt.NDArray[np.float32]:
        """Return the scores of a picture, the net's first output without its batch: one a class.

        Raises:
            DataError: the file is missing or no picture, or the mean or the crop does not fit it.
        """
        image = read_image(path, color=self._color, size=self._size)[:: self._step]
        data = np.empty((1, *self._transform.output_shape(image.shape)), np.float32)
        numbers = self._transform.draws(0, np.zeros(1, np.int64))
        self._transform.batch(image[None], numbers, data)
        with torch.no_grad():
            given = torch.from_numpy(data).to(self._net.context.device)
            outputs = self._net({self._input: given})
        scores: npt.NDArray[np.float32] = outputs[self._net.plan.outputs[0][0]].cpu().numpy()
        return scores.reshape(-1)
