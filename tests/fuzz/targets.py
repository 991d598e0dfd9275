"""The fuzz targets: kinds of inputs, and the public functions that read them.

Law: `load` returns when what was read holds together, raises PoseidonError when it was refused, and
anything else, an AssertionError above all, is a finding.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import cv2
import h5py
import numpy as np
import torch

from poseidon.caffe.data.datum import Decoding, RawLayout, decode, encode_datum
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.layers import base
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.blob import from_array
from poseidon.caffe.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    AnnotatedDatum,
    BlobProto,
    Datum,
    LayerParameter,
    NetParameter,
    NetState,
    SolverParameter,
    SolverState,
)
from poseidon.caffe.proto.definition import NetDefinition, read_net, read_solver
from poseidon.caffe.proto.text import parse, to_text
from poseidon.caffe.snapshot import caffemodel, hdf5
from poseidon.caffe.snapshot.solverstate import RunState, read_head, read_state, write_state
from poseidon.caffe.solver.settings import solver_settings
from poseidon.errors import PoseidonError
from tests.fuzz import branches, detection, mutation
from tests.fuzz.fields import Fields
from tests.fuzz.mutation import BINARY, MODEL, TEXT
from tests.support.nets import build

ROOT = Path(__file__).parents[2]
# Of a short net more mutations survive the parser.
LARGEST_TEXT = 6_000
# Nets of the fuzz stay small: a blob beyond this is refused by the same rule as one beyond Caffe's
# limit.
LARGEST_BLOB = 1 << 19
LARGEST_RUN = 1 << 16
NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv1" top: "bn" }
layer { name: "ip1" type: "InnerProduct" bottom: "bn" top: "ip1" inner_product_param { num_output: 5 } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A fuzz target: one kind of input.

    Attributes:
        seeds: valid inputs to mutate.
        mutations: how.
        load: reads a file of it.
        suffix: of the file.
    """

    seeds: Sequence[bytes]
    mutations: tuple[mutation.Mutation, ...]
    load: Callable[[Path], None]
    suffix: str = ""

    def case(self, seed: int, number: int) -> bytes:
        """Return input `number` of a seed."""
        random = Random(f"{seed}:{number}")
        return mutation.mutate(random.choice(self.seeds), random, self.mutations)


def kinds(scratch: Path, shared: Path | None) -> dict[str, Kind]:
    """Return every kind by name.

    Args:
        scratch: an empty folder for files of the making.
        shared: real data, where there is any.
    """
    nets, solvers = _texts(shared)
    net = build(NET)
    models, states, images = _snapshots(scratch, net, shared)
    text_net, text_solver = Fields(NetParameter, "text"), Fields(SolverParameter, "text")
    model, state, datum = (Fields(kind, "binary") for kind in (NetParameter, SolverState, Datum))
    return {
        "prototxt": Kind(
            seeds=nets, mutations=(*TEXT, *[text_net] * 32), load=_load_net, suffix=".prototxt"
        ),
        "branches": Kind(
            seeds=branches.seeds(),
            mutations=(*TEXT, *[text_net] * 32),
            load=run_net,
            suffix=".prototxt",
        ),
        "solver": Kind(
            seeds=solvers,
            mutations=(*TEXT, *[text_solver] * 16),
            load=_load_solver,
            suffix=".prototxt",
        ),
        "binary": Kind(
            seeds=[_binary(text) for text in nets],
            mutations=(*BINARY, *[model] * 4),
            load=_load_net,
        ),
        "caffemodel": Kind(seeds=models, mutations=(*MODEL, *[model] * 10), load=_ModelLoader(net)),
        "solverstate": Kind(
            seeds=states, mutations=(*MODEL, *[state] * 10), load=_StateLoader(net)
        ),
        "hdf5": Kind(seeds=images, mutations=BINARY, load=_Hdf5Loader(net), suffix=".h5"),
        "datum": Kind(seeds=_data(), mutations=(*BINARY, *[datum] * 3), load=_load_datum),
        "detection": Kind(
            seeds=detection.NETS,
            mutations=(*TEXT, *[text_net] * 32),
            load=detection.load_running_net,
            suffix=".prototxt",
        ),
        "augmentation": Kind(
            seeds=detection.texts_of_steps(),
            mutations=(*TEXT, *[Fields(LayerParameter, "text")] * 32),
            load=detection.load_steps,
        ),
        "annotated": Kind(
            seeds=detection.records(),
            mutations=(*BINARY, *[Fields(AnnotatedDatum, "binary")] * 3),
            load=detection.load_record,
        ),
        "annotation": Kind(
            seeds=detection.annotations(), mutations=TEXT, load=detection.load_annotation
        ),
        "mean": Kind(
            seeds=[_mean()], mutations=(*MODEL, Fields(BlobProto, "binary")), load=_load_mean
        ),
    }


def _texts(shared: Path | None) -> tuple[list[bytes], list[bytes]]:
    """Return the nets and solvers of the project and of the corpus, without the long ones."""
    folders = [ROOT / "prototxt"]
    if shared is not None:
        folders += [shared / "data" / "prototxt-corpus", *[shared / "golden" / "layers"] * 3]
    nets, solvers = (
        [NET.encode()],
        [b'net: "n"\nbase_lr: 0.1\nmax_iter: 9\nlr_policy: "step"\ngamma: 0.1\nstepsize: 3\n'],
    )
    for path in sorted(path for folder in folders for path in folder.rglob("*.prototxt")):
        if path.stat().st_size <= LARGEST_TEXT:
            (solvers if b"base_lr" in path.read_bytes() else nets).append(path.read_bytes())
    return nets, solvers


def _binary(text: bytes) -> bytes:
    try:
        return parse(text.decode(), NetParameter(), source="seed").SerializeToString()
    except PoseidonError:  # a foreign layer
        return b""


def _snapshots(
    scratch: Path, net: Net, shared: Path | None
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return models, states, and both in HDF5: our own, and real Caffe's if present."""
    param, blobs = build(NET).definition.param, net.layer_blobs()
    model = caffemodel.to_message(param, blobs)
    models = [model.SerializeToString(), mutation.unpacked(model)]
    hdf5.write_model(scratch / "m.h5", blobs, owned=net.owned_blobs())
    histories = tuple((array,) for _, _, arrays in blobs for array in arrays)
    state = RunState(iteration=7, model="m.caffemodel", histories=histories)
    for name in ("s.solverstate", "s.h5"):
        write_state(scratch / name, state)
    states = [(scratch / "s.solverstate").read_bytes()]
    if shared is not None:
        files = shared / "golden" / "files"
        models += [path.read_bytes() for path in sorted(files.glob("*.caffemodel"))]
        states += [path.read_bytes() for path in sorted(files.glob("*.solverstate"))]
    packed = io.BytesIO()
    with h5py.File(packed, "w") as file:
        for name, _, arrays in blobs:
            for index, array in enumerate(arrays):
                file.create_dataset(
                    f"data/{name}/{index}", data=array, chunks=True, compression="gzip"
                )
    return (
        models,
        states,
        [(scratch / "m.h5").read_bytes(), (scratch / "s.h5").read_bytes(), packed.getvalue()],
    )


def _data() -> list[bytes]:
    """Return raw, float and encoded records."""
    picture = np.arange(3 * 9 * 11, dtype=np.uint8).reshape(3, 9, 11)
    records = [encode_datum(picture, 7), encode_datum(picture[:1].astype(np.float32), 3)]
    for ending in (".png", ".jpg", ".bmp", ".webp", ".tiff"):
        encoded = cv2.imencode(ending, np.ascontiguousarray(picture.transpose(1, 2, 0)))[
            1
        ].tobytes()
        records.append(Datum(data=encoded, encoded=True, label=1).SerializeToString())
    return records


def _mean() -> bytes:
    return from_array(np.ones((1, 3, 4, 4), np.float32)).SerializeToString()


def _load_net(path: Path) -> None:
    definition = read_net(path)
    _check_printing(definition.param)
    for phase in (TRAIN, TEST):
        _compile(definition, phase)


def _compile(definition: NetDefinition, phase: int) -> None:
    _compiled(definition, phase).close()


def _compiled(definition: NetDefinition, phase: int) -> Net:
    state = NetState(phase=phase)  # type: ignore[arg-type]
    with mock.patch.object(base, "LARGEST_BLOB", LARGEST_BLOB):
        return compile_net(definition, LayerContext(phase=phase, seed=1), state=state)


def run_net(path: Path) -> None:
    """Compile a net, and run it if its inputs are small."""
    definition = read_net(path)
    _check_printing(definition.param)
    for phase in (TRAIN, TEST):
        net = _compiled(definition, phase)
        generator = torch.Generator().manual_seed(1)
        shapes = net.input_shapes
        if sum(map(math.prod, [*shapes.values(), *net.blob_shapes.values()])) <= LARGEST_RUN:
            # Small whole numbers: many are legal labels and indices.
            net(
                {
                    name: torch.randint(0, 3, shape, generator=generator).float()
                    for name, shape in shapes.items()
                }
            )
        net.close()


def _check_printing(param: NetParameter | SolverParameter) -> None:
    param.DiscardUnknownFields()  # text has no place for them
    again = parse(to_text(param), type(param)(), source="printed")
    assert again.SerializeToString(deterministic=True) == param.SerializeToString(
        deterministic=True
    )


def _load_solver(path: Path) -> None:
    solver = read_solver(path)
    _check_printing(solver.param)
    rate = solver_settings(solver).rate
    for iteration in (0, 1, 10**6):
        rate(iteration)
    solver.test_nets()
    solver.net_definition()


class _ModelLoader:
    """Reads a model and loads it into a net."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def __call__(self, path: Path) -> None:
        layers = caffemodel.read_model(path)
        numbers = sum(array.size for _, arrays in layers for array in arrays if array is not None)
        assert numbers * 4 <= path.stat().st_size, f"{numbers} numbers of nowhere"
        self._net.load_blobs(layers)


class _StateLoader:
    """Reads a state for the blobs of a net, and for the blobs of the recorded runs."""

    def __init__(self, net: Net) -> None:
        self._blobs = [
            (f"{name}.{index}", array.shape)
            for name, _, arrays in net.layer_blobs()
            for index, array in enumerate(arrays)
        ]

    def __call__(self, path: Path) -> None:
        read_head(path)
        state = read_state(path, self._blobs, 1)
        assert [arrays[0].shape for arrays in state.histories] == [
            shape for _, shape in self._blobs
        ]


class _Hdf5Loader:
    """Reads a file as a model, or if it is not one, as a state."""

    def __init__(self, net: Net) -> None:
        self._net, self._states = net, _StateLoader(net)

    def __call__(self, path: Path) -> None:
        try:
            self._net.load_blobs(caffemodel.read_model(path))
        except PoseidonError:
            self._states(path)


def _load_datum(path: Path) -> None:
    record = path.read_bytes()
    layout = RawLayout.of(record)
    for decoding in Decoding:
        array, label = decode(record, decoding)
        assert (
            array.ndim == 3 and array.dtype in (np.uint8, np.float32) and -(2**31) <= label < 2**31
        )
        if layout is not None:
            assert bytes(layout.pixels(record)) == array.tobytes()
            assert layout.label(record[layout.end :]) == label


def _load_mean(path: Path) -> None:
    mean = read_mean(path)
    assert mean.size * 4 <= path.stat().st_size
