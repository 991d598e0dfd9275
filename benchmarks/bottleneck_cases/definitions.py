"""Small nets and solvers whose compute, bytes and reading can be set.

Law: pure, but for `write_pictures`. Compute is a layer that sleeps, so that jobs need little of
this machine's processors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import cv2
import numpy as np

from poseidon.caffe.data.cursor import open_writer
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.proto.caffe_pb2 import Datum

MODULE = "bottleneck_layers"
LAYERS = '''
import json
import time

import caffe


class Sleep(caffe.Layer):
    """Computes for some seconds: as many as its rank is given, or the usual number."""

    def setup(self, bottom, top):
        seconds = json.loads(self.param_str)
        self.seconds = seconds.get(str(self.rank), seconds["usual"])

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        time.sleep(self.seconds)
        top[0].data[...] = bottom[0].data

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff


class Reader(Sleep):
    """Reads a batch in some seconds."""

    def setup(self, bottom, top):
        super().setup(bottom, top)
        self.shape = json.loads(self.param_str)["shape"]

    def reshape(self, bottom, top):
        top[0].reshape(*self.shape)
        top[1].reshape(self.shape[0])

    def forward(self, bottom, top):
        time.sleep(self.seconds)
        top[0].data[...] = 0.5
        top[1].data[...] = 1

    def backward(self, top, propagate_down, bottom):
        pass
'''
SOLVER = """
net: "net.prototxt" base_lr: 0.0001 lr_policy: "fixed" momentum: 0.9 random_seed: 7
display: 1 max_iter: 10000000 snapshot_after_train: false snapshot_prefix: "snap"
"""
PICTURES = 8
PICTURE_SIDE = 1800
SMALL_SIDE = 24


class Data(Enum):
    """The data layer of a net."""

    DUMMY = "DummyData"
    PYTHON = "Python"
    IMAGES = "ImageData"
    LMDB = "Data"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetShape:
    """The settings of a net: a data layer, a layer that sleeps, and two fully-connected layers.

    Attributes:
        data: kind of the data layer.
        compute_s: seconds that a forward pass sleeps.
        compute_of: the same for single ranks.
        read_s, read_of: the same for a data layer in Python.
        batch: images a worker.
        inputs, outputs: extents of the first fully-connected layer, which has nearly all bytes; a
            data layer of pictures sets `inputs`.
    """

    data: Data = Data.DUMMY
    compute_s: float = 0.03
    compute_of: dict[int, float] = field(default_factory=dict)
    read_s: float = 0.0
    read_of: dict[int, float] = field(default_factory=dict)
    batch: int = 4
    inputs: int = 64
    outputs: int = 64

    def net(self) -> str:
        """Return the definition of the net."""
        compute = _python("Sleep", _by_rank(self.compute_s, self.compute_of))
        return NET % (self.data.value, self._data_layer(), compute, self.outputs)

    def _data_layer(self) -> str:
        if self.data is Data.DUMMY:
            shape = (
                f"shape {{ dim: {self.batch} dim: {self.inputs} }} shape {{ dim: {self.batch} }}"
            )
            return f"dummy_data_param {{ {shape} }}"
        if self.data is Data.PYTHON:
            settings = {**_by_rank(self.read_s, self.read_of), "shape": [self.batch, self.inputs]}
            return _python("Reader", settings)
        if self.data is Data.IMAGES:
            size = f"new_height: {SMALL_SIDE} new_width: {SMALL_SIDE}"
            return f'image_data_param {{ source: "pictures.txt" batch_size: {self.batch} {size} shared_file_system: true }}'
        crop = f"transform_param {{ crop_size: {SMALL_SIDE} }}"
        return f'{crop} data_param {{ source: "pictures_lmdb" backend: LMDB batch_size: {self.batch} shared_file_system: true }}'


NET = """
name: "bottleneck"
layer { name: "data" type: "%s" top: "data" top: "label" %s }
layer { name: "compute" type: "Python" bottom: "data" top: "computed" %s }
layer { name: "fc" type: "InnerProduct" bottom: "computed" top: "fc"
  inner_product_param { num_output: %d weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "relu" type: "ReLU" bottom: "fc" top: "fc" }
layer { name: "out" type: "InnerProduct" bottom: "fc" top: "out"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""


def _python(layer: str, settings: dict[str, object]) -> str:
    text = json.dumps(settings).replace('"', '\\"')
    return f'python_param {{ module: "{MODULE}" layer: "{layer}" param_str: "{text}" }}'


def _by_rank(usual: float, of_rank: dict[int, float]) -> dict[str, object]:
    return {"usual": usual, **{str(rank): seconds for rank, seconds in of_rank.items()}}


def write_pictures(folder: Path) -> None:
    """Write large pictures as JPEG, a list of them, and a database of them; decoding one takes
    tens of milliseconds.
    """
    writer = open_writer(folder / "pictures_lmdb", Backend.LMDB)
    lines = []
    for number in range(PICTURES):
        pixels = np.random.default_rng(number).integers(
            0, 256, (PICTURE_SIDE, PICTURE_SIDE, 3), dtype=np.uint8
        )
        picture = cv2.imencode(".jpg", pixels)[1].tobytes()
        (folder / f"{number}.jpg").write_bytes(picture)
        lines.append(f"{number}.jpg {number % 10}\n")
        datum = Datum(channels=3, height=PICTURE_SIDE, width=PICTURE_SIDE, label=number % 10)
        datum.encoded, datum.data = True, picture
        writer.put(b"%08d" % number, datum.SerializeToString())
    writer.close()
    (folder / "pictures.txt").write_text("".join(lines), encoding="ascii")
