"""A model that Caffe trained, through pycaffe; and nets that read databases."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import poseidon.pycaffe as caffe
from tests.poseidon.pycaffe.conftest import Write


def test_a_classifier_knows_the_eagle(shared: Path) -> None:
    place = shared / "data" / "models" / "squeezenet_v1.0_deepcompression"
    net = caffe.Classifier(
        place / "SqueezeNet_deploy.prototxt",
        place / "squeezenet_v1.0_decompressed.caffemodel",
        image_dims=(256, 256),
        mean=np.array([104.0, 117.0, 123.0]),
        raw_scale=255,
        channel_swap=(2, 1, 0),
    )
    birds_of_prey = range(21, 25)  # ILSVRC-2012: kite, bald eagle, vulture, great grey owl
    (photograph,) = (shared / "data" / "images").rglob("eagle.jpg")
    scores = net.predict([caffe.io.load_image(photograph)])
    assert scores.shape == (1, 1000)
    assert int(scores.argmax()) in birds_of_prey


def test_data_layers_read_and_let_go(shared: Path, write: Write) -> None:
    database = shared / "data" / "dbs" / "lmdb" / "train_lmdb"
    path = write(
        f"""
        layer {{ name: "d" type: "Data" top: "data" top: "label"
          data_param {{ source: "{database}" backend: LMDB batch_size: 3 }} }}
        layer {{ name: "s" type: "Silence" bottom: "data" bottom: "label" }}
        """
    )
    net = caffe.Net(str(path), caffe.TEST)
    seen = []
    for _ in range(2):
        net.forward()
        seen.append(net.blobs["data"].data.copy())
    assert seen[0].shape == (3, 3, 32, 32) and np.abs(seen[0] - seen[1]).max() > 0
    del net  # the reader's thread ends: the test would fail if it did not
