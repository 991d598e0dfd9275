"""Checkpoints of `resnet50_trainer.py`: an epoch's parameters and nets as a Caffe2 predictor."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

from poseidon.caffe2 import core, workspace
from poseidon.caffe2 import data_parallel_model as dpm
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.predictor import predictor_exporter, predictor_py_utils
from poseidon.caffe2.predictor_constants import predictor_constants
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.errors import UsageError

LOGGER = logging.getLogger("resnet50_trainer")


def checkpoint_path(args: argparse.Namespace, epoch: int) -> Path:
    """Return the file of the checkpoint after so many epochs."""
    return Path(args.file_store_path) / f"{args.save_model_name}_{epoch}.mdl"


def save(args: argparse.Namespace, model: ModelHelper, epoch: int) -> Path:
    """Write a checkpoint after so many epochs, remove the one before; return the new path.

    The first makes the folder.
    """
    first = f"{model._device_prefix}_{model._devices[0]}"
    inputs = {f"{first}/{name}" for name in ("data", "data_fp32", "label")}
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=model.net.Proto(),
        parameters=sorted({str(blob) for blob in dpm.GetCheckpointParams(model)} - inputs),
        inputs=[f"{first}/data"],
        outputs=[f"{first}/softmax"],
        shapes={
            f"{first}/data": (args.num_channels, args.image_size, args.image_size),
            f"{first}/softmax": (1, args.num_labels),
        },
    )
    path = checkpoint_path(args, epoch)
    path.parent.mkdir(exist_ok=True)
    predictor_exporter.save_to_db("minidb", str(path), meta)
    checkpoint_path(args, epoch - 1).unlink(missing_ok=True)
    return path


def epoch_of(path: str) -> int:
    """Return the epochs of a checkpoint, by its name."""
    found = re.search(r"_(\d+)\.mdl$", path)
    if found is None:
        LOGGER.warning("The name of %s has no epoch (_<epoch>.mdl): counting from 0", path)
        return 0
    LOGGER.info("Reset epoch to %s", found[1])
    return int(found[1])


def load(path: str, model: ModelHelper) -> None:
    """Read a checkpoint into the first device, and copy it to all devices and shards."""
    LOGGER.info("Loading path: %s", path)
    first = core.DeviceOption(model._device_type, model._devices[0])
    meta = predictor_exporter.load_from_db(path, "minidb", first)
    before = shapes_of_params(model)
    for kind in (
        predictor_constants.PREDICT_INIT_NET_TYPE,
        predictor_constants.GLOBAL_INIT_NET_TYPE,
    ):
        workspace.RunNetOnce(core.Net(predictor_py_utils.GetNet(meta, kind)))
    check_loaded(path, meta, before, shapes_of_params(model))
    iteration = workspace.FetchBlob("optimizer_iteration")
    on_cpu = core.DeviceOption(caffe2_pb2.PROTO_CPU, 0)
    workspace.FeedBlob("optimizer_iteration", iteration, device_option=on_cpu)
    dpm.FinalizeAfterCheckpoint(model)


def shapes_of_params(model: ModelHelper) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the first device."""
    scope = f"{model._device_prefix}_{model._devices[0]}/"
    names = [str(param) for param in model.params if str(param).startswith(scope)]
    return {name: workspace.FetchBlob(name).shape for name in names}


def check_loaded(path: str, meta: Any, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise UsageError for a different network's checkpoint: parameters missing or misshapen."""
    stored = set(predictor_py_utils.GetBlobs(meta, predictor_constants.PARAMETERS_BLOB_TYPE))
    for name, shape in expected.items():
        if name in stored and found[name] == shape:
            continue
        has = f"{name} has the shape {found[name]}" if name in stored else f"it has no {name}"
        raise UsageError(
            f"--load_model_path={path}: {has}, the network of the flags expects the shape {shape}; "
            "use the flags with which the checkpoint was written"
        )
