"""Turn LeNet into a fully convolutional net and score a larger image at every position in one
pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np

import poseidon.pycaffe as caffe
from poseidon.errors import PoseidonError

HERE = Path(__file__).resolve().parent
# In a project of `poseidon init` LeNet is beside this file.
DEFINITION = HERE / "lenet.prototxt"
if not DEFINITION.is_file():
    DEFINITION = HERE.parents[1] / "prototxt" / "lenet" / "lenet.prototxt"
# Fully-connected layer -> the convolution that does its work.
CONVOLVED = {"ip1": "ip1-conv", "ip2": "ip2-conv"}


def convolved(net: caffe.Net) -> caffe.Net:
    """Return the net as convolutions, with the same numbers: row o of an InnerProduct is kernel
    o, C x H x W.
    """
    result = caffe.Net(str(Path(__file__).with_name("lenet_conv.prototxt")), caffe.TEST)
    for name, blobs in net.params.items():
        for mine, theirs in zip(result.params[CONVOLVED.get(name, name)], blobs, strict=True):
            mine.data.flat = theirs.data.flat
    return result


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="of LeNet; default: random weights")
    parser.add_argument("out", nargs="?", help="the convolutional net's weights")
    files = parser.parse_args(words)
    weights = [files.model] if files.model else []
    net = caffe.Net(str(DEFINITION), *weights, caffe.TEST)
    surgery = convolved(net)
    picture = np.random.default_rng(0).random((1, 1, 36, 44), np.float32)
    surgery.blobs["data"].reshape(*picture.shape)
    surgery.blobs["data"].data[...] = picture
    map_of_scores = surgery.forward()["prob"].copy()
    net.blobs["data"].reshape(1, 1, 28, 28)
    worst = 0.0
    for row, column in np.ndindex(map_of_scores.shape[2:]):
        top, left = 4 * row, 4 * column  # two poolings of stride 2
        net.blobs["data"].data[...] = picture[:, :, top : top + 28, left : left + 28]
        worst = max(
            worst, float(np.abs(net.forward()["prob"] - map_of_scores[..., row, column]).max())
        )
    print(
        f"{map_of_scores.shape[2]}x{map_of_scores.shape[3]} places, greatest difference {worst:.1e}"
    )
    if files.out:
        surgery.save(files.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PoseidonError as error:
        sys.exit(f"convolve.py: {error}")
