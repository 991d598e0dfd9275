"""Pictures of patches: one image, several in a grid, the channels of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Background = Callable[[Array], Any]


class PatchVisualizer:
    """Draws patches with matplotlib, in a grid where they are several.

    Args:
        gap: pixels between two patches.
    """

    def __init__(self, gap: int = 1) -> None:
        self.gap = gap

    def ShowSingle(self, patch: Array, cmap: Any = None) -> Array:
        """Draw one patch (H, W), (H, W, 1) or (H, W, 3); return the drawn image."""
        if patch.ndim == 3 and patch.shape[2] == 1:
            patch = patch[:, :, 0]
        return _drawn(patch, cmap)

    def ShowMultiple(
        self,
        patches: Array,
        ncols: int | None = None,
        cmap: Any = None,
        bg_func: Background = np.mean,
    ) -> Array:
        """Draw patches (N, H, W) or (N, H, W, 3) in a grid; return the drawn image.

        Args:
            patches: the patches.
            ncols: the columns; by default as many as rows.
            cmap: matplotlib's color map of gray patches.
            bg_func: gives the color between the patches from their values.
        """
        count = len(patches)
        columns = ncols or int(np.ceil(np.sqrt(count)))
        rows = -(-count // columns)
        height, width = self.get_patch_shape(patches[0])
        gap = self.gap
        shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, *patches.shape[3:])
        image = np.full(shape, bg_func(patches), patches.dtype)
        for number, patch in enumerate(patches):
            row, column = divmod(number, columns)
            top, left = row * (height + gap), column * (width + gap)
            image[top : top + height, left : left + width] = patch
        return _drawn(image, cmap)

    def ShowImages(self, patches: Array, *args: Any, **kwargs: Any) -> Array:
        """Draw images of any range of values: the smallest becomes 0, the largest 1.

        See `ShowMultiple`.
        """
        values = patches.astype(np.float32)
        values -= values.min()
        values /= values.max() or 1
        return self.ShowMultiple(values, *args, **kwargs)

    def ShowChannels(self, patch: Array, cmap: Any = None, bg_func: Background = np.mean) -> Array:
        """Draw each channel of a patch (H, W, C); return the drawn image."""
        if patch.ndim != 3:
            raise ValueError(f"a patch (H, W, C) is expected, not one of shape {patch.shape}")
        channels = patch.transpose(2, 0, 1)
        return self.ShowMultiple(channels, cmap=cmap, bg_func=bg_func)

    def get_patch_shape(self, patch: Array) -> tuple[int, int]:
        return int(patch.shape[0]), int(patch.shape[1])


def _drawn(image: Array, cmap: Any) -> Array:
    from matplotlib import pyplot  # it takes long to import

    pyplot.imshow(image, cmap=cmap)
    pyplot.axis("off")
    return image


_visualizer = PatchVisualizer()


class _Order:
    """The functions of `PatchVisualizer` for patches whose channels are at an axis, -1 or -3."""

    def __init__(self, channels: int) -> None:
        self._channels = channels

    def _last(self, patches: Array) -> Array:
        return np.moveaxis(patches, self._channels, -1)

    def ShowSingle(self, patch: Array, *args: Any, **kwargs: Any) -> None:
        """Draw one patch."""
        _visualizer.ShowSingle(self._last(patch), *args, **kwargs)

    def ShowMultiple(self, patches: Array, *args: Any, **kwargs: Any) -> None:
        """Draw patches (N, ...)."""
        _visualizer.ShowMultiple(self._last(patches), *args, **kwargs)

    def ShowImages(self, patches: Array, *args: Any, **kwargs: Any) -> None:
        """Draw images (N, ...) of any range of values."""
        _visualizer.ShowImages(self._last(patches), *args, **kwargs)

    def ShowChannels(self, patch: Array, *args: Any, **kwargs: Any) -> None:
        """Draw each channel of a patch."""
        _visualizer.ShowChannels(self._last(patch), *args, **kwargs)


NHWC = _Order(-1)
NCHW = _Order(-3)
