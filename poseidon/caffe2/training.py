"""The ResNet-50 trainer of examples/: its flags, what follows from them, the store in which its shards
meet (by the flags of each shard, or in a job of `poseidon run`), and its checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from poseidon.caffe2 import core, workspace
from poseidon.caffe2 import data_parallel_model as dpm
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.models import resnet
from poseidon.caffe2.predictor import predictor_exporter, predictor_py_utils
from poseidon.caffe2.predictor_constants import predictor_constants
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.shards.rendezvous import published_address
from poseidon.caffe2.workspace.current import current
from poseidon.errors import UsageError

AUTO = "auto"
"""The value of --shard_batch_sizes that has the speed of each shard measured."""
POSITIVE = (
    "batch_size",
    "num_shards",
    "num_labels",
    "image_size",
    "resnext_num_groups",
    "resnext_width_per_group",
    "first_iter_timeout",
    "timeout",
)
"""The flags whose values are above 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the flags.

    Attributes:
        gpus: the devices of this host.
        shards, shard: the hosts, and which one this is.
        batch_sizes: images of each shard in an iteration.
        epoch_iters: iterations of an epoch.
        weighted: the shards read unequal parts of each batch.
    """

    gpus: list[int]
    shards: int
    shard: int
    batch_sizes: list[int]
    epoch_iters: int
    weighted: bool

    @property
    def batch_size(self) -> int:
        """Images of this shard in an iteration."""
        return self.batch_sizes[self.shard]

    @property
    def epoch_size(self) -> int:
        """Images of an epoch, of all shards."""
        return self.epoch_iters * sum(self.batch_sizes)


def switch(text: str) -> bool:
    """Read true or false."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"expected true or false, found '{text}'")
    return known[text.lower()]


def add_flag(group: Any, name: str, text: str, **settings: Any) -> None:
    """Add a flag; one without type or default is a switch, on without a value."""
    if not settings:
        settings = {"type": switch, "nargs": "?", "const": True, "default": False}
    group.add_argument(f"--{name}", help=text, **settings)


def flags() -> argparse.ArgumentParser:
    """Return the parser of the flags: the flags of Caffe2's trainers, then what was added."""
    parser = argparse.ArgumentParser(description="Train ResNet-50 on a database of images")
    data = parser.add_argument_group("data")
    add_flag(data, "train_data", "database; null: random images", required=True, metavar="PATH")
    add_flag(data, "test_data", "database to test each epoch on", default=None, metavar="PATH")
    add_flag(data, "db_type", "lmdb, leveldb or minidb", default="lmdb")
    add_flag(data, "num_channels", "3: color, 1: gray", type=int, default=3)
    add_flag(data, "image_size", "side of the images", type=int, default=227)
    add_flag(data, "num_labels", "classes", type=int, default=1000)
    for name, what in (("mean", "subtracted"), ("std", "divided by")):
        text = f"what is {what} for each channel"
        add_flag(data, f"image_{name}_per_channel", text, type=float, nargs="*", default=None)
    model = parser.add_argument_group("model")
    nets = ("resnext", "shufflenet")
    add_flag(model, "model", "resnext or shufflenet", choices=nets, default="resnext")
    add_flag(model, "num_layers", "18, 34, 50, 101, 152 or 200", type=int, default=50)
    add_flag(model, "resnext_num_groups", "groups of the 3x3 convolutions", type=int, default=1)
    add_flag(model, "resnext_width_per_group", "their width", type=int, default=64)
    add_flag(
        model,
        "dtype",
        "storage of activations and parameters",
        choices=("float", "float16"),
        default="float",
    )
    add_flag(model, "float16_compute", "compute in float16")
    add_flag(model, "enable_tensor_core", "let GPUs use tensor cores")
    add_flag(model, "model_parallel", "not supported: ends with a sentence")
    add_flag(model, "cudnn_workspace_limit_mb", "memory of cuDNN", type=int, default=64)
    training = parser.add_argument_group("training")
    add_flag(training, "batch_size", "images of this machine in an iteration", type=int, default=32)
    add_flag(training, "epoch_size", "images of an epoch, in all", type=int, default=1500000)
    add_flag(training, "num_epochs", "epochs", type=int, default=1000)
    add_flag(training, "test_epoch_size", "images of a test (all)", type=int, default=None)
    add_flag(training, "base_learning_rate", "for a batch of 256", type=float, default=0.1)
    add_flag(training, "weight_decay", "L2 regularization", type=float, default=1e-4)
    add_flag(training, "save_model_name", "of checkpoints", default="resnet50_model")
    add_flag(training, "load_model_path", "checkpoint to load", default=None, metavar="PATH")
    add_flag(training, "first_iter_timeout", "seconds of iteration 1", type=int, default=1200)
    add_flag(training, "timeout", "seconds of each other", type=int, default=60)
    devices = parser.add_argument_group("devices")
    add_flag(devices, "gpus", "their numbers, with commas", default=None)
    add_flag(devices, "num_gpus", "how many, in place of a list", type=int, default=1)
    add_flag(devices, "use_cpu", "compute on the CPU")
    add_flag(devices, "use_nccl", "NCCL between the GPUs of a machine")
    add_flag(devices, "use_ideep", "accepted; the CPU computes as always")
    shards = parser.add_argument_group("several machines")
    add_flag(shards, "num_shards", "machines", type=int, default=1)
    add_flag(shards, "shard_id", "this machine, from 0", type=int, default=0)
    add_flag(shards, "run_id", "unique name of this start, the same on all", default=None)
    add_flag(
        shards,
        "file_store_path",
        "shared folder of rendezvous and checkpoints",
        default="/tmp",
        metavar="DIR",
    )
    add_flag(shards, "redis_host", "Redis in place of the folder for the rendezvous", default=None)
    add_flag(shards, "redis_port", "its port", type=int, default=6379)
    add_flag(shards, "distributed_transport", "tcp", choices=("tcp", "ibverbs"), default="tcp")
    add_flag(shards, "distributed_interfaces", "network interface of this machine", default="")
    add_flag(
        shards,
        "shard_batch_sizes",
        "batch size of each, with commas; auto: by speed",
        default=None,
        metavar="N,...",
    )
    added = parser.add_argument_group("not in Caffe2")
    add_flag(added, "image_scale", "shorter side before the crop", type=int, default=256)
    add_flag(added, "seed", "of parameters, crops and mirror images", type=int, default=0)
    return parser


def numbers(flag: str, text: str) -> list[int]:
    """Read whole numbers with commas between them."""
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise UsageError(f"--{flag}={text}: expected whole numbers with commas, such as 0,1")
    return [int(part) for part in text.split(",")]


def plan_of(
    args: argparse.Namespace, *, workers: int = 1, rank: int = 0, gpu: int | None = None
) -> Plan:
    """Check the flags and return what follows from them.

    Args:
        args: the flags.
        workers, rank: of the job that started this process; more than one worker are the shards.
        gpu: the GPU that the job has given this process; None: none.

    Raises:
        UsageError: flags contradict each other.
    """
    for name in POSITIVE:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name}={getattr(args, name)}: expected a whole number above 0")
    if args.redis_port not in range(1, 65536):
        raise UsageError(f"--redis_port={args.redis_port}: expected a port, 1 to 65535")
    gpus = list(range(args.num_gpus)) if gpu is None else [gpu]
    if args.gpus is not None:
        gpus = numbers("gpus", args.gpus)
    if not gpus:
        raise UsageError(f"--num_gpus={args.num_gpus}: expected a whole number above 0")
    if len(set(gpus)) < len(gpus):
        raise UsageError(f"--gpus={args.gpus}: expected each GPU once")
    shards, shard = args.num_shards, args.shard_id
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        shards, shard = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("SIZE", "RANK"))
    if workers > 1:
        shards, shard = workers, rank
    if not 0 <= shard < max(shards, 1):
        raise UsageError(f"--shard_id={shard}: expected 0 to {shards - 1} (--num_shards)")
    sizes = [args.batch_size] * shards
    if args.shard_batch_sizes and args.shard_batch_sizes != AUTO:
        sizes = numbers("shard_batch_sizes", args.shard_batch_sizes)
    if len(sizes) != shards or min(sizes) < 1:
        raise UsageError(
            f"--shard_batch_sizes={args.shard_batch_sizes}: expected {shards} numbers above 0"
        )
    if any(size % len(gpus) for size in sizes[shard : shard + 1]):
        raise UsageError(f"{len(gpus)} GPUs cannot share a batch of {sizes[shard]} evenly")
    iters = args.epoch_size // sum(sizes)
    if iters < 1:
        raise UsageError(
            f"--epoch_size={args.epoch_size} is less than one batch of all shards, {sum(sizes)} "
            "images"
        )
    if args.image_size > args.image_scale:
        raise UsageError(
            f"--image_size={args.image_size}: expected at most --image_scale={args.image_scale}"
        )
    if args.num_channels not in (1, 3):
        raise UsageError(f"--num_channels={args.num_channels}: expected 3 (color) or 1 (gray)")
    for name in ("image_mean_per_channel", "image_std_per_channel"):
        if getattr(args, name) and len(getattr(args, name)) != args.num_channels:
            raise UsageError(f"--{name}: expected {args.num_channels} numbers, one a channel")
    if args.model_parallel:
        raise UsageError("--model_parallel is not supported: use replicas")
    if args.num_layers not in resnet.BLOCKS:
        raise UsageError(f"--num_layers={args.num_layers}: expected one of {sorted(resnet.BLOCKS)}")
    if not -(2**63) <= args.seed < 2**64:
        raise UsageError(f"--seed={args.seed}: expected a number of 64 bits")
    return Plan(gpus, shards, shard, sizes, iters, weighted=len(set(sizes)) > 1)


STORE = "store_handler"
"""The blob of the store's handler."""
LONGEST_ADDRESS = 128
"""Bytes of an address and a port."""


class Group(Protocol):
    """What `poseidon.distribute` returns."""

    def mean(self, numbers: Tensor) -> Any:
        """Return the mean over the workers."""


def from_flags(args: argparse.Namespace, plan: Plan) -> dict[str, Any] | None:
    """Make the flags' store: Redis if a host is given, else a folder; None for one shard.

    Raises:
        UsageError: there is no run id.
        RuntimeError: the store cannot be reached.
    """
    if plan.shards == 1:
        return None
    if args.run_id is None:
        raise UsageError("--run_id is missing: give all shards one new name")
    if args.redis_host:
        kind = "RedisStoreHandlerCreate"
        where: dict[str, Any] = {"host": args.redis_host, "port": args.redis_port}
    else:
        kind, where = "FileStoreHandlerCreate", {"path": args.file_store_path}
    workspace.RunOperatorOnce(
        core.CreateOperator(kind, [], [STORE], prefix=str(args.run_id), **where)
    )
    return _rendezvous(args, plan)


def in_job(args: argparse.Namespace, plan: Plan, group: Group) -> dict[str, Any]:
    """Make a store in the memory of rank 0, and tell the other workers of the job its address.

    Args:
        args: the flags.
        plan: the shards are the workers of the job.
        group: the workers.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    host = published_address(_interface(args) or None)
    if plan.shard == 0:
        _tcp_store(host, 0, serve=True)
        port = current().get(STORE).value.store.port
        _broadcast(group, f"{host} {port}", plan.shards)
    else:
        host, _, port = _broadcast(group, "", plan.shards).rpartition(" ")
        _tcp_store(host, int(port), serve=False)
    return _rendezvous(args, plan)


def _rendezvous(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "kv_handler": STORE,
        "shard_id": plan.shard,
        "num_shards": plan.shards,
        "engine": "GLOO",
        "transport": args.distributed_transport,
        "interface": _interface(args),
        "exit_nets": None,
    }


def _interface(args: argparse.Namespace) -> str:
    """Return the first of the network interfaces, as Caffe2 did."""
    interfaces: str = args.distributed_interfaces
    return interfaces.partition(",")[0]


def _tcp_store(host: str, port: int, *, serve: bool) -> None:
    where: dict[str, Any] = {"host": host, "port": port, "prefix": "trainer", "serve": int(serve)}
    workspace.RunOperatorOnce(core.CreateOperator("TCPStoreHandlerCreate", [], [STORE], **where))


def _broadcast(group: Group, text: str, workers: int) -> str:
    """Return rank 0's text on all workers; the others give an empty one."""
    numbers = torch.zeros(LONGEST_ADDRESS, dtype=torch.int64)
    numbers[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.int64)
    sums = torch.as_tensor(group.mean(numbers)) * workers
    return bytes(round(float(number)) for number in sums).rstrip(b"\0").decode()


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
