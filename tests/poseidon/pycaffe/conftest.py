"""Files of small nets, and a process-wide mode that no test leaves changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from poseidon.pycaffe import mode

# A little net with a loss: 5 pictures of 2 x 3 x 4, 13 classes.
SIMPLE = """
name: "simple" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { num: 5 channels: 2 height: 3 width: 4 num: 5 channels: 1 height: 1 width: 1
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { decay_mult: 1 } param { decay_mult: 0 }
  convolution_param { num_output: 11 kernel_size: 2 pad: 3
    weight_filler { type: "gaussian" std: 0.1 } bias_filler { type: "constant" value: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 13 weight_filler { type: "gaussian" std: 0.1 }
    bias_filler { type: "constant" value: -3 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def mode_as_before() -> Iterator[None]:
    """Put back the device, seed and rank that a test set."""
    before = asdict(mode.MODE)
    yield
    for name, value in before.items():
        setattr(mode.MODE, name, value)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a definition and gives its file."""

    def write(text: str, name: str = "net.prototxt") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def simple(write: Write) -> Path:
    """The file of the little net."""
    return write(SIMPLE)
