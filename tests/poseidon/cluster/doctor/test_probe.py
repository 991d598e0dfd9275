"""The probe of links between two ends on loopback, with real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from poseidon.base.few_visitors import FewVisitors
from poseidon.cluster.doctor.probe import Probe, measure, packets_arriving, path_mtu, reach

TOKEN = "0123456789abcdef0123456789abcdef"
ADDRESS = "127.0.0.1"


@pytest.fixture(params=["127.0.0.1", "::1"])
def listening(request: pytest.FixtureRequest) -> Iterator[tuple[str, int, int]]:
    """A probe that listens: its address, a TCP port, a UDP port."""
    probe = Probe()
    answer = probe.answer({"do": "listen", "address": request.param, "ports": [0], "token": TOKEN})
    if "problem" in answer:
        pytest.skip("needs IPv6 on loopback")
    yield request.param, answer["tcp"][0], answer["udp"]
    probe.close()


def test_an_open_port_is_reached_and_measured(listening: tuple[str, int, int]) -> None:
    address, tcp, _ = listening
    assert reach(address, tcp, TOKEN.encode(), 5.0) == "open"
    link = measure(address, tcp, TOKEN.encode(), 0.05)
    assert link["rtt_s"] > 0
    assert link["send"] > 0
    assert link["receive"] > 0


def test_packets_of_all_sizes_arrive_up_to_the_mtu(listening: tuple[str, int, int]) -> None:
    address, _, udp = listening
    mtu = path_mtu(address)
    assert mtu is not None
    sizes = [200, 1500, min(mtu, 9000)]
    assert packets_arriving(address, udp, TOKEN.encode(), sizes) == sorted(set(sizes))


def test_a_stranger_gets_nothing(listening: tuple[str, int, int]) -> None:
    address, tcp, udp = listening
    wrong = b"x" * len(TOKEN)
    assert reach(address, tcp, wrong, 5.0) == "other"
    assert packets_arriving(address, udp, wrong, [200]) == []
    with socket.create_connection((address, tcp), timeout=5.0) as stranger:
        stranger.sendall(wrong)
        assert stranger.recv(1) == b"", "the connection is closed without an answer"


def test_a_closed_port_is_refused() -> None:
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
    assert reach(ADDRESS, port, TOKEN.encode(), 5.0) == "refused"


def test_a_port_of_another_program_is_told_apart() -> None:
    with socket.create_server((ADDRESS, 0)) as other:
        other.settimeout(10.0)
        port = other.getsockname()[1]
        # The kernel connects, and nobody reads: the probe waits for the answer to its token.
        assert reach(ADDRESS, port, TOKEN.encode(), 0.2) == "timeout"


@pytest.mark.parametrize("said", [b"", b"?", b"!"])
def test_a_measurement_that_ends_early_is_a_sentence(said: bytes) -> None:
    def serve(connection: socket.socket, _: object) -> None:
        connection.recv(len(TOKEN))
        connection.sendall(said)

    listener = socket.create_server((ADDRESS, 0))
    asked = {"address": ADDRESS, "port": listener.getsockname()[1], "seconds": 0.05}
    visitors = FewVisitors(listener, serve, name="poseidon-probe")
    answer = Probe().answer({"do": "measure", **asked, "token": TOKEN})
    visitors.close()
    assert answer["problem"] in (
        "the other end has closed the connection",
        "what listens there is not a probe",
        "Connection reset by peer",
    )


def test_a_datagram_of_a_stranger_does_not_count() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((ADDRESS, 0))

        def answer() -> None:
            content, sender = probe.recvfrom(1 << 16)
            for said in (b"?", len(content).to_bytes(4, "big")):
                probe.sendto(said, sender)

        thread = threading.Thread(target=answer)
        thread.start()
        assert packets_arriving(ADDRESS, probe.getsockname()[1], TOKEN.encode(), [200]) == [200]
        thread.join()


def test_a_port_in_use_is_a_sentence_and_the_others_listen() -> None:
    with socket.create_server((ADDRESS, 0)) as taken:
        probe = Probe()
        request = {
            "do": "listen",
            "address": ADDRESS,
            "ports": [taken.getsockname()[1], 0],
            "token": TOKEN,
        }
        used, free = probe.answer(request)["tcp"]
        assert "in use" in used.lower()
        assert reach(ADDRESS, free, TOKEN.encode(), 5.0) == "open"
        probe.close()
    assert reach(ADDRESS, free, TOKEN.encode(), 5.0) == "refused"


def test_an_error_of_the_system_is_an_answer() -> None:
    assert "problem" in Probe().answer(
        {"do": "listen", "address": "203.0.113.1", "ports": [0], "token": TOKEN}
    )
