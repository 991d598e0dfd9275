"""A simulation of an iteration: the passes of one worker as events, until they repeat.

`poseidon plan` has a formula for the same scenario (`poseidon/observe/plan/iteration.py`). The simulation
also has what a formula lacks: the order of messages, and shards that wait for the last worker's
part of a chunk, which counts with hundreds of hosts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.event_queue import Action
from benchmarks.simulation.schemes import FactorScheme, RingScheme, ServerScheme
from poseidon.observe.plan.iteration import Iteration, local_steps
from poseidon.observe.plan.scenario import LayerLoad, PlannedExchange, Scenario, loads

ITERATIONS = 4
"""Number of simulated iterations. The first find the links idle; the last one is measured."""


class Simulation:
    """The simulation of a job of a few iterations.

    Args:
        scenario: the scenario.

    Attributes:
        begins_s: after `run`, the start of each iteration, and of the one that would follow.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._loads: list[LayerLoad] = loads(scenario)
        self._cluster = Cluster(scenario)
        self._server = ServerScheme(self._cluster, self._arrived)
        self._factors = FactorScheme(self._cluster, self._arrived)
        self._ring = RingScheme(self._cluster, self._loads, self._arrived)
        self._fresh = [0] * len(self._loads)
        self._missing = [0] * len(self._loads)
        self._waiting: Action | None = None
        self._held: list[Action] = []
        self._iteration = 0
        self.begins_s: list[float] = []

    def run(self) -> None:
        """Run the simulation."""
        self._begin_iteration()
        self._cluster.events.run()

    @property
    def busy(self) -> float:
        """The part of the time that the processors were busy; after `run`."""
        return min(1.0, self._cluster.processors_s / self.begins_s[-1])

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all hosts; after `run`."""
        return self._cluster.cpu_s

    def _begin_iteration(self) -> None:
        self.begins_s.append(self._cluster.events.now_s)
        if len(self.begins_s) <= ITERATIONS:
            self._forward(0)

    def _forward(self, layer: int) -> None:
        if layer == len(self._loads):
            self._backward(layer - 1)
            return
        needed = range(len(self._fresh)) if self._waits_for_all else (layer,)
        if any(self._fresh[other] < self._iteration for other in needed):
            self._waiting = partial(self._forward, layer)
            return
        self._cluster.compute(self._loads[layer].forward_s, partial(self._forward, layer + 1))

    def _backward(self, layer: int) -> None:
        load = self._loads[layer]
        self._missing[layer] = self._count_missing(load)
        if load.factors is not None:
            self._when_free(partial(self._factors.send, self._iteration, layer, load.factors))
        self._cluster.compute(load.backward_s, partial(self._after_backward, layer))

    def _after_backward(self, layer: int) -> None:
        self._send_dense(layer)
        if self._loads[layer].factors is not None or not self._missing[layer]:
            self._arrived(layer)  # the weight itself is in use until now
        if layer:
            self._backward(layer - 1)
            return
        held, self._held = self._held, []
        for action in held:
            action()
        self._iteration += 1
        self._begin_iteration()

    def _send_dense(self, layer: int) -> None:
        if self._scenario.workers > 1 and self._scenario.exchange is PlannedExchange.RING:
            self._when_free(partial(self._ring.send, self._iteration, layer))
        elif self._scenario.exchange is not PlannedExchange.RING:
            self._when_free(partial(self._server.send, self._iteration, layer, self._loads[layer]))

    @property
    def _waits_for_all(self) -> bool:
        return self._scenario.exchange is PlannedExchange.RING or not self._scenario.wait_free

    def _when_free(self, action: Action) -> None:
        if self._scenario.wait_free:
            action()
        else:
            self._held.append(action)

    def _count_missing(self, load: LayerLoad) -> int:
        """Count the arrivals before the layer is up to date: values, gradients from factors, and
        its own release.
        """
        ring = self._scenario.exchange is PlannedExchange.RING
        count = int(self._scenario.workers > 1) if ring else self._server.count(load)
        return count + 2 if load.factors is not None else count

    def _arrived(self, layer: int) -> None:
        self._missing[layer] -= 1
        if self._missing[layer] > 0:
            return
        self._fresh[layer] += 1
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()


def simulate(scenario: Scenario) -> Iteration:
    """Return an iteration in the steady state.

    If busy processors slow down links, the slow-down is in proportion to how busy this iteration
    keeps them.
    """
    if scenario.local_steps > 1:
        return local_steps(scenario, simulate)
    simulation = Simulation(scenario)
    simulation.run()
    machine = scenario.machine
    if machine.busy_goodput is not None and machine.busy_goodput != machine.goodput:
        lost = simulation.busy * (machine.goodput - machine.busy_goodput)
        slower = replace(machine, goodput=machine.goodput - lost, busy_goodput=None)
        return simulate(replace(scenario, machine=slower))
    begins = simulation.begins_s
    return Iteration(
        seconds=begins[ITERATIONS] - begins[ITERATIONS - 1], cpu_s=simulation.cpu_s / ITERATIONS
    )
