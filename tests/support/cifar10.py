"""The shipped cifar10_quick on generated images."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.mean import compute_mean, write_mean
from poseidon.caffe.data.prepare.convert import Labelled, write_labelled
from poseidon.caffe.data.prepare.procedural import draw_images
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import to_text


def make_pictures(folder: Path, count: int) -> Labelled:
    """Make `train_lmdb` and `mean.binaryproto` in `folder`."""
    pictures = draw_images(count, seed=5)
    write_labelled(folder / "train_lmdb", Backend.LMDB, pictures, key_digits=5)
    with closing(open_cursor(folder / "train_lmdb", Backend.LMDB)) as cursor:
        write_mean(folder / "mean.binaryproto", compute_mean(cursor))
    return pictures


def shipped_solver(
    repository: Path,
    source: Path,
    folder: Path,
    *,
    batch: int,
    iterations: int,
    iter_size: int = 1,
    shared: bool = True,
) -> Path:
    """Return the shipped solver with a number of iterations, and its net with this data and
    batch.
    """
    solver = read_solver(
        repository / "prototxt" / "cifar10" / "cifar10_quick_solver.prototxt"
    ).param
    net = read_net(repository / "prototxt" / "cifar10" / "cifar10_quick_train_test.prototxt").param
    for layer in net.layer:
        if layer.type == "Data":
            layer.data_param.source = str(source)
            layer.data_param.batch_size = batch
            layer.data_param.shared_file_system = shared
            layer.transform_param.mean_file = str(source.parent / "mean.binaryproto")
    folder.mkdir()
    (folder / "net.prototxt").write_text(to_text(net), encoding="utf-8")
    solver.net = "net.prototxt"
    solver.max_iter = iterations
    solver.iter_size = iter_size
    solver.random_seed = 1
    solver.snapshot_prefix = "snap"
    solver.ClearField("test_iter")
    solver.ClearField("test_interval")
    path = folder / "solver.prototxt"
    path.write_text(to_text(solver), encoding="utf-8")
    return path
