"""`poseidon deploy` and `poseidon classify`: the commands and scripts of docs/trained_nets.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import poseidon
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.cli.main import main
from poseidon.cli.models import deploy_name

PAGE = Path(__file__).parents[3] / "docs" / "trained_nets.md"
NET = """
name: "small"
layer { name: "pictures" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { crop_size: 24 mean_file: "mean.binaryproto" }
  data_param { source: "db" backend: LMDB batch_size: 2 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 } param { name: "shared" lr_mult: 2 }
  convolution_param { num_output: 5 kernel_size: 5 stride: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "prob_of_test" type: "Softmax" bottom: "ip" top: "tested" include { phase: TEST stage: "look" } }
"""
NAMES = ("cat", "dog", "bird", "fish")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A net that was trained on a database of pictures, which are here too."""
    monkeypatch.chdir(tmp_path)
    random, lines = np.random.default_rng(0), []
    for label, name in enumerate(NAMES):
        cv2.imwrite(f"{name}.png", random.integers(0, 256, (32, 32, 3), np.uint8))
        lines.append(f"{name}.png {label}\n")
    Path("list").write_text("".join(lines), encoding="utf-8")
    assert main(["convert_imageset", "./", "list", "db"]) == 0
    assert main(["compute_image_mean", "db", "mean.binaryproto"]) == 0
    Path("train_val.prototxt").write_text(NET, encoding="utf-8")
    Path("labels.txt").write_text("\n".join(NAMES), encoding="utf-8")
    net = open_net(NetRequest(model=Path("train_val.prototxt"), phase=TEST))
    write_model(Path("net.caffemodel"), net.definition.param, net.layer_blobs())
    net.close()
    return tmp_path


def scores_of_the_test_net() -> np.ndarray:
    """Return the scores of the four pictures by the net that trains, in its phase TEST."""
    request = NetRequest(
        model=Path("train_val.prototxt"),
        weights=(Path("net.caffemodel"),),
        phase=TEST,
        stages=("look",),
    )
    net = open_net(request)
    with torch.no_grad():
        scores = torch.cat([net()["tested"].clone() for _ in range(2)])
    net.close()
    return scores.numpy()


def test_the_page(folder: Path, capsys: pytest.CaptureFixture[str], unbound: None) -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = dict.fromkeys(("sh", "python"), 0)
    expected, variables = scores_of_the_test_net(), {}
    capsys.readouterr()
    poseidon.bind()
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", page, re.DOTALL):
        made[language] += 1
        if language == "python":
            exec(block, variables)
            continue
        for line in block.splitlines():
            command, *words = shlex.split(line, comments=True)
            assert (command, main(words)) == ("poseidon", 0), line
    assert made == {"sh": 2, "python": 2}
    said = capsys.readouterr().out
    first = page.partition("```\nWrote ")[2].partition("```")[0]
    assert said.startswith(f"Wrote {first}")
    assert [line.removeprefix("---------- ") for line in said.splitlines() if "-----" in line] == [
        *(f"Prediction for {name}.png ----------" for name in ("cat", "cat", "dog", "cat"))
    ]
    best = np.argsort(-expected[0], kind="stable")
    numbered = [f"{expected[0][place]:.4f} - {place}" for place in best]
    assert said.splitlines()[3:7] == numbered
    named = [f'{expected[0][place]:.4f} - "{NAMES[place]}"' for place in best]
    assert "\n".join(named) in said
    # the script subtracts the mean pixel
    assert variables["scores"].shape == (2, 4)


def test_the_deploy_net_computes_what_the_test_net_does(folder: Path) -> None:
    import poseidon.pycaffe as caffe

    assert main(["deploy", "train_val.prototxt", "--batch=4"]) == 0
    text = Path("deploy.prototxt").read_text(encoding="utf-8")
    assert not re.search(r"lr_mult|filler|include|loss|accuracy|label", text)
    assert 'name: "shared"' in text
    net = caffe.Net("deploy.prototxt", caffe.TEST, weights="net.caffemodel")
    mean = read_mean(Path("mean.binaryproto"))
    data = [cv2.imread(f"{name}.png").transpose(2, 0, 1) - mean for name in NAMES]
    net.blobs["data"].data[...] = np.stack(data)[:, :, 4:28, 4:28]
    np.testing.assert_array_equal(net.forward()["prob"], scores_of_the_test_net())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["deploy", "train_val.prototxt"], 2, "deploy.prototxt exists; name the file to write"),
        (["classify", "deploy.prototxt", "net.caffemodel"], 2, "PICTURE is missing"),
        (["classify", "deploy.prototxt", "net.caffemodel", "no.png"], 1, "no.png: there is no su"),
        (["classify", "deploy.prototxt", "net.caffemodel", "list"], 1, "the image list cannot be"),
        (
            ["classify", "train_val.prototxt", "net.caffemodel", "cat.png"],
            2,
            "the net's inputs are",
        ),
        (
            ["classify", "deploy.prototxt", "net.caffemodel", "cat.png", "--labels=list2"],
            1,
            "list2 has 2 labels, but the net returns 4 scores; expected a line for each",
        ),
        (
            ["classify", "deploy.prototxt", "net.caffemodel", "cat.png", "--mean=1,2"],
            2,
            "the mean has 2 values, but the net takes 3 channels; expected 1 or 3",
        ),
        (
            ["classify", "deploy.prototxt", "net.caffemodel", "cat.png", "--images_dim=8"],
            1,
            "crop_size 24 is larger than the images",
        ),
    ],
)
def test_commands_of_models_name_wrong_input(
    folder: Path, words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "train_val.prototxt"]) == 0
    Path("list2").write_text("a\nb\n", encoding="utf-8")
    assert main(words) == code
    assert f"poseidon {words[0]}: {sentence}" in capsys.readouterr().err


def test_usual_names() -> None:
    assert deploy_name(Path("models/lenet_train_test.prototxt")) == "lenet_deploy.prototxt"
    assert deploy_name(Path("train_val.prototxt")) == "deploy.prototxt"
    assert deploy_name(Path("net.prototxt")) == "net_deploy.prototxt"
