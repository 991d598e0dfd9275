"""The upgrades that a definition needs, applied in Caffe's order.

Law: a current definition is returned unchanged; upgrading twice equals upgrading once.
"""

from __future__ import annotations

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.upgrade.fields import (
    fix_batch_norm,
    has_batch_norm_params,
    has_inputs,
    has_old_transformation,
    has_solver_type,
    move_transformation,
    to_input_layer,
    to_type,
)
from poseidon.caffe.proto.upgrade.v0 import from_v0, is_v0
from poseidon.caffe.proto.upgrade.v1 import from_v1, is_v1

NET_UPGRADES = (
    (is_v0, from_v0),
    (is_v1, from_v1),
    (has_old_transformation, move_transformation),
    (has_inputs, to_input_layer),
    (has_batch_norm_params, fix_batch_norm),
)


def upgrade_net(net: NetParameter) -> NetParameter:
    """Return the net, read from text or from a model file, in the current format.

    `net` itself is not changed.

    Each layer stays one layer in the same order, except that V0's padding layers are folded into
    their readers (`v0.kept_layers`) and the net's inputs become a new first layer.

    Raises:
        UpgradeError: the net contradicts itself, or has settings that no format knows.
    """
    for needed, transform in NET_UPGRADES:
        if needed(net):
            net = transform(net)
    return net


def needs_upgrade(net: NetParameter) -> bool:
    """Return whether `upgrade_net` would change anything."""
    return any(needed(net) for needed, _ in NET_UPGRADES)


def upgrade_solver(solver: SolverParameter) -> SolverParameter:
    """Return the solver in the current format, without upgrading the nets inside.

    `solver` is not changed.

    Raises:
        UpgradeError: the solver contradicts itself.
    """
    return to_type(solver) if has_solver_type(solver) else solver
