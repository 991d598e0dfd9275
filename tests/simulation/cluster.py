"""The hosts of a simulated job, what dials them, and the faults that they may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random

from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import Dialer
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError
from tests.simulation.hosts import HostAgent, JobProcess, SimulatedHost
from tests.simulation.launcher import Primitives, SimulatedChannel, dial
from tests.simulation.network import Fabric
from tests.simulation.processes import Process
from tests.simulation.world import World

DIAL_S = 0.5
MOST_STOPPED_S = 15.0
"""Of a launcher: its agents wait for 20 s."""
GONE_S = 60.0
"""A host that is to come back after a longer time never does."""


class Cluster(ABC):
    """The hosts of one job, and what has happened to them.

    Args:
        world: of the run.
        count: of the hosts.

    Attributes:
        machines: the hosts, by address.
        asked_to_stop: whether the user has asked for the job's end.
        started: whether the job has run.
        disturbed: whether anything has happened to a process, a host or a link.
        disturbed_early: whether that was before the job had started.
        touched: the processes that were stopped, waited for a disk, or whose links carried nothing
            for a while.
        killed: the agents of hosts on which the user has killed the job.
        cut_off: whether a host was: then the launcher may not have heard of that.
        gone: the hosts that never come back.
    """

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.fabric = Fabric(world)
        self.primitives = Primitives(world)
        self.asked_to_stop = self.started = self.disturbed = self.disturbed_early = False
        self.touched: set[Process] = set()
        self.agents: dict[str, RemoteAgent] = {}
        self.killed: list[RemoteAgent] = []
        self.cut_off = False
        self.gone: set[SimulatedHost] = set()
        self.machines = {
            host.address: SimulatedHost(self.fabric, f"host {host.id}", self.spawn)
            for host in hosts_of(count)
        }
        self._dialled = 0

    @abstractmethod
    def spawn(self, process: JobProcess, spec: ProcessSpec) -> None:
        """Let a process of the job do its work."""

    @abstractmethod
    def ask_to_stop(self, within_s: float | None) -> None:
        """Ask the job to stop, as the user."""

    @property
    def processes(self) -> list[JobProcess]:
        """The processes of the job that live."""
        return [process for host in self.machines.values() for process in host.processes]

    def dial(self, host: SimulatedHost) -> RemoteAgent:
        """Start an agent on a host, and connect the launcher to it.

        Raises:
            JobError: the host does not answer.
        """
        self.primitives.wait(lambda: False, DIAL_S)
        if not host.up:
            raise JobError(f"{host.name} does not answer")
        self._dialled += 1
        agent = HostAgent(host, self._dialled)
        host.agents.append(agent)
        name = f"launcher to {agent.process.name}"
        end = self.fabric.end(self.primitives.process, name, relayed=True)
        self.fabric.connect(name, agent.process.name)
        agent.serve()
        channel = SimulatedChannel(self.fabric, end, agent.process.name)
        found = self.agents[agent.process.name] = dial(self.primitives, channel, host.name)
        return found

    def note(self, *touched: Process) -> None:
        """Note that something happens; `touched`: see there."""
        self.touched.update(touched)
        self.disturbed = True
        self.disturbed_early |= not self.started

    def some_process(self, draw: float) -> JobProcess | None:
        """Return a process that lives."""
        processes = self.processes
        return processes[int(draw * len(processes))] if processes else None

    def some_host(self, draw: float) -> SimulatedHost:
        """Return a host."""
        machines = list(self.machines.values())
        return machines[int(draw * len(machines))]

    def some_agent(self, draw: float) -> HostAgent | None:
        """Return the agent of a host that has processes of the job."""
        agents = self.some_host(draw).agents[-1:]
        return next((each for each in agents if each.process.alive and each.processes), None)


def hosts_of(count: int) -> list[Host]:
    """Return hosts as a machinefile has them."""
    return [Host(id=n, address=f"10.0.0.{n + 1}", port=9000) for n in range(count)]


class ClusterDialer(Dialer):
    """Dials the hosts of a cluster, one after the other. They have no disks."""

    takes_files = False  # type: ignore[assignment]

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        """See `Dialer`."""
        found: dict[int, RemoteAgent | JobError] = {}
        for host in hosts:
            try:
                found[host.id] = self._cluster.dial(self._cluster.machines[host.address])
            except JobError as error:
                found[host.id] = error
        return found


def kill(cluster: Cluster, draw: float, for_s: float) -> None:
    """Kill a process."""
    process = cluster.some_process(draw)
    if process is not None:
        cluster.note()
        process.exit(-9)


def stop(cluster: Cluster, draw: float, for_s: float) -> None:
    """Stop a process for a while."""
    process = cluster.some_process(draw)
    if process is not None:
        cluster.note(process)
        process.stop(for_s)


def crash(cluster: Cluster, draw: float, for_s: float) -> None:
    """End all on a host, which comes back later, or never."""
    host = cluster.some_host(draw)
    cluster.cut_off = True
    cluster.note()
    host.crash()
    if for_s > GONE_S:
        cluster.gone.add(host)
    else:
        cluster.world.after(for_s, lambda: setattr(host, "up", host not in cluster.gone))


def stall(cluster: Cluster, draw: float, for_s: float) -> None:
    """Let the links of a host carry nothing for a while."""
    cluster.cut_off = True
    agents = cluster.some_host(draw).agents
    touched = [each for agent in agents for each in (agent.process, *agent.processes.values())]
    cluster.note(*touched)
    for process in touched:
        cluster.fabric.stall(process, for_s)


def separate(cluster: Cluster, draw: float, for_s: float) -> None:
    """Lose the connections of two processes."""
    one, other = cluster.some_process(draw), cluster.some_process(1 - draw)
    if one is not None and other is not None and one is not other:
        cluster.note()
        cluster.fabric.separate(one, other, 10.0)


def stop_launcher(cluster: Cluster, draw: float, for_s: float) -> None:
    """Stop the launcher for a while."""
    cluster.disturbed_early |= not cluster.started
    cluster.primitives.process.stop(min(for_s / 4, MOST_STOPPED_S))


def interrupt(cluster: Cluster, draw: float, for_s: float) -> None:
    """Press Ctrl-C, or send SIGTERM."""
    cluster.asked_to_stop = True
    cluster.ask_to_stop(25.0 if draw < 0.5 else None)


def kill_as_user(cluster: Cluster, draw: float, for_s: float) -> None:
    """Kill the job on one host."""
    agent = cluster.some_agent(draw)
    if agent is not None:
        cluster.note()
        cluster.asked_to_stop = True
        if (known := cluster.agents.get(agent.process.name)) is not None:
            cluster.killed.append(known)
        agent.kill_as_user()


def kill_agent(cluster: Cluster, draw: float, for_s: float) -> None:
    """Kill the agent of a host, but not what it has started."""
    agent = cluster.some_agent(draw)
    if agent is not None:
        cluster.note(*agent.processes.values())
        agent.kill()


def stop_agent(cluster: Cluster, draw: float, for_s: float) -> None:
    """Stop the agent of a host for a while, but not what it has started."""
    agent = cluster.some_agent(draw)
    if agent is not None:
        cluster.cut_off = True
        cluster.note(agent.process, *agent.processes.values())
        agent.process.stop(for_s / 3)


def ask_agent_to_end(cluster: Cluster, draw: float, for_s: float) -> None:
    """Send SIGTERM to the agent of a host, as a machine that shuts down does."""
    agent = cluster.some_agent(draw)
    if agent is not None:
        cluster.note(agent.process, *agent.processes.values())
        agent.ask_to_end()


def part(cluster: Cluster, draw: float, for_s: float) -> None:
    """Let the processes of a host reach none of the others for a while; the launcher reaches all."""
    host = cluster.some_host(draw)
    cluster.note()
    cluster.fabric.part(
        lambda process: process in host.processes,
        lambda process: process in cluster.processes and process not in host.processes,
        for_s,
    )


Fault = Callable[[Cluster, float, float], None]
FAULTS: Mapping[str, Fault] = {
    "kill": kill,
    "stop": stop,
    "crash": crash,
    "stall": stall,
    "separate": separate,
    "launcher stop": stop_launcher,
    "interrupt": interrupt,
    "user kill": kill_as_user,
    "agent kill": kill_agent,
    "agent stop": stop_agent,
    "agent term": ask_agent_to_end,
    "part": part,
}


def draw_duration(random: Random) -> float:
    """Return for how many seconds a fault lasts."""
    return random.random() * random.choice((3, 9, 90))
