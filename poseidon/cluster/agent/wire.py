"""The wire format between a launcher and the agent on a host: a JSON object, then bytes.

    {"kind": "Put", "id": 3, "path": "/tmp/x/net.prototxt", "offset": 0}
<content>

`kind` is the name of the message's class (`messages.py`), and the other keys are its fields, save
its field of bytes, if it has one: that follows the line as it is.

Law: pure. What `decode` returns has the types of its class (`json_fields.py`). Either side closes
the connection on anything else.

How long a peer has been silent, measured in the time for which this process was running.

Law: pure. A process that was stopped, or has no processor, receives late what its peer has sent in
time. Such a pause must not count as silence. So a wait that lasts longer than its limit counts as
the limit, and a silence is found after the same number of waits, however busy this machine is.
"""

from __future__ import annotations

import json
from typing import Generic, TypeVar, get_args

from poseidon.cluster.agent.messages import Report, Request
from poseidon.errors import PoseidonError
from ps_server.json_fields import fields_of, plain, value_of


class PeerSilence:
    """The silence of another process.

    Args:
        longest_wait_s: the longest time between two looks of a process that is not late.
        now_s: the time, by any steady clock.
    """

    def __init__(self, longest_wait_s: float, now_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._looked_s = self._known_s = now_s
        self._seconds = 0.0
        self.heard_s = now_s
        """When it was heard last. Another thread may set it."""

    def look(self, now_s: float) -> float:
        """Return for how many seconds it has been silent while this process was running."""
        since_s, self._looked_s = self._looked_s, now_s
        if self._known_s != self.heard_s:
            since_s = self._known_s = self.heard_s
            self._seconds = 0.0
        self._seconds += min(max(0.0, now_s - since_s), self._longest_wait_s)
        return self._seconds


_M = TypeVar("_M")


class WireError(ValueError):
    """What came is not a message of this protocol."""


class MessageCodec(Generic[_M]):
    """Encodes and decodes messages.

    Args:
        kinds: their classes: frozen dataclasses.
    """

    def __init__(self, *kinds: type[_M]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: _M) -> bytes:
        fields = fields_of(message)
        content = fields.pop("content", None)
        header = json.dumps({"kind": type(message).__name__, **fields}, default=plain).encode()
        return b"%b\n%b" % (header, content) if isinstance(content, bytes) else header

    def decode(self, encoded: bytes) -> _M:
        """Decode a message.

        Raises:
            WireError: it is not one of these.
        """
        header, _, content = encoded.partition(b"\n")
        try:
            fields = json.loads(header)
            kind = self._kinds[fields["kind"]]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise WireError(f"not a message: {encoded[:80]!r}") from error
        try:
            return value_of(kind, {**fields, "content": content})
        except (ValueError, PoseidonError) as error:
            raise WireError(str(error)) from error


REQUESTS: MessageCodec[Request] = MessageCodec(*get_args(Request))
REPORTS: MessageCodec[Report] = MessageCodec(*get_args(Report))
