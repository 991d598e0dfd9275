"""An attacker in the middle of a connection: a relay that reads ZeroMQ's messages and changes
them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from tests.support.relay import Relay

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4

Message = list[bytes]
Change = Callable[[int, Message], list[Message]]
"""From the number of a message of a direction, and the message, to what goes on in its place."""


def unchanged(number: int, message: Message) -> list[Message]:
    """Change nothing."""
    return [message]


class TamperingRelay(Relay):
    """Relays connections, and messages as changed.

    Args:
        target: `tcp://host:port`.
        there: changes messages to the target.
        back: changes messages from the target.
    """

    def __init__(self, target: str, there: Change = unchanged, back: Change = unchanged) -> None:
        self._change = {True: there, False: back}
        super().__init__(target)

    def _pass(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        def send(piece: bytes) -> None:
            kept.extend(piece)
            target.sendall(piece)

        try:
            left = GREETING_BYTES  # each end waits for a part of the other's
            while left:
                piece = _some(source, left)
                send(piece)
                left -= len(piece)
            for number, message in enumerate(_messages(source, send)):
                for changed in self._change[kept is self.there](number, message):
                    send(_encoded(changed))
        except OSError:
            return


def _messages(source: socket.socket, send: Callable[[bytes], None]) -> Iterator[Message]:
    """Yield messages; pass commands on, the mechanism's among them."""
    message: Message = []
    while True:
        flags = _exactly(source, 1)
        length = _exactly(source, 8 if flags[0] & LONG else 1)
        body = _exactly(source, int.from_bytes(length, "big"))
        if flags[0] & COMMAND:
            send(flags + length + body)
            continue
        message.append(body)
        if not flags[0] & MORE:
            yield message
            message = []


def _encoded(message: Message) -> bytes:
    parts = [
        bytes([LONG | (MORE if place < len(message) else 0)]) + len(part).to_bytes(8, "big") + part
        for place, part in enumerate(message, 1)
    ]
    return b"".join(parts)


def _exactly(source: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        got += _some(source, size - len(got))
    return got


def _some(source: socket.socket, most: int) -> bytes:
    piece = source.recv(most)
    if not piece:
        raise OSError("the connection has ended")
    return piece
