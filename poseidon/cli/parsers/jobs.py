"""The commands that start processes: train, run, worker, extract_features.

Choices and defaults are written out: the modules that have them as enums take seconds to import.
Tests keep both equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from poseidon.cli.parsers.form import (
    Command,
    Group,
    Parser,
    chosen,
    flag,
    help_flag,
    retired,
    solver_flag,
    switch,
    word,
)
from poseidon.cli.parsers.values import TRUTH, count, devices, number, one_of, port, positive, whole

EXCHANGES = ("hybrid", "auto", "ps", "svb", "allreduce", "local")
SVB = (*TRUTH, "auto")
CONSISTENCIES = ("SSP", "SSPPush", "SSPAggr")
PRECISIONS = ("float32", "float16", "bfloat16")
DIVERGENCES = ("stop", "mend")
LAUNCHERS = ("auto", "local", "ssh", "ray")
ENCRYPTIONS = ("auto", "on")
EFFECTS = ("stop", "snapshot", "none")
SHOWN = ("first", "all")
PROGRESS = ("auto", "bar", "lines")
ON_TERMINAL = "on a terminal: auto (log and bar), bar, lines"
"""The help of --progress of a command with a log."""
ON_NAN = ("stop", "warn")
BACKENDS = ("leveldb", "lmdb")
RETURN_TIMEOUT_S = 180.0

RETIRED = {
    "num_table_threads": "--num_app_threads is the number of workers of a client on CPU, --gpu "
    "names its GPUs",
    "num_clients": "the machinefile, --hostfile, says how many clients there are",
    "stats_path": "statistics are in the job's folder; poseidon stats shows them",
    "svb_timeout_ms": "nothing is polled; --stall_timeout is for a process that hangs",
    "snapshot_clock": "the solver's snapshot says how often",
    "resume_clock": "--snapshot=FILE.solverstate goes on from a run",
    "snapshot_dir": "the solver's snapshot_prefix says where",
    "resume_dir": "--snapshot=FILE.solverstate goes on from a run",
    "server_bandwidth_mbps": "--client_bandwidth_mbps is the budget of each client",
}
"""Flags of the original Poseidon, and what to use instead."""
RETIRED_VALUES = (
    "num_zmq_threads",
    "row_type",
    "row_oplog_type",
    "oplog_type",
    "append_only_oplog_type",
    "append_only_buffer_capacity",
    "append_only_buffer_pool_size",
    "bg_apply_append_oplog_freq",
    "process_storage_type",
    "thread_oplog_batch_size",
    "server_table_logic",
    "bg_idle_milli",
    "server_idle_milli",
    "row_candidate_factor",
    "update_sort_policy",
    "numa_index",
    "numa_policy",
    "server_push_row_upper_bound",
    "client_send_oplog_upper_bound",
)
"""Those that need no replacement."""
RETIRED_SWITCHES = (
    "init_thread_access_table",
    "oplog_dense_serialized",
    "no_oplog_replay",
    "version_maintain",
    "numa_opt",
    "naive_table_oplog_meta",
    "suppression_on",
    "use_approx_sort",
)
"""Those that may have no value."""


def _retired(parser: Parser, *more: str) -> None:
    for name, instead in RETIRED.items():
        retired(parser, name, instead)
    for name in (*RETIRED_VALUES, *more):
        retired(parser, name)
    for name in RETIRED_SWITCHES:
        retired(parser, name, alone=True)


def _no_model(_: str) -> str:
    """Refuse -model, which is for test and time and often tried here."""
    raise argparse.ArgumentTypeError("the net is named by the solver; expected --solver=FILE")


def _train(parser: Parser) -> None:
    group = parser.section("What to train")
    flag(group, "solver", "the solver definition (prototxt)", metavar="FILE", required=True)
    flag(
        group,
        "snapshot",
        "resume from a .solverstate, or a job's newest",
        metavar="FILE|JOB",
        default="",
    )
    flag(
        group,
        "weights",
        "start from comma-separated .caffemodels",
        metavar="FILES",
        default="",
    )
    flag(group, "level", "level of the train net, for its include rules", type=whole, metavar="L")
    flag(group, "stage", "comma-separated stages of the train net", default="", metavar="NAMES")
    import_flag(group)
    group = parser.section(
        "Fields of the solver",
        "They replace those of the solver's file, for this job and its restarts alone. A value is "
        "written as in the "
        "file, the field of a block as --set train_state.level=1.",
    )
    flag(
        group,
        "set",
        "any field; may be given more than once",
        dest="settings",
        action="append",
        metavar="FIELD=VALUE",
    )
    for name, text, metavar in (
        ("max_iter", "iterations to train for", "N"),
        ("display", "iterations from one log line to the next", "N"),
        ("test_interval", "iterations from one test to the next", "N"),
    ):
        solver_flag(group, name, text, metavar=metavar)
    solver_flag(
        group,
        "solver_mode",
        "CPU or GPU",
        choices=("CPU", "GPU"),
        type=one_of(("CPU", "GPU")),
        metavar="MODE",
    )
    _machines(parser)
    _results(
        parser,
        ("snapshot_keep", "newest snapshots that stay; 0 (default): all", count, "N", 0),
        ("net_outputs", "PREFIX.netoutputs: averaged losses (job in --output)", str, "PREFIX", ""),
    )
    _exchange(parser)
    text = "a loss or weights not finite: stop (default), warn"
    chosen(_failures(parser), "on_nan", text, ON_NAN, default="stop", metavar="WHAT")
    flag(parser, "model", argparse.SUPPRESS, type=_no_model)
    flag(parser, "client_id", argparse.SUPPRESS, type=count, default=0)
    _retired(parser)
    help_flag(parser)


def _run(parser: Parser) -> None:
    word(parser, "script", "the script", metavar="SCRIPT")
    word(parser, "arguments", "its own arguments", nargs=argparse.REMAINDER, metavar="...")
    group = parser.section("What to train")
    flag(
        group,
        "snapshot",
        "resume from a file of group.save(), or a job's newest",
        metavar="FILE|JOB",
        default="",
    )
    _machines(parser)
    _results(parser)
    _exchange(parser)
    _failures(parser)
    help_flag(parser)


def _worker(parser: Parser) -> None:
    text = "train or run and its flags, without --hostfile"
    word(parser, "job_arguments", text, nargs=argparse.REMAINDER, metavar="train|run ...")
    group = parser.section("Rendezvous")
    flag(group, "key_file", "the key: a file that every task can read, no one else", metavar="FILE")
    flag(group, "new_key", "make such a file, and end", metavar="FILE")
    flag(group, "rendezvous_port", "port of rank 0; default: $MASTER_PORT", type=port, metavar="P")
    text = "seconds until all tasks have connected (300)"
    flag(group, "rendezvous_timeout", text, type=number, default=300.0, metavar="S")
    help_flag(parser)


def _extract_features(parser: Parser) -> None:
    word(
        parser,
        "caffe_arguments",
        "as Caffe's tool takes them, see above",
        nargs="*",
        metavar="ARGUMENT",
    )
    group = parser.section("What to extract")
    flag(group, "model", "the net; its TEST data is read", metavar="FILE")
    flag(group, "weights", "comma-separated models; later ones win", metavar="FILES", default="")
    flag(group, "extract_feature_blob_names", "the features: fc7,fc8", metavar="BLOBS")
    group.add_argument(
        "--save_feature_dataset_names",
        "-save_feature_dataset_names",
        "--save_feature_leveldb_names",
        "-save_feature_leveldb_names",
        metavar="NAMES",
        help="a database for each blob",
    )
    flag(
        group,
        "num_mini_batches",
        "at most N batches of a worker (all)",
        type=whole,
        default=0,
        metavar="N",
    )
    chosen(
        group, "backend", "lmdb or leveldb (leveldb)", BACKENDS, default="leveldb", metavar="KIND"
    )
    import_flag(group)
    group = parser.section("Where it runs")
    _clients(group)
    flag(group, "output", "folder of logs (output/<job>)", metavar="DIR")
    progress_flag(group, ON_TERMINAL)
    flag(group, "job", argparse.SUPPRESS, metavar="ID")
    _retired(parser, "num_rows_per_table", "table_staleness", "client_id")
    help_flag(parser)


def import_flag(group: Group) -> None:
    """Add -import."""
    text = "Python modules that add layers"
    flag(group, "import", text, dest="imports", metavar="MODULES", default="")


def progress_flag(
    group: Group, text: str = "auto (a bar on a terminal), bar, lines (one a minute)"
) -> None:
    """Add --progress."""
    chosen(group, "progress", text, PROGRESS, default="auto", metavar="HOW")


def _clients(group: Group) -> None:
    flag(group, "hostfile", "the machinefile; default: this machine alone", metavar="FILE")
    text = "GPUs, a worker each: 0,1 or all (CPU)"
    flag(group, "gpu", text, type=devices, metavar="IDS", default="")
    flag(
        group,
        "num_app_threads",
        "workers of each client on CPU (1)",
        type=whole,
        default=1,
        metavar="T",
    )


def _machines(parser: Parser) -> None:
    group = parser.section(
        "Where it runs",
        "A client is a line '<id> <host> <port>' of the machinefile: workers and shards on that "
        "host. A worker is a process "
        "with a copy of the net, on one device. A shard is a server process that holds a part of "
        "the parameters.",
    )
    _clients(group)
    flag(group, "threads", "CPU threads of a worker (equal parts)", type=whole, metavar="N")
    flag(
        group,
        "num_comm_channels_per_client",
        "shards of each client (1)",
        type=whole,
        default=1,
        metavar="C",
    )
    chosen(
        group,
        "launcher",
        "auto (SSH to others), local, ssh, ray",
        LAUNCHERS,
        default="auto",
        metavar="HOW",
    )
    flag(group, "ssh_config", "in place of ~/.ssh/config, as ssh -F", metavar="FILE")
    flag(group, "ray_address", "head of the Ray cluster ($RAY_ADDRESS)", metavar="HOST:PORT")
    flag(group, "clients", "Ray nodes with workers (1)", type=whole, metavar="N")
    flag(group, "servers", "Ray nodes with shards alone (0)", type=count, default=0, metavar="N")
    flag(
        group,
        "ray_resources",
        "of a client: CPU=4,big=1 (CPU=1 a thread)",
        default="",
        metavar="LIST",
    )
    text = "of a client with shards alone (CPU=1)"
    flag(group, "ray_server_resources", text, default="", metavar="LIST")
    text = "seconds to wait for Ray's nodes (300)"
    flag(group, "ray_timeout", text, type=number, default=300.0, metavar="S")
    chosen(
        group,
        "encrypt",
        "auto (between machines), on (everywhere)",
        ENCRYPTIONS,
        default="auto",
        metavar="WHEN",
    )
    switch(group, "allreduce_in_clear", "let allreduce go unencrypted")


def _exchange(parser: Parser) -> None:
    group = parser.section(
        "How gradients are exchanged",
        "ps: through the parameter server. svb: gradients of fully-connected layers as sufficient "
        "factors, two small "
        "matrices, to each other worker. hybrid: per layer the one with fewer bytes. allreduce: "
        "torch.distributed. auto: "
        "per layer the fastest of the three, by a measurement at the start. local: not at all, "
        "for one worker. With "
        "staleness S a worker begins an iteration at most S ahead of the slowest; 0 gives the "
        "weights of one process with "
        "all workers' batches. With --sync_every=H each worker trains alone for H iterations, a "
        "round, then an outer rule "
        "applies the mean of their changes: docs/local_steps.md. S then counts rounds.",
    )
    chosen(
        group,
        "exchange",
        "hybrid (default), auto, ps, svb, allreduce, local",
        EXCHANGES,
        metavar="KIND",
    )
    switch(
        group,
        "svb",
        "short for --exchange=svb; --nosvb: ps",
        type=one_of(SVB),
        choices=SVB,
        default=None,
    )
    text = "bound of staleness, in iterations or rounds (0)"
    flag(group, "table_staleness", text, type=count, default=0, metavar="S")
    text = "pieces of a tensor; 0 (default): by size"
    flag(group, "num_rows_per_table", text, type=count, default=0, metavar="N")
    text = "SSP (pull), SSPPush (push), SSPAggr"
    bsp = {"bsp": "--consistency_model=SSPPush --table_staleness=0"}
    chosen(
        group,
        "consistency_model",
        text,
        CONSISTENCIES,
        instead=bsp,
        default="SSPPush",
        metavar="NAME",
    )
    text = "Mbit/s for changes sent early (SSPAggr)"
    flag(group, "client_bandwidth_mbps", text, type=positive, metavar="F")
    text = "float32 (default), float16, bfloat16"
    chosen(group, "wire_precision", text, PRECISIONS, default="float32", metavar="TYPE")
    text = "lossy codecs: int8, 'fc*=topk:0.01'; see docs"
    flag(group, "compress", text, default="", metavar="SCHEMES")
    text = "--compress=auto: largest share of loss, as 0.01"
    flag(group, "loss_budget", text, type=positive, metavar="F")
    text = "local steps between exchanges; 0 (default): none"
    flag(group, "sync_every", text, type=count, default=0, metavar="H")
    flag(group, "outer_lr", "rate of the outer rule (0.7)", type=number, default=0.7, metavar="F")
    flag(group, "outer_momentum", "its momentum (0.9)", type=number, default=0.9, metavar="F")
    switch(group, "outer_nesterov", "its momentum is Nesterov's (on)", default=True)
    text = "parts sent at different iterations of a round (1)"
    flag(group, "sync_fragments", text, type=count, default=1, metavar="P")
    text = "local steps made while a part travels (0)"
    flag(group, "sync_delay", text, type=count, default=0, metavar="D")
    text = "weight of the own value after a delay (0.5)"
    flag(group, "sync_mix", text, type=number, default=0.5, metavar="F")
    switch(group, "wait_free", "send gradients during the backward pass (on)", default=True)
    text = "iterations between comparisons of weights (1000)"
    flag(group, "check_replicas", text, type=count, default=1000, metavar="N")
    text = "weights differ: stop (default), mend"
    chosen(group, "on_divergence", text, DIVERGENCES, default="stop", metavar="WHAT")
    switch(group, "trace", "write <output>/trace_*.json, for Perfetto")


def _results(parser: Parser, *more: tuple[str, str, Any, str, Any]) -> None:
    group = parser.section("Output")
    flag(group, "output", "the job's folder: logs, statistics (output/<job>)", metavar="DIR")
    for name, text, kind, metavar, default in more:
        flag(group, name, text, type=kind, metavar=metavar, default=default)
    switch(group, "dashboard", "serve a live page of the job; see poseidon dashboard")
    flag(group, "tensorboard_dir", "write losses and scores for TensorBoard there", metavar="DIR")
    flag(
        group, "metrics_port", "serve values to Prometheus on 127.0.0.1:N", type=count, metavar="N"
    )
    chosen(
        group,
        "show_logs",
        "first (worker 0 and all warnings), all",
        SHOWN,
        default="first",
        metavar="WHOSE",
    )
    progress_flag(group, ON_TERMINAL)
    text = "seconds between progress lines, without a bar (60)"
    flag(group, "progress_interval", text, type=number, default=60.0, metavar="S")
    switch(group, "background", "return once the job runs")
    flag(group, "job", argparse.SUPPRESS, metavar="ID")


def _failures(parser: Parser) -> Group:
    group = parser.section(
        "Signals and failures",
        "A restart starts all processes again from the newest snapshot, when a process, a host or "
        "a link was lost.",
    )
    for name, signal, default in (
        ("sigint", "Ctrl-C does", "stop"),
        ("sighup", "a hang-up does", "snapshot"),
    ):
        text = f"what {signal}: stop, snapshot, none ({default})"
        chosen(group, f"{name}_effect", text, EFFECTS, default=default, metavar="WHAT")
    flag(group, "max_restarts", "restarts (3 on several hosts, else 0)", type=count, metavar="N")
    text = "how long a restart waits for lost hosts (180)"
    flag(group, "return_timeout", text, type=number, default=RETURN_TIMEOUT_S, metavar="S")
    text = "a process that hangs this long has failed (120)"
    flag(group, "stall_timeout", text, type=number, default=120.0, metavar="S")
    text = "seconds from SIGTERM to the job's end (25)"
    flag(group, "term_deadline", text, type=number, default=25.0, metavar="S")
    return group


def _python(parser: Parser) -> None:
    text = (
        "as Python takes them: its options, then a script, -m MODULE or -c CODE, then its arguments"
    )
    word(parser, "words", text, nargs="*", metavar="WORD")
    help_flag(parser)


COMMANDS: Sequence[Command] = (
    Command(
        name="train",
        line="train a Caffe net on one machine or many",
        description="Train the net of a Caffe solver on the clients of a machinefile.",
        example="poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt \\\n"
        "    --hostfile=machinefiles/localserver",
        declare=_train,
    ),
    Command(
        name="run",
        line="run a script that trains any torch module",
        description="Run a Python script on every worker; poseidon.distribute, called in it, "
        "trains a torch module on "
        "all of them together. Flags stand before the script; what follows it is the script's.",
        example="poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py",
        declare=_run,
    ),
    Command(
        name="python",
        line="run a script of Caffe or Caffe2 unchanged",
        description="Run Python with `caffe`, `caffe2.python` and `caffe2.proto` bound to "
        "Poseidon's modules, in each "
        "Python that the script starts too. Everything after `python` is Python's.",
        example="poseidon python tools/test_net.py --gpu 0\nposeidon python -m my_package.evaluate",
        declare=_python,
        verbatim=True,
    ),
    Command(
        name="worker",
        line="take part in a job of torchrun, srun, mpirun",
        description="Started once for each task by torchrun, srun, mpirun or Kubernetes: reads "
        "rank and size from the "
        "environment, connects to rank 0 and runs the job on the tasks' hosts; see docs/schedulers.",
        example="poseidon worker --new_key=$HOME/.poseidon.key\n"
        "srun --ntasks-per-node=1 poseidon worker --key_file=$HOME/.poseidon.key \\\n"
        "    train --solver=solver.prototxt",
        declare=_worker,
    ),
    Command(
        name="extract_features",
        line="write features of a trained net into databases",
        description="With the arguments of Caffe's tool, one process: WEIGHTS NET BLOBS DATABASES "
        "NUM_MINI_BATCHES DB_TYPE "
        "[CPU/GPU] [DEVICE_ID]. With flags, a job of all clients and their workers, which writes "
        "<name>_<client>_<thread>. Each record is extracted once.",
        example="poseidon extract_features net.caffemodel net.prototxt fc7 features 100 lmdb\n"
        "poseidon extract_features --model=net.prototxt --weights=net.caffemodel \\\n"
        "    --extract_feature_blob_names=fc7 --save_feature_dataset_names=features",
        declare=_extract_features,
    ),
)
