"""A sample of the corpus of every grammar and kind is built and run; the whole takes minutes:
`python -m tests.corpus`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.verdicts import verdict_of

BOTH = ["TRAIN: forward, backward", "TEST: forward"]
TRAINED = ("today's", [*BOTH, "random inputs for Data"])
SAMPLE = {
    "BVLC__caffe/examples/mnist/lenet_train_test.prototxt": TRAINED,
    "BVLC__caffe/examples/mnist/mnist_autoencoder.prototxt": (
        "today's",
        [
            BOTH[0],
            "TEST test-on-test: forward",
            "TEST test-on-train: forward",
            "random inputs for Data",
        ],
    ),
    "BVLC__caffe/examples/hdf5_classification/nonlinear_train_val.prototxt": (
        "today's",
        [*BOTH, "random inputs for HDF5Data"],
    ),
    "BVLC__caffe/examples/cifar10/cifar10_quick.prototxt": ("today's", ["TEST: forward"]),
    "everpeace__caffe/examples/siamese/mnist_siamese_train_test.prototxt": (
        "V1",
        ["TRAIN: forward, backward", "random inputs for Data"],
    ),
    "everpeace__caffe/examples/mnist/lenet.prototxt": ("V1, input_dim", ["TEST: forward"]),
    "junyuseu__ResNet-on-Cifar10/data_augmentation/20/res20_cifar_train_test.prototxt": TRAINED,
    "BVLC__caffe/examples/mnist/lenet_solver_adam.prototxt": ("today's", ["legal (Adam, fixed)"]),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str, shared: Path) -> None:
    verdict = verdict_of(shared / "data" / "prototxt-corpus" / name)
    grammar, words = SAMPLE[name]
    assert verdict.read and verdict.printed
    assert (verdict.grammar, verdict.words) == (grammar, words)
    assert verdict.kind == "solver" or (verdict.built and verdict.ran)


def test_what_does_not_build_says_why(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text('layer { name: "a" type: "ReLU" bottom: "x" top: "y" }')
    verdict = verdict_of(path)
    assert verdict.read and verdict.printed and not verdict.built
    assert verdict.words == ["line 1: layer 'a' (ReLU): unknown bottom 'x'"]


def test_what_is_no_number_is_told(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "i" type: "Input" top: "data" input_param { shape { dim: 2 dim: 9 } } }'
        'layer { name: "l" type: "Power" bottom: "data" top: "y" power_param { power: 0.5 } }'
    )
    assert verdict_of(path).words == ["TEST: forward, not finite"]
