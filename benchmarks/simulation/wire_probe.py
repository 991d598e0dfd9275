"""One end of a stream of chunks in a process: prints its processor time, and the duration of the
stream.

python -m benchmarks.simulation.wire_probe receive tcp://10.0.0.1:9000 100
python -m benchmarks.simulation.wire_probe send tcp://10.0.0.1:9000 100
"""

from __future__ import annotations

import json
import sys
import time

import zmq

from ps_server.transport.zmq_sockets import SEND_BUFFER_BYTES

CHUNK_BYTES = 2 * 2**20
LINGER_MS = 10_000


def receive(socket: zmq.Socket[bytes], address: str, count: int) -> float:
    """Receive a number of chunks. Return the seconds from the first to the last."""
    socket.bind(address)
    socket.recv(copy=False)
    began_s = time.perf_counter()
    for _ in range(count - 1):
        socket.recv(copy=False)
    return time.perf_counter() - began_s


def send(socket: zmq.Socket[bytes], address: str, count: int) -> float:
    """Send a number of chunks, and wait until they have left. Return the seconds."""
    began_s = time.perf_counter()
    socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
    socket.connect(address)
    payload = bytearray(CHUNK_BYTES)
    trackers = [socket.send(payload, copy=False, track=True) for _ in range(count)]
    for tracker in trackers:
        tracker.wait()
    return time.perf_counter() - began_s


def main(argv: list[str]) -> None:
    """Run one end. Print its processor time and the duration, in seconds."""
    role, address, count = argv
    context = zmq.Context()
    socket = context.socket(zmq.PULL if role == "receive" else zmq.PUSH)
    began_s = time.process_time()
    seconds = {"receive": receive, "send": send}[role](socket, address, int(count))
    used_s = time.process_time() - began_s
    socket.close(linger=LINGER_MS)
    context.term()
    print(json.dumps({"cpu_s": used_s, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
