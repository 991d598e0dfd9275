"""The flags that `test`, `time` and `extract_features` have in common, as Caffe's tools name them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from poseidon.cluster.plan import devices_from_flag
from poseidon.engine.solo import NetRequest
from poseidon.errors import SnapshotError, UsageError
from poseidon.layers.user_modules import import_modules, module_names
from poseidon.proto.caffe_pb2 import Phase


def add_flag(parser: argparse.ArgumentParser, name: str, **settings: object) -> None:
    """A flag that may be written -name or --name."""
    parser.add_argument(f"--{name}", f"-{name}", dest=name, **settings)  # type: ignore[arg-type]


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Declare -import."""
    parser.add_argument(
        "--import",
        "-import",
        dest="imports",
        metavar="MODULES",
        default="",
        help="Python modules that register layers of your own, parted by commas; see docs/own_layers.md",
    )


def add_net_flags(parser: argparse.ArgumentParser, *, phase: str, weights_help: str) -> None:
    """Declare -model, -weights, -iterations, -gpu, -phase, -level, -stage and -import."""
    add_flag(parser, "model", metavar="FILE", required=True, help="the net definition (prototxt)")
    add_flag(parser, "weights", metavar="FILES", default="", help=weights_help)
    add_flag(parser, "iterations", type=int, default=50, metavar="N", help="batches (50)")
    add_flag(parser, "gpu", metavar="ID", default="", help="the GPU; default: CPU")
    add_flag(parser, "phase", default=phase, choices=list(Phase.keys()), help=f"of the net ({phase})")
    add_flag(parser, "level", type=int, default=0, metavar="L", help="level for rules of the net (0)")
    add_flag(
        parser, "stage", default="", metavar="NAMES", help="stages for rules of the net, parted by commas"
    )
    add_import_flag(parser)


def net_request(arguments: argparse.Namespace) -> NetRequest:
    """What the flags ask for; the modules that they name are imported.

    Raises:
        UsageError: fewer than one iteration, a GPU that is not there, or a module that fails.
        SnapshotError: there is no such model.
    """
    if arguments.iterations < 1:
        raise UsageError(f"-iterations is {arguments.iterations}, expected 1 or more")
    import_modules(module_names(arguments.imports))
    return NetRequest(
        model=Path(arguments.model),
        weights=weight_files(arguments.weights),
        phase=Phase.Value(arguments.phase),
        level=arguments.level,
        stages=tuple(stage for stage in arguments.stage.split(",") if stage),
        device=one_device(arguments.gpu),
    )


def weight_files(text: str) -> tuple[Path, ...]:
    """The models of a -weights flag, parted by commas.

    Raises:
        SnapshotError: one is not there.
    """
    paths = tuple(Path(part.strip()) for part in text.split(",") if part.strip())
    for path in paths:
        if not path.is_file():
            raise SnapshotError(f"-weights: there is no file {path}")
    return paths


def one_device(gpu: str) -> torch.device:
    """The device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, available=torch.cuda.device_count())[0])
