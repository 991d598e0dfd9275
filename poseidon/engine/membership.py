"""What a worker's exchange must know of its document."""

from __future__ import annotations

from poseidon.engine.document import WorkerDocument
from poseidon.exchange.build import Membership
from ps_server.keys import Keyring


def membership(document: WorkerDocument) -> Membership:
    """What the exchange must know of the document."""
    return Membership(
        rank=document.rank // document.local_workers,
        workers=document.workers // document.local_workers,
        local_rank=document.local_rank,
        local_workers=document.local_workers,
        local_address=document.local_address,
        shards=document.shards,
        host=document.host,
        token=bytes.fromhex(document.token),
        keys=Keyring.from_json(document.keys) if document.keys else None,
        homes=document.homes,
        shares=document.shares,
        options=document.exchange,
    )
