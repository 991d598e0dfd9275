"""Residual networks (He et al., 2015; Xie et al., 2016), with Caffe2's names of blobs."""

from __future__ import annotations

import logging
from typing import Any

from poseidon.caffe2 import brew

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""The blocks of each stage by the number of layers."""


class ResNetBuilder:
    """Adds residual blocks to a model; `prev_blob` is what the next one reads."""

    def __init__(
        self,
        model: Any,
        prev_blob: Any,
        no_bias: Any,
        is_test: bool,
        bn_epsilon: float = 1e-5,
        bn_momentum: float = 0.9,
    ) -> None:
        """Start behind a blob.

        Args:
            model: the model.
            prev_blob: the blob that the first block reads.
            no_bias: whether convolutions have no bias.
            is_test: whether batch normalization uses the running statistics.
            bn_epsilon, bn_momentum: of batch normalization.
        """
        self.model = model
        self.comp_count = 0
        self.comp_idx = 0
        self.prev_blob = prev_blob
        self.is_test = is_test
        self.bn_epsilon = bn_epsilon
        self.bn_momentum = bn_momentum
        self.no_bias = 1 if no_bias else 0

    def add_conv(
        self,
        in_filters: int,
        out_filters: int,
        kernel: int,
        stride: int = 1,
        group: int = 1,
        pad: int = 0,
    ) -> Any:
        """Add a convolution; return its output."""
        self.comp_idx += 1
        name = f"comp_{self.comp_count}_conv_{self.comp_idx}"
        window = {"kernel": kernel, "stride": stride, "group": group, "pad": pad}
        self.prev_blob = self._convolve(self.prev_blob, name, in_filters, out_filters, **window)
        return self.prev_blob

    def _convolve(self, blob: Any, name: str, before: int, after: int, **window: int) -> Any:
        settings = {"weight_init": ("MSRAFill", {}), **window, "no_bias": self.no_bias}
        return brew.conv(self.model, blob, name, before, after, **settings)

    def add_relu(self) -> Any:
        """Add a ReLU in place."""
        self.prev_blob = brew.relu(self.model, self.prev_blob, self.prev_blob)
        return self.prev_blob

    def _normalize(self, blob: Any, name: str, filters: int) -> Any:
        settings = {"epsilon": self.bn_epsilon, "momentum": self.bn_momentum}
        return brew.spatial_bn(self.model, blob, name, filters, **settings, is_test=self.is_test)

    def add_spatial_bn(self, num_filters: int) -> Any:
        """Add batch normalization."""
        name = f"comp_{self.comp_count}_spatbn_{self.comp_idx}"
        self.prev_blob = self._normalize(self.prev_blob, name, num_filters)
        return self.prev_blob

    def _add_layer(
        self, normalize: bool, before: int, after: int, kernel: int, **window: int
    ) -> Any:
        """Add a convolution and, if wanted, batch normalization; return the output."""
        made = self.add_conv(before, after, kernel, **window)
        return self.add_spatial_bn(after) if normalize else made

    def _shortcut(
        self, blob: Any, in_filters: int, out_filters: int, stride: int, normalize: bool
    ) -> Any:
        """Return the projection of a block's input to the shape of its output."""
        name = f"shortcut_projection_{self.comp_count}"
        blob = self._convolve(blob, name, in_filters, out_filters, kernel=1, stride=stride)
        return self._normalize(blob, name + "_spatbn", out_filters) if normalize else blob

    def _finish(self, shortcut: Any) -> None:
        name = f"comp_{self.comp_count}_sum_{self.comp_idx}"
        self.prev_blob = brew.sum(self.model, [shortcut, self.prev_blob], name)
        self.comp_idx += 1
        self.add_relu()
        self.comp_count += 1
        self.comp_idx = 0

    def add_bottleneck(
        self,
        input_filters: int,
        base_filters: int,
        output_filters: int,
        stride: int = 1,
        group: int = 1,
        spatial_batch_norm: bool = True,
    ) -> None:
        """Add a block of convolutions 1x1, 3x3 (with the stride and the groups) and 1x1."""
        self.comp_idx = 0
        shortcut = self.prev_blob
        window = {"stride": stride, "group": group, "pad": 1}
        self._add_layer(spatial_batch_norm, input_filters, base_filters, 1)
        self.add_relu()
        self._add_layer(spatial_batch_norm, base_filters, base_filters, 3, **window)
        self.add_relu()
        last = self._add_layer(spatial_batch_norm, base_filters, output_filters, 1)
        if input_filters != output_filters:
            shortcut = self._shortcut(
                shortcut, input_filters, output_filters, stride, spatial_batch_norm
            )
        self.prev_blob = last
        self._finish(shortcut)

    def add_simple_block(
        self,
        input_filters: int,
        num_filters: int,
        down_sampling: bool = False,
        spatial_batch_norm: bool = True,
    ) -> None:
        """Add a block of two 3x3 convolutions; the first has stride 2 where it samples down."""
        self.comp_idx = 0
        shortcut = self.prev_blob
        stride = 2 if down_sampling else 1
        self._add_layer(spatial_batch_norm, input_filters, num_filters, 3, stride=stride, pad=1)
        self.add_relu()
        last = self._add_layer(spatial_batch_norm, num_filters, num_filters, 3, pad=1)
        if input_filters != num_filters:
            shortcut = self._shortcut(shortcut, input_filters, num_filters, stride, False)
            if spatial_batch_norm:
                # Caffe2 normalizes this one with other settings than the rest.
                name, settings = shortcut + "_spatbn", {"epsilon": 1e-3, "is_test": self.is_test}
                shortcut = brew.spatial_bn(self.model, shortcut, name, num_filters, **settings)
        self.prev_blob = last
        self._finish(shortcut)


def create_resnet_32x32(
    model: Any,
    data: Any,
    num_input_channels: int,
    num_groups: int,
    num_labels: int,
    is_test: bool = False,
) -> Any:
    """Add a network for pictures of 32x32 pixels: three stages of 2 * `num_groups` simple blocks.

    Returns:
        the reference to the softmax.
    """
    conv1 = brew.conv(model, data, "conv1", num_input_channels, 16, kernel=3, stride=1)
    bn1 = brew.spatial_bn(model, conv1, "conv1_spatbn", 16, epsilon=1e-3, is_test=is_test)
    relu1 = brew.relu(model, bn1, "relu1")
    filters = (16, 32, 64)
    builder = ResNetBuilder(model, relu1, no_bias=0, is_test=is_test)
    before = 16
    for stage, width in enumerate(filters):
        for block in range(2 * num_groups):
            down = block == 0 and stage > 0
            builder.add_simple_block(before, width, down_sampling=down)
            before = width
    brew.average_pool(model, builder.prev_blob, "final_avg", kernel=8, stride=1)
    brew.fc(model, "final_avg", "last_out", 64, num_labels)
    return brew.softmax(model, "last_out", "softmax")


def create_resnet50(
    model: Any,
    data: Any,
    num_input_channels: int,
    num_labels: int,
    label: Any = None,
    is_test: bool = False,
    no_loss: bool = False,
    no_bias: Any = 0,
    conv1_kernel: int = 7,
    conv1_stride: int = 2,
    final_avg_kernel: int = 7,
) -> Any:
    """Add ResNet-50; see `create_resnext`."""
    layers, groups, width = 50, 1, 64
    shape = (num_input_channels, num_labels, layers, groups, width)
    windows = (conv1_kernel, conv1_stride, final_avg_kernel)
    return create_resnext(model, data, *shape, label, is_test, no_loss, no_bias, *windows)


def create_resnext(
    model: Any,
    data: Any,
    num_input_channels: int,
    num_labels: int,
    num_layers: int,
    num_groups: int,
    num_width_per_group: int,
    label: Any = None,
    is_test: bool = False,
    no_loss: bool = False,
    no_bias: Any = 1,
    conv1_kernel: int = 7,
    conv1_stride: int = 2,
    final_avg_kernel: int = 7,
    log: logging.Logger | None = None,
    bn_epsilon: float = 1e-5,
    bn_momentum: float = 0.9,
) -> Any:
    """Add a ResNet or ResNeXt of bottlenecks; from 50 layers on they have 4 times the filters.

    Args:
        model: the model.
        data: images.
        num_input_channels: of the images.
        num_labels: classes.
        num_layers: 18, 34, 50, 101, 152 or 200.
        num_groups, num_width_per_group: of the 3x3 convolutions; 1 and 64 for a ResNet.
        label: labels, for the loss.
        is_test: whether batch normalization uses the running statistics.
        no_loss: whether only the scores are wanted.
        no_bias: whether convolutions have no bias.
        conv1_kernel, conv1_stride: of the first convolution.
        final_avg_kernel: kept in the operator; the last pooling is global.
        log: kept for Caffe2's scripts.
        bn_epsilon, bn_momentum: of batch normalization.

    Returns:
        scores `last_out_L<num_labels>` with `no_loss`; with labels softmax and loss; else softmax.

    Raises:
        AssertionError: there is no network of that many layers.
    """
    assert num_layers in BLOCKS, f"no ResNet has {num_layers} layers; use one of {sorted(BLOCKS)}"
    window = {"kernel": conv1_kernel, "stride": conv1_stride, "pad": 3, "no_bias": no_bias}
    brew.conv(model, data, "conv1", num_input_channels, 64, weight_init=("MSRAFill", {}), **window)
    settings = {"epsilon": bn_epsilon, "momentum": bn_momentum, "is_test": is_test}
    brew.spatial_bn(model, "conv1", "conv1_spatbn_relu", 64, **settings)
    brew.relu(model, "conv1_spatbn_relu", "conv1_spatbn_relu")
    brew.max_pool(model, "conv1_spatbn_relu", "pool1", kernel=3, stride=2, pad=1)
    builder = ResNetBuilder(model, "pool1", no_bias, is_test, bn_epsilon, bn_momentum)
    inner = num_groups * num_width_per_group
    # Caffe2's nets of 18 and 34 layers have bottlenecks too
    before, after = (64, 64 if num_layers < 50 else 256)
    for stage, blocks in enumerate(BLOCKS[num_layers]):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            builder.add_bottleneck(before, inner, after, stride=stride, group=num_groups)
            before = after
        inner *= 2
        after *= 2
    window = {"kernel": final_avg_kernel, "stride": 1, "global_pooling": True}
    pooled = brew.average_pool(model, builder.prev_blob, "final_avg", **window)
    scores = brew.fc(model, pooled, f"last_out_L{num_labels}", before, num_labels)
    if no_loss:
        return scores
    if label is not None:
        return model.SoftmaxWithLoss([scores, label], ["softmax", "loss"])
    return brew.softmax(model, scores, "softmax")
