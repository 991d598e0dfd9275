"""ResNets: the filters of the blocks, whatever the number of layers."""

from __future__ import annotations

import pytest

from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.models import resnet


@pytest.mark.parametrize(
    ("layers", "groups", "width", "blocks", "inner", "outputs"),
    [
        (18, 32, 4, [2, 2, 2, 2], [128, 256, 512, 1024], [64, 128, 256, 512]),
        (34, 2, 16, [3, 4, 6, 3], [32, 64, 128, 256], [64, 128, 256, 512]),
        (101, 32, 4, [3, 4, 23, 3], [128, 256, 512, 1024], [256, 512, 1024, 2048]),
    ],
)
def test_filters_of_bottleneck_blocks(
    layers: int, groups: int, width: int, blocks: list[int], inner: list[int], outputs: list[int]
) -> None:
    model = ModelHelper(name="resnext", arg_scope={"order": "NCHW"})
    of_groups = {"num_groups": groups, "num_width_per_group": width}
    resnet.create_resnext(model, "data", 3, 10, num_layers=layers, label="label", **of_groups)
    shapes = {
        op.output[0]: list(argument.ints)
        for op in model.param_init_net.Proto().op
        for argument in op.arg
        if argument.name == "shape"
    }
    block, before = 0, 64
    for count, middle, after in zip(blocks, inner, outputs, strict=True):
        for _ in range(count):
            assert shapes[f"comp_{block}_conv_1_w"] == [middle, before, 1, 1]
            assert shapes[f"comp_{block}_conv_2_w"] == [middle, middle // groups, 3, 3]
            assert shapes[f"comp_{block}_conv_3_w"] == [after, middle, 1, 1]
            assert (f"shortcut_projection_{block}_w" in shapes) == (before != after)
            block, before = block + 1, after
    assert shapes["last_out_L10_w"] == [10, outputs[-1]]
