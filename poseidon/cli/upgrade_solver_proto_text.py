"""`poseidon upgrade_solver_proto_text`: a prototxt solver of any grammar, in today's."""

from __future__ import annotations

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.text import read, to_text
from poseidon.caffe.proto.upgrade.driver import upgrade_solver
from poseidon.caffe.proto.upgrade.fields import has_solver_type
from poseidon.cli.upgrading import Upgrade

COMMAND = Upgrade(
    what="a solver in text",
    read=lambda path: read(path, SolverParameter()),
    needed=has_solver_type,
    upgrade=upgrade_solver,
    write=lambda solver: to_text(solver).encode(),
)
run = COMMAND.run
