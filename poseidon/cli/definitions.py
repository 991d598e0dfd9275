"""The commands for definitions and models as files: init copies a net of the zoo, download_model_binary
gets its model, and three commands upgrade old grammars.

Law: as with Caffe's tools of these names, an upgrade writes its output even if there is nothing to
upgrade. If a setting was left out, it is printed and the exit code is 1. If the upgrade fails, nothing is
written and an earlier file stays.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from google.protobuf.message import Message

from poseidon.base.durable import is_standard_output
from poseidon.base.paths import own_command, own_python
from poseidon.caffe.data.prepare.download import fetch_model, is_complete, read_model_folder
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.projects import (
    project_files,
    project_title,
    projects,
    training_commands,
    write_project,
)
from poseidon.caffe.proto.text import read, to_text
from poseidon.caffe.proto.upgrade import (
    dropped_settings,
    needs_upgrade,
    upgrade_net,
    upgrade_solver,
)
from poseidon.caffe.proto.upgrade_v1 import UpgradeError, has_solver_type
from poseidon.caffe.snapshot.caffemodel import read_message
from poseidon.cli.progress_bar import progress_bar
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import DefinitionError, UsageError, nearest

ALIASES = {"mnist": "lenet"}


def run_init(arguments: argparse.Namespace) -> int:
    """Make the project, or list the projects."""
    known = projects()
    if arguments.project is None or arguments.list:
        for name, folder in known.items():
            print(f"{name:20} {project_title(folder)}")
        print(f"\nMake one of them with: {own_command()} init PROJECT [DIR]")
        return 0
    name = ALIASES.get(arguments.project, arguments.project)
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"`{own_command()} init` lists them"
        raise UsageError(f"there is no project '{arguments.project}'; {hint}")
    folder = Path(arguments.folder or name)
    write_project(folder, project_files(name, known[name]))
    print(f"Created {folder}; its README.md describes the files. To train:\n")
    # Paths of programs lead from the new folder.
    typed = {"poseidon": own_command(folder), "python": own_python(folder)}
    lines = [f"cd {shlex.quote(str(folder))}"]
    for command in training_commands(name, known[name]):
        program, _, words = command.partition(" ")
        lines.append(f"{typed.get(program, program)} {words}")
    print("\n".join(f"    {line}" for line in lines))
    return 0


def run_download_model_binary(arguments: argparse.Namespace) -> int:
    """Fetch; 0 when the model is there."""
    model = read_model_folder(arguments.dirname)
    if is_complete(model):
        print("Model already exists.")
        return 0
    with progress_bar(arguments.progress) as report:
        fetch_model(model, report)
    print(f"{model.path} is ready")
    return 0


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade(Generic[M]):
    """One of the commands.

    Attributes:
        what: what a file holds, with its form.
        left_out: what the upgrade leaves out: index of the layer, and a sentence.
    """

    what: str
    read: Callable[[Path], M]
    needed: Callable[[M], bool]
    upgrade: Callable[[M], M]
    write: Callable[[M], bytes]
    left_out: Callable[[M], Sequence[tuple[int, str]]] = lambda _: ()

    def run(self, arguments: argparse.Namespace) -> int:
        """Upgrade; 0 when all of it is written."""
        message = self.read(arguments.input)
        if not message.ByteSize():
            raise DefinitionError(
                "the file is empty: there is nothing to upgrade", source=str(arguments.input)
            )
        # With a pipe as the output nothing else must go there.
        notes = sys.stderr if is_standard_output(arguments.output) else sys.stdout
        strays = self.left_out(message)
        for index, sentence in strays:
            print(f"{arguments.input}: layer {index + 1} of the file: {sentence}", file=sys.stderr)
        if self.needed(message):
            try:
                message = self.upgrade(message)
            except UpgradeError as error:
                layer = "" if error.layer is None else f"layer {error.layer + 1} of the file: "
                raise DefinitionError(
                    f"{layer}{error.message}", source=str(arguments.input)
                ) from error
        else:
            print(f"{arguments.input} is already in today's grammar.", file=notes)
        write_atomically(arguments.output, self.write(message))
        print(f"Wrote {self.what} to {arguments.output}.", file=notes)
        return 1 if strays else 0


run_upgrade_net_proto_binary = Upgrade(
    what="a net in binary form",
    read=lambda path: read_message(path, NetParameter(), "binary net"),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=NetParameter.SerializeToString,
    left_out=dropped_settings,
).run
run_upgrade_net_proto_text = Upgrade(
    what="a net in text",
    read=lambda path: read(path, NetParameter()),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=lambda net: to_text(net).encode(),
    left_out=dropped_settings,
).run
run_upgrade_solver_proto_text = Upgrade(
    what="a solver in text",
    read=lambda path: read(path, SolverParameter()),
    needed=has_solver_type,
    upgrade=upgrade_solver,
    write=lambda solver: to_text(solver).encode(),
).run
