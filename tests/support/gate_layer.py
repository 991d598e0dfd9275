"""A layer that stops a training at an iteration until the test lets it go on:
`--import=tests.support.gate_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from poseidon.caffe.layers.base import Layer, Shape
from poseidon.caffe.layers.registry import register
from tests.support.polling import until

GATE_S = 240.0


@register("Gate")
class Gate(Layer):
    """y = x, once a file is there.

    Fields (python_param): param_str, `<file> <passes>`: how many passes need no file.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """See `Layer`."""
        path, passes = self.param.python_param.param_str.rsplit(" ", 1)
        self._file, self._left = Path(path), int(passes)
        return [bottoms[0]]

    def forward(self, bottom: Tensor) -> Tensor:
        """See `Layer`."""
        self._left -= 1
        if self._left < 0:
            until(self._file.exists, "the test has not opened the gate", GATE_S)
        return bottom * 1.0
