"""A sharded key-value parameter server with bounded staleness.

Knows no nets; imports nothing of `poseidon`.

Start shards with `python -m ps_server`; train against them with `Client`.
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))
):  # `python -m` searches the current folder before Python's own library
    sys.path.append(sys.path.pop(0))

from ps_server import importing

with importing.collector_paused():  # torch is among them
    from ps_server.client import Client
    from ps_server.collection import Collection
    from ps_server.errors import (
        LocalProtocolError,
        PeerLeft,
        PeerLost,
        RemoteProtocolError,
        ServerError,
        SpecError,
        StalenessTimeout,
        TransportError,
    )
    from ps_server.protocol.messages import Signal, SignalKind
    from ps_server.protocol.settings import (
        CodecKind,
        CodecPair,
        CodecSpec,
        Consistency,
        Keeping,
        Precision,
        Regularization,
        Rule,
        RuleKind,
        StoreSpec,
        TableSpec,
    )
    from ps_server.protocol.shard import Shard
    from ps_server.server import Server
    from ps_server.transport.zmq_sockets import ZmqServerTransport

__all__ = [
    "Client",
    "CodecKind",
    "CodecPair",
    "CodecSpec",
    "Collection",
    "Consistency",
    "Keeping",
    "LocalProtocolError",
    "PeerLeft",
    "PeerLost",
    "Precision",
    "Regularization",
    "RemoteProtocolError",
    "Rule",
    "RuleKind",
    "Server",
    "ServerError",
    "Shard",
    "Signal",
    "SignalKind",
    "SpecError",
    "StalenessTimeout",
    "StoreSpec",
    "TableSpec",
    "TransportError",
    "ZmqServerTransport",
]
