"""Drawings of nets."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pydot
import pytest

from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from poseidon.caffe.proto.definition import read_net
from poseidon.cli.main import main
from poseidon.errors import UsageError
from poseidon.pycaffe.draw import draw_net_to_file, get_edge_label, get_layer_label, get_pydot_graph

ALEXNET = Path("prototxt/alexnet/train_val.prototxt")


@pytest.fixture(scope="module")
def alexnet() -> NetParameter:
    return read_net(Path(__file__).parents[3] / ALEXNET).param


def labels(net: NetParameter, **how: object) -> list[str]:
    return [node.get_label() for node in get_pydot_graph(net, "LR", **how).get_nodes()]  # type: ignore[arg-type]


def test_every_definition_of_the_repository_has_a_graph(repository: Path) -> None:
    """Longer ResNets have no layer that ResNet-50 has not."""
    for path in repository.glob("prototxt/**/*.prototxt"):
        if not path.name.startswith(("resnet101", "resnet152")) and "solver" not in path.name:
            net = read_net(path).param
            nodes = {layer.name for layer in net.layer}
            assert len(get_pydot_graph(net, "TB", phase=TEST).get_nodes()) > len(nodes) / 2, path


def test_boxes_say_what_the_layers_are(alexnet: NetParameter) -> None:
    conv2 = next(layer for layer in alexnet.layer if layer.name == "conv2")
    assert (
        get_layer_label(conv2, "LR")
        == "conv2 | (Convolution) | kernel size: 5 | stride: 1 | pad: 2"
    )
    assert get_layer_label(conv2, "TB").startswith("conv2\\n(Convolution)\\n")
    assert get_layer_label(conv2, "LR", True).endswith("lr mult: 1, 2")
    assert get_edge_label(conv2) == "256"


def test_phases(alexnet: NetParameter) -> None:
    assert sum("accuracy" in label for label in labels(alexnet, phase=TEST)) > 0
    assert sum("accuracy" in label for label in labels(alexnet, phase=TRAIN)) == 0
    assert sum("(Data)" in label for label in labels(alexnet)) == 2


def test_signs_of_the_dot_language_are_only_letters() -> None:
    net = NetParameter()
    net.layer.add(name='a"b{c}<d>|', type="ReLU", bottom=["x"], top=["y"])
    assert '"a\\"b\\{c\\}\\<d\\>/' in labels(net)[0]


@pytest.mark.needs("dot")
@pytest.mark.parametrize(
    ("extension", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_command(extension: str, magic: bytes, tmp_path: Path, repository: Path) -> None:
    target = tmp_path / f"net.{extension}"
    words = ["draw_net", str(repository / ALEXNET), str(target), "--rankdir", "TB"]
    assert main([*words, "--phase", "TEST"]) == 0
    assert target.read_bytes().startswith(magic)


@pytest.mark.needs("dot")
@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
@pytest.mark.parametrize(
    "net", ["googlenet/train_val", "resnet/resnet50_train_val", "lenet/lenet_train_test"]
)
def test_the_drawing_is_legible_on_a4(
    repository: Path, tmp_path: Path, net: str, phase: str
) -> None:
    """Fitted to a page with margins of 1 cm, a line is 5 points high or more; a drawing fills
    its view.
    """
    target = tmp_path / "net.svg"
    path = str(repository / f"prototxt/{net}.prototxt")
    assert main(["draw_net", path, str(target), f"--phase={phase}"]) == 0
    root = ElementTree.fromstring(target.read_bytes())
    width, height = (
        float((root.get(side) or "").removesuffix("pt")) for side in ("width", "height")
    )
    shown = [float(number) for number in (root.get("viewBox") or "").split()]
    assert [shown[0] + shown[2], shown[1] + shown[3]] == pytest.approx([width, height], abs=1), (
        "it is not cut off"
    )
    a4 = (190 / 25.4 * 72, 277 / 25.4 * 72)
    assert 9 * max(min(x / width, y / height) for x, y in (a4, a4[::-1])) >= 5


@pytest.mark.needs("dot")
def test_an_unknown_format(
    alexnet: NetParameter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="format 'nosuch', expected png, svg or pdf"):
        draw_net_to_file(alexnet, tmp_path / "net.nosuch")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_a_wrong_file_direction_or_program_is_named(
    alexnet: NetParameter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="missing extension"):
        draw_net_to_file(alexnet, tmp_path / "net")
    with pytest.raises(UsageError, match="rankdir is 'UP', expected one of LR"):
        get_pydot_graph(alexnet, "UP")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="install the package graphviz"):
        draw_net_to_file(alexnet, tmp_path / "net.png")


def test_the_command_reads_no_data_and_draws_one_phase(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphs: list[str] = []

    def lay_out(graph: pydot.Dot, extension: str) -> bytes:
        graphs.append(graph.to_string())
        return b"picture"

    monkeypatch.setattr("poseidon.cli.models.render", lay_out)
    words = ["draw_net", str(repository / ALEXNET), str(tmp_path / "net.png")]
    assert main(words) == 0
    assert (tmp_path / "net.png").read_bytes() == b"picture"
    assert "<b>conv2</b><br/>Convolution 5x5 x 256<br/>group 2, ReLU" in graphs[0]
    assert "accuracy" not in graphs[0]
    assert main([*words, "--shapes"]) == 1  # those depend on the data, which is not here
    assert "layer 'data' (Data): the database" in capsys.readouterr().err
    deploy = str(repository / ALEXNET.with_name("deploy.prototxt"))
    assert main([*words[:1], deploy, *words[2:], "--shapes", "--phase=TEST"]) == 0
    assert "10x96x55x55" in graphs[1]
    assert main([*words, "--shapes", "--phase=ALL"]) == 2
