"""The examples' definitions say what their READMEs promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from poseidon.layers.registry import layer_class
from poseidon.net.plan import plan_net
from poseidon.proto.definition import read_net
from tests.support.trainings import machinefile, poseidon


def test_the_net_for_feature_extraction_is_caffenet(repository: Path) -> None:
    definition = read_net(repository / "examples" / "feature_extraction" / "imagenet_val.prototxt")
    data = definition.param.layer[0]
    assert (data.type, list(data.top)) == ("ImageData", ["data", "label"])
    assert data.image_data_param.shared_file_system
    data.type = "Input"  # the plan needs no pictures
    plan = plan_net(definition, layer_class)
    assert {"fc7", "prob"} <= plan.names.keys()
    outputs = {
        layer.name: layer.inner_product_param.num_output
        for layer in definition.param.layer
        if "fc" in layer.name
    }
    assert outputs == {"fc6": 4096, "fc7": 4096, "fc8": 1000}


def test_surgery_leaves_the_scores_as_they_were(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(repository / "examples" / "net_surgery" / "convolve.py"))["main"]
    main([])
    places, difference = re.fullmatch(
        r"(\dx\d) places, greatest difference (\S+)\n", capsys.readouterr().out
    ).groups()  # type: ignore[union-attr]
    assert places == "3x5"
    assert float(difference) < 1e-5


@pytest.mark.parametrize("words", [("--max_iter=1",), ("--clients=3",)])
def test_cifar10_into_no_folder_is_one_sentence(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    main = runpy.run_path(str(repository / "examples" / "cifar10" / "train_cifar10.py"))["main"]
    main.__globals__["prepare_and_tell"] = lambda request: None
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main([*words, f"--output={taken}"]) == 1
    assert capsys.readouterr().err == f"train_cifar10.py: {taken}: File exists\n"


@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("script", "words", "result", "least"),
    [
        ("torch_cnn", ("--epochs=3", "--records=1024"), r"epoch 3: loss \S+, accuracy (\S+)%", 30.0),
        pytest.param(
            "torch_cnn",
            ("--epochs=3", "--records=1024", "--torch_optimizer"),
            r"epoch 3: loss \S+, accuracy (\S+)%",
            30.0,
            marks=pytest.mark.thorough,
        ),
        ("transformer", ("--steps=60", "--width=32"), r"(\S+)% of the letters", 18.0),
    ],
)
def test_torch_modules_learn_on_two_clients(
    repository: Path, tmp_path: Path, script: str, words: tuple[str, ...], result: str, least: float
) -> None:
    path = repository / "examples" / script / "train.py"
    done = poseidon(tmp_path, "run", f"--hostfile={machinefile(tmp_path, 2)}", path, *words)
    assert done.returncode == 0, done.stderr
    found = re.search(result, done.stderr)
    assert found is not None, done.stderr
    assert float(found.group(1)) > least
