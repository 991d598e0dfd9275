"""One end of a stream of chunks, in a process of its own: says what its processor took.

python -m benchmarks.simulation.wire_probe receive tcp://10.0.0.1:9000 100
python -m benchmarks.simulation.wire_probe send tcp://10.0.0.1:9000 100
"""

from __future__ import annotations

import json
import sys
import time

import zmq

CHUNK_BYTES = 2 * 2**20


def receive(socket: zmq.Socket[bytes], address: str, count: int) -> None:
    """Take so many chunks."""
    socket.bind(address)
    for _ in range(count):
        socket.recv(copy=False)


def send(socket: zmq.Socket[bytes], address: str, count: int) -> None:
    """Send so many chunks, and wait until they have left."""
    socket.connect(address)
    payload = bytearray(CHUNK_BYTES)
    trackers = [socket.send(payload, copy=False, track=True) for _ in range(count)]
    for tracker in trackers:
        tracker.wait()


def main(words: list[str]) -> None:
    """Run one end; prints its processor time, seconds."""
    role, address, count = words
    context = zmq.Context()
    socket = context.socket(zmq.PULL if role == "receive" else zmq.PUSH)
    began_s = time.process_time()
    {"receive": receive, "send": send}[role](socket, address, int(count))
    used_s = time.process_time() - began_s
    socket.close(linger=10_000)
    context.term()
    print(json.dumps({"cpu_s": used_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
