"""What can be said about a job before any of its processes starts: no data is opened and nothing is written.

Law: a check here repeats none of the workers' rules; it calls the same functions earlier, so that a mistake is told
in a second and on the user's own terminal. What needs data (shapes, labels, partitions) the workers find.
"""

from __future__ import annotations

import os
from pathlib import Path

from poseidon.errors import DefinitionError
from poseidon.net.compile import plan_phase
from poseidon.net.plan import NetPlan
from poseidon.proto.definition import NetDefinition, SolverDefinition
from poseidon.solvers.settings import SolverSettings


def check_nets(solver: SolverDefinition, settings: SolverSettings) -> NetDefinition:
    """Join the layers of the train net and of every test net, without their shapes.

    Returns:
        The train net, all phases.

    Raises:
        DefinitionError: a net is missing, a layer's type or a bottom is unknown, there is no loss to train on, ...
    """
    definition = solver.net_definition()
    plan = plan_phase(definition, solver.train_state(definition))
    require_loss(definition, plan, settings)
    for test in solver.test_nets():
        plan_phase(test.definition, test.state)
    return definition


def require_loss(definition: NetDefinition, plan: NetPlan, settings: SolverSettings) -> None:
    """Check that training has something to lower.

    Raises:
        DefinitionError: no top of the train net weighs in a loss.
    """
    if not plan.losses and settings.max_iter > 0:
        raise DefinitionError(
            "the net has no loss to train on; expected a loss layer or a loss_weight",
            source=definition.source,
        )


def check_snapshot_prefix(solver: SolverDefinition) -> None:
    """Check that snapshots have a place: a failure at the last iteration would cost the whole run.

    Raises:
        DefinitionError: their folder cannot be made or written.
    """
    folder = solver.snapshot_prefix().parent
    obstacle = obstacle_to(folder)
    if obstacle:
        raise solver.error("snapshot_prefix", f"snapshots cannot be written to {folder}: {obstacle}")


def obstacle_to(folder: Path) -> str | None:
    """Why files cannot be written to a folder, which need not exist yet; None when they can."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written by this user"
    return None
