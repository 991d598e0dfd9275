"""Measure how long a definition takes to become a net, beyond torch's own allocation and filling
of its blobs.

    python benchmarks/building.py [--definition FILE] [--rounds 5] [--depths 3,8,36,3]

Without a definition: a residual net of bottlenecks, by default of 152 layers, with BatchNorm and
Scale as Caffe's users write them. `text` is reading, checking and upgrading the prototxt; `build`
is shapes, layers and the plan; `blobs` is torch's own work. The promise for 152 layers is text +
build < 2 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

import torch

from poseidon.caffe.layers.base import BlobSpec, LayerContext
from poseidon.caffe.net import compile as compiling
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetState
from poseidon.caffe.proto.definition import read_net

WIDTHS = (64, 128, 256, 512)


class ResidualNet:
    """Writes the text of a residual net."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._layers = [
            'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 '
            "dim: 224 dim: 224 } } }",
            'layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 1 } } }',
        ]
        blob = self._unit("conv1", "data", 64, kernel=7, stride=2)
        blob = self._add("Pooling", "pool1", blob, "pooling_param { kernel_size: 3 stride: 2 }")
        for stage, (depth, width) in enumerate(zip(depths, WIDTHS, strict=True)):
            for index in range(depth):
                stride = 2 if index == 0 and stage > 0 else 1
                blob = self._block(
                    f"res{stage + 2}_{index}", blob, width, stride, widens=index == 0
                )
        blob = self._add(
            "Pooling", "pool5", blob, "pooling_param { global_pooling: true pool: AVE }"
        )
        filler = 'weight_filler { type: "msra" }'
        blob = self._add(
            "InnerProduct", "fc", blob, f"inner_product_param {{ num_output: 1000 {filler} }}"
        )
        self._add("SoftmaxWithLoss", "loss", f'{blob}" bottom: "label')

    @property
    def text(self) -> str:
        """The definition."""
        return "\n".join(self._layers)

    def _add(self, kind: str, name: str, bottom: str, body: str = "", *, top: str = "") -> str:
        self._layers.append(
            f'layer {{\n  name: "{name}"\n  type: "{kind}"\n  bottom: "{bottom}"\n  top: "{top or name}"\n  {body}\n}}'
        )
        return top or name

    def _unit(
        self, name: str, bottom: str, width: int, *, kernel: int, stride: int = 1, relu: bool = True
    ) -> str:
        filler = 'bias_term: false weight_filler { type: "msra" }'
        sizes = f"num_output: {width} kernel_size: {kernel} stride: {stride} pad: {kernel // 2}"
        self._add("Convolution", name, bottom, f"convolution_param {{ {sizes} {filler} }}")
        self._add("BatchNorm", f"bn_{name}", name, top=name)
        self._add("Scale", f"scale_{name}", name, "scale_param { bias_term: true }", top=name)
        return self._add("ReLU", f"relu_{name}", name, top=name) if relu else name

    def _block(self, name: str, bottom: str, width: int, stride: int, *, widens: bool) -> str:
        past = bottom
        if widens:
            past = self._unit(f"{name}_1", bottom, 4 * width, kernel=1, stride=stride, relu=False)
        inner = self._unit(f"{name}_2a", bottom, width, kernel=1, stride=stride)
        inner = self._unit(f"{name}_2b", inner, width, kernel=3)
        inner = self._unit(f"{name}_2c", inner, 4 * width, kernel=1, relu=False)
        self._add("Eltwise", name, f'{past}" bottom: "{inner}')
        return self._add("ReLU", f"relu_{name}", name, top=name)


def measure(path: Path) -> tuple[float, float, float, int]:
    """Seconds of reading, of building without the blobs, and of the blobs; and the number of
    layers.
    """
    blobs_s = 0.0
    new_blob = compiling.new_blob  # type: ignore[attr-defined]

    def timed(spec: BlobSpec, seed: int) -> torch.Tensor:
        nonlocal blobs_s
        began = time.perf_counter()
        blob = new_blob(spec, seed)
        blobs_s += time.perf_counter() - began
        return blob

    compiling.new_blob = timed  # type: ignore[attr-defined]
    try:
        began = time.perf_counter()
        definition = read_net(path)
        text_s = time.perf_counter() - began
        began = time.perf_counter()
        net = compiling.compile_net(
            definition, LayerContext(phase=TRAIN, seed=1), state=NetState(phase=TRAIN)
        )
        build_s = time.perf_counter() - began - blobs_s
    finally:
        compiling.new_blob = new_blob  # type: ignore[attr-defined]
    net.close()
    return text_s, build_s, blobs_s, len(net.layer_modules)


def main() -> None:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(description="Time from prototxt to net.")
    parser.add_argument("--definition", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", default="3,8,36,3", metavar="A,B,C,D")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = flags.definition
        if path is None:
            path = Path(folder) / "residual.prototxt"
            path.write_text(
                ResidualNet([int(d) for d in flags.depths.split(",")]).text, encoding="utf-8"
            )
        rounds = [measure(path) for _ in range(flags.rounds)]
    text, build, blobs = (statistics.median(times[i] for times in rounds) for i in range(3))
    print(f"{rounds[0][3]} layers: text {text:.2f} s, build {build:.2f} s, blobs {blobs:.2f} s")
    print(f"beyond torch: {text + build:.2f} s (median of {flags.rounds})")


if __name__ == "__main__":
    main()
