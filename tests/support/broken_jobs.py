"""A correct job, and ways to break it: definitions, flags, data, models and states."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import torch

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.proto.blob import from_array
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverState
from tests.support.databases import make_database, make_pictures

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


def mixed_shapes(path: Path) -> None:
    shapes = [(1, 6, 6)] * 3 + [(1, 6, 5)]
    make_database(
        path,
        Backend.LMDB,
        (
            (b"%05d" % i, encode_datum(np.zeros(shape, np.uint8), i))
            for i, shape in enumerate(shapes)
        ),
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
        path,
        Backend.LMDB,
        [(b"a", encode_datum(np.zeros((1, 6, 6), np.uint8), 0)), (b"bad", b"\x0a")],
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


def saved_state(*, histories: int = 4, cut: int = 0) -> Preparation:
    """`s.solverstate`, of SGD unless it has other than four histories."""
    shapes = [(2, 1, 3, 3), (2,), (10, 18), (10,)] * 2
    state = SolverState(iter=1, learned_net="w.caffemodel")
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
