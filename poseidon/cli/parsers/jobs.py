"""The flags of the commands that start, watch and change jobs, and of completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from poseidon.base.settings import GRACE_S
from poseidon.cli.parsers.form import Command, FlagGroup, Parser, flag, switch, word
from poseidon.flags.flag import Opens, Takes, progress
from poseidon.flags.values import count, number, positive, whole

SHELLS = ("bash", "zsh", "fish", "tcsh")
_JOB = "a job's id or its output folder; default: the newest of the current folder"


def _ssh_config(group: FlagGroup) -> None:
    flag(group, "ssh_config", "in place of ~/.ssh/config, as ssh -F", metavar="FILE")


def _ps(parser: Parser) -> None:
    group = parser.section("Flags")
    text = "ask the hosts of this machinefile, too"
    flag(group, "hostfile", text, metavar="FILE", opens=Opens.MACHINEFILE)
    _ssh_config(group)
    switch(group, "json", "print a list of objects, for scripts")


def _logs(parser: Parser) -> None:
    word(parser, "job", _JOB, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    flag(group, "worker", "only the lines of this worker", read=whole, metavar="RANK")
    flag(group, "shard", "only the lines of this shard", read=whole, metavar="INDEX")
    flag(group, "lines", "only the last N lines", read=whole, metavar="N")
    switch(group, "follow", "print new lines until the job ends")


def _stats(parser: Parser) -> None:
    word(parser, "job", _JOB, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    switch(group, "json", "print statistics.json, for scripts")
    text = "merge the traces of a job (train --trace) into one file"
    flag(group, "trace", text, read=Path, metavar="FILE")
    text = "draw one iteration of the trace: PNG, SVG, PDF"
    flag(group, "picture", text, read=Path, metavar="FILE")
    flag(group, "iteration", "iteration of the picture (the middle one)", read=whole, metavar="N")
    flag(group, "rank", "worker of the picture (0)", read=whole, default=0, metavar="R")


def _kill(parser: Parser) -> None:
    text = "a job's id (poseidon ps) or output folder, or a machinefile"
    word(parser, "target", text, takes=Takes.OPTIONAL_WORD, metavar="JOB")
    group = parser.section("Flags")
    switch(group, "all", "all jobs of this user that this machine has on record")
    text = "look for the job on the hosts of this file, too"
    flag(group, "hostfile", text, metavar="FILE", opens=Opens.MACHINEFILE)
    text = f"seconds from SIGTERM to SIGKILL ({GRACE_S:g})"
    flag(group, "grace", text, read=number, default=GRACE_S, metavar="S")
    _ssh_config(group)


def _leave(parser: Parser) -> None:
    text = f"{_JOB}; then the address of a client, or its number"
    word(parser, "words", text, metavar="[JOB] HOST", takes=Takes.WORDS)


def _join(parser: Parser) -> None:
    word(parser, "job", _JOB, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    flag(group, "host", "the address of the host that is to take part", metavar="ADDRESS")


def _doctor(parser: Parser) -> None:
    group = parser.section("Flags")
    text = "examine the hosts of this machinefile (this machine)"
    flag(group, "hostfile", text, metavar="FILE", opens=Opens.MACHINEFILE)
    _ssh_config(group)
    text = "of each transfer between two hosts (0.5)"
    flag(group, "seconds", text, read=number, default=0.5, metavar="S")
    switch(group, "json", "print an object, for scripts")
    group.add(progress())


def _plan(parser: Parser) -> None:
    group = parser.section("What is trained")
    flag(group, "solver", "its train net", metavar="FILE", opens=Opens.FILE)
    flag(group, "net", "a train net, or a deploy net", metavar="FILE", opens=Opens.FILE)
    flag(group, "module", "function that returns module and input", metavar="FILE:NAME")
    flag(group, "compute", "forward and backward pass (measured here)", read=positive, metavar="MS")
    group = parser.section("Where")
    text = "measure the hosts of this machinefile"
    flag(group, "hostfile", text, metavar="FILE", opens=Opens.MACHINEFILE)
    _ssh_config(group)
    flag(group, "hosts", "with a worker, without a machinefile", read=count, default=0, metavar="N")
    flag(group, "servers", "further hosts that only serve (0)", read=count, default=0, metavar="N")
    flag(group, "virtual_workers", "V of the job (one a host)", read=count, default=0, metavar="V")
    flag(group, "rate", "of each link, Mbit/s (measured)", read=positive, metavar="MBIT")
    flag(group, "latency", "from host to host (measured, or 0.05)", read=positive, metavar="MS")
    flag(group, "seconds", "to measure hosts, about (30)", read=positive, default=30.0, metavar="S")
    group = parser.section("Flags")
    switch(group, "json", "print an object, for scripts")
    group.add(progress())


def _dashboard(parser: Parser) -> None:
    text = "folders of jobs, or folders that hold some; default: output/ and all jobs that run"
    word(parser, "folders", text, takes=Takes.WORDS, metavar="DIR", opens=Opens.FOLDER)
    group = parser.section("Flags")
    flag(
        group,
        "port",
        "port of the page (8300); 0: a free one",
        read=whole,
        default=8300,
        metavar="N",
    )
    text = "address to listen at (127.0.0.1); other addresses need a token"
    flag(group, "host", text, default="127.0.0.1", metavar="ADDRESS")


def _completion(parser: Parser) -> None:
    word(parser, "shell", "bash, zsh, fish or tcsh", choices=SHELLS)


MANAGING: Sequence[Command] = (
    Command(
        name="ps",
        module="running_jobs",
        line="list running jobs",
        description="List the running jobs of this user: id, start, launcher, processes, "
        "iteration, rate, ETA, output folder.",
        example="poseidon ps\nposeidon ps --hostfile=cluster",
        declare=_ps,
    ),
    Command(
        name="logs",
        module="records",
        line="show the logs of a job",
        description="Print what the processes of a job have logged, in the order of time.",
        example="poseidon logs --follow\nposeidon logs output/<job> --worker=3 --lines=20",
        declare=_logs,
    ),
    Command(
        name="stats",
        module="records",
        line="show what a job's tensors and shards cost",
        description="Print the bytes and the transfer time of each tensor per iteration, and the "
        "load of each shard.",
        example="poseidon stats\nposeidon stats output/<job> --trace=job.json",
        declare=_stats,
    ),
    Command(
        name="kill",
        module="running_jobs",
        line="stop the processes of a job",
        description="Stop exactly the processes of a job, on all its hosts, by its id or by the "
        "machinefile that it was started from.",
        example="poseidon kill cifar10_quick-20260105-204016-3f9a1c\nposeidon kill "
        "machinefiles/localserver",
        declare=_kill,
    ),
    Command(
        name="dashboard",
        module="records",
        line="show jobs on a live page",
        description="Serve a page with the curves, processes, tensors and logs of jobs, running or "
        "ended, and what limits each of them.",
        example="poseidon dashboard\nposeidon dashboard output --port=8080",
        declare=_dashboard,
    ),
    Command(
        name="doctor",
        module="doctor",
        line="examine hosts and the links between them",
        description="Examine this machine, or all hosts of a machinefile: versions, GPUs, limits, "
        "disk, clock, names, SSH; and between each two hosts ports, latency, bandwidth both ways, "
        "MTU. Print what is wrong and what to do.",
        example="poseidon doctor\nposeidon doctor --hostfile=cluster",
        declare=_doctor,
    ),
    Command(
        name="plan",
        module="plan",
        line="predict iteration times, and recommend flags",
        description="Measure the hosts of a machinefile, or take rates as given, and predict how "
        "long an iteration of a "
        "net takes by each exchange; recommend flags, with reasons. Nothing is trained.",
        example="poseidon plan --solver=solver.prototxt --hostfile=cluster\n"
        "poseidon plan --net=deploy.prototxt --hosts=4 --rate=250 --compute=50",
        declare=_plan,
    ),
)
HOSTS: Sequence[Command] = (
    Command(
        name="leave",
        module="running_jobs",
        line="let a host leave a running job",
        description="Let a host leave an elastic job. Its other hosts continue after the next "
        "iteration; nothing is repeated.",
        example="poseidon leave cifar10_quick-20260105-204016-3f9a1c node3",
        declare=_leave,
    ),
    Command(
        name="join",
        module="running_jobs",
        line="add a host to a running job",
        description="Prepare a host while an elastic job runs, and add it at the next snapshot in "
        "memory. It takes virtual workers over from the other hosts.",
        example="poseidon join cifar10_quick-20260105-204016-3f9a1c --host=node5",
        declare=_join,
    ),
)
SHELL: Sequence[Command] = (
    Command(
        name="completion",
        module="shell",
        line="complete commands and flags in a shell",
        description="Print a script for a shell that completes commands, flags and their values.",
        example="poseidon completion bash > poseidon.bash; source poseidon.bash\n"
        "poseidon completion zsh > poseidon.zsh; source poseidon.zsh",
        declare=_completion,
    ),
)


def _later(name: str) -> Callable[[Parser], None]:
    """Return what declares a command's flags: a function of `job_flags`.

    Its fields take as long to import as the rest of a command such as `poseidon ps`.
    """

    def declare(parser: Parser) -> None:
        getattr(import_module("poseidon.cli.parsers.job_flags"), name)(parser)

    return declare


STARTING: Sequence[Command] = (
    Command(
        name="train",
        module="jobs",
        line="train a Caffe net on one machine or many",
        description="Train the net of a Caffe solver on the clients of a machinefile.",
        example="poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt \\\n"
        "    --hostfile=machinefiles/localserver",
        declare=_later("train"),
    ),
    Command(
        name="run",
        module="jobs",
        line="run a script that trains any torch module",
        description="Run a Python script on every worker; poseidon.distribute, called in it, "
        "trains a torch module on "
        "all of them together. Flags stand before the script; what follows it is the script's.",
        example="poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py",
        declare=_later("run"),
    ),
    Command(
        name="python",
        module="shell",
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
        module="jobs",
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
        module="nets",
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
