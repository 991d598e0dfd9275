"""Looks at connections that ZeroMQ owns."""

from __future__ import annotations

import socket

from ps_server.transport.listening import Borrowed, Listening
from tests.support.polling import until


def test_bytes_that_nobody_has_read_do_not_count() -> None:
    """On a loaded machine they wait for a thread of this process."""
    listening = Listening("tcp://127.0.0.1:0", send_buffer_bytes=0)
    listener = socket.socket(fileno=listening.descriptor())
    port = listener.getsockname()[1]
    with listener, socket.create_connection(("127.0.0.1", port)) as peer:
        listener.setblocking(True)
        owned, _ = listener.accept()
        with owned:
            borrowed = Borrowed(listening)
            place = borrowed.place(owned.fileno())
            peer.sendall(bytes(1000))
            until(lambda: len(owned.recv(1000, socket.MSG_PEEK)) == 1000, "no bytes came", 10.0)
            assert borrowed.received_bytes(owned.fileno(), place) == 0
            owned.recv(600)
            assert borrowed.received_bytes(owned.fileno(), place) == 600
            borrowed.close()
    listening.close()
