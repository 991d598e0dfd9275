"""A sharded key-value parameter server with bounded staleness.

Knows no nets; imports nothing of `poseidon`.

Start shards with `python -m ps_server`; train against them with `Client`.

Law: importing this package does not import torch. Access to a name imports its module, so that the
settings of a store cost a command line nothing.
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))
):  # `python -m` searches the current folder before Python's own library
    sys.path.append(sys.path.pop(0))

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ps_server.client import Client
    from ps_server.codecs.base import Codec
    from ps_server.codecs.registry import CodecPair, register_codec
    from ps_server.collection import Collection
    from ps_server.errors import (
        Interrupted,
        LocalProtocolError,
        PeerLeft,
        PeerLost,
        PeerUnreachable,
        RemoteProtocolError,
        ServerError,
        SpecError,
        StalenessTimeout,
        TransportError,
    )
    from ps_server.network import Network
    from ps_server.protocol.messages import Signal, SignalKind
    from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind, RowTableSpec
    from ps_server.protocol.settings import (
        Consistency,
        Keeping,
        NewtonSchulz,
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
    "Codec",
    "CodecPair",
    "Collection",
    "Consistency",
    "Interrupted",
    "Keeping",
    "LocalProtocolError",
    "Network",
    "NewtonSchulz",
    "PeerLeft",
    "PeerLost",
    "PeerUnreachable",
    "Precision",
    "Regularization",
    "RemoteProtocolError",
    "RowInit",
    "RowRule",
    "RowRuleKind",
    "RowTableSpec",
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
    "register_codec",
]

if not TYPE_CHECKING:
    _MODULES = {
        "client": ("Client",),
        "codecs.base": ("Codec",),
        "codecs.registry": ("CodecPair", "register_codec"),
        "collection": ("Collection",),
        "errors": (
            "Interrupted",
            "LocalProtocolError",
            "PeerLeft",
            "PeerLost",
            "PeerUnreachable",
            "RemoteProtocolError",
            "ServerError",
            "SpecError",
            "StalenessTimeout",
            "TransportError",
        ),
        "network": ("Network",),
        "protocol.messages": (
            "Signal",
            "SignalKind",
        ),
        "protocol.row_settings": ("RowInit", "RowRule", "RowRuleKind", "RowTableSpec"),
        "protocol.settings": (
            "Consistency",
            "Keeping",
            "NewtonSchulz",
            "Precision",
            "Regularization",
            "Rule",
            "RuleKind",
            "StoreSpec",
            "TableSpec",
        ),
        "protocol.shard": ("Shard",),
        "server": ("Server",),
        "transport.zmq_sockets": ("ZmqServerTransport",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'ps_server' has no attribute '{name}'")
        with import_module("ps_server.process_environment").collector_paused():
            return getattr(import_module(f"ps_server.{_MODULE_OF[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
