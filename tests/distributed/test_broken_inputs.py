"""Broken inputs through the real command line: each ends with one clear sentence and an exit code, and leaves nothing.

Every case is a sound job with one thing broken. What the launcher can see must stop the job before a process is
started and before a file is written. What a worker finds by itself is met with the worker as a thread of this
process; what takes several processes, or has to cross their borders, with true ones.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import psutil
import pytest
import torch

from poseidon.cli.main import main
from poseidon.cluster.local import LocalLauncher
from poseidon.data.databases.kinds import Backend
from poseidon.data.datum import encode_datum
from poseidon.data.mean import write_mean
from poseidon.proto.blob import from_array
from poseidon.proto.caffe_pb2 import NetParameter, SolverState
from tests.support.databases import make_database, make_pictures
from tests.support.thread_launcher import ThreadLauncher

NET = """name: "small"
layer { name: "data" type: "Data" top: "data" top: "label"
  transform_param { scale: 0.01 }
  data_param { source: "train_lmdb" backend: LMDB batch_size: 4 shared_file_system: true } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """net: "net.prototxt"
base_lr: 0.01
lr_policy: "fixed"
momentum: 0.9
max_iter: 2
snapshot_prefix: "snap"
random_seed: 1
solver_mode: CPU
"""
ONE_CLIENT = "0 127.0.0.1 0\n"
TWO_CLIENTS = ONE_CLIENT + "1 127.0.0.1 0\n"
V0_NET = """name: "old" input: "data" input_dim: 4 input_dim: 1 input_dim: 6 input_dim: 6
layers { layer { name: "convolution" type: "convolution" num_output: 2 kernelsize: 3 } bottom: "data" top: "convolution" }
"""
HAS_NO_GPU = not torch.cuda.is_available()

Preparation = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One mistake in a job that is otherwise correct.

    Attributes:
        name: of the case.
        says: regular expression that the sentence must hold; `{}` stands for the folder.
        edit: (file, old text, new text) each; the old text must be there.
        prepare: further damage.
        flags: added to the command.
        command: instead of `train` and its flags.
        code: expected exit code.
    """

    name: str
    says: str
    edit: tuple[tuple[str, str, str], ...] = ()
    prepare: Preparation | None = None
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    code: int = 1

    def __str__(self) -> str:
        return self.name


def net(old: str, new: str) -> tuple[str, str, str]:
    return ("net.prototxt", old, new)


def solver(old: str, new: str) -> tuple[str, str, str]:
    return ("solver.prototxt", old, new)


def hosts(text: str) -> tuple[str, str, str]:
    return ("hosts", ONE_CLIENT, text)


def write(name: str, content: str | bytes) -> Preparation:
    """Return a preparation that writes a file to the folder."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def sound_job(folder: Path) -> None:
    """Write a correct job."""
    (folder / "net.prototxt").write_text(NET, encoding="utf-8")
    (folder / "solver.prototxt").write_text(SOLVER, encoding="utf-8")
    (folder / "hosts").write_text(ONE_CLIENT, encoding="utf-8")
    make_pictures(folder / "train_lmdb", 10, shape=(1, 6, 6))


def spoil(case: Broken, folder: Path) -> list[str]:
    """Write the job to `folder` and break it. Return the arguments of the command."""
    sound_job(folder)
    for name, old, new in case.edit:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text, f"{name} does not hold {old!r}"
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    if case.prepare is not None:
        case.prepare(folder)
    if case.command is not None:
        return [word.replace("{}", str(folder)) for word in case.command]
    words = ["train", f"--solver={folder}/solver.prototxt", f"--output={folder}/output"]
    if not any(flag.startswith("--hostfile") for flag in case.flags):
        words.append(f"--hostfile={folder}/hosts")
    return [*words, *(flag.replace("{}", str(folder)) for flag in case.flags)]


LAUNCHER = (
    Broken(
        name="solver-field-typo",
        edit=(solver("base_lr:", "bace_lr:"),),
        says=r"solver\.prototxt:2:1: unknown field 'bace_lr' in SolverParameter; did you mean 'base_lr'\?",
    ),
    Broken(
        name="net-field-typo",
        edit=(net("{ num_output: 2 kernel_size", "{ num_output: 2 kernal_size"),),
        says=r"net\.prototxt:6:\d+: unknown field 'kernal_size' in ConvolutionParameter; did you mean 'kernel_size'\?",
    ),
    Broken(
        name="enum-typo", edit=(net("pool: MAX", "pool: MAXX"),), says=r"net\.prototxt:7:\d+: .*MAXX.*MAX"
    ),
    Broken(
        name="brace-missing",
        edit=(net('top: "loss" }', 'top: "loss"'),),
        says=r"net\.prototxt:10:1: the '\{' of 'layer' in line 10 is not",
    ),
    Broken(
        name="text-for-a-number",
        edit=(net("num_output: 10", 'num_output: "ten"'),),
        says=r"net\.prototxt:9:\d+: .*num_output",
    ),
    Broken(
        name="number-for-text", edit=(solver('"fixed"', "3"),), says=r"solver\.prototxt:3:\d+: .*lr_policy"
    ),
    Broken(
        name="solver-missing", prepare=lambda f: (f / "solver.prototxt").unlink(), says=r"{}/solver\.prototxt"
    ),
    Broken(name="solver-is-a-folder", command=("train", "--solver={}"), says=r"{}.*(folder|directory)"),
    Broken(name="solver-empty", prepare=write("solver.prototxt", ""), says=r"solver\.prototxt: .*empty"),
    Broken(
        name="solver-not-text",
        prepare=write("solver.prototxt", b"\xff\xfe\x00"),
        says=r"solver\.prototxt.*text",
    ),
    Broken(name="net-not-named", edit=(solver('net: "net.prototxt"\n', ""),), says="no train net is named"),
    Broken(
        name="net-missing",
        edit=(solver("net.prototxt", "nett.prototxt"),),
        says=r"solver\.prototxt:1: net: there is no net definition 'nett\.prototxt' \(searched: ",
    ),
    Broken(name="net-empty", prepare=write("net.prototxt", "# nothing\n"), says=r"net\.prototxt: .*empty"),
    Broken(
        name="first-grammar",
        prepare=write("net.prototxt", V0_NET),
        says=r"net\.prototxt:2: unknown layer type 'convolution' of Caffe's first format \(V0\); expected one of .*conv",
    ),
    Broken(
        name="net-without-loss",
        edit=(net("SoftmaxWithLoss", "Accuracy"),),
        says=r"net\.prototxt: the net has no loss to train on",
    ),
    Broken(
        name="layer-type-unknown",
        edit=(net('"InnerProduct"', '"InerProduct"'),),
        says=r"net\.prototxt:8: layer 'ip' .*'InerProduct'.*did you mean 'InnerProduct'\?",
    ),
    Broken(
        name="bottom-unknown",
        edit=(net('bottom: "pool" top: "ip"', 'bottom: "pol" top: "ip"'),),
        says=r"net\.prototxt:8: layer 'ip' \(InnerProduct\): unknown bottom 'pol'; did you mean 'pool'\?",
    ),
    Broken(
        name="bottom-only-in-the-other-phase",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net('top: "label"\n', 'top: "label" include { phase: TRAIN }\n'),
        ),
        says=r"net\.prototxt:5: layer 'conv' \(Convolution\): unknown bottom 'data'",
    ),
    Broken(
        name="phase-without-layers",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net("layer { name", "layer { include { phase: TRAIN } name"),
        ),
        says=r"net\.prototxt: the net has no layer for phase TEST",
    ),
    Broken(
        name="lr-policy-unknown",
        edit=(solver("fixed", "fixt"),),
        says=r"solver\.prototxt:3: lr_policy: .*fixed",
    ),
    Broken(
        name="momentum-out-of-range",
        edit=(solver("momentum: 0.9", "momentum: 1.5"),),
        says=r"solver\.prototxt:4: momentum: .*1\.5",
    ),
    Broken(
        name="rate-not-a-number",
        edit=(solver("base_lr: 0.01", "base_lr: nan"),),
        says=r"solver\.prototxt:2: base_lr",
    ),
    Broken(
        name="test-interval-missing",
        edit=(solver("max_iter", "test_iter: 1 max_iter"),),
        says=r"solver\.prototxt.*: test_interval: expected a positive number",
    ),
    Broken(
        name="test-iter-negative",
        edit=(solver("max_iter", "test_iter: -1 test_interval: 1 max_iter"),),
        says=r"solver\.prototxt:5: test_iter: ",
    ),
    Broken(
        name="max-iter-missing",
        edit=(solver("max_iter: 2\n", ""),),
        says=r"solver\.prototxt: max_iter: missing",
    ),
    Broken(
        name="solver-type-unknown",
        edit=(solver("max_iter", 'type: "SDG" max_iter'),),
        says=r"solver\.prototxt:5: type: unknown solver type 'SDG'; did you mean 'SGD'\?",
    ),
    Broken(
        name="snapshot-folder-cannot-be-made",
        edit=(solver('"snap"', '"hosts/snap"'),),
        says=r"solver\.prototxt:6: snapshot_prefix: .*hosts",
    ),
    Broken(name="output-is-a-file", flags=("--output={}/hosts",), says=r"output.*{}/hosts"),
    Broken(name="output-below-a-file", flags=("--output={}/hosts/deep",), says=r"output.*{}/hosts/deep"),
    Broken(
        name="net-outputs-below-a-file", flags=("--net_outputs={}/hosts/o",), says=r"net_outputs.*{}/hosts"
    ),
    Broken(
        name="hosts-missing", flags=("--hostfile={}/none",), says=r"{}/none: there is no such machinefile"
    ),
    Broken(name="hosts-empty", edit=(hosts("# nobody\n"),), says=r"{}/hosts: no client found"),
    Broken(
        name="host-id-missing",
        edit=(hosts("0 127.0.0.1 0\n2 127.0.0.1 0\n"),),
        says=r"{}/hosts:2: .*1 is missing",
    ),
    Broken(
        name="host-id-twice",
        edit=(hosts("0 127.0.0.1 0\n0 127.0.0.1 0\n"),),
        says=r"{}/hosts:2: client 0 is already",
    ),
    Broken(
        name="host-port-text",
        edit=(hosts("0 127.0.0.1 http\n"),),
        says=r"{}/hosts:1: the port must be .*'http'",
    ),
    Broken(
        name="host-port-too-high",
        edit=(hosts("0 127.0.0.1 65536\n"),),
        says=r"{}/hosts:1: the port must be .*65536",
    ),
    Broken(
        name="host-port-shared",
        edit=(hosts("0 127.0.0.1 9000\n1 127.0.0.1 9000\n"),),
        says=r"{}/hosts:2: clients 0 and 1 on 127\.0\.0\.1 share port 9000",
    ),
    Broken(
        name="host-address-wrong",
        edit=(hosts("0 127.0.0.256 0\n"),),
        says=r"{}/hosts:1: '127\.0\.0\.256' is not an",
    ),
    Broken(
        name="host-line-short",
        edit=(hosts("127.0.0.1 9999\n"),),
        says=r"{}/hosts:1: expected '<id> <host> <port>'",
    ),
    Broken(
        name="host-remote",
        edit=(hosts("0 node7 9999\n"),),
        says=r"root@node7: the name node7 is not known|\S+@node7: ",
    ),
    Broken(
        name="snapshot-and-weights",
        flags=("--snapshot=a", "--weights=b"),
        says="--snapshot and --weights exclude each other",
        code=2,
    ),
    Broken(name="snapshot-missing", flags=("--snapshot={}/s",), says=r"--snapshot: there is no file {}/s"),
    Broken(
        name="weights-missing",
        flags=("--weights={}/w,{}/net.prototxt",),
        says=r"--weights: there is no file {}/w",
    ),
    Broken(name="staleness-negative", flags=("--table_staleness=-1",), says=r"table_staleness.*'-1'", code=2),
    Broken(name="consistency-unknown", flags=("--consistency_model=BSP",), says=r"SSPPush.*'BSP'", code=2),
    Broken(name="flag-unknown", flags=("--solvr=x",), says=r"--solvr", code=2),
    Broken(name="threads-zero", flags=("--threads=0",), says=r"--threads=0: expected 1 or more", code=2),
    Broken(
        name="return-timeout-below-zero",
        flags=("--return_timeout=-1",),
        says=r"--return_timeout=-1: expected 0",
        code=2,
    ),
    Broken(name="stall-timeout-zero", flags=("--stall_timeout=0",), says=r"stall_timeout.*0", code=2),
    Broken(
        name="channels-zero", flags=("--num_comm_channels_per_client=0",), says=r"channels.* 1 .*0", code=2
    ),
    Broken(name="gpu-not-a-number", flags=("--gpu=first",), says=r"--gpu must be .*'first'", code=2),
    Broken(name="solver-flag-missing", command=("train",), says=r"--solver", code=2),
    Broken(name="command-unknown", command=("trian",), says=r"trian", code=2),
    Broken(
        name="partition-nothing",
        command=("partition_data", "{}/none_lmdb"),
        says=r"{}/none_lmdb does not exist",
    ),
    Broken(name="partition-no-database", command=("partition_data", "{}"), says=r"{} is not a database"),
    Broken(
        name="partition-a-short-list",
        command=("partition_data", "{}/hosts"),
        says=r"cannot divide {}/hosts into 2 parts: it has only 1 lines",
        code=2,
    ),
    Broken(
        name="partition-other-backend",
        command=("partition_data", "--backend=leveldb", "{}/train_lmdb"),
        says=r"train_lmdb is LMDB, but was named as LevelDB",
    ),
    Broken(
        name="partition-exists",
        prepare=lambda folder: (folder / "train_lmdb_1").mkdir(),
        command=("partition_data", "{}/train_lmdb"),
        says=r"train_lmdb_1.*exists",
    ),
    Broken(
        name="partition-too-many",
        command=("partition_data", "--num_partitions=11", "{}/train_lmdb"),
        says=r"into 11 parts: it has only 10 records",
        code=2,
    ),
    Broken(
        name="partition-none",
        command=("partition_data", "--num_partitions=0", "{}/train_lmdb"),
        says=r"into 0 parts: expected at least 1",
        code=2,
    ),
    Broken(
        name="mean-of-different-shapes",
        prepare=lambda folder: mixed_shapes(folder / "mixed"),
        command=("compute_image_mean", "{}/mixed", "{}/mean"),
        says=r"{}/mixed: the record with key '00003' has shape",
    ),
    Broken(
        name="mean-into-a-file",
        command=("compute_image_mean", "{}/train_lmdb", "{}/hosts/mean"),
        says=r"{}/hosts/mean cannot be written",
    ),
    Broken(
        name="cifar-from-nothing",
        command=("convert_cifar", "{}/none", "{}/made", "lmdb"),
        says=r"{}/none",
    ),
    Broken(
        name="cifar-broken-archive",
        prepare=write("cifar-10-python.tar.gz", b"not an archive"),
        command=("convert_cifar", "{}", "{}/made", "lmdb"),
        says=r"cifar-10-python\.tar\.gz",
    ),
    Broken(name="kill-nobody", command=("kill", "{}/none"), says=r"{}/none' is neither a running job nor"),
    Broken(
        name="kill-without-target",
        command=("kill",),
        says=r"expected a job's id, a machinefile, or --all",
        code=2,
    ),
)
if HAS_NO_GPU:
    LAUNCHER += (
        Broken(
            name="gpu-mode-without-gpu",
            edit=(solver("CPU", "GPU"),),
            says=r"solver\.prototxt:8: solver_mode: GPU",
        ),
        Broken(name="gpu-flag-without-gpu", flags=("--gpu=0",), says=r"--gpu=0: there is no GPU 0", code=2),
        Broken(name="gpu-all-without-gpu", flags=("--gpu=all",), says=r"--gpu=all: no GPU", code=2),
    )


def mixed_shapes(path: Path) -> None:
    shapes = [(1, 6, 6)] * 3 + [(1, 6, 5)]
    make_database(
        path,
        Backend.LMDB,
        ((b"%05d" % i, encode_datum(np.zeros(shape, np.uint8), i)) for i, shape in enumerate(shapes)),
    )


def replace_database(records: Callable[[Path], object]) -> Preparation:
    """Another train_lmdb."""

    def prepare(folder: Path) -> None:
        for file in (folder / "train_lmdb").iterdir():
            file.unlink()
        (folder / "train_lmdb").rmdir()
        records(folder / "train_lmdb")

    return prepare


def empty_lmdb(path: Path) -> None:
    lmdb.open(str(path), map_size=1 << 20).close()


def cut_short(path: Path) -> None:
    data = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(data[: len(data) // 2])


def damaged_record(path: Path) -> None:
    make_database(
        path, Backend.LMDB, [(b"a", encode_datum(np.zeros((1, 6, 6), np.uint8), 0)), (b"bad", b"\x0a")]
    )


def model(*, outputs: int = 10, kernel: int = 3) -> NetParameter:
    """A saved model of the sound net, or of one with other shapes."""
    saved = NetParameter(name="small")
    shapes = {"conv": [(2, 1, kernel, kernel), (2,)], "ip": [(outputs, 18), (outputs,)]}
    for name, of_layer in shapes.items():
        layer = saved.layer.add(name=name)
        layer.blobs.extend(from_array(np.zeros(shape, np.float32)) for shape in of_layer)
    return saved


def saved_model(name: str, *, outputs: int = 10, cut: int = 0) -> Preparation:
    content = model(outputs=outputs).SerializeToString()
    return write(name, content[: len(content) - cut])


def saved_state(*, histories: int = 4, cut: int = 0, model_file: str = "w.caffemodel") -> Preparation:
    """`s.solverstate`, of SGD unless it has other than four histories."""
    shapes = [(2, 1, 3, 3), (2,), (10, 18), (10,)] * 2
    state = SolverState(iter=1, learned_net=model_file)
    state.history.extend(from_array(np.zeros(shape, np.float32)) for shape in shapes[:histories])
    content = state.SerializeToString()
    return write("s.solverstate", content[: len(content) - cut])


def damaged_state(folder: Path) -> None:
    """A history whose first blob has fewer values than its shape says."""
    state = SolverState(iter=1, learned_net="w.caffemodel")
    state.history.extend(
        from_array(np.zeros(shape, np.float32)) for shape in [(2, 1, 3, 3), (2,), (10, 8), (10,)]
    )
    del state.history[0].data[5:]
    (folder / "s.solverstate").write_bytes(state.SerializeToString())


def both(*preparations: Preparation) -> Preparation:
    return lambda folder: [prepare(folder) for prepare in preparations]


NOT_SHARED = net("shared_file_system: true", "shared_file_system: false")
TWO = hosts(TWO_CLIENTS)
LAUNCHER += (
    Broken(
        name="database-missing",
        edit=(net("train_lmdb", "none_lmdb"),),
        says=r"net\.prototxt:2: layer 'data' \(Data\): the database .*/none_lmdb does not exist",
    ),
    Broken(name="database-empty", prepare=replace_database(empty_lmdb), says=r"{}/train_lmdb is empty"),
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
        says=r"net\.prototxt:10: layer 'loss' \(SoftmaxWithLoss\): bottom 'label' has 1 value per item, expected 9",
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
        says=r"mean file .*mean cannot be read: .*compute_image_mean makes one",
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
        says=r"cannot read the model .*none\.caffemodel: No such file",
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
        name="leveldb-shared-by-two-clients",
        edit=(TWO, net("backend: LMDB", "backend: LEVELDB")),
        prepare=replace_database(
            lambda path: make_pictures(path, 10, backend=Backend.LEVELDB, shape=(1, 6, 6))
        ),
        says=r"LevelDB database {}/train_lmdb .*in one process only: give each client its own part",
    ),
    Broken(
        name="partition-missing",
        edit=(TWO, NOT_SHARED),
        says=r"{}/train_lmdb_\d \(shared_file_system is false\), which does not exist: create it with",
    ),
    Broken(
        name="partitions-of-more-clients",
        edit=(TWO, NOT_SHARED),
        prepare=lambda f: [make_pictures(f / f"train_lmdb_{part}", 3, shape=(1, 6, 6)) for part in range(3)],
        says=r"divided for more than the 2 clients of this job, as train_lmdb_2 shows",
    ),
)
WORKER = (
    Broken(
        name="pictures-of-different-shapes",
        prepare=replace_database(mixed_shapes),
        says=r"net\.prototxt:2: layer 'data' \(Data\): .*record 3 \(key '00003'\) is 1 x 6 x 5 .*must have one shape",
    ),
    Broken(
        name="record-damaged",
        prepare=replace_database(damaged_record),
        says=r"record 1 \(key 'bad'\): the record is not a Datum",
    ),
    Broken(
        name="model-of-another-net",
        prepare=saved_model("w.caffemodel", outputs=7),
        flags=("--weights={}/w.caffemodel",),
        says=r"{}/w\.caffemodel: layer 'ip': blob 0 has shape 7x18 in the file, expected 10x",
    ),
    Broken(
        name="state-of-another-solver",
        prepare=both(saved_state(histories=8), saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate has 8 history blobs; this net and solver type need 4",
    ),
    Broken(
        name="model-is-a-state",
        prepare=saved_state(),
        flags=("--weights={}/s.solverstate",),
        says=r"{}/s\.solverstate is not a model",
    ),
    Broken(
        name="state-with-a-damaged-history",
        prepare=both(damaged_state, saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate: the history of 'conv\.0': ",
    ),
)
PROCESSES = (
    Broken(
        name="label-outside-the-classes",
        edit=(net("num_output: 10", "num_output: 3"),),
        says=r"net\.prototxt:10: layer 'loss' \(SoftmaxWithLoss\): label \d is outside 0\.\.2",
    ),
    Broken(
        name="model-cut-short",
        prepare=saved_model("w.caffemodel", cut=50),
        flags=("--weights={}/w.caffemodel",),
        says=r"{}/w\.caffemodel is not a model, or it is truncated",
    ),
)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own state folder and an empty working folder."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    return made


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no process outlives the command."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not left


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content, and every folder.

    LMDB's lock file is not counted: each reader makes it. Nor is what lies in a LevelDB database: LevelDB writes there to read.
    """
    found = (
        path
        for path in folder.rglob("*")
        if path.name != "lock.mdb" and not (path.parent / "CURRENT").exists()
    )
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in found}


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command. Return its exit code and the last line of standard error; check that there is no traceback."""
    try:
        code = main(words)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err, err
    return code, err.strip().split("\n")[-1]


def check_sentence(case: Broken, folder: Path, code: int, sentence: str) -> None:
    assert re.search(case.says.replace("{}", re.escape(str(folder))), sentence), sentence
    assert code == case.code, sentence
    assert sentence.startswith("poseidon"), sentence
    assert len(sentence) < 600, sentence
    for noise in ("Error:", "Errno", "<class", "object at 0x"):
        assert noise not in sentence.replace("poseidon: error:", ""), sentence


@pytest.mark.parametrize("case", LAUNCHER, ids=str)
def test_launcher_refuses(
    case: Broken, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher refuses before a process starts, and writes nothing to disk."""
    words = spoil(case, folder)
    before = tree(folder)

    def start(*_: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(LocalLauncher, "start", start)
    code, sentence = run(words, capsys)
    check_sentence(case, folder, code, sentence)
    assert tree(folder) == before


def check_job(case: Broken, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the job ends with the sentence, leaves nothing but its logs, and is not registered any more."""
    words = spoil(case, folder)
    before = set(tree(folder))
    code, sentence = run(words, capsys)
    check_sentence(case, folder, code, sentence)
    new = set(tree(folder)) - before
    # LevelDB tidies its folder whenever it is opened.
    mine = re.compile(
        r"output(/worker_\d+\.log|/statistics\.json)?|train_lmdb/(LOG.*|MANIFEST-\d+|\d+\.(ldb|log))"
    )
    assert not [path for path in new if not mine.fullmatch(path)]
    assert not [path for path in tree(folder.parent / "home") if path.endswith(".json")]


@pytest.mark.parametrize("case", WORKER, ids=str)
def test_worker_refuses(
    case: Broken, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker finds it before or in the first iteration."""
    monkeypatch.setattr("poseidon.launch.site.LocalLauncher", ThreadLauncher)
    check_job(case, folder, capsys)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_job_fails_cleanly(case: Broken, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's process finds it: all processes end, and the user reads that worker's sentence."""
    check_job(case, folder, capsys)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_sound_job_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job that every case breaks is sound; and on one machine it takes free ports, though the machinefile's is taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        hostfile = f"0 127.0.0.1 {other.getsockname()[1]}\n1 127.0.0.1 0\n"
        code, sentence = run(spoil(Broken(name="sound", edit=(hosts(hostfile),), says=""), folder), capsys)
    assert code == 0, sentence
    assert (folder / "snap_iter_2.caffemodel").is_file()
