"""Faults of a run, and the verdict about its processes."""

from __future__ import annotations

from collections.abc import Sequence

from ps_server.errors import ServerError
from tests.simulation.network import RESET_S, SILENCE_S, Fabric
from tests.simulation.processes import Process, Running
from tests.simulation.world import Violation, World

LOSS_P = 0.15


def plan_faults(
    world: World, fabric: Fabric, processes: Sequence[Process], *, longest_s: float
) -> None:
    """Plan what happens to processes and their links.

    Args:
        world: of the run.
        fabric: the network.
        processes: of the run.
        longest_s: how long one may be stopped or cut off; what is on its way arrives later.
    """
    random = world.stream("plan")
    for number in range(random.choice((0, 0, 1, 3))):
        process, at_s, for_s = random.choice(processes), random.random(), random.random()
        kind = random.choice(("stopped", "cut off"))
        act = process.stop if kind == "stopped" else lambda s, p=process: fabric.stall(p, s)
        if world.deviates(f"{process.name} {kind} ({number})"):
            world.after(2 * at_s, lambda act=act, for_s=for_s: act(longest_s * for_s))
    if random.random() < LOSS_P and len(processes) > 1:
        process, other = random.sample(processes, 2)
        at_s, kind = random.random() * 3, random.choice(("killed", "silent", "reset"))
        if world.deviates(f"{process.name} {kind}"):
            world.after(at_s, lambda: _lose(fabric, process, other, kind))


def _lose(fabric: Fabric, process: Process, other: Process, kind: str) -> None:
    fabric.world.lossy, fabric.world.lost_s = True, fabric.world.now
    if kind == "killed":
        process.kill()
    else:
        fabric.separate(process, other, SILENCE_S if kind == "silent" else RESET_S)


def judge(world: World, processes: Sequence[Process], tasks: Sequence[Running]) -> None:
    """Check that each process that lives has ended, and without an error if nothing was lost.

    Raises:
        Violation: one has not.
    """
    for task in tasks:
        if task.error is not None and not isinstance(task.error, ServerError):
            raise task.error
    for process, task in zip(processes, tasks, strict=True):
        if not process.alive:
            continue
        if not task.over:
            raise Violation(f"{process.name} waits for ever for {task.waits_for}")
        if task.error is not None and not world.lossy:
            raise Violation(f"{process.name}, though nothing was lost: {task.error}")
