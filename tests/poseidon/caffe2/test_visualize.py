"""Grids of patches, and the two orders of dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from poseidon.caffe2 import visualize


@pytest.fixture(autouse=True)
def drawings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draw without a window."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def drawn() -> np.ndarray:
    from matplotlib import pyplot

    return np.asarray(pyplot.gca().images[-1].get_array())


def test_several_patches_make_a_grid() -> None:
    patches = np.arange(1, 4, dtype=np.float32)[:, None, None] * np.ones((3, 2, 3), np.float32)
    image = visualize.PatchVisualizer(gap=1).ShowMultiple(patches, bg_func=np.min)
    expected = np.ones((5, 7), np.float32)
    expected[:2, 4:], expected[3:, :3] = 2, 3
    np.testing.assert_array_equal(image, expected)
    assert visualize.PatchVisualizer(gap=2).ShowMultiple(patches, ncols=3).shape == (2, 13)


def test_images_are_scaled_to_the_range_of_colors() -> None:
    images = np.array([-2.0, 6.0])[:, None, None, None] * np.ones((2, 2, 2, 3))
    found = visualize.PatchVisualizer().ShowImages(images)
    assert (found.min(), found.max()) == (0, 1)


def test_both_orders_draw_the_same() -> None:
    patches = np.random.default_rng(0).random((4, 3, 2, 5)).astype(np.float32)
    for name, first, last in (
        ("ShowMultiple", patches, patches.transpose(0, 2, 3, 1)),
        ("ShowImages", patches, patches.transpose(0, 2, 3, 1)),
        ("ShowSingle", patches[0], patches[0].transpose(1, 2, 0)),
        ("ShowChannels", patches[0], patches[0].transpose(1, 2, 0)),
    ):
        getattr(visualize.NCHW, name)(first)
        one = drawn()
        getattr(visualize.NHWC, name)(last)
        np.testing.assert_array_equal(one, drawn())


def test_channels_need_three_dimensions() -> None:
    with pytest.raises(ValueError, match=r"a patch \(H, W, C\) is expected"):
        visualize.PatchVisualizer().ShowChannels(np.zeros((2, 2)))
