"""Agents in actors of Ray, one on the node of each client.

The launcher calls two methods of an actor: `put` takes messages to its agent, `get` returns those
from it. Ray's own connections are in the clear unless the cluster has TLS, so what the methods carry
is sealed as between workers (`ps_server/transport/sealed_ends.py`): each side makes a key pair for
one connection, and Ray sees public keys, sizes and times. What does not come in the order in which it
was sealed, once, is refused.

Law: a lost node or actor ends the channel. One call of each kind is in progress at a time, so that
messages keep their order and a slow node slows the launcher down.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from poseidon.base.settings import expanded, inherited_environment
from poseidon.cluster.agent.child import ChildSettings, base_environment
from poseidon.cluster.agent.host import Agent, AgentSettings
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.channel import MAX_QUEUED, QueueChannel
from poseidon.cluster.dial.dialer import Dialer, Needs
from poseidon.cluster.dial.ray_cluster import RayCluster, connect_to_cluster, reason_of
from poseidon.cluster.dial.ray_resources import Resources, pinned
from poseidon.cluster.machinefile import Host
from poseidon.errors import JobError, printable
from poseidon.version import __version__
from ps_server.errors import RemoteProtocolError
from ps_server.keys import KeyPair, Keyring, key_bytes
from ps_server.transport.sealed_ends import ConnectingEnd, ServerConnection
from ps_server.transport.sealing import Sealer

POLL_S = 2.0
CALL_S = 60.0
"""How long a call that does not wait for messages may take."""
MAX_BATCH_BYTES = 4 << 20
CALLS = ("put", "get")
"""Methods of the actor that run at the same time, each on a thread of its own."""
ACTOR_S = 60.0
"""How long an actor may take to start on its node; the first ones have `timeout` of `--launcher` if that is
longer.
"""
PROMPT_S = 2.0
"""How long to wait for nodes before a line says so."""
RETURN_S = 15.0
"""How long one attempt of a restart waits for a node; `--return_timeout` limits all of them."""


class AgentActor:
    """The actor: an agent on its node. Each method is called by one thread at a time."""

    def __init__(self) -> None:
        self._own = KeyPair.new()

    def describe(self) -> dict[str, Any]:
        """Return the node's id, the version, the interpreter, and the public key."""
        import ray  # it runs this actor

        return {
            "node": ray.get_runtime_context().get_node_id(),
            "version": __version__,
            "python": sys.executable,
            "public": self._own.public,
        }

    def connect(self, public: str, first: bytes, python: str, workdir: str, folder: str) -> bytes:
        """Start the agent; return the second message of the handshake.

        Args:
            public: the launcher's public key.
            first: the first message.
            python: the interpreter of its processes; empty: Ray's own.
            workdir: their working directory; empty: `folder`, or the user's home where there is no
                such folder.
            folder: the launcher's.

        Raises:
            NotADirectoryError: there is no folder `workdir`.
        """
        self._sealed = ServerConnection.answering(
            key_bytes(self._own.secret), first, {key_bytes(public)}
        )
        wanted = str(expanded(workdir or folder))
        if not os.path.isdir(wanted):
            if workdir:
                raise NotADirectoryError(f"workdir={workdir} is not a folder there")
            wanted = str(expanded("~"))
        os.chdir(wanted)
        inherited = inherited_environment()
        own = {name: value for name, value in inherited.items() if not name.startswith("RAY_")}
        settings = AgentSettings(
            children=ChildSettings(environment=base_environment(own), folder=wanted),
            python=str(expanded(python)) if python else sys.executable,
        )
        agent_end, self._channel = QueueChannel.pair()
        threading.Thread(target=Agent(agent_end, settings).serve, daemon=True).start()
        return self._sealed.second

    def put(self, packet: list[bytes]) -> None:
        """Take messages to the agent, in order."""
        for message in self._sealed.opener.open(_writable(packet)):
            self._channel.send(bytes(message))

    def get(self, timeout_s: float) -> list[bytes] | None:
        """Return messages of the agent, none if there are none in time; None once it has ended."""
        message = self._channel.receive(timeout_s)
        if message is None:
            return None if self._channel.closed else []
        return _packet(self._sealed.sealer, message, self._channel)


def _packet(sealer: Sealer, message: bytes, channel: QueueChannel) -> list[bytes]:
    """Return a message and those that wait behind it, sealed."""
    batch, size_bytes = [message], len(message)
    while size_bytes < MAX_BATCH_BYTES and len(batch) < MAX_QUEUED:
        if (following := channel.poll()) is None:
            break
        batch.append(following)
        size_bytes += len(following)
    return [bytes(part) for part in sealer.packet(batch)]


def _writable(packet: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in packet]


class RayDialer(Dialer):
    """A client has a node of its own; a lost client gets another as soon as Ray has one.

    Args:
        hosts: the clients, as in the machinefile.
        address: of the cluster; None: as Ray finds it.
        timeout_s: how long to wait for nodes at the start.
        folder: the launcher's working directory.
        resources: returns what a client asks of its node.
        warn: takes a sentence when the nodes have to be waited for.
    """

    moves = True

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        address: str | None,
        timeout_s: float,
        folder: str,
        resources: Callable[[Host, Needs], Resources],
        warn: Callable[[str], object],
    ) -> None:
        self._lines = {host.id: host for host in hosts}
        self._address = address
        self._timeout_s = timeout_s
        self._folder = folder
        self._resources = resources
        self._warn = warn
        self._cluster: RayCluster | None = None
        self._bundles: dict[int, Resources] = {}
        self._nodes: dict[int, str] = {}
        self._started = False

    def place(self, hosts: Sequence[Host], needs: Needs) -> None:
        """See `Dialer`: has Ray place the clients.

        Raises:
            UsageError: no node has the address of a client.
            JobError: not every client has a node in time.
        """
        again = self._cluster is not None
        cluster = self._cluster = self._cluster or connect_to_cluster(self._address)
        nodes = cluster.nodes
        self._bundles = {
            host.id: pinned(
                self._resources(self._lines[host.id], needs), self._lines[host.id].address, nodes
            )
            for host in hosts
        }
        cluster.request(self._bundles)
        if again or cluster.placed(PROMPT_S):
            return
        limit_s = self._timeout_s
        self._warn(f"waiting up to {limit_s:g} s for nodes: {cluster.describe_lack()}")
        if not cluster.placed(limit_s):
            raise JobError(
                f"{cluster.describe_lack()}; after {limit_s:g} s (--launcher=ray:timeout) they have none; "
                "add nodes with 'ray start --address=HEAD:6379', or ask for fewer clients or "
                "resources"
            )

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        assert self._cluster is not None, "place comes first"
        cluster = self._cluster
        labels = {host.id: f"client {host.id}" for host in hosts}
        again, self._started = self._started, True
        if again and not cluster.placed(RETURN_S):
            waiting = JobError(
                f"{', '.join(labels.values())}: no node of the Ray cluster within {RETURN_S:g} s; "
                f"{cluster.describe_lack()}"
            )
            return dict.fromkeys(labels, waiting)
        limit_s = ACTOR_S if again else max(ACTOR_S, self._timeout_s)

        def agent_of(
            client: int, label: str, actor: Any, description: Mapping[str, Any]
        ) -> RemoteAgent:
            host = self._lines[client]
            where = (host.python or "", host.workdir or "", self._folder)
            return dial_actor(label, actor, cluster.ray, description, where)

        found: dict[int, RemoteAgent | JobError] = {}
        for client, outcome in cluster.start_actors(
            labels, AgentActor, CALLS, limit_s, agent_of
        ).items():
            if isinstance(outcome, JobError):
                found[client] = outcome
            else:
                found[client], self._nodes[client] = outcome[0], outcome[1].address
        return found

    def located(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        return tuple(
            replace(host, address=self._nodes[host.id], peer_address=None)
            if self._nodes.get(host.id, host.address) != host.address
            else host
            for host in hosts
        )

    def cores(self, host: Host, found: int) -> int:
        """See `Dialer`: the CPUs that Ray has reserved."""
        return max(1, min(found, int(self._bundles[host.id].get("CPU", 1))))

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def dial_actor(
    label: str,
    actor: Any,
    ray: Any,
    description: Mapping[str, Any],
    where: tuple[str, str, str],
) -> RemoteAgent:
    """Return the agent of an actor.

    Args:
        label: the host in messages.
        actor: a handle on its `AgentActor`; owned from here on.
        ray: the module.
        description: what the actor has returned of itself.
        where: the interpreter, `workdir` and `folder` of `AgentActor.connect`.

    Raises:
        JobError: the node has a different version of Poseidon, or is lost.
    """
    version = printable(str(description["version"]))
    if version != __version__:
        raise JobError(
            f"{label}: Poseidon {version} is installed for Ray's Python {description['python']}, "
            f"and {__version__} at the launcher; install the same version"
        )
    keys = Keyring(own=KeyPair.new(), expect=(description["public"],))
    far, channel = QueueChannel.pair()
    pump = _Pump(label, actor, ray, channel, ConnectingEnd(keys, 0))
    try:
        pump.start(keys.own.public, where)
    except (OSError, RemoteProtocolError) as error:
        raise JobError(f"{label}: its Ray actor is lost: {error}") from error
    agent = RemoteAgent(far, label)
    agent.connect()
    return agent


class _Pump:
    """Carries messages between a channel and an actor; ends the actor with the channel."""

    def __init__(
        self, label: str, actor: Any, ray: Any, channel: QueueChannel, sealed: ConnectingEnd
    ) -> None:
        self._label = label
        self._actor = actor
        self._ray = ray
        self._channel = channel
        self._sealed = sealed

    def start(self, public: str, where: tuple[str, str, str]) -> None:
        """Agree on keys, and begin.

        Args:
            public: this side's public key.
            where: see `dial_actor`.

        Raises:
            OSError, RemoteProtocolError: the actor is lost, or does not agree.
        """
        second = self._call("connect", public, self._sealed.first, *where)
        self._sealed.receive([memoryview(second)])
        for role, work in (("send", self._send), ("receive", self._receive)):
            name = f"poseidon ray {self._label} {role}"
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor; return its answer.

        Raises:
            OSError: the node or its actor is lost, or does not answer in time.
        """
        call = getattr(self._actor, method)
        if method in CALLS:
            call = call.options(concurrency_group=method)
        try:
            return self._ray.get(call.remote(*arguments), timeout=CALL_S)
        except self._ray.exceptions.GetTimeoutError:
            raise OSError(f"no answer within {CALL_S:g} s") from None
        except Exception as error:
            raise OSError(reason_of(error)) from error

    def _send(self) -> None:
        sealer = self._sealed.sealer
        assert sealer is not None, "`start` has agreed on keys"
        while (message := self._channel.receive()) is not None:
            self._call("put", _packet(sealer, message, self._channel))

    def _receive(self) -> None:
        while (packet := self._call("get", POLL_S)) is not None:
            for message in self._sealed.receive(_writable(packet)) if packet else ():
                self._channel.send(bytes(message))

    def _run(self, work: Callable[[], None]) -> None:
        # Whatever ends a thread, a lost node above all, ends the channel: the agent counts as lost.
        why = ""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the agent's owner reads it
            why = "" if self._channel.closed else str(error)
        self._channel.close(why)
        with suppress(Exception):  # the cluster may have ended
            self._ray.kill(self._actor, no_restart=True)
