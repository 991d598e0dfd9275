"""ShuffleNet V2 (Ma et al., 2018), with Caffe2's names of blobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.caffe2 import brew

SCALE_CHANNELS = {
    "0.5x": (24, 48, 96, 192, 1024),
    "1.0x": (24, 116, 232, 464, 1024),
    "1.5x": (24, 176, 352, 704, 1024),
    "2.0x": (24, 244, 488, 976, 2048),
}
"""The channels of the first convolution, of the three stages and of the last
convolution, by the size of the network.
"""
STRIDE_1_REPEAT = (3, 7, 3)
STRIDE_2_REPEAT = (1, 1, 1)
EPSILON = 1e-3


@dataclass(eq=False)
class ShuffleNetV2Builder:
    """Adds ShuffleNet V2 to a model.

    Args:
        model: the model.
        data: images.
        num_input_channels: of the images.
        num_labels: classes.
        num_groups: of the shuffled channels.
        output_channels: see `SCALE_CHANNELS`.
        stride_1_repeat_times, stride_2_repeat_times: blocks of each stage.
        is_test: whether batch normalization uses the running statistics.
        detection: whether blocks begin with a further depthwise convolution.
        use_bn: whether there is batch normalization.
    """

    model: Any
    data: Any
    num_input_channels: int
    num_labels: int
    num_groups: int = 2
    output_channels: Sequence[int] = SCALE_CHANNELS["1.0x"]
    stride_1_repeat_times: Sequence[int] = STRIDE_1_REPEAT
    stride_2_repeat_times: Sequence[int] = STRIDE_2_REPEAT
    is_test: bool = False
    detection: bool = False
    use_bn: bool = True

    def create(self) -> tuple[Any, int]:
        """Add the network; return the scores and their number. The last pooling is global."""
        first, *stages, last = self.output_channels
        blob = brew.conv(
            self.model, self.data, "conv_1", self.num_input_channels, first, kernel=3, stride=2
        )
        blob = brew.max_pool(self.model, blob, "pool_1", kernel=3, stride=2)
        channels = first
        repeats = zip(stages, self.stride_1_repeat_times, self.stride_2_repeat_times, strict=True)
        for stage, (wanted, times_1, times_2) in enumerate(repeats, 2):
            for block in range(1, times_2 + 1):
                blob, channels = self.add_block_stride_2(
                    f"stage_{stage}_stride2_{block}", blob, channels, wanted
                )
            for block in range(1, times_1 + 1):
                blob, channels = self.add_block_stride_1(
                    f"stage_{stage}_stride1_{block}", blob, channels, wanted
                )
        blob = brew.conv(self.model, blob, "conv_5", channels, last, kernel=1)
        blob = brew.average_pool(self.model, blob, "avg_pooled", kernel=7, global_pooling=True)
        scores = brew.fc(self.model, blob, f"last_out_L{self.num_labels}", last, self.num_labels)
        return scores, self.num_labels

    def add_block_stride_2(
        self, prefix: str, blob_in: Any, dim_in: int, dim_out: int
    ) -> tuple[Any, int]:
        """Add a block that halves the images' sides; return its output and its channels."""
        half = dim_out // 2
        right = blob_in
        if self.detection:
            right = self._depthwise(blob_in, f"{prefix}_right_conv_d", dim_in)
        right = self._pointwise(right, f"{prefix}_right_conv_1", dim_in, dim_in)
        right = self._depthwise(right, f"{prefix}_right_dwconv", dim_in, stride=2, suffix="_nb")
        right = self._pointwise(right, f"{prefix}_right_conv_3", dim_in, half)
        left = (
            self._depthwise(blob_in, f"{prefix}_left_conv_d", dim_in) if self.detection else blob_in
        )
        left = self._depthwise(left, f"{prefix}_left_dwconv", dim_in, stride=2)
        left = self._pointwise(left, f"{prefix}_left_conv_1", dim_in, half)
        return self._joined(prefix, right, left), 2 * half

    def add_block_stride_1(
        self, prefix: str, blob_in: Any, dim_in: int, dim_out: int
    ) -> tuple[Any, int]:
        """Add a block that changes half the channels; return its output and its channels."""
        before, half = dim_in // 2, dim_out // 2
        left, right = self.model.net.Split(blob_in, [f"{prefix}_left", f"{prefix}_right"])
        if self.detection:
            right = self._depthwise(right, f"{prefix}_right_conv_d", before)
        right = self._pointwise(right, f"{prefix}_right_conv_1", before, before)
        right = self._depthwise(right, f"{prefix}_right_dwcon", before)
        right = self._pointwise(right, f"{prefix}_right_conv_3", before, half)
        return self._joined(prefix, right, left), 2 * half

    def _depthwise(
        self, blob: Any, name: str, channels: int, stride: int = 1, suffix: str = "_bn"
    ) -> Any:
        window = {"kernel": 3, "stride": stride, "group": channels, "pad": 1}
        blob = brew.conv(self.model, blob, name, channels, channels, **window)
        return self._normalized(blob, channels, suffix)

    def _pointwise(self, blob: Any, name: str, dim_in: int, dim_out: int) -> Any:
        blob = brew.conv(self.model, blob, name, dim_in, dim_out, kernel=1)
        blob = self._normalized(blob, dim_out)
        return brew.relu(self.model, blob, blob)

    def _normalized(self, blob: Any, channels: int, suffix: str = "_bn") -> Any:
        if not self.use_bn:
            return blob
        return brew.spatial_bn(
            self.model, blob, blob + suffix, channels, epsilon=EPSILON, is_test=self.is_test
        )

    def _joined(self, prefix: str, right: Any, left: Any) -> Any:
        joined = brew.concat(self.model, [right, left], f"{prefix}_concated")
        return self.model.net.ChannelShuffle(
            joined, f"{prefix}_shuffled", group=self.num_groups, kernel=1
        )


def create_shufflenet(
    model: Any,
    data: Any,
    num_input_channels: int,
    num_labels: int,
    label: Any = None,
    is_test: bool = False,
    no_loss: bool = False,
) -> Any:
    """Add ShuffleNet V2.

    Args:
        model: the model.
        data: images.
        num_input_channels: of the images.
        num_labels: classes.
        label: labels, for the loss.
        is_test: whether batch normalization uses the running statistics.
        no_loss: whether only the scores are wanted.

    Returns:
        the scores `last_out_L<num_labels>` with `no_loss`; softmax and loss with labels; else None.
    """
    builder = ShuffleNetV2Builder(model, data, num_input_channels, num_labels, is_test=is_test)
    scores, _ = builder.create()
    if no_loss:
        return scores
    if label is not None:
        return model.SoftmaxWithLoss([scores, label], ["softmax", "loss"])
    return None
