"""The commands that start processes: train, run, python, worker, extract_features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from poseidon.cli.parsers.form import Command, Parser


def _later(name: str) -> Callable[[Parser], None]:
    """Return what declares a command's flags: a function of `job_flags`.

    Its fields take as long to import as the rest of a command such as `poseidon ps`.
    """

    def declare(parser: Parser) -> None:
        getattr(import_module("poseidon.cli.parsers.job_flags"), name)(parser)

    return declare


COMMANDS: Sequence[Command] = (
    Command(
        name="train",
        line="train a Caffe net on one machine or many",
        description="Train the net of a Caffe solver on the clients of a machinefile.",
        example="poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt \\\n"
        "    --hostfile=machinefiles/localserver",
        declare=_later("train"),
    ),
    Command(
        name="run",
        line="run a script that trains any torch module",
        description="Run a Python script on every worker; poseidon.distribute, called in it, "
        "trains a torch module on "
        "all of them together. Flags stand before the script; what follows it is the script's.",
        example="poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py",
        declare=_later("run"),
    ),
    Command(
        name="python",
        line="run a script of Caffe or Caffe2 unchanged",
        description="Run Python with `caffe`, `caffe2.python` and `caffe2.proto` bound to "
        "Poseidon's modules, in each "
        "Python that the script starts too. Everything after `python` is Python's.",
        example="poseidon python tools/test_net.py --gpu 0\nposeidon python -m my_package.evaluate",
        declare=_later("python"),
        verbatim=True,
    ),
    Command(
        name="worker",
        line="take part in a job of torchrun, srun, mpirun",
        description="Started once for each task by torchrun, srun, mpirun or Kubernetes: reads "
        "rank and size from the "
        "environment, connects to rank 0 and runs the job on the tasks' hosts; see docs/schedulers.",
        example="poseidon worker --new_key=$HOME/.poseidon.key\nsrun --ntasks-per-node=1 poseidon "
        "worker --key_file=$HOME/.poseidon.key \\\n    train --solver=solver.prototxt",
        declare=_later("worker"),
    ),
)
TOOLS: Sequence[Command] = (
    Command(
        name="extract_features",
        line="write features of a trained net into databases",
        description="With the arguments of Caffe's tool, one process: WEIGHTS NET BLOBS DATABASES "
        "NUM_MINI_BATCHES DB_TYPE [CPU/GPU] [DEVICE_ID]. With flags, a job of all clients and "
        "their workers, which writes <name>_<client>_<thread>. Each record is extracted once.",
        example="poseidon extract_features net.caffemodel net.prototxt fc7 features 100 lmdb\n"
        "poseidon extract_features --model=net.prototxt --weights=net.caffemodel \\\n"
        "    --extract_feature_blob_names=fc7 --save_feature_dataset_names=features",
        declare=_later("extract_features"),
    ),
)
