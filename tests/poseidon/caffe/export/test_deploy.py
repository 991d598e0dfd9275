"""Deploy nets: those of the zoo are the published ones, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.export.deploy import deploy_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.definition import parse_net, read_net
from poseidon.errors import DefinitionError, UsageError
from tests.support.databases import make_pictures

ROOT = Path(__file__).parents[4]
DATA = """
layer { name: "in" type: "DummyData" top: "data" top: "label" top: "other"
  dummy_data_param { data_filler { type: "uniform" } data_filler { type: "uniform" } data_filler { type: "uniform" }
    shape { dim: 5 dim: 6 } shape { dim: 5 dim: 6 } shape { dim: 5 dim: 6 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 6 } }
"""


def loss(kind: str, bottoms: str, rest: str = "") -> str:
    named = " ".join(f'bottom: "{bottom}"' for bottom in bottoms.split())
    name = f"{kind}_{bottoms.replace(' ', '_')}"
    return f'layer {{ name: "{name}" type: "{kind}" {named} top: "{name}" {rest} }}\n'


def deploy(text: str, **settings: int) -> Net:
    definition = parse_net(text.encode(), source="net.prototxt", folder=Path("/nowhere"))
    return deploy_net(definition, {}, **settings)


def kinds(net: Net) -> list[tuple[str, list[str], list[str]]]:
    return [
        (layer.type, list(layer.bottom), list(layer.top)) for layer in net.definition.param.layer
    ]


@pytest.mark.parametrize("name", ["alexnet", "caffenet", "googlenet", "nin", "squeezenet"])
def test_the_zoos_deploy_nets(name: str) -> None:
    folder = ROOT / "prototxt" / name
    net = deploy_net(read_net(folder / "train_val.prototxt"), {})
    published = read_net(folder / "deploy.prototxt").param.layer
    assert kinds(net) == [(layer.type, list(layer.bottom), list(layer.top)) for layer in published]
    assert all(shape[0] == 1 for shape in net.input_shapes.values())


@pytest.mark.parametrize(
    ("losses", "outputs"),
    [
        (loss("SoftmaxWithLoss", "ip label"), {"prob": "Softmax"}),
        (loss("SigmoidCrossEntropyLoss", "ip other"), {"prob": "Sigmoid"}),
        (loss("EuclideanLoss", "ip other"), {"ip": "InnerProduct"}),
        (loss("Accuracy", "ip label"), {"ip": "InnerProduct"}),
        (  # an autoencoder compares with its input
            loss("SigmoidCrossEntropyLoss", "ip data") + loss("EuclideanLoss", "ip data"),
            {"prob": "Sigmoid"},
        ),
        (  # two tasks
            loss("SoftmaxWithLoss", "ip label") + loss("EuclideanLoss", "data other"),
            {"prob": "Softmax"},
        ),
        (
            loss("SoftmaxWithLoss", "ip label")
            + loss("SoftmaxWithLoss", "ip other", "loss_weight: 0.5"),
            {"prob": "Softmax", "SoftmaxWithLoss_ip_other_prob": "Softmax"},
        ),
        (  # an auxiliary classifier
            'layer { name: "aux" type: "ReLU" bottom: "data" top: "aux" }\n'
            + loss("SoftmaxWithLoss", "aux label", "loss_weight: 0.3")
            + loss("Accuracy", "aux label")
            + loss("SoftmaxWithLoss", "ip label"),
            {"prob": "Softmax"},
        ),
        (loss("Silence", "label") + loss("SoftmaxWithLoss", "ip label"), {"prob": "Softmax"}),
    ],
)
def test_what_becomes_of_losses(losses: str, outputs: dict[str, str]) -> None:
    net = deploy(DATA + losses.replace('top: "Silence_label"', ""), batch=2)
    types = {top: layer.type for layer in net.definition.param.layer for top in layer.top}
    assert {name: types[name] for name, _ in net.plan.outputs} == outputs
    assert "aux" not in types
    assert "label" not in types


def test_the_shape_of_data(tmp_path: Path) -> None:
    make_pictures(tmp_path / "db", 1)
    text = (
        'layer {{ name: "d" type: "Data" top: "data" top: "label" data_param {{ source: "{}" '
        "backend: LMDB batch_size: 8 }} {} }}" + DATA.partition("\n}")[0].split("\n")[-1]
    )
    text += 'layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: 6 }} }}'
    (_, *extents) = deploy(text.format(tmp_path / "db", "")).input_shapes["data"]
    assert len(extents) == 3
    cropped = deploy(text.format("/none", "transform_param { crop_size: 7 }"), batch=3)
    assert cropped.input_shapes == {"data": (3, 3, 7, 7)}
    with pytest.raises(UsageError, match="state it as it is after cropping: --input=data:1,C,H,W"):
        deploy(text.format("/none", ""))
    with pytest.raises(DefinitionError, match="no output to deploy"):
        deploy('layer { name: "d" type: "Input" top: "x" input_param { shape { dim: 1 } } }')
