"""What the three upgrade commands share: read a file, upgrade it, write it, and print what was
done.

Law: as with Caffe's tools of these names, the output is written even if there is nothing to
upgrade, and if something was left out; the latter is printed, and the exit code is 1. If the
upgrade fails, nothing is written and an earlier file stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from google.protobuf.message import Message

from poseidon.base.durable import is_standard_output
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.text import read, to_text
from poseidon.caffe.proto.upgrade.driver import (
    dropped_settings,
    needs_upgrade,
    upgrade_net,
    upgrade_solver,
)
from poseidon.caffe.proto.upgrade.v1 import UpgradeError, has_solver_type
from poseidon.caffe.snapshot.caffemodel import read_message
from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import DefinitionError

M = TypeVar("M", bound=Message)


def nothing(_: object) -> Sequence[tuple[int, str]]:
    """Return what the upgrade of a solver leaves out: nothing."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade(Generic[M]):
    """One of the commands.

    Attributes:
        what: what a file holds, with its form.
        read: the message of a file.
        needed: whether there is anything to do.
        upgrade: the message in today's grammar.
        write: a message as the bytes of a file.
        left_out: what the upgrade leaves out: index of the layer, and a sentence.
    """

    what: str
    read: Callable[[Path], M]
    needed: Callable[[M], bool]
    upgrade: Callable[[M], M]
    write: Callable[[M], bytes]
    left_out: Callable[[M], Sequence[tuple[int, str]]] = nothing

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


NET_BINARY = Upgrade(
    what="a net in binary form",
    read=lambda path: read_message(path, NetParameter(), "binary net"),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=NetParameter.SerializeToString,
    left_out=dropped_settings,
)
run_upgrade_net_proto_binary = NET_BINARY.run


NET_TEXT = Upgrade(
    what="a net in text",
    read=lambda path: read(path, NetParameter()),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=lambda net: to_text(net).encode(),
    left_out=dropped_settings,
)
run_upgrade_net_proto_text = NET_TEXT.run


SOLVER_TEXT = Upgrade(
    what="a solver in text",
    read=lambda path: read(path, SolverParameter()),
    needed=has_solver_type,
    upgrade=upgrade_solver,
    write=lambda solver: to_text(solver).encode(),
)
run_upgrade_solver_proto_text = SOLVER_TEXT.run
