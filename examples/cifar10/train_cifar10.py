#!/usr/bin/env python3
"""Train cifar10_quick on this machine: prepare the databases once, then start `poseidon train`.

python examples/cifar10/train_cifar10.py [--clients N] [--devices 0,1|cpu] [--staleness S]
    [--backend lmdb|leveldb] [--data DIR] [flags of `poseidon train`: --max_iter=N, --set FIELD=VALUE, ...]
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds; Ctrl-C ends them without a traceback
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()
if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    # The imports take seconds, on a busy machine many.
    print("train_cifar10.py: loading torch", file=sys.stderr, flush=True)

from poseidon.cli.main import main as poseidon
from poseidon.cli.main import parse_arguments
from poseidon.cli.parsers.data import add_data_flags
from poseidon.cli.prepare_cifar10 import prepare_and_print
from poseidon.cluster.jobs.registry import new_job_id
from poseidon.data.databases.kinds import Backend
from poseidon.data.prepare.cifar10 import Request
from poseidon.engine.tools.preflight import check_nets
from poseidon.errors import PoseidonError, UsageError
from poseidon.launch.job_folder import remove_unused
from poseidon.proto.caffe_pb2 import DataParameter
from poseidon.proto.definition import read_net, read_solver
from poseidon.proto.text import to_text
from poseidon.settings import read_settings
from poseidon.solvers.settings import solver_settings

HERE = Path(__file__).resolve().parent
SOLVER = ROOT / "prototxt" / "cifar10" / "cifar10_quick_solver.prototxt"
LOCALSERVER = ROOT / "machinefiles" / "localserver"
LOCALSERVER_CLIENTS = 2


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's flags, and those that are passed on to `poseidon train`."""
    parser = argparse.ArgumentParser(
        description="Train cifar10_quick on this machine.",
        epilog="Further flags go to `poseidon train`: --max_iter=N, --set FIELD=VALUE, --snapshot=FILE, --background, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--clients", type=int, default=2, help="number of clients (default 2)")
    parser.add_argument("--devices", default="cpu", help="GPUs of each client, 0,1, or cpu (default)")
    parser.add_argument("--staleness", type=int, default=0, help="bound of staleness (default 0)")
    parser.add_argument("--solver", type=Path, default=SOLVER, help="another solver definition")
    parser.add_argument("--output", type=Path, help="folder of logs (default: output/cifar10-<time>)")
    add_data_flags(parser)
    flags, others = parser.parse_known_args(words)
    if flags.clients < 1:
        raise UsageError(f"--clients={flags.clients}: expected 1 or more")
    if flags.staleness < 0:
        raise UsageError(f"--staleness={flags.staleness}: expected 0 or more")
    if flags.data is not None and not flags.data.exists():
        raise UsageError(f"--data={flags.data}: there is no such file or folder")
    return flags, others


def derive_solver(path: Path, settings: Sequence[str], request: Request, output: Path) -> Path:
    """Return the solver to train with: the file itself, or with LevelDB a copy in `output` whose net reads that.

    What the copy names is what the solver means by it: its nets stay where they lie, with their own sources.

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
        raise UsageError("--set net=... with --backend=leveldb: give a --solver that names this net")
    solver = read_solver(path)
    param = solver.param
    for name in ("net", "train_net"):
        if param.HasField(name):
            setattr(param, name, str(solver.resolve(getattr(param, name))))
    param.test_net[:] = [str(solver.resolve(path)) for path in param.test_net]
    models = [part.strip() for names in param.weights for part in names.split(",")]
    param.weights[:] = [name if Path(name).exists() else str(solver.resolve(name)) for name in models]
    output.mkdir(parents=True, exist_ok=True)
    if param.snapshot_prefix:
        param.snapshot_prefix = str(solver.snapshot_prefix())
    if param.net:
        param.net = str(with_leveldb(Path(param.net), request, output))
    solver_file = output / path.name
    solver_file.write_text(to_text(param), encoding="utf-8")
    return solver_file


def with_leveldb(path: Path, request: Request, output: Path) -> Path:
    """Return a net: a copy in `output` that reads this example's databases as LevelDB, or another net as it is."""
    definition = read_net(path)
    databases = {
        request.database(part, Backend.LMDB).name: request.database(part) for part in ("train", "test")
    }
    own = [layer for layer in definition.param.layer if Path(layer.data_param.source).name in databases]
    for layer in own:
        layer.data_param.source = str(databases[Path(layer.data_param.source).name])
        layer.data_param.backend = DataParameter.LEVELDB
        layer.data_param.shared_file_system = request.clients == 1
        if layer.transform_param.mean_file:
            layer.transform_param.mean_file = str(definition.resolve(layer.transform_param.mean_file))
    if not own:
        return path
    net_file = output / "train_test.prototxt"
    net_file.write_text(to_text(definition.param), encoding="utf-8")
    return net_file


def machinefile(clients: int, output: Path) -> Path:
    """Write a machinefile of that many clients on this machine."""
    if clients == LOCALSERVER_CLIENTS:
        return LOCALSERVER
    output.mkdir(parents=True, exist_ok=True)
    path = output / "machinefile"
    path.write_text("".join(f"{client} 127.0.0.1 0\n" for client in range(clients)), encoding="utf-8")
    return path


def derived_files(flags: argparse.Namespace, output: Path) -> list[Path]:
    """Return the files that this script may write to a job's folder."""
    return [output / name for name in (Path(flags.solver).name, "train_test.prototxt", "machinefile")]


def main(words: list[str]) -> int:
    """Check flags and definitions, prepare the data, and train; return the exit code."""
    with ExitStack() as stack:
        return _main(words, stack)


def _main(words: list[str], stack: ExitStack) -> int:
    try:
        flags, others = parse(words)
        request = Request(
            folder=HERE,
            backend=Backend.parse(flags.backend),
            clients=flags.clients,
            data=flags.data,
            hint=read_settings().data_folder,
        )
        settings = parse_arguments(["train", f"--solver={flags.solver}", *others]).settings or ()
        job = new_job_id("cifar10", datetime.now(), secrets.token_hex(3))
        output = (flags.output or ROOT / "output" / job).absolute()
        if not output.exists():
            stack.callback(lambda: remove_unused(output, derived_files(flags, output)))
        solver = derive_solver(flags.solver, settings, request, output)
        command = ["train", f"--solver={solver}", f"--output={output}", f"--job={job}"]
        if not any(word.lstrip("-").startswith("hostfile") for word in others):
            command.append(f"--hostfile={machinefile(flags.clients, output)}")
        if flags.devices != "cpu":
            command.append(f"--gpu={flags.devices}")
        if not request.database("train").exists():
            print(f"train_cifar10.py: preparing CIFAR-10 in {HERE}", file=sys.stderr, flush=True)
        prepare_and_print(request)
    except PoseidonError as error:
        print(f"train_cifar10.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # of the folder that the derived definitions go to
        print(f"train_cifar10.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    command += [f"--table_staleness={flags.staleness}", f"--net_outputs={output / 'cifar-netoutputs'}"]
    code = poseidon([*command, *others])
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
