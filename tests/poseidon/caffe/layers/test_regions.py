"""Pooling of regions, against hand-computed parts and torch's pooling."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError
from tests.support.nets import build, inputs, layer, noise, stack


def roi(body: str = "pooled_h: 2 pooled_w: 3", regions: int = 2) -> Net:
    shapes = {"x": (2, 3, 8, 9), "r": (regions, 5)}
    return build(
        inputs(**shapes) + layer("ROIPooling", "x r", "y", f"roi_pooling_param {{ {body} }}")
    )


def test_a_region_inside_is_pooled_as_a_picture_of_its_own() -> None:
    x = noise(2, 3, 8, 9).requires_grad_()
    regions = torch.tensor([[1.0, 2, 1, 8, 6], [0, 0, 0, 16, 14]])
    y = roi("pooled_h: 2 pooled_w: 3 spatial_scale: 0.5", 2)({"x": x, "r": regions})["y"]
    # 2..8 and 1..6 by a half, rounded half up: columns 1..4, rows 1..3 of picture 1.
    expected = [x[1:2, :, 1:4, 1:5], x[:1]]
    for found, part in zip(y, expected, strict=True):
        torch.testing.assert_close(found, torch.nn.functional.adaptive_max_pool2d(part, (2, 3))[0])
    y.sum().backward()
    assert x.grad is not None and float(x.grad.sum()) == y.numel()


def test_a_region_outside_the_map_is_zero() -> None:
    x = noise(2, 3, 8, 9).abs()
    y = roi(regions=1)({"x": x, "r": torch.tensor([[0.0, 6, 2, 11, 5]])})["y"]
    torch.testing.assert_close(y[0, :, 0, 0], x[0, :, 2:4, 6:8].amax((1, 2)))
    assert not y[0, :, :, 2].any()


@pytest.mark.parametrize(("cells", "parts"), [(57, 7), (114, 7), (57, 14), (114, 14)])
def test_the_last_part_reaches_one_cell_further_where_float32_rounds_up(
    cells: int, parts: int
) -> None:
    """57 / 7 x 7 is 57.000004 in float32: Caffe's last part has a cell after the region."""
    line = torch.arange(130.0).view(1, 1, 1, 130)
    shapes = {"x": tuple(line.shape), "r": (1, 5)}
    net = build(
        inputs(**shapes)
        + layer("ROIPooling", "x r", "y", f"roi_pooling_param {{ pooled_h: 1 pooled_w: {parts} }}")
    )
    found = net({"x": line, "r": torch.tensor([[0.0, 0, 0, cells - 1, 0]])})["y"]
    assert float(found[0, 0, 0, -1]) == cells  # the cell of this index is outside the region
    # 62 / 14 x 7 is 30.999998: part 7 begins a cell earlier.
    falling = net({"x": -line, "r": torch.tensor([[0.0, 0, 0, 61, 0]])})["y"]
    assert parts != 14 or float(falling[0, 0, 0, 7]) == -30
    exact = net({"x": line, "r": torch.tensor([[0.0, 0, 0, 55, 0]])})["y"]
    assert float(exact[0, 0, 0, -1]) == 55


def test_corners_are_rounded_half_away_from_zero() -> None:
    """-2.5 is -3, so the region from -2.5 to 2.5 has 7 cells: parts -3..0, 0..3 and the second
    ends at cell 3.
    """
    line = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    net = build(
        stack(
            "ROIPooling x=1,1,1,8 r=1,5 > y | roi_pooling_param { pooled_h: 1 pooled_w: 7 spatial_scale: 0.5 }"
        )
    )
    found = net({"x": line, "r": torch.tensor([[0.0, -5, 0, 5, 0]])})["y"]
    # Cells -3, -2, -1 are outside the map, 0 .. 3 hold 1 .. 4.
    assert found.flatten().tolist() == [0, 0, 0, 1, 2, 3, 4]


def test_the_gradient_goes_to_the_first_of_equal_maxima() -> None:
    x = torch.zeros(1, 1, 2, 4).requires_grad_()
    net = build(
        stack("ROIPooling x=1,1,2,4 r=2,5 > y | roi_pooling_param { pooled_h: 1 pooled_w: 2 }")
    )
    net({"x": x, "r": torch.tensor([[0.0, 0, 0, 3, 1], [0, 0, 0, 3, 1]])})["y"].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [2, 0, 2, 0, 0, 0, 0, 0]


def test_no_regions_and_a_wrong_image() -> None:
    net = roi(regions=2)
    assert net({"x": noise(2, 3, 8, 9), "r": torch.zeros(0, 5)})["y"].shape == (0, 3, 2, 3)
    with pytest.raises(DataError, match=r"index 2 is outside 0\.\.1"):
        net({"x": noise(2, 3, 8, 9), "r": torch.tensor([[2.0, 0, 0, 1, 1]])})


def psroi(body: str, x: tuple[int, ...] = (1, 8, 4, 4), regions: int = 1) -> Net:
    return build(
        inputs(x=x, r=(regions, 5))
        + layer("PSROIPooling", "x r", "y", f"psroi_pooling_param {{ {body} }}")
    )


def test_each_part_of_a_region_reads_channels_of_its_own() -> None:
    """The region 0..7 by a half spans 0 to 4: parts of 2 cells.

    Channel (c 2 + i) 2 + j holds 10 (channel) + column.
    """
    x = (10 * torch.arange(8.0).view(8, 1, 1) + torch.arange(4.0)).expand(8, 4, 4).unsqueeze(0)
    net = psroi("spatial_scale: 0.5 output_dim: 2 group_size: 2")
    y = net({"x": x.contiguous(), "r": torch.tensor([[0.0, 0, 0, 7, 7]])})["y"]
    assert y[0].flatten().tolist() == pytest.approx([0.5, 12.5, 20.5, 32.5, 40.5, 52.5, 60.5, 72.5])


def test_parts_overlap_and_end_at_the_map() -> None:
    """The region 1..4 spans 1 to 5: parts of 2 cells at 1 and 3, the second clipped to one.

    Corners are rounded before scaling.
    """
    x = torch.arange(4.0).expand(1, 4, 4, 4).contiguous()
    net = psroi("spatial_scale: 1 output_dim: 1 group_size: 2", x=(1, 4, 4, 4))
    y = net({"x": x, "r": torch.tensor([[0.0, 0.6, 0.6, 4.4, 4.4]])})["y"]
    assert y.flatten().tolist() == pytest.approx([1.5, 3, 1.5, 3])
    outside = net({"x": x, "r": torch.tensor([[0.0, 9, 9, 12, 12]])})["y"]
    assert not outside.any()


def test_samples_between_cells() -> None:
    """ROIAlign by hand: 0..2 in one part has samples at 0.5 and 1.5 of a ramp."""
    x = torch.arange(4.0).expand(1, 1, 4, 4).contiguous()
    text = inputs(x=(1, 1, 4, 4), r=(3, 5))
    body = "pooled_h: 1 pooled_w: 1 sampling_ratio: 2"
    net = build(text + layer("ROIAlign", "x r", "y", f"roi_align_param {{ {body} }}"))
    regions = torch.tensor([[0.0, 0, 0, 2, 2], [0, 3, 0, 5, 2], [0, 7, 7, 9, 9]])
    # The second: 3.5 has the value at the border, 4.5 is outside. The third is outside.
    assert net({"x": x, "r": regions})["y"].flatten().tolist() == pytest.approx([1, 1.5, 0])
