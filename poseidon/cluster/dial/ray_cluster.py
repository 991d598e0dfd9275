"""An existing Ray cluster: the nodes for a job's clients, and an actor on each.

Law: each client has a node of its own (a placement group, STRICT_SPREAD). Ray places a lost
client's bundle again, on a node that an autoscaler or a user adds; the bundles of the others stay.
Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from poseidon.base.settings import read_settings, restrain_ray
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.ray_resources import RayNode, Resources, describe_lack
from poseidon.cluster.process import for_each_host
from poseidon.errors import JobError, UsageError, printable

LISTEN_S = 5.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The preface of a client, and its empty SETTINGS frame."""
FRAME_HEADER, SETTINGS, TLS_ALERT = 9, b"\x04", b"\x15"
POLL_S = 1
"""Whole seconds: Ray drops a fraction, and a wait of 0.5 s returns at once."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RayCluster:
    """A cluster that this process is connected to.

    Args:
        ray: the module, connected; disconnected by `close`.
    """

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        """The module."""
        self._group: Any = None
        self._bundles: dict[int, Resources] = {}
        self._position: dict[int, int] = {}

    @property
    def nodes(self) -> tuple[RayNode, ...]:
        """The nodes that are alive."""
        return tuple(
            RayNode(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                name=node["NodeManagerHostname"],
                resources=node["Resources"],
            )
            for node in self.ray.nodes()
            if node["Alive"]
        )

    def describe_lack(self) -> str:
        """Return what the clients need and what the cluster has."""
        free = self.ray.available_resources()
        return describe_lack(list(self._bundles.values()), self.nodes, free)

    def request(self, bundles: Mapping[int, Resources]) -> None:
        """Request a node for each client; release what was requested before.

        Args:
            bundles: the resources of each client, by its id.
        """
        from ray.util import placement_group

        self._release()
        self._bundles = dict(bundles)
        self._position = {client: position for position, client in enumerate(bundles)}
        self._group = placement_group(
            [dict(bundle) for bundle in bundles.values()], strategy="STRICT_SPREAD"
        )

    def placed(self, timeout_s: float) -> bool:
        """Wait until every client has a node; return False when the time is up.

        Raises:
            JobError: Ray has ended this job, as after the loss of the node that the launcher runs
                on.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._group.wait(POLL_S):  # Python handles no signal while Ray waits
                if time.monotonic() + POLL_S > deadline_s:
                    return False
        except Exception as error:
            raise JobError(
                f"Ray has ended this job ({reason_of(error)}), as it does when the launcher's own "
                "node is lost; start the "
                "launcher on a node that stays, such as the head, and resume with --snapshot=JOB"
            ) from error
        return True

    def start_actors(
        self,
        labels: Mapping[int, str],
        kind: type,
        calls: Sequence[str],
        timeout_s: float,
        agent_of: Callable[[int, str, Any, Mapping[str, Any]], RemoteAgent],
    ) -> Mapping[int, tuple[RemoteAgent, RayNode] | JobError]:
        """Start an actor for each of some clients and open its agent, in parallel.

        Args:
            labels: the clients in messages, by id.
            kind: the actor's class; its `describe` returns facts, among them its `node`.
            calls: its methods that run at the same time.
            timeout_s: how long to wait for a client's node and its actor.
            agent_of: opens the agent, given the client, its label, the actor and the facts.

        Returns:
            The agent and the node, or the error, by the client's id.
        """

        def start(client: int) -> tuple[RemoteAgent, RayNode]:
            label = labels[client]
            try:
                actor = self._start_actor(client, kind, calls)
            except Exception as error:
                raise JobError(
                    f"{label}: Ray could not start its actor: {reason_of(error)}"
                ) from error
            try:
                facts = self._describe(actor, label, timeout_s)
                node = next((node for node in self.nodes if node.id == facts["node"]), None)
                if node is None:
                    raise JobError(f"{label}: its node was lost while it started")
                return agent_of(client, f"{label} on {node.name}", actor, facts), node
            except BaseException:
                with contextlib.suppress(Exception):  # the cluster may have ended
                    self.ray.kill(actor, no_restart=True)
                raise

        clients = list(labels)
        outcomes = for_each_host(start, clients, name="poseidon ray")
        return dict(zip(clients, outcomes, strict=True))

    def close(self) -> None:
        """Release the nodes and disconnect. May be called twice."""
        self._release()
        self.ray.shutdown()

    def _release(self) -> None:
        if self._group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):  # the cluster may have ended
                remove_placement_group(self._group)
            self._group = None

    def _start_actor(self, client: int, actor: type, calls: Sequence[str]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._bundles[client])
        known = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        amounts = {option: resources.pop(name, 0) for option, name in known.items()}
        if not amounts["memory"]:
            del amounts["memory"]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._position[client]
        )
        kind = self.ray.remote(
            **amounts,
            resources=resources,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
            concurrency_groups=dict.fromkeys(calls, 1),
        )
        return kind(actor).remote()

    def _describe(self, actor: Any, label: str, timeout_s: float) -> Mapping[str, Any]:
        """Wait for an actor; return what it returns of itself."""
        described = actor.describe.remote()
        ready, _ = self.ray.wait([described], timeout=timeout_s)
        if not ready:
            raise JobError(
                f"{label}: no node of the Ray cluster has started its actor within {timeout_s:g} "
                f"s; {self.describe_lack()}"
            )
        try:
            return dict(self.ray.get(described))
        except Exception as error:
            raise JobError(f"{label}: {_explained(error)}") from error


def reason_of(error: BaseException) -> str:
    """Return the first line of an error of Ray that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)


def connect_to_cluster(address: str | None) -> RayCluster:
    """Connect this process to a running cluster.

    Args:
        address: `host:port` of its head; None: $RAY_ADDRESS, else the cluster that runs on this
            machine.

    Raises:
        UsageError: Ray is not installed, there is no cluster, or it has a different version of Ray
            or Python.
    """
    restrain_ray()
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"--launcher=ray needs the package ray ({error}): pip install 'poseidon[ray]'"
        ) from error
    source = "--launcher=ray:address" if address else "RAY_ADDRESS"
    address = address or read_settings().ray_address
    if address is not None:
        _check_listens(address, source)
    try:
        with _own_signal_handlers(), _in_root_folder():
            ray.init(
                address=address or "auto",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                namespace="poseidon",
            )
    except Exception as error:
        raise UsageError(
            _not_connected(f"{address} ({source})" if address else None, error)
        ) from error
    return RayCluster(ray)


@contextmanager
def _in_root_folder() -> Iterator[None]:
    """Leave the current folder: Ray puts the one of `init` first on the path of its tasks,
    before Python's library.
    """
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def _check_listens(address: str, source: str) -> None:
    """Raise an error if no head of a cluster listens at an address: Ray itself
    tries for half a minute, or without end.
    """
    if address == "auto":
        return
    if "://" in address:
        raise UsageError(
            f"{source}={address}: expected host:port of the cluster's head; the launcher runs on "
            "one of the nodes"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"{source}={address}: expected host:port of the cluster's head, as in node0:6379"
        )
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=LISTEN_S
        ) as connection:
            _check_speaks_http2(connection)
    except (OSError, OverflowError) as error:
        raise UsageError(_not_connected(f"{address} ({source})", error)) from error


def _check_speaks_http2(connection: socket.socket) -> None:
    """Raise OSError unless the other end answers as a gRPC server does: with a
    SETTINGS frame (RFC 9113, 3.4), or in TLS.
    """
    connection.sendall(HTTP2_PREFACE)
    answer = b""
    with contextlib.suppress(TimeoutError):
        while len(answer) < FRAME_HEADER and (
            received := connection.recv(FRAME_HEADER - len(answer))
        ):
            answer += received
    if answer[3:4] != SETTINGS and answer[:1] != TLS_ALERT:
        raise OSError("what listens there is not the head of a Ray cluster")


def _not_connected(address: str | None, error: Exception) -> str:
    # what follows names flags of Ray's own
    text = reason_of(error).split(". Please specify")[0].rstrip(".")
    if "ersion mismatch" in str(error):
        text = " ".join(str(error).split())
        return f"the Ray cluster and this launcher do not fit together: {printable(text)}"
    where = (
        f"at {address}"
        if address
        else "on this machine (--launcher=ray:address or $RAY_ADDRESS names a different one)"
    )
    return (
        f"no Ray cluster was reached {where}: {text}; start one with 'ray start --head', and 'ray "
        "start --address=HEAD:6379' on the other nodes"
    )


def _explained(error: Exception) -> str:
    """Return why an actor could not start."""
    text = str(error)
    missing = re.search(r"No module named '([^']+)'", text)
    if missing:
        return (
            f"Ray's Python on its node has no module '{printable(missing[1])}'; install the "
            "launcher's version of Poseidon, "
            "with the extra ray, in the environment that runs 'ray start'"
        )
    return f"its Ray actor could not start: {reason_of(error)}"


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the handlers of signals: Ray installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
