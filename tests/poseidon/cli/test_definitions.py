"""Projects of the zoo's nets and upgrades of definitions: paths lead into the project, and existing
files stay.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.projects import EXAMPLES, projects
from poseidon.caffe.proto.text import parse
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.tools.preflight import check_nets
from poseidon.cli.main import main
from tests.support.sampling import sample

NAMES = sorted(projects())


@pytest.mark.parametrize("name", sample([(name,) for name in NAMES], every=3))
def test_a_project_stands_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine" / name
    assert main(["init", name, str(folder)]) == 0
    files = sorted(folder.iterdir())
    assert {"README.md", "machinefile"} - {path.name for path in files} == (
        {"machinefile"} if name == "net_surgery" else set()
    )
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(prototxt|examples|machinefiles)/", text), path
        assert "repository" not in text, path
        assert "use_environment" not in text, path
    for path in folder.glob("*.prototxt"):
        if "solver" not in path.name:
            read_net(path)
            continue
        solver = read_solver(path)
        check_nets(solver, solver_settings(solver))
        if "net" in {field.name for field, _ in solver.param.ListFields()}:
            assert solver.resolve(solver.param.net).parent == folder


def test_the_readme_has_the_commands_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "cifar10", str(tmp_path / "c")]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert [line.split()[:2] for line in commands] == [
        ["cd", str(tmp_path / "c")],
        ["poseidon", "prepare_cifar10"],
        ["poseidon", "train"],
    ]
    readme = (tmp_path / "c" / "README.md").read_text(encoding="utf-8")
    assert [line for line in readme.splitlines() if line.startswith("    ")] == commands[1:]
    solver = re.search(r"--solver=(\S+)", readme)
    assert solver is not None and (tmp_path / "c" / solver[1]).is_file()


@pytest.mark.parametrize(("name", "program"), [("cifar10", "poseidon"), ("net_surgery", "python")])
def test_the_commands_work_without_an_activated_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    program: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for each in ("poseidon", "python"):
        (folder / each).write_text("")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["init", name, "a project"]) == 0
    first, *commands = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")
    ]
    assert first == "    cd 'a project'"
    assert commands and {line.split()[0] for line in commands} == {f"../.venv/bin/{program}"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_of_an_example_name_its_files(tmp_path: Path, name: str) -> None:
    assert main(["init", name, str(tmp_path / name)]) == 0
    scripts = [
        word for command in EXAMPLES[name] for word in command.split() if word.endswith(".py")
    ]
    assert scripts and all((tmp_path / name / script).is_file() for script in scripts)
    for path in (tmp_path / name).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        compile(text, path, "exec")
        assert "sys.path" not in text


def test_the_readme_names_only_what_the_project_has(tmp_path: Path) -> None:
    readmes = {}
    for name in ("net_surgery", "resnet50", "torch_cnn", "faster_rcnn", "segnet", "lenet", "nin"):
        assert main(["init", name, str(tmp_path / name)]) == 0
        readmes[name] = (tmp_path / name / "README.md").read_text(encoding="utf-8")
    assert not re.search("machinefile|job|snapshot|poseidon run", readmes["net_surgery"])
    assert "output/<job>" not in readmes["resnet50"] and "poseidon plot" not in readmes["torch_cnn"]
    assert "poseidon plot -o curves.png" in readmes["lenet"]
    assert "--solver_mode=CPU" in readmes["nin"] and "--solver_mode=CPU" not in readmes["lenet"]
    for name, words in {"faster_rcnn": "poseidon convert_voc", "segnet": "label image"}.items():
        assert words in readmes[name] and "convert_imageset" not in readmes[name]


def test_surgery_of_a_project_needs_no_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "net_surgery", str(tmp_path / "mine")]) == 0
    module = runpy.run_path(str(tmp_path / "mine" / "convolve.py"))
    assert module["DEFINITION"] == tmp_path / "mine" / "lenet.prototxt"
    module["main"]([])
    assert "3x5 places" in capsys.readouterr().out


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    assert main(["init", "lenet", str(tmp_path / "full")]) == 2
    assert "exists already and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    assert main(["init", "mnist", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "lenet_solver.prototxt").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_the_projects_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    listed = capsys.readouterr().out
    assert main(["init", "--list"]) == 0
    assert capsys.readouterr().out == listed
    assert all(f"{name} " in listed for name in NAMES)
    for wrong, hint in (
        ("cifar", "did you mean cifar10?"),
        ("xyzzy", "`poseidon init` lists them"),
    ):
        assert main(["init", wrong]) == 2
        assert f"there is no project '{wrong}'; {hint}" in capsys.readouterr().err


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
        ("upgrade_net_proto_text", b'layers { layer { type: "nosuch" } }', "layer 1 of the file"),
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
    assert "old: layer 1 of the file" in capsys.readouterr().err
