"""Checks before a process starts; the messages are held through the command line in
test_broken_inputs.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.layers import registry
from poseidon.caffe.layers.base import Layer, LayerContext
from poseidon.caffe.proto.caffe_pb2 import TRAIN
from poseidon.caffe.proto.definition import SolverDefinition, read_solver
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.tools.preflight import (
    Extraction,
    check_layers,
    check_nets,
    check_snapshot_prefix,
)
from poseidon.engine.document import read_document
from poseidon.errors import DataError, DefinitionError, UsageError
from poseidon.exchange.membership import Membership
from ps_server.network import Network
from ps_server.protocol.seats import Seat
from tests.support.training import write_definitions


def test_a_sound_solver_passes_without_its_data(tmp_path: Path) -> None:
    solver = read_solver(write_definitions(tmp_path, batch=4, extra="max_iter: 3"))
    assert check_nets(solver, solver_settings(solver)).param.name == "small"
    check_snapshot_prefix(solver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.prototxt", "solver.prototxt"]


def test_a_folder_of_snapshots_is_made_in_one_that_is_there_alone(tmp_path: Path) -> None:
    new, wrong = tmp_path / "new" / "snap", tmp_path / "nosuch" / "new" / "snap"
    for prefix in (tmp_path / "snap", new):
        check_snapshot_prefix(
            read_solver(write_definitions(tmp_path, batch=4)).with_settings(
                [f"snapshot_prefix={prefix}"]
            )
        )
    solver = read_solver(write_definitions(tmp_path, batch=4)).with_settings(
        [f"snapshot_prefix={wrong}"]
    )
    with pytest.raises(
        DefinitionError, match=f"there is no folder {tmp_path}/nosuch to make new in; make it"
    ):
        check_snapshot_prefix(solver)
    assert not new.parent.exists() and not wrong.parent.parent.exists()


def test_no_loss_matters_only_to_training(tmp_path: Path) -> None:
    for max_iter in (0, 3):
        solver = read_solver(write_definitions(tmp_path, batch=4, extra=f"max_iter: {max_iter}"))
        net = tmp_path / "net.prototxt"
        net.write_text(net.read_text().replace('"SoftmaxWithLoss"', '"Accuracy"'))
        if max_iter:
            with pytest.raises(DefinitionError, match="no loss to train on"):
                check_nets(solver, solver_settings(solver))
        else:
            check_nets(solver, solver_settings(solver))


ALONE = LayerContext(phase=TRAIN, seed=1)
DUMMY = """
layer {{ name: "x" type: "DummyData" top: "x" top: "t"
  dummy_data_param {{ shape {{ dim: 4 dim: 6 }} shape {{ dim: 4 dim: 2 }} }} }}
{layers}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }}
"""
INNER = 'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {more} inner_product_param {{ num_output: {n} }} }}'


def inner(bottom: str, top: str, outputs: int, *, more: str = "") -> str:
    return INNER.format(name=f"ip_{top}", bottom=bottom, top=top, n=outputs, more=more)


def solver_of_layers(folder: Path, *layers: str) -> SolverDefinition:
    (folder / "net.prototxt").write_text(DUMMY.format(layers="\n".join(layers)))
    (folder / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 1 lr_policy: "fixed" max_iter: 1'
    )
    return read_solver(folder / "solver.prototxt")


def test_a_mistake_of_the_test_net_alone_is_found(tmp_path: Path) -> None:
    """It shares the blobs of the train net."""
    layers = [
        inner("x", "y", n, more=f"include {{ phase: {phase} }}")
        for n, phase in ((2, "TRAIN"), (3, "TEST"))
    ]
    solver = solver_of_layers(tmp_path, *layers)
    check_layers(solver, [ALONE], files_are_here=True)
    solver.param.test_iter.append(1)
    solver.param.test_interval = 1
    with pytest.raises(DefinitionError, match=r"layer 'ip_y' .InnerProduct."):
        check_layers(solver, [ALONE], files_are_here=True)


def test_code_of_the_user_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies below it is checked, and what lies beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "with_effects.py").write_text("raise SystemExit('imported')")

    class Counted(Layer):
        def __init__(self, *_: object) -> None:
            pytest.fail("created")

    monkeypatch.setitem(registry._CLASSES, "Counted", Counted)
    python = 'layer { name: "py" type: "Python" bottom: "h" top: "p" python_param { module: "with_effects" layer: "L" } }'
    counted = 'layer { name: "own" type: "Counted" bottom: "p" top: "y" }'
    for below, beside, says in (
        (inner("x", "h", 3), inner("x", "side", 4), None),
        (inner("x", "h", 0), inner("x", "side", 4), "ip_h"),
        (inner("x", "h", 3), inner("x", "side", 0), "ip_side"),
    ):
        solver = solver_of_layers(tmp_path, below, python, counted, beside)
        if says is None:
            check_layers(solver, [ALONE], files_are_here=True)
            continue
        with pytest.raises(DefinitionError, match=rf"layer '{says}' .*num_output"):
            check_layers(solver, [ALONE], files_are_here=True)


def test_a_blob_whose_owner_is_unknown_is_left_to_the_worker(tmp_path: Path) -> None:
    """The second layer may differ from the first in shape where the owner, which both must suit,
    is not known here.
    """
    named = 'param { name: "w" share_mode: PERMISSIVE } param { name: "b" share_mode: PERMISSIVE }'
    python = 'layer { name: "py" type: "Python" bottom: "x" top: "p" python_param { module: "m" layer: "L" } }'
    owner, sharer = inner("p", "h", 3, more=named), inner("x", "y", 2, more=named)
    check_layers(solver_of_layers(tmp_path, python, owner, sharer), [ALONE], files_are_here=True)
    with pytest.raises(DefinitionError, match=r"layer 'ip_y' .*param 'w'"):
        check_layers(
            solver_of_layers(tmp_path, owner.replace('"p"', '"x"'), sharer),
            [ALONE],
            files_are_here=True,
        )


def test_files_of_other_hosts_are_not_looked_for(tmp_path: Path) -> None:
    path = write_definitions(tmp_path, batch=4, extra="max_iter: 3")
    check_layers(read_solver(path), [ALONE], files_are_here=False)
    with pytest.raises(DataError, match=r"layer 'data' \(Data\)"):
        check_layers(read_solver(path), [ALONE], files_are_here=True)
    with pytest.raises(DefinitionError, match=r"layer 'ip_y' .*num_output"):
        check_layers(solver_of_layers(tmp_path, inner("x", "y", 0)), [ALONE], files_are_here=False)


WHOLE = Extraction(
    model="/net.prototxt",
    weights=("/a", "/b"),
    blobs=("fc7", "fc8"),
    databases=("/f7", "/f8"),
    backend="leveldb",
    job="j",
    member=Membership(network=Network(rank=5, size=6), hosts=(1, 3, 2)),
)


def test_round_trip() -> None:
    assert read_document(Extraction, WHOLE.to_json()) == WHOLE


def test_names() -> None:
    assert WHOLE.paths() == (Path("/f7_2_1"), Path("/f8_2_1"))
    alone = replace(WHOLE, job="", databases=("features",), blobs=("a",))
    assert alone.paths() == (Path("features"),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a Extraction"),
        (b'{"nodel": "x"}', "fields that this version does not know"),
        (b'{"model": 3}', "Extraction has 3 as its model"),
        (b'{"model": "m"}', "Extraction has no"),
        (WHOLE.to_json().replace(b'["/f7", "/f8"]', b'["/f7"]'), "2 blobs and"),
        (WHOLE.to_json().replace(b'"fc8"', b'"fc7"'), "the blob fc7 is named twice"),
        (WHOLE.to_json().replace(b'"/f8"', b'"/f7"'), "the database /f7 is named twice"),
        (WHOLE.to_json().replace(b'"batches": 0', b'"batches": -1'), "num_mini_batches is -1"),
        (WHOLE.to_json().replace(b'"leveldb"', b'"hdf5"'), "unknown backend 'hdf5'"),
    ],
)
def test_illegal_documents_of_an_extraction_are_refused(line: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_document(Extraction, line)


def test_parts_whose_records_differ_in_size_are_named(tmp_path: Path) -> None:
    for part, extent in enumerate((4, 5)):
        cv2.imwrite(str(tmp_path / f"{part}.png"), np.zeros((extent, extent, 3), np.uint8))
        (tmp_path / f"list_{part}").write_text(f"{part}.png 0\n")
    data = """layer { name: "d" type: "ImageData" top: "x" top: "t" image_data_param { source: "list"
      batch_size: 1 shared_file_system: false } }"""
    loss = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "t" top: "loss" }'
    (tmp_path / "net.prototxt").write_text("\n".join((data, inner("x", "y", 2), loss)))
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 1 lr_policy: "fixed"')
    solver = read_solver(tmp_path / "solver.prototxt")
    clients = [
        replace(ALONE, seat=Seat(host=part, host_count=2), rank=part, workers=2) for part in (0, 1)
    ]
    with pytest.raises(DataError, match=r"list_1 make 'x' 1x3x5x5, those of .*list_0 1x3x4x4"):
        check_layers(solver, clients, files_are_here=True)
