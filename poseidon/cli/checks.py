"""Checks of a command line: that the files it names exist, and that its flags fit together.

They run before the code of the command is imported, because importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from poseidon.base.paths import own_command
from poseidon.caffe.data.databases import require
from poseidon.cluster.machinefile import missing_machinefile
from poseidon.errors import DataError, DefinitionError, SnapshotError, UsageError, counted
from poseidon.flags.flag import Flag, Opens
from poseidon.flags.values import paths

CAFFE_ARGUMENTS = "WEIGHTS NET BLOBS DATABASES NUM_MINI_BATCHES DB_TYPE [CPU/GPU] [DEVICE_ID]"
"""The arguments of Caffe's extract_features."""
LEAST_LIMIT_S = 5.0
"""Of --seconds of `poseidon plan`."""
_OF_EXTRACTION = ("model", "weights", "extract_feature_blob_names", "save_feature_dataset_names")


def check(arguments: argparse.Namespace) -> None:
    """Check the command line of any command.

    Raises:
        PoseidonError: what it names does not exist, or flags are missing or exclude each other.
    """
    if getattr(arguments, "client_id", 0):  # client 0 starts all of them
        return
    _COMBINATIONS.get(arguments.command, _nothing)(arguments)
    for flag, value in arguments.opened:
        for name in value if isinstance(value, tuple) else (value,):
            _check_name(flag, name)


def check_models(models: Sequence[Path], flag: str) -> None:
    """Raise SnapshotError if a model does not exist."""
    for path in models:
        if not path.is_file():
            folders = import_module("poseidon.caffe.data.prepare.download")
            raise SnapshotError(f"{flag}: there is no file {path}{folders.how_to_fetch(path)}")


def _check_name(flag: Flag, name: Any) -> None:
    path = Path(name)
    if flag.opens is Opens.NET and path.name.rpartition(":")[2] != path.name:  # of a function
        return
    if flag.opens is Opens.MODEL:
        check_models([path], flag.title)
    if path.is_dir() if flag.opens is Opens.FOLDER else path.exists():
        return
    match flag.opens:
        case Opens.MACHINEFILE:
            raise missing_machinefile(path)
        case Opens.DATABASE:
            require(path)
        case Opens.SNAPSHOT:
            import_module("poseidon.launcher.job_folder").folder_of_snapshot(name)
        case Opens.LOG:
            import_module("poseidon.launcher.job_folder").find_training_log(name)
        case Opens.FILE:
            raise DefinitionError("there is no such file", source=str(path))
        case _:
            expected = flag.text.partition(";")[0]
            raise DataError(f"{path}: there is no such {flag.opens.value}; expected {expected}")


def _nothing(_: argparse.Namespace) -> None:
    pass


def _check_job(arguments: argparse.Namespace) -> None:
    if arguments.command == "train" and arguments.solver.suffix == ".py":
        raise UsageError(
            f"{arguments.solver} is a Python script, not a solver; run it with: {own_command()} "
            f"run {shlex.quote(str(arguments.solver))}"
        )
    requests = import_module("poseidon.launcher.request")
    kind = requests.TrainRequest if arguments.command == "train" else requests.ScriptRequest
    import_module("poseidon.cli.jobs").job_request(kind, arguments)


def _check_scoring(arguments: argparse.Namespace) -> None:
    if arguments.iterations < 1:
        raise UsageError(f"-iterations is {arguments.iterations}; it must be at least 1")
    if arguments.command == "test" and not arguments.weights:
        raise _missing_weights("-weights")


def _check_extraction(arguments: argparse.Namespace) -> None:
    if arguments.caffe_arguments:
        if any(getattr(arguments, name) for name in _OF_EXTRACTION):
            raise UsageError("give either the arguments of Caffe's tool or flags, not both")
        _check_caffe_arguments(arguments.caffe_arguments)
        return
    for name in _OF_EXTRACTION:
        if name == "weights" and not arguments.weights and arguments.model:
            raise _missing_weights("--weights")
        if not getattr(arguments, name):
            raise UsageError(
                f"--{name} is missing; or give the arguments of Caffe's tool: {CAFFE_ARGUMENTS}"
            )


def _check_caffe_arguments(arguments: Sequence[str]) -> None:
    if not 6 <= len(arguments) <= 8:
        given = counted(len(arguments), "argument")
        raise UsageError(f"expected {CAFFE_ARGUMENTS}, found {given}")
    weights, _, _, _, count, _ = arguments[:6]
    if weights.endswith(".prototxt"):
        raise UsageError(f"WEIGHTS is the definition {weights}; the order is {CAFFE_ARGUMENTS}")
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"NUM_MINI_BATCHES is '{count}'; expected 1 or more")
    if arguments[6:] and arguments[6] not in ("CPU", "GPU"):
        raise UsageError(f"'{arguments[6]}' is neither CPU nor GPU")
    check_models(paths(weights), "WEIGHTS")


def _missing_weights(flag: str) -> UsageError:
    return UsageError(
        f"{flag} is missing: name a trained model, such as the .caffemodel in a job's folder, or a "
        f"published one: {own_command()} download_model_binary FOLDER fetches it"
    )


def _check_plan(arguments: argparse.Namespace) -> None:
    sources = [name for name in ("solver", "net", "module") if getattr(arguments, name)]
    if len(sources) != 1:
        given = " and ".join(f"--{name}" for name in sources) or "none of them"
        raise UsageError(f"expected one of --solver, --net and --module, found {given}")
    if arguments.hostfile and (arguments.hosts or arguments.servers):
        raise UsageError("--hostfile sets the number of hosts; leave out --hosts and --servers")
    if not arguments.hostfile and not (arguments.hosts and arguments.rate):
        raise UsageError("expected --hostfile=FILE, or --hosts=N and --rate=MBIT")
    if arguments.seconds < LEAST_LIMIT_S:
        raise UsageError(f"--seconds must be at least {LEAST_LIMIT_S:g}, not {arguments.seconds:g}")


def _check_make_db(arguments: argparse.Namespace) -> None:
    pictures, target = arguments.pictures, arguments.db_name
    if arguments.generate:
        if pictures is None or target is not None:
            raise UsageError("--generate=two_class takes one argument: the folder of the databases")
        if min(arguments.count, arguments.test_count) < 2:
            raise UsageError("--count and --test_count must be 2 or more: there are two classes")
        return
    if pictures is None or target is None:
        raise UsageError("give PICTURES and DB_NAME, or --generate=two_class and a folder")
    if arguments.shorter_side and (arguments.resize_height or arguments.resize_width):
        raise UsageError("--shorter_side and --resize_height, --resize_width exclude each other")
    if not pictures.exists():
        raise DataError(
            f"{pictures}: there is no such file or folder; expected a folder with a sub-folder for "
            "each class, or a list file"
        )


def _check_kill(arguments: argparse.Namespace) -> None:
    if (arguments.target is None) != arguments.all:
        raise UsageError(
            f"give a job's id, a machinefile, or --all; `{own_command()} ps` lists the jobs"
        )
    if not arguments.grace >= 0:
        raise UsageError(f"--grace must be 0 seconds or more, not {arguments.grace}")


def _check_classify(arguments: argparse.Namespace) -> None:
    if not arguments.pictures:
        raise UsageError("PICTURE is missing")


def _check_worker(arguments: argparse.Namespace) -> None:
    if not (arguments.new_key or arguments.key_file):
        raise UsageError(
            f"--key_file is missing: make one with '{own_command()} worker --new_key=FILE', for "
            "all tasks"
        )
    if not arguments.rendezvous_timeout > 0:
        raise UsageError(
            f"--rendezvous_timeout={arguments.rendezvous_timeout:g}: expected more than 0 seconds"
        )


_COMBINATIONS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "train": _check_job,
    "run": _check_job,
    "test": _check_scoring,
    "time": _check_scoring,
    "extract_features": _check_extraction,
    "plan": _check_plan,
    "make_db": _check_make_db,
    "kill": _check_kill,
    "classify": _check_classify,
    "worker": _check_worker,
}
