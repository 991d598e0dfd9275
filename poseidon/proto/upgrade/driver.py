"""Asks every upgrade's question in Caffe's order and applies the ones that are needed.

Law: upgrading what is up to date gives it back unchanged, and upgrading twice is upgrading once.
"""

from __future__ import annotations

from poseidon.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.proto.upgrade.batch_norm import fix_batch_norm, has_batch_norm_params
from poseidon.proto.upgrade.data_params import has_old_transformation, move_transformation
from poseidon.proto.upgrade.inputs import has_inputs, to_input_layer
from poseidon.proto.upgrade.solver_type import has_solver_type, to_type
from poseidon.proto.upgrade.v0 import from_v0, is_v0
from poseidon.proto.upgrade.v1 import from_v1, is_v1

NET_UPGRADES = (
    (is_v0, from_v0),
    (is_v1, from_v1),
    (has_old_transformation, move_transformation),
    (has_inputs, to_input_layer),
    (has_batch_norm_params, fix_batch_norm),
)
SOLVER_UPGRADES = ((has_solver_type, to_type),)


def upgrade_net(net: NetParameter) -> NetParameter:
    """The net, read from text or from a model file, in today's grammar; `net` itself is not changed.

    Each layer stays one layer, in its place, but the padding layers of V0 (`v0.kept_layers`); inputs of the net become
    one more, before all others.

    Raises:
        UpgradeError: the net contradicts itself, or has what no grammar knew.
    """
    for needed, transformed in NET_UPGRADES:
        if needed(net):
            net = transformed(net)
    return net


def needs_upgrade(net: NetParameter) -> bool:
    """Whether `upgrade_net` would change anything."""
    return any(needed(net) for needed, _ in NET_UPGRADES)


def solver_needs_upgrade(solver: SolverParameter) -> bool:
    """Whether `upgrade_solver` would change anything."""
    return any(needed(solver) for needed, _ in SOLVER_UPGRADES)


def upgrade_solver(solver: SolverParameter) -> SolverParameter:
    """The solver's own settings in today's grammar, without the nets inside; `solver` is not changed.

    Raises:
        UpgradeError: the solver contradicts itself.
    """
    for needed, transformed in SOLVER_UPGRADES:
        if needed(solver):
            solver = transformed(solver)
    return solver
