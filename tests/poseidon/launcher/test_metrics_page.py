"""The page of `--metrics_port`: what it says, whom it answers, and strangers who hold its port."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from poseidon.launcher.metrics_page import LONGEST_REQUEST_BYTES, Gauge, MetricsPage
from tests.support.polling import until
from tests.support.strangers import ATTACKS, files_of, flooded

FILES = 64
STRANGERS = 150
WAIT_S = 50.0


@pytest.mark.parametrize(
    ("value", "label", "line"),
    [
        (1, "a", 'poseidon_loss{job="a"} 1.0'),
        (1e-300, "a", 'poseidon_loss{job="a"} 1e-300'),
        (float("nan"), "a", 'poseidon_loss{job="a"} NaN'),
        (float("-inf"), "a", 'poseidon_loss{job="a"} -Inf'),
        (2.5, 'a"\\\n', r'poseidon_loss{job="a\"\\\n"} 2.5'),
    ],
)
def test_a_gauge_as_prometheus_reads_it(value: float, label: str, line: str) -> None:
    gauge = Gauge("poseidon_loss", "Total loss", ("job",))
    gauge.set(value, label)
    assert gauge.lines() == ["# HELP poseidon_loss Total loss", "# TYPE poseidon_loss gauge", line]


@pytest.fixture(scope="module")
def page() -> Iterator[MetricsPage]:
    page = MetricsPage(0)
    page.gauge("poseidon_loss", "Total loss", "job").set(1.5, "lenet")
    yield page
    page.close()


def ask(port: int, method: str = "GET", path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        assert answer.getheader("Access-Control-Allow-Origin") is None
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "/metrics", "localhost", 200),
        ("GET", "/metrics?name[]=x", "127.0.0.1:9400", 200),
        ("GET", "/", "[::1]:9400", 200),
        ("GET", "/metrics", "evil.example", 403),
        ("GET", "/metrics", "127.0.0.1.evil.example:9400", 403),
        ("GET", "/metrics", "", 403),
        ("GET", "/etc/passwd", "localhost", 404),
        ("POST", "/metrics", "localhost", 405),
    ],
)
def test_whom_it_answers(page: MetricsPage, method: str, path: str, host: str, status: int) -> None:
    found, text = ask(page.port, method, path, Host=host)
    assert found == status
    assert ("poseidon_loss" in text) is (status == 200)


def test_a_request_that_is_too_long_is_not_answered(page: MetricsPage) -> None:
    with pytest.raises(OSError):
        ask(page.port, Filler="x" * LONGEST_REQUEST_BYTES)


def serve(pipe: Connection) -> None:
    """Serve a page in a process with few files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    page = MetricsPage(0)
    pipe.send(page.port)
    pipe.recv()
    page.close()


@pytest.mark.parametrize("attack", ["silence", "a long line"])
def test_it_answers_during_an_attack(attack: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    port = pipe.recv()

    def answered() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(port)[0] == 200
        return False

    assert process.pid is not None
    with flooded(port, STRANGERS, ATTACKS[attack]):
        until(answered, "the page does not answer", WAIT_S)
        assert files_of(process.pid) < FILES // 2
    pipe.send("end")
    process.join(WAIT_S)
    assert process.exitcode == 0
