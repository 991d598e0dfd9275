"""`poseidon upgrade_solver_proto_text`: a prototxt solver of any grammar, in today's."""

from __future__ import annotations

from poseidon.cli.upgrading import Upgrade
from poseidon.proto.caffe_pb2 import SolverParameter
from poseidon.proto.text import read, to_text
from poseidon.proto.upgrade.driver import upgrade_solver
from poseidon.proto.upgrade.fields import has_solver_type

COMMAND = Upgrade(
    what="a solver in text",
    read=lambda path: read(path, SolverParameter()),
    needed=has_solver_type,
    upgrade=upgrade_solver,
    write=lambda solver: to_text(solver).encode(),
)
run = COMMAND.run
