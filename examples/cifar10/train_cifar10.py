#!/usr/bin/env python3
"""Train cifar10_quick: prepare the databases once, then start `poseidon train`.

python examples/cifar10/train_cifar10.py [--clients N] [--devices 0,1|cpu] [--staleness S]
    [--backend lmdb|leveldb] [--data DIR] [flags of `poseidon train`: --max_iter=N, --set
    FIELD=VALUE, ...]

What no flag says is as in run_local.py beside this file, which is to be edited.
"""

from __future__ import annotations

import argparse
import runpy
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # imports take seconds; Ctrl-C ends them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()
if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    # The imports take seconds, on a busy machine many.
    print("train_cifar10.py: loading torch", file=sys.stderr, flush=True)

from poseidon.base.settings import read_settings
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.cifar10 import Cifar10Request
from poseidon.caffe.proto.caffe_pb2 import DataParameter
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import to_text
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.tools.preflight import check_nets
from poseidon.cli.databases import prepare_and_print
from poseidon.cli.main import main as poseidon
from poseidon.cli.main import parse_arguments
from poseidon.cli.parsers.data import DATA
from poseidon.cluster.jobs.registry import new_job_id
from poseidon.cluster.machinefile import read_machinefile
from poseidon.errors import PoseidonError, UsageError
from poseidon.flags.flag import BACKENDS
from poseidon.flags.values import one_of
from poseidon.launcher.job_folder import remove_unused

HERE = Path(__file__).resolve().parent
RUN_LOCAL = HERE / "run_local.py"
SECONDS = 0.1
"""Of an iteration of cifar10_quick, about, on two processors."""
EARLY = ("test_interval=100", "test_iter=20")
"""For the 2,000 drawn pictures of the test."""


def run_local() -> dict[str, Any]:
    """Return what run_local.py defines.

    Raises:
        UsageError: an edit has left it without sense.
    """
    try:
        return runpy.run_path(str(RUN_LOCAL))
    except SyntaxError as error:
        raise UsageError(f"{RUN_LOCAL}:{error.lineno}: {error.msg}") from error
    except NameError as error:  # `true` for True
        raise UsageError(f"{RUN_LOCAL}: {error}") from error


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's flags, and those that are passed on to `poseidon train`."""
    parser = argparse.ArgumentParser(
        description="Train cifar10_quick. Defaults are set in run_local.py, which is to be edited.",
        epilog="Further flags go to `poseidon train`: --max_iter=N, --set FIELD=VALUE, "
        "--snapshot=FILE, "
        "--background, ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--clients", type=int, help="clients on this machine (default: machinefiles/localserver's)"
    )
    parser.add_argument("--devices", help="GPUs of each client, 0,1, or cpu (device)")
    parser.add_argument("--staleness", type=int, help="bound of staleness (table_staleness)")
    parser.add_argument("--solver", type=Path, help="another solver definition (solver)")
    parser.add_argument(
        "--output", type=Path, help="folder of logs (default: output/cifar10-<time>)"
    )
    parser.add_argument("--data", "-data", type=Path, metavar="DIR", help=DATA)
    parser.add_argument(
        *("--backend", "-backend"),
        type=one_of(BACKENDS),
        choices=BACKENDS,
        default="lmdb",
        metavar="KIND",
        help="lmdb or leveldb (lmdb)",
    )
    flags, others = parser.parse_known_args(words)
    if flags.clients is not None and flags.clients < 1:
        raise UsageError(f"--clients={flags.clients}: expected 1 or more")
    if flags.staleness is not None and flags.staleness < 0:
        raise UsageError(f"--staleness={flags.staleness}: expected 0 or more")
    if flags.data is not None and not flags.data.exists():
        raise UsageError(f"--data={flags.data}: there is no such file or folder")
    return flags, others


def derive_solver(
    path: Path, settings: Sequence[str], request: Cifar10Request, output: Path
) -> Path:
    """Return the solver to train with: the file itself, or with LevelDB a copy in `output` whose
    net reads that.

    What the copy names is what the solver means by it: its nets stay where they lie, with their own
    sources.

    Args:
        path: of the solver.
        settings: of --set and its like; they are checked here and become no part of the copy.
        request: the data.
        output: the job's folder.
    """
    solver = read_solver(path).with_settings(settings)
    check_nets(solver, solver_settings(solver))
    if request.backend is Backend.LMDB:
        return path
    if "net" in solver.overridden:
        raise UsageError(
            "--set net=... with --backend=leveldb: give a --solver that names this net"
        )
    solver = read_solver(path)
    param = solver.param
    for name in ("net", "train_net"):
        if param.HasField(name):
            setattr(param, name, str(solver.resolve(getattr(param, name))))
    param.test_net[:] = [str(solver.resolve(path)) for path in param.test_net]
    models = [part.strip() for names in param.weights for part in names.split(",")]
    param.weights[:] = [
        name if Path(name).exists() else str(solver.resolve(name)) for name in models
    ]
    output.mkdir(parents=True, exist_ok=True)
    if param.snapshot_prefix:
        param.snapshot_prefix = str(solver.snapshot_prefix())
    if param.net:
        param.net = str(with_leveldb(Path(param.net), request, output))
    solver_file = output / path.name
    solver_file.write_text(to_text(param), encoding="utf-8")
    return solver_file


def with_leveldb(path: Path, request: Cifar10Request, output: Path) -> Path:
    """Return a net: a copy in `output` that reads this example's databases as LevelDB, or
    another net as it is.
    """
    definition = read_net(path)
    databases = {
        request.database(part, Backend.LMDB).name: request.database(part)
        for part in ("train", "test")
    }
    own = [
        layer for layer in definition.param.layer if Path(layer.data_param.source).name in databases
    ]
    for layer in own:
        layer.data_param.source = str(databases[Path(layer.data_param.source).name])
        layer.data_param.backend = DataParameter.LEVELDB
        layer.data_param.shared_file_system = request.clients == 1
        if layer.transform_param.mean_file:
            layer.transform_param.mean_file = str(
                definition.resolve(layer.transform_param.mean_file)
            )
    if not own:
        return path
    net_file = output / "train_test.prototxt"
    net_file.write_text(to_text(definition.param), encoding="utf-8")
    return net_file


def write_machinefile(clients: int, output: Path) -> Path:
    """Write a machinefile of that many clients on this machine."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "machinefile"
    path.write_text(
        "".join(f"{client} 127.0.0.1 0\n" for client in range(clients)), encoding="utf-8"
    )
    return path


def train_flags(flags: argparse.Namespace, others: list[str], output: Path) -> dict[str, str]:
    """Return the flags of `poseidon train`: run_local.py's, with this script's in their place.

    Args:
        flags: of this script.
        others: those that are passed on.
        output: the job's folder.
    """
    edited = run_local()
    words: dict[str, str] = {**edited["train_flags"](others), "hostfile": str(edited["HOSTFILE"])}
    if flags.solver is not None:
        words["solver"] = str(flags.solver)
    if flags.devices is not None:
        words["gpu"] = "" if flags.devices == "cpu" else flags.devices
    if flags.staleness is not None:
        words["table_staleness"] = str(flags.staleness)
    if flags.output is not None:
        words["net_outputs"] = str(output / "cifar-netoutputs")
    return words


def early_tests(settings: Sequence[str]) -> list[str]:
    """Return settings for the drawn pictures, which are fewer: the first scores come sooner."""
    named = {setting.partition("=")[0].strip() for setting in settings}
    return [] if named & {"test_interval", "test_iter"} else list(EARLY)


def announcement(path: Path, settings: Sequence[str]) -> str:
    """Return a line on how long the training takes, and when it is tested first.

    Args:
        path: of the solver.
        settings: of flags.
    """
    param = read_solver(path).with_settings(settings).param
    minutes = max(round(param.max_iter * SECONDS / 60), 1)
    tested = "the start and the end"
    if 0 < param.test_interval < param.max_iter:
        tested = f"iterations 0, {param.test_interval}, {2 * param.test_interval}, ..."
    return (
        f"train_cifar10.py: training for {param.max_iter} iterations, about {minutes} min on two "
        f"processors; tested at {tested}"
    )


def derived_files(solver: Path, output: Path) -> list[Path]:
    """Return the files that this script may write to a job's folder."""
    return [output / name for name in (solver.name, "train_test.prototxt", "machinefile")]


def main(words: list[str]) -> int:
    """Check flags and definitions, prepare the data, and train; return the exit code."""
    with ExitStack() as stack:
        return _main(words, stack)


def _main(words: list[str], stack: ExitStack) -> int:
    try:
        flags, others = parse(words)
        job = new_job_id("cifar10", datetime.now(), secrets.token_hex(3))
        output = (flags.output or ROOT / "output" / job).absolute()
        settings = train_flags(flags, others, output)
        path = Path(settings["solver"])
        given = parse_arguments(["train", f"--solver={path}", *others])
        hostfile = Path(given.hostfile or settings["hostfile"])
        count = None if given.hostfile else flags.clients
        request = Cifar10Request(
            folder=HERE,
            backend=Backend.parse(flags.backend),
            clients=count or sum(host.works for host in read_machinefile(hostfile)),
            data=flags.data,
            hint=read_settings().data_folder,
        )
        if not output.exists():
            stack.callback(lambda: remove_unused(output, derived_files(path, output)))
        settings["solver"] = str(derive_solver(path, given.settings or (), request, output))
        settings["hostfile"] = str(write_machinefile(count, output) if count else hostfile)
        if not request.database("train").exists():
            print(f"train_cifar10.py: preparing CIFAR-10 in {HERE}", file=sys.stderr, flush=True)
        prepared = prepare_and_print(request)
        early = early_tests(given.settings) if prepared.warning is not None else []
        others += [f"--set={setting}" for setting in early]
        if flags.solver is None:
            print(announcement(path, [*given.settings, *early]), file=sys.stderr, flush=True)
    except PoseidonError as error:
        print(f"train_cifar10.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # of the folder that the derived definitions go to
        print(f"train_cifar10.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    own = [f"--{name}={value}" for name, value in settings.items()]
    code = poseidon(["train", f"--output={output}", f"--job={job}", *own, *others])
    if code == 0:
        stack.pop_all()  # the folder stays
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("train_cifar10.py: interrupted", file=sys.stderr)
        sys.exit(130)
