"""A small net, its solver, and its data: procedural images whose brightness gives their label; and
the beginning of a script.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from poseidon.caffe.data.cursor import open_writer
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum

RECORDS = 240
NET = """
name: "chaos"
layer { name: "data" type: "Data" top: "data" top: "label" transform_param { scale: 0.01 mirror: true crop_size: 10 }
  data_param { source: "%s" backend: LMDB batch_size: 8 shared_file_system: %s } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 64 weight_filler { type: "gaussian" std: 0.05 } } }
layer { name: "out" type: "InnerProduct" bottom: "fc" top: "out"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.001 random_seed: 7
display: 10 average_loss: 10 snapshot: 100 snapshot_prefix: "%s" max_iter: %d
"""
TRANSFORMER = """
import hashlib, sys
import torch, poseidon
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.1)
net = nn.Sequential(
    nn.Embedding(100, 64),
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    nn.Flatten(),
    nn.Linear(64 * 16, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
records = torch.randint(0, 100, (%s, 16), generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(records, records[:, 0] %% 10)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""
"""The beginning of a script, for so many records."""


def write_job(folder: Path, iterations: int, *, source: str, prefix: str, shared: bool) -> Path:
    """Write the definitions and, if the data is shared, the data.

    Returns:
        The path of the solver.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.prototxt").write_text(NET % (source, str(shared).lower()), encoding="ascii")
    solver = folder / "solver.prototxt"
    solver.write_text(SOLVER % (prefix, iterations), encoding="ascii")
    if shared and not (folder / "train_lmdb").exists():
        write_pictures(folder / "train_lmdb", 0, RECORDS)
    return solver


def write_pictures(path: Path, begin: int, end: int) -> None:
    """Write a database of the images `begin` to `end`."""
    writer = open_writer(path, Backend.LMDB)
    for number in range(begin, end):
        noise = np.random.default_rng(number).integers(0, 64, (3, 12, 12))
        pixels = (noise + 19 * (number % 10)).astype(np.uint8)
        writer.put(b"%08d" % number, encode_datum(pixels, number % 10))
    writer.close()
