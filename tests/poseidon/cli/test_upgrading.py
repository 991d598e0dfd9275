"""The upgrade commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import parse
from poseidon.cli.main import main

OLD_NET = 'layers { name: "ip" type: INNER_PRODUCT bottom: "x" top: "y" blobs_lr: 2 blobs { num: 1 data: 3 } }'
NEW_NET = 'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" param { lr_mult: 2 } blobs { num: 1 data: 3 } }'
OLD_SOLVER, NEW_SOLVER = "solver_type: ADAGRAD base_lr: 0.1", 'type: "AdaGrad" base_lr: 0.1'


def net(text: str) -> NetParameter:
    return parse(text, NetParameter(), source="")


def test_net_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_text(OLD_NET)
    assert main(["upgrade_net_proto_text", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert net((tmp_path / "new").read_text()) == net(NEW_NET)
    assert f"Wrote a net in text to {tmp_path / 'new'}" in capsys.readouterr().out


def test_what_is_up_to_date_is_written_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").write_text(NEW_NET)
    assert main(["upgrade_net_proto_text", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert net((tmp_path / "new").read_text()) == net(NEW_NET)
    assert "already in today's grammar" in capsys.readouterr().out


def test_standard_output_gets_the_net_alone(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(NEW_NET)
    command = [sys.executable, "-m", "poseidon", "upgrade_net_proto_text"]
    found = subprocess.run(
        [*command, str(tmp_path / "old"), "/dev/stdout"], capture_output=True, text=True, check=True
    )
    assert net(found.stdout) == net(NEW_NET)
    assert "already in today's grammar" in found.stderr and "to /dev/stdout" in found.stderr


def test_net_binary_keeps_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(net(OLD_NET).SerializeToString())
    assert main(["upgrade_net_proto_binary", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert NetParameter.FromString((tmp_path / "new").read_bytes()) == net(NEW_NET)


def test_solver_text(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(OLD_SOLVER)
    assert main(["upgrade_solver_proto_text", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    expected = parse(NEW_SOLVER, SolverParameter(), source="")
    assert parse((tmp_path / "new").read_text(), SolverParameter(), source="") == expected


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("upgrade_net_proto_text", b"layers { type: NOSUCH }", "old:1"),
        (
            "upgrade_net_proto_text",
            b'layers { layer { type: "nosuch" } }',
            "layer 1 of the file: unknown layer type",
        ),
        ("upgrade_net_proto_text", b"layers { } layer { }", "mixes"),
        ("upgrade_net_proto_binary", b"layer { }", "is not a binary net"),
        ("upgrade_net_proto_binary", b"", "old: the file is empty"),
        ("upgrade_solver_proto_text", b"solver_type: SGD type: 'Adam'", "type"),
    ],
)
def test_mistakes_leave_nothing_behind(
    command: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").write_bytes(content)
    (tmp_path / "new").write_bytes(b"before")
    assert main([command, str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "new").read_bytes() == b"before"


def test_definitions_are_read_in_binary_too(tmp_path: Path) -> None:
    (tmp_path / "net").write_bytes(net(OLD_NET).SerializeToString())
    assert read_net(tmp_path / "net").param == net(NEW_NET)
    solver = SolverParameter(net="a net", base_lr=0.5)
    (tmp_path / "solver").write_bytes(solver.SerializeToString())
    assert read_solver(tmp_path / "solver").param == solver


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_text('layers { layer { type: "relu" kernelsize: 3 } }')
    assert main(["upgrade_net_proto_text", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert net((tmp_path / "new").read_text()) == net('layer { type: "ReLU" }')
    assert (
        "old: layer 1 of the file: kernelsize is not a setting of a 'relu' layer"
        in capsys.readouterr().err
    )
