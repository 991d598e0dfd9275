"""Broken databases, models and states that the launcher must refuse before it starts a process."""

import numpy as np

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.mean import write_mean
from tests.support.broken_jobs import (
    NOT_SHARED,
    TWO,
    Broken,
    both,
    cut_short,
    empty_lmdb,
    net,
    replace_database,
    saved_model,
    saved_state,
    solver,
)
from tests.support.databases import make_pictures

DATA_AND_MODELS = (
    Broken(
        name="database-missing",
        edit=(net("train_lmdb", "none_lmdb"),),
        says=r"net\.prototxt:2: layer 'data' \(Data\): the database .*/none_lmdb does not exist",
    ),
    Broken(
        name="database-empty", prepare=replace_database(empty_lmdb), says=r"{}/train_lmdb is empty"
    ),
    Broken(
        name="database-cut-short",
        prepare=lambda f: cut_short(f / "train_lmdb"),
        says=r"{}/train_lmdb is truncated",
    ),
    Broken(
        name="lmdb-is-leveldb",
        prepare=replace_database(
            lambda path: make_pictures(path, 10, backend=Backend.LEVELDB, shape=(1, 6, 6))
        ),
        says=r"{}/train_lmdb is LevelDB, but was named as LMDB: write backend: LEVELDB",
    ),
    Broken(
        name="kernel-too-large",
        edit=(net("kernel_size: 3", "kernel_size: 7"),),
        says=r"net\.prototxt:5: layer 'conv' \(Convolution\): .*7.*6",
    ),
    Broken(
        name="labels-do-not-fit-the-scores",
        edit=(net('bottom: "ip" bottom', 'bottom: "pool" bottom'),),
        says=r"net\.prototxt:10: layer 'loss' \(SoftmaxWithLoss\): bottom 'label' has 1 value per "
        r"item, expected 9",
    ),
    Broken(
        name="mean-file-of-other-shape",
        edit=(net("scale: 0.01", 'mean_file: "mean"'),),
        prepare=lambda f: write_mean(f / "mean", np.zeros((3, 6, 6), np.float32)),
        says=r"{}/mean is 3 x 6 x 6 .*but the images are 1 x 6 x 6",
    ),
    Broken(
        name="mean-file-missing",
        edit=(net("scale: 0.01", 'mean_file: "mean"'),),
        says=r"mean file .*mean cannot be read: .*compute_image_mean` makes one",
    ),
    Broken(
        name="crop-too-large",
        edit=(net("scale: 0.01", "crop_size: 9"),),
        says=r"crop_size 9 is larger than the images, which are 1 x 6 x 6",
    ),
    Broken(
        name="state-cut-short",
        prepare=both(saved_state(cut=50), saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate is not a solver state, or it is truncated",
    ),
    Broken(
        name="state-is-a-model",
        prepare=saved_model("w.caffemodel"),
        flags=("--snapshot={}/w.caffemodel",),
        says=r"{}/w\.caffemodel is not a solver state",
    ),
    Broken(
        name="model-named-in-the-solver-missing",
        edit=(solver("max_iter", 'weights: "none.caffemodel" max_iter'),),
        says=r"solver\.prototxt:\d+: weights: there is no file .*none\.caffemodel",
    ),
    Broken(
        name="batch-size-zero",
        edit=(net("batch_size: 4", "batch_size: 0"),),
        says=r"net\.prototxt:2: layer 'data' \(Data\): .*batch_size",
    ),
    Broken(
        name="state-without-its-model",
        prepare=saved_state(),
        flags=("--snapshot={}/s.solverstate",),
        says=r"the weights of {}/s\.solverstate are missing",
    ),
    Broken(
        name="partition-missing",
        edit=(TWO, NOT_SHARED),
        says=r"{}/train_lmdb_\d \(shared_file_system is false\), which does not exist: write "
        r"shared_file_system: true",
    ),
    Broken(
        name="streaming-with-workers-of-a-host",
        flags=("--local_steps=4,fragments=2", "--workers=2"),
        says="fragments and delay of --local_steps need one worker on each host, not 2: the workers of "
        "a host exchange all tensors",
        code=2,
    ),
    Broken(
        name="compress-pattern-without-tensor",
        edit=(TWO,),
        flags=("--compress=fc*=int8",),
        says=r"--compress=fc\*=int8: no tensor that int8 can take has a name like 'fc\*'; the "
        r"tensors are conv.0, conv.1, ip.0",
        code=2,
    ),
    Broken(
        name="compress-pattern-of-a-codec-that-cannot-take-it",
        flags=("--compress=conv.1=powersgd:1",),
        says=r"no tensor that powersgd:1 can take has a name like 'conv.1'",
        code=2,
    ),
    Broken(
        name="powersgd-with-a-limit-of-the-norm",
        edit=(TWO, solver("max_iter: 2", "max_iter: 2 clip_gradients: 35")),
        flags=("--compress=powersgd:1",),
        says=r"clip_gradients: 35 cannot be combined with --compress=powersgd:1, ",
        code=2,
    ),
    Broken(
        name="partitions-of-more-clients",
        edit=(TWO, NOT_SHARED),
        prepare=lambda f: [
            make_pictures(f / f"train_lmdb_{part}", 3, shape=(1, 6, 6)) for part in range(3)
        ],
        says=r"was divided for 3 clients, but this job has 2: remove its parts",
    ),
)
