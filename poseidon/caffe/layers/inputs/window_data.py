"""WindowData: batches of foreground and background windows of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.data.batches.window_file import read_windows
from poseidon.caffe.data.batches.windows import CHANNELS, CropMode, Floats, Sampling, WindowMaker
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.layers.base import LayerError, Shape, check_positive, times
from poseidon.caffe.layers.inputs.sources import ReadingSource
from poseidon.caffe.layers.registry import register

MODES = {"warp": CropMode.WARP, "square": CropMode.SQUARE}


@register("WindowData")
class WindowData(ReadingSource):
    """Windows drawn at random from a window file (R-CNN, Girshick et al., 2014); see
    `poseidon.caffe.data.batches.windows`.

    Tops: data N x 3 x crop x crop; label N, 0 for background. The first N - floor(N fg_fraction)
    items are background.

    Fields: window_data_param: source; root_folder, the prefix of each path; batch_size N of one
    worker; fg_threshold, bg_threshold, fg_fraction; context_pad; crop_mode, warp or square;
    cache_images; shared_file_system. transform_param: crop_size, mirror, scale, mean_file or
    mean_value.
    """

    TOPS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.reader is None:
            self.reader = self._open()
        return [self.reader.shape, self.reader.shape[:1]]

    def _open(self) -> NumberedReader[WindowMaker]:
        param, transform = self.param.window_data_param, self.param.transform_param
        check_positive(param, "batch_size")
        check_positive(transform, "crop_size")
        if 2 * param.context_pad >= transform.crop_size:
            raise LayerError(
                f"context_pad is {param.context_pad}, expected less than half of crop_size "
                f"{transform.crop_size}"
            )
        if param.crop_mode not in MODES:
            raise LayerError(f"crop_mode is '{param.crop_mode}', expected {' or '.join(MODES)}")
        if not 0 <= param.fg_fraction <= 1:
            raise LayerError(f"fg_fraction is {param.fg_fraction:g}, expected 0 to 1")
        file = read_windows(
            self.source(param),
            param.root_folder,
            fg_threshold=param.fg_threshold,
            bg_threshold=param.bg_threshold,
        )
        sampling = Sampling(
            batch_size=param.batch_size,
            crop=transform.crop_size,
            # In single precision, as in Caffe.
            foreground=int(np.float32(param.batch_size) * np.float32(param.fg_fraction)),
            context_pad=param.context_pad,
            mode=MODES[param.crop_mode],
            mirror=transform.mirror,
            scale=transform.scale,
            mean=self._mean(),
            cache=param.cache_images,
            share=self.share(param, param.batch_size),
            seed=self.context.seed,
        )
        return NumberedReader(file.source, WindowMaker(file, sampling))

    def _mean(self) -> Floats | None:
        param = self.param.transform_param
        if param.HasField("mean_file") and param.mean_value:
            raise LayerError(
                "transform_param has both mean_file and mean_value, expected one of them"
            )
        if param.HasField("mean_file"):
            mean = read_mean(self.context.resolve(param.mean_file))
            if (
                mean.shape[0] != CHANNELS
                or mean.shape[1] != mean.shape[2]
                or mean.shape[1] < param.crop_size
            ):
                raise LayerError(
                    f"mean_file is {times(mean.shape)}, expected a square image of {CHANNELS} "
                    f"channels and an extent of at least {param.crop_size}"
                )
            return mean
        return self.channel_mean()
