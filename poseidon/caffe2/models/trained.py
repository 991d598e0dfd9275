"""The folder of trained models: `$CAFFE2_MODELS`, by default `~/.caffe2/models`.

A model is a folder with `init_net.pb`, `predict_net.pb` and, except for old ones,
`value_info.json`, the types and shapes of its inputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from poseidon.base.settings import model_zoo
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.errors import DataError

NETS = ("predict_net.pb", "init_net.pb")
VALUE_INFO = "value_info.json"
ZOO = (
    *("bvlc_alexnet", "bvlc_googlenet", "bvlc_reference_caffenet", "bvlc_reference_rcnn_ilsvrc13"),
    *("densenet121", "finetune_flickr_style", "inception_v1", "inception_v2", "mobilenet_v2"),
    *("resnet50", "squeezenet", "vgg16", "vgg19", "zfnet512"),
)
"""Models of Caffe2's zoo, whose absence is explained where a script imports them."""


def models_folder(variable: str = "CAFFE2_MODELS") -> Path:
    """Return the folder of trained models that a variable names; see the module."""
    return model_zoo(variable)[0]


def is_name(name: str) -> bool:
    """Return whether a name may be a model's: letters, digits, `_`, `-`, and `/` inside."""
    return name != "__init__" and re.fullmatch(r"[\w-]+(/[\w-]+)*", name, re.ASCII) is not None


def is_model(folder: Path) -> bool:
    """Return whether a folder has the nets of a model."""
    return all((folder / name).is_file() for name in NETS)


def read_model(folder: Path) -> tuple[NetDef, NetDef, dict[str, Any]]:
    """Return the init net of a model, the net that predicts, and the types and shapes of its
    inputs, as in {"data": [1, [1, 3, 224, 224]]}; empty where the model has none.

    Raises:
        DataError: a file is missing or damaged.
    """
    info = folder / VALUE_INFO
    try:
        shapes = json.loads(info.read_bytes()) if info.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{info} cannot be read as shapes of inputs: {error}") from error
    return read_net(folder / "init_net.pb"), read_net(folder / "predict_net.pb"), shapes


def read_net(path: Path) -> NetDef:
    """Return the net of a file.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        net = NetDef.FromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except DecodeError as error:
        raise DataError(f"{path} is not a net of Caffe2") from error
    if not net.op:
        raise DataError(f"{path} is not a net of Caffe2: it has no operators")
    return net
