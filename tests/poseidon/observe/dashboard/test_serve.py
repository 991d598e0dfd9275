"""The address of the page, as the command prints it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

pytest.importorskip("uvicorn")
from poseidon.errors import JobError
from poseidon.observe.dashboard.serve import page_address, serve


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8300/"),
        ("node0", "http://node0:8300/"),
        ("fd00::8", "http://[fd00::8]:8300/"),
        ("0.0.0.0", f"http://{socket.gethostname()}:8300/"),
        ("::", f"http://{socket.gethostname()}:8300/"),
    ],
)
def test_an_address_that_a_browser_can_open(host: str, address: str) -> None:
    assert page_address(host, 8300) == address


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_page_without_an_error(number: signal.Signals) -> None:
    command = "from poseidon.observe.dashboard.serve import serve; raise SystemExit(serve([], host='127.0.0.1', port=0, token=''))"
    with subprocess.Popen([sys.executable, "-c", command], stdout=-1, stderr=-1, text=True) as page:
        assert page.stdout is not None
        address = page.stdout.readline().split()[-1]
        with urlopen(address, timeout=30) as answer:  # its handlers are in place
            assert answer.status == 200
        with socket.create_connection(
            ("127.0.0.1", urlsplit(address).port), timeout=30
        ) as stranger:
            stranger.sendall(b"no HTTP\r\n\r\n")
            assert stranger.recv(99).startswith(b"HTTP/1.1 400")
        page.send_signal(number)
        _, errors = page.communicate(timeout=30)
    assert (page.returncode, errors) == (0, "")


@pytest.mark.processes
def test_a_signal_ends_the_page_although_a_file_cannot_be_read(tmp_path: Path) -> None:
    """As on a network's file system whose server has gone."""
    (tmp_path / "metrics.jsonl").write_text("")
    command = (
        "import threading; from pathlib import Path; from poseidon.observe.dashboard import folders, serve;"
        "folders.JobFolder.refresh = lambda self: (print('reads', flush=True), threading.Event().wait());"
        "serve.END_S = 0.1;"
        f"serve.serve([Path({str(tmp_path)!r})], host='127.0.0.1', port=0, token='')"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=-1, text=True) as page:
        assert page.stdout is not None
        port = urlsplit(page.stdout.readline().split()[-1]).port
        with socket.create_connection(("127.0.0.1", port), timeout=30) as browser:
            browser.sendall(b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert page.stdout.readline() == "reads\n"
            page.terminate()
            assert page.wait(30) == 0


@pytest.mark.processes
def test_who_says_nothing_makes_room_for_others() -> None:
    """Else strangers take all files that the process may open, and asyncio prints it for ever."""
    command = (
        "from poseidon.observe.dashboard import serve; serve.MOST = 4;"
        "raise SystemExit(serve.serve([], host='127.0.0.1', port=0, token=''))"
    )
    with (
        subprocess.Popen([sys.executable, "-c", command], stdout=-1, text=True) as page,
        ExitStack() as stack,
    ):
        stack.callback(page.terminate)
        assert page.stdout is not None
        address = page.stdout.readline().split()[-1]
        place = "127.0.0.1", urlsplit(address).port
        silent = [stack.enter_context(socket.create_connection(place, 30)) for _ in range(5)]
        assert silent[0].recv(1) == b""  # the fifth has taken its place
        with urlopen(address, timeout=30) as answer:
            assert answer.status == 200
        assert silent[1].recv(1) == b""


@pytest.mark.processes
def test_pages_that_follow_jobs_do_not_lock_others_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    command = (
        "from pathlib import Path; from poseidon.observe.dashboard import serve; serve.MOST = 4;"
        f"serve.serve([Path({str(tmp_path)!r})], host='127.0.0.1', port=0, token='')"
    )
    request = f"GET /api/jobs/{tmp_path.name}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        subprocess.Popen([sys.executable, "-c", command], stdout=-1, text=True) as page,
        ExitStack() as stack,
    ):
        stack.callback(page.terminate)
        assert page.stdout is not None
        address = page.stdout.readline().split()[-1]
        place = "127.0.0.1", urlsplit(address).port
        for _ in range(4):
            browser = stack.enter_context(socket.create_connection(place, 30))
            browser.sendall(request.encode())
            assert browser.recv(12) == b"HTTP/1.1 200"
        with urlopen(address, timeout=30) as answer:
            assert answer.status == 200


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError) as caught:
            serve([], host="127.0.0.1", port=port, token="")
    assert str(caught.value) == (
        f"cannot listen at 127.0.0.1:{port}: Address already in use; choose a different --port, "
        "or 0 for a free one"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_is_one_sentence(host: str) -> None:
    with pytest.raises(
        JobError, match=rf"^cannot listen at {host}:0: .*; expected an address of this machine$"
    ):
        serve([], host=host, port=0, token="")
