"""`poseidon classify`: the likeliest classes of pictures, as Caffe's classification.bin prints
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import text_of
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.tools.classification import PictureScores
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.cli.net_requests import one_device
from poseidon.errors import DataError
from ps_server.numerics import prepare_process


def run(arguments: argparse.Namespace) -> int:
    """Print the classes of each picture; 0 when all of them have been."""
    prepare_process()
    mean, labels, pictures = arguments.mean, arguments.labels, arguments.pictures
    if len(pictures) == 3 and pictures[0].suffix == ".binaryproto":  # as Caffe's tool takes them
        mean, labels, *pictures = pictures
    names = _labels(labels) if labels is not None else ()
    request = NetRequest(
        model=arguments.net,
        weights=(arguments.model,),
        phase=TEST,
        device=one_device(arguments.gpu),
    )
    net = open_net(request)
    try:
        scores = PictureScores(
            net,
            mean=mean,
            scale=arguments.scale,
            size=arguments.images_dim,
            rgb=arguments.rgb,
        )
        for path in pictures:
            found = scores.of(path)
            if names and len(names) != len(found):
                raise DataError(
                    f"{labels} has {len(names)} labels, but the net returns {len(found)} scores; "
                    "expected a line for each"
                )
            print(f"---------- Prediction for {path} ----------")
            for place in (-found).argsort(kind="stable")[: arguments.top].tolist():
                print(f"{found[place]:.4f} - " + (f'"{names[place]}"' if names else str(place)))
    finally:
        net.close()
    return 0


def _labels(path: Path) -> Sequence[str]:
    try:
        text = text_of(read_definition(path))
    except OSError as error:
        raise DataError(f"cannot read the labels {path}: {error.strerror}") from error
    if text is None:
        raise DataError(f"{path} is not text; expected a line with the name of each class")
    return text.splitlines()
