"""Every reader of foreign files ends in one sentence, whatever a small file holds."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from poseidon.base import foreign_files
from poseidon.caffe.data.batches.images import read_image
from poseidon.caffe.data.cursor import LmdbCursor
from poseidon.caffe.data.datum import Decoding, decode, decode_annotated, read_label_map
from poseidon.caffe.data.leveldb_cursor import LevelDbCursor
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.data.prepare.annoset import AnnotationFormat, read_marked
from poseidon.caffe.data.prepare.convert import read_mnist
from poseidon.caffe.data.prepare.imageset import Conversion, to_datum
from poseidon.caffe.export.formats import read_tensors
from poseidon.caffe.layers.losses import read_matrix
from poseidon.caffe.proto.caffe_pb2 import BlobProto
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe.snapshot.solverstate import read_head
from poseidon.caffe2.export.files import VALUE_INFO, read_predictor
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.utils import MakeArgument
from poseidon.engine.leaf import packed
from poseidon.errors import PoseidonError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.observe.metrics.trace_iteration import read_trace
from poseidon.torch import checkpoint_file
from poseidon.torch.tables.group import read_rows
from ps_server import RowRule, RowRuleKind, RowTableSpec


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return buffer.getvalue()


def nested(tag: bytes, depth: int) -> bytes:
    """Return fields of length-delimited messages, each in the one before."""
    content = b""
    for _ in range(depth):
        size, length = len(content), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        content = tag + length + bytes([size]) + content
    return content


def shaped(*shape: int, values: int = 1) -> bytes:
    blob = BlobProto(data=[1.0] * values)
    blob.shape.dim.extend(shape)
    return blob.SerializeToString()


ENTITIES = b"".join(b'<!ENTITY e%d "%s">' % (n, b"&e%d;" % (n - 1) * 10) for n in range(1, 10))
FILES: Mapping[str, bytes] = {
    "empty": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "words": b"hello world\n" * 5,
    "a list of lists": b"[" * 20_000,
    "an object of objects": b'{"a":' * 20_000,
    "a long number": b'{"a":1' + b"0" * 5000 + b"}",
    "blocks in blocks": b"layer { include { " * 5_000,
    "nets in nets": b"op { arg { n { " * 2_000,
    "messages in messages": nested(b"\x12", 3_000),
    "no UTF-8": b"\x0a\x02\xff\xfe",
    "a zero byte": b"a: 1\x00",
    "a start of a zip": b"PK\x03\x04" + bytes(100),
    "a zip of no pickle": zipped(b"junk"),
    "marks of a pickle": b"\x80\x02" + b"(" * 1000,
    "a frame beyond the end": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "an end without a value": b"\x80\x02.",
    "an item without a list": b"\x80\x02K\x01a.",
    "a start of HDF5": b"\x89HDF\r\n\x1a\n" + bytes(200),
    "entities in entities": b'<!DOCTYPE l [<!ENTITY e0 "a">' + ENTITIES + b"]><l>&e9;</l>",
    "a shape of 2**80": shaped(1, 1 << 40, 1 << 40),
    "a shape that overflows to 0": shaped(1, 1 << 32, 1 << 31, 2, values=0),
    "a negative shape": shaped(1, -1, -1, 1),
    "pixels that overflow to 0": bytes.fromhex("00000803 80000000 80000000 00000004"),
    "a cut text in a pickle": zipped(b"\x80\x02X"),
    "a checkpoint of nothing": packed({"poseidon": 1}),
    "a checkpoint of endless steps": packed({"poseidon": 1, "steps": math.inf}),
    "an image of sides beyond it": b"GIF89a\xff\xff\xff\xff\x00\x00\x00",
    "a tag list in itself": b"II*\x00\x00\x00\x00\x00",
}


def in_folder(name: str, read: Callable[[Path], object], path: Path) -> None:
    """Read a folder in which a file of this name has the content."""
    folder = path.with_suffix(".folder")
    folder.mkdir()
    (folder / name).write_bytes(path.read_bytes())
    read(folder)


def beside_nets(path: Path) -> None:
    """Read Caffe2's nets beside which a file of shapes is."""
    fill = OperatorDef(type="ConstantFill", output=["w"], arg=[MakeArgument("shape", [1])])
    add = OperatorDef(type="Add", input=["data", "w"], output=["sum"])
    for name, op in (("init.pb", fill), ("net.pb", add)):
        path.with_name(name).write_bytes(NetDef(op=[op]).SerializeToString())
    read_predictor(path.with_name("net.pb"), path.with_name("init.pb"), {})


SPEC = RowTableSpec(name="users", rows=9, dim=2, rule=RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD))
READERS: Mapping[str, Callable[[Path], object]] = {
    "mean.binaryproto": read_mean,
    "infogain.binaryproto": read_matrix,
    "model.caffemodel": read_model,
    "model.caffemodel.h5": read_model,
    "a.solverstate": read_head,
    "a.solverstate.h5": read_head,
    "net.prototxt": read_net,
    "solver.prototxt": read_solver,
    "labelmap.prototxt": read_label_map,
    "tensors.pth": read_tensors,
    "tensors.safetensors": read_tensors,
    "caffe2.pb": lambda path: read_predictor(path, path, {}),
    "caffe2.pbtxt": lambda path: read_predictor(path, path, {}),
    VALUE_INFO: beside_nets,
    "plan.json": RecordedPlan.read,
    "trace.json": lambda path: list(read_trace(path)),
    "checkpoint.pt": checkpoint_file.read_head,
    "checkpoint.pt.rows0": lambda path: list(read_rows(path, SPEC, 1)),
    "image.png": partial(read_image, color=True),
    "idx": lambda path: read_mnist(path, path),
    "lmdb": partial(in_folder, "data.mdb", LmdbCursor),
    "leveldb": partial(in_folder, "CURRENT", LevelDbCursor),
    "datum": lambda path: decode(path.read_bytes(), Decoding.COLOR),
    "annotated": lambda path: decode_annotated(path.read_bytes(), Decoding.COLOR),
    **{f"marks.{form.name}": partial(read_marked, form=form) for form in AnnotationFormat},
}


@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_is_one_sentence(reader: str, tmp_path: Path) -> None:
    refused = 0
    for number, (kind, content) in enumerate(FILES.items()):
        path = tmp_path / str(number) / reader
        path.parent.mkdir()
        path.write_bytes(content)
        try:
            READERS[reader](path)
        except PoseidonError as error:
            refused += 1
            assert str(error) and "\n" not in str(error), (kind, error)
        except Exception as error:
            raise AssertionError(f"{reader} of {kind}") from error
    assert refused > len(FILES) // 2


@pytest.mark.parametrize(
    "name",
    [
        *("model.caffemodel", "model.caffemodel.h5", "a.solverstate", "a.solverstate.h5"),
        *("tensors.pth", "checkpoint.pt", "checkpoint.pt.rows0", "idx"),
    ],
)
def test_a_pipe_in_place_of_a_file_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_files, "PIPE_SILENT_S", 0.01)
    os.mkfifo(tmp_path / name)
    with pytest.raises(PoseidonError, match=r"it is not a regular file|nothing was written to"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    "read",
    [
        read_mean,
        read_matrix,
        read_model,
        read_net,
        read_solver,
        read_label_map,
        RecordedPlan.read,
        lambda path: read_predictor(path, path, {}),
        lambda path: to_datum(path, 0, Conversion()),
        lambda path: read_marked(path, AnnotationFormat.XML),
    ],
)
def test_a_device_without_end_is_one_sentence(read: Callable[[Path], object]) -> None:
    with pytest.raises(PoseidonError, match="it is a device, not a file or a pipe"):
        read(Path("/dev/zero"))
