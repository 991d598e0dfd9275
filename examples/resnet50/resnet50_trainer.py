"""Trains ResNet-50 and its relatives on a database of images: on one host, or on several that
are started by hand.

    python examples/resnet50/resnet50_trainer.py --train_data data/two_class_train --num_labels 2 --epoch_size 1280

The flags, log lines and log file are as in Caffe2's trainer; README.md explains what was added.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# A checkout works without being installed; a copy of this file uses the package that is installed.
sys.path[:0] = [
    str(root) for root in Path(__file__).absolute().parents if (root / "poseidon").is_dir()
]

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import torch

import poseidon
from poseidon.caffe2 import (
    brew,
    core,
    experiment_util,
    optimizer,
    timeout_guard,
    training,
    workspace,
)
from poseidon.caffe2 import data_parallel_model as dpm
from poseidon.caffe2.images.records import holds_datums
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.initializers import Initializer, PseudoFP16Initializer
from poseidon.caffe2.models import resnet, shufflenet
from poseidon.caffe2.runtime import databases
from poseidon.caffe2.runtime.errors import sentence
from poseidon.caffe2.training import AUTO, Plan, flags, from_flags, in_job, plan_of
from poseidon.errors import JobError, PoseidonError, UsageError

logging.basicConfig()
log = logging.getLogger("resnet50_trainer")
log.setLevel(logging.DEBUG)

EPOCHS_OF_A_STEP = 30
"""The learning rate falls to a tenth after so many epochs."""
MEASURED = 3
"""Iterations in which the speed of a shard is measured."""
EXPLODED = 40
"""A loss from which on training has failed."""


class Builders:
    """The builder functions of `Parallelize`."""

    def __init__(self, args: argparse.Namespace, plan: Plan) -> None:
        self.args = args
        self.plan = plan

    def image_input(self, reader: Any, is_test: bool, path: str) -> Any:
        """Return the builder of images from a database."""
        args = self.args
        options = {
            "batch_size": self.plan.batch_size // len(self.plan.gpus),
            "scale": args.image_scale,
            "crop": args.image_size,
            "color": int(args.num_channels == 3),
            "mirror": 1,
            "is_test": is_test,
            "use_caffe_datum": holds_datums(path, args.db_type),
            "output_type": args.dtype,
        }
        for name, default in (("mean", 128.0), ("std", 128.0)):
            given = getattr(args, f"image_{name}_per_channel")
            options[f"{name}_per_channel" if given else name] = given or default

        def build(model: Any) -> None:
            on_gpu = core.IsGPUDeviceType(model._device_type)
            data, _ = brew.image_input(
                model, reader, ["data", "label"], order="NCHW", use_gpu_transform=on_gpu, **options
            )
            model.StopGradient(data, data)
            if args.dtype == "float16" and not on_gpu:
                model.FloatToHalf(data, data)

        return build

    def null_input(self, model: Any) -> None:
        """Add random images of class 1, made once: what is measured then is arithmetic alone."""
        batch = self.plan.batch_size // len(self.plan.gpus)
        side = self.args.image_size
        data = "data_fp32" if self.args.dtype == "float16" else "data"
        model.param_init_net.GaussianFill(
            [], [data], shape=[batch, self.args.num_channels, side, side]
        )
        if self.args.dtype == "float16":
            model.param_init_net.FloatToHalf(data, "data")
        model.param_init_net.ConstantFill(
            [], ["label"], shape=[batch], value=1, dtype=core.DataType.INT32
        )

    def network(self, is_test: bool) -> Any:
        """Return the builder of the layers."""
        args = self.args
        half = args.dtype == "float16"
        initializer = PseudoFP16Initializer if half else Initializer
        create: Any = shufflenet.create_shufflenet
        options: dict[str, Any] = {}
        if args.model == "resnext":
            create = resnet.create_resnext
            options = {
                "num_layers": args.num_layers,
                "num_groups": args.resnext_num_groups,
                "num_width_per_group": args.resnext_width_per_group,
                "no_bias": True,
            }

        def build(model: Any, loss_scale: float) -> list[Any]:
            with brew.arg_scope(
                [brew.conv, brew.fc],
                WeightInitializer=initializer,
                BiasInitializer=initializer,
                float16_compute=args.float16_compute,
                enable_tensor_core=args.enable_tensor_core,
            ):
                scores = create(
                    model,
                    "data",
                    num_input_channels=args.num_channels,
                    num_labels=args.num_labels,
                    no_loss=True,
                    is_test=is_test,
                    **options,
                )
            if half:
                scores = model.net.HalfToFloat(scores, f"{scores}_fp32")
            softmax, loss = model.SoftmaxWithLoss([scores, "label"], ["softmax", "loss"])
            loss = model.Scale(loss, scale=loss_scale)
            brew.accuracy(model, [softmax, "label"], "accuracy")
            return [loss]

        return build

    def optimizer(self, model: Any) -> Any:
        """Add SGD with Nesterov's momentum, whose rate falls after each 30 epochs."""
        args = self.args
        settings = {
            "momentum": 0.9,
            "nesterov": 1,
            "policy": "step",
            "stepsize": max(
                1, EPOCHS_OF_A_STEP * self.plan.epoch_size // sum(self.plan.batch_sizes)
            ),
            "gamma": 0.1,
        }
        if args.float16_compute:
            return optimizer.build_fp16_sgd(
                model, args.base_learning_rate, weight_decay=args.weight_decay, **settings
            )
        optimizer.add_weight_decay(model, args.weight_decay)
        return optimizer.build_multi_precision_sgd(model, args.base_learning_rate, **settings)


def measured_sizes(args: argparse.Namespace, plan: Plan, meeting: Any) -> list[int]:
    """Return batch sizes of the shards by the speed at which each trains on random images."""
    workspace.SwitchWorkspace("speed", True)
    model = ModelHelper(name="speed")
    builders = Builders(args, plan)
    dpm.Parallelize(
        model,
        input_builder_fun=builders.null_input,
        forward_pass_builder_fun=builders.network(is_test=False),
        optimizer_builder_fun=builders.optimizer,
        devices=plan.gpus,
        cpu_device=args.use_cpu,
    )
    dpm.RunInitNet(model)
    dpm.RunNet(model, 1)
    start = time.perf_counter()
    dpm.RunNet(model, MEASURED)
    speed = MEASURED * plan.batch_size / (time.perf_counter() - start)
    workspace.ResetWorkspace()
    workspace.SwitchWorkspace("default")
    speeds = dpm.ExchangeValue(meeting, "speed", speed)
    sizes = dpm.BatchSizesBySpeed(sum(plan.batch_sizes), speeds, multiple=len(plan.gpus))
    log.info(
        f"Images/sec of each shard: {[round(speed, 2) for speed in speeds]}, batch sizes: {sizes}"
    )
    return sizes


def build_train_model(
    args: argparse.Namespace, plan: Plan, meeting: Any, epoch: int
) -> ModelHelper:
    """Return the model that trains, on all devices and with the shards' sums of gradients."""
    arg_scope = {
        "order": "NCHW",
        "use_cudnn": True,
        "cudnn_exhaustive_search": True,
        "ws_nbytes_limit": args.cudnn_workspace_limit_mb << 20,
    }
    model = ModelHelper(name="resnet50", arg_scope=arg_scope)
    builders = Builders(args, plan)
    if args.train_data == "null":
        add_input = builders.null_input
    else:
        sizes = {"shard_sizes": plan.batch_sizes} if plan.weighted else {}
        reader = model.CreateDB(
            "reader",
            db=args.train_data,
            db_type=args.db_type,
            num_shards=plan.shards,
            shard_id=plan.shard,
            skip=epoch * plan.epoch_iters * plan.batch_size,
            **sizes,
        )
        add_input = builders.image_input(reader, is_test=False, path=args.train_data)
    dpm.Parallelize(
        model,
        input_builder_fun=add_input,
        forward_pass_builder_fun=builders.network(is_test=False),
        optimizer_builder_fun=builders.optimizer,
        devices=plan.gpus,
        rendezvous=meeting,
        use_nccl=args.use_nccl,
        cpu_device=args.use_cpu,
        ideep=args.use_ideep,
        shard_batch_sizes=plan.batch_sizes if plan.weighted else None,
    )
    dpm.OptimizeGradientMemory(model, {}, set(), False)
    return model


def build_test_model(args: argparse.Namespace, plan: Plan) -> ModelHelper:
    """Return the model that tests, with the parameters of the training model."""
    log.info("----- Create test net ----")
    model = ModelHelper(name="resnet50_test", init_params=False)
    builders = Builders(args, plan)
    reader = model.CreateDB("test_reader", db=args.test_data, db_type=args.db_type)
    dpm.Parallelize(
        model,
        input_builder_fun=builders.image_input(reader, is_test=True, path=args.test_data),
        forward_pass_builder_fun=builders.network(is_test=True),
        devices=plan.gpus,
        use_nccl=args.use_nccl,
        cpu_device=args.use_cpu,
        ideep=args.use_ideep,
    )
    return model


def check_folder(path: str) -> None:
    """Raise UsageError when checkpoints cannot be written to a folder; the first makes one that
    is not there.
    """
    folder = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    try:
        # permissions do not tell of all file systems, /proc for one
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"--file_store_path={path}: expected a folder in which checkpoints can be written "
            f"({error.strerror})"
        ) from error


def fetch(model: ModelHelper, name: str) -> float:
    """Return the mean of a scalar over the devices."""
    blobs = [f"{model._device_prefix}_{device}/{name}" for device in model._devices]
    return float(np.mean([workspace.FetchBlob(blob) for blob in blobs]))


def test(args: argparse.Namespace, plan: Plan, model: ModelHelper) -> float:
    """Return the accuracy of a pass over the test images."""
    size = args.test_epoch_size or databases.count(args.test_data, args.db_type)
    accuracies = []
    for _ in range(max(1, size // plan.batch_size)):
        workspace.RunNet(model.net.Proto().name)
        accuracies.append(fetch(model, "accuracy"))
    return float(np.mean(accuracies))


def run_epoch(
    args: argparse.Namespace, plan: Plan, model: ModelHelper, epoch: int
) -> tuple[float, float]:
    """Train for an epoch; return loss and accuracy of its last batch."""
    log.info(f"Starting epoch {epoch}/{args.num_epochs}")
    for i in range(plan.epoch_iters):
        with timeout_guard.CompleteInTimeOrDie(args.first_iter_timeout if i == 0 else args.timeout):
            start = time.perf_counter()
            dpm.RunNet(model, 1) if i == 0 else workspace.RunNet(model.net.Proto().name)
            seconds = time.perf_counter() - start
        rate = plan.batch_size / seconds
        log.info(
            f"Finished iteration {i + 1}/{plan.epoch_iters} of epoch {epoch} ({rate:.2f} "
            "images/sec)"
        )
        loss, accuracy = fetch(model, "loss"), fetch(model, "accuracy")
        log.info(f"Training loss: {loss}, accuracy: {accuracy}")
    return loss, accuracy


def open_log(args: argparse.Namespace, plan: Plan, begin: int) -> experiment_util.ModelTrainerLog:
    """Return the log file: a new one, or the log of the run that has ended before epoch `begin`."""
    model = f"resnet{args.num_layers}" if args.model == "resnext" else args.model
    name = (
        f"{model}_gpu{len(plan.gpus)}_b{plan.batch_size}_L{args.num_labels}"
        f"_lr{args.base_learning_rate:.2f}_v2" + (f"_shard{plan.shard}" if plan.shard else "")
    )
    earlier = [
        path
        for path in sorted(Path().glob(f"{name}_[0-9]*.log"))  # no other shards' logs
        if begin
        and [row["epoch"] for row in experiment_util.read_log(path)][-1:] == [str(begin - 1)]
    ]
    return experiment_util.ModelTrainerLog(name, args, continued=earlier[-1] if earlier else None)


def train(args: argparse.Namespace, saved: list[str]) -> None:
    """Train, test, and write log and checkpoints.

    Args:
        args: the flags.
        saved: takes the path of each checkpoint once it is complete.

    Raises:
        PoseidonError: flags contradict each other, or shards do not find each other.
        RuntimeError: data or a checkpoint cannot be read.
        AssertionError: the loss has exploded.
    """
    worker = poseidon.this_worker()
    with ExitStack() as job:
        group = None
        if worker.size > 1:  # started by `poseidon run`: its workers are the shards
            group = job.enter_context(
                poseidon.distribute(torch.nn.Linear(1, 1), poseidon.SGD(lr=0.0))
            )
        plan = plan_of(args, workers=worker.size, rank=worker.rank, gpu=worker.device.index)
        meeting = from_flags(args, plan) if group is None else in_job(args, plan, group)
        if plan.shard == 0:
            check_folder(args.file_store_path)
        if args.shard_batch_sizes == AUTO and plan.shards > 1:
            sizes = measured_sizes(args, plan, meeting)
            args.shard_batch_sizes = ",".join(map(str, sizes))
            plan = plan_of(args, workers=worker.size, rank=worker.rank, gpu=worker.device.index)
        run(args, plan, meeting, saved)


def run(args: argparse.Namespace, plan: Plan, meeting: Any, saved: list[str]) -> None:
    """Train with what follows from the flags. See `train`."""
    log.info(f"Running on GPUs: {plan.gpus}")
    log.info(f"Using epoch size: {plan.epoch_size}")
    torch.manual_seed(args.seed)
    begin = training.epoch_of(args.load_model_path) if args.load_model_path else 0
    model = build_train_model(args, plan, meeting, begin)
    dpm.RunInitNet(model)
    test_model = build_test_model(args, plan) if args.test_data else None
    if test_model is not None:
        dpm.RunInitNet(test_model)
    if args.load_model_path:
        training.load(args.load_model_path, model)
    table = open_log(args, plan, begin)
    for epoch in range(begin, args.num_epochs):
        loss, accuracy = run_epoch(args, plan, model, epoch)
        table.log(
            input_count=(epoch + 1) * plan.epoch_iters * plan.batch_size,
            batch_count=(epoch + 1) * plan.epoch_iters,
            additional_values={
                "accuracy": accuracy,
                "loss": loss,
                "learning_rate": float(workspace.FetchBlob(dpm.GetLearningRateBlobNames(model)[0])),
                "epoch": epoch,
                "test_accuracy": -1 if test_model is None else test(args, plan, test_model),
            },
        )
        assert loss < EXPLODED, "Exploded gradients :("
        if plan.shard == 0:
            saved.append(str(training.save(args, model, epoch + 1)))


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Keep from the log where this script has made the operator that fails: `main` prints what
    is wrong with its inputs.
    """
    workspaces = logging.getLogger("poseidon.caffe2.workspace")
    level = workspaces.level
    workspaces.setLevel(logging.ERROR)
    try:
        yield
    finally:
        workspaces.setLevel(level)


def main(argv: list[str] | None = None) -> None:
    """Run the trainer; a mistake ends the process with one sentence and code 1 or 2."""
    args = flags().parse_args(argv)
    saved = [args.load_model_path] if args.load_model_path else []
    try:
        with without_tracebacks():
            train(args, saved)
    except KeyboardInterrupt:
        if poseidon.this_worker().size > 1:
            raise
        newest = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
        if args.shard_id:
            newest = "shard 0 writes the checkpoints"
        print(f"resnet50_trainer.py: interrupted; {newest}", file=sys.stderr, flush=True)
        sys.exit(130)
    except (PoseidonError, RuntimeError, ValueError, AssertionError, OSError) as error:
        if poseidon.this_worker().size > 1:  # the launcher prints it
            raise JobError(sentence(error)) from None
        print(f"resnet50_trainer.py: {sentence(error)}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    main()
