"""The dashboard over HTTP: jobs, one job, its stream, its logs; the token; nothing but GET."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import until

uvicorn = pytest.importorskip("uvicorn")
app = pytest.importorskip("poseidon.observe.dashboard.serve")
folders = pytest.importorskip("poseidon.observe.dashboard.folders")

RECORDS = (
    {"time": 100.0, "kind": "start", "job": "lenet-1", "workers": 1, "shards": 0},
    {
        "time": 101.0,
        "kind": "train",
        "iteration": 20,
        "loss": 2.0,
        "rate": 0.1,
        "outputs": {"loss": 2.0},
    },
    {"time": 102.0, "kind": "end", "outcome": "finished", "iteration": 20},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one job that has ended."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "state"))
    job = tmp_path / "output" / "lenet-1"
    job.mkdir(parents=True)
    (job / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (job / "worker_0.log").write_text(
        "I0105 20:40:16.000000  7 solver.cpp:1] Iteration 0, loss = 2\n"
        "I0105 20:40:17.000000  7 solver.cpp:1] Snapshotting\n"
    )
    return tmp_path / "output"


@contextmanager
def served(*given: Path, token: str = "") -> Iterator[str]:
    """Serve folders; return the address."""
    server = uvicorn.Server(
        uvicorn.Config(
            app.make_app([*given], token=token),
            port=0,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the server starts", 30.0)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


START = {"time": 1.0, "kind": "start", "job": "x", "addresses": {"a": "<script>alert(1)</script>"}}
WORKER = {
    "time": 2.0,
    "kind": "worker",
    "index": 1,
    "host": "<script>alert(1)</script>",
    "iteration": 2,
}
HOSTILE: dict[str, list[object]] = {
    "values": [START, {"time": 2.0, "kind": "progress", "iteration": 1, "rate": float("nan")}],
    "deep": ["[" * 50_000],
    "extremes": [
        START,
        *({**WORKER, "time": time_s, "iteration": number, "sending_s": {"a": float(number)}}
          for time_s, number in ((0.0, 0), (1e-300, 2**53), (1e11, 2**53))),
        *({"time": time_s, "kind": "shard", "index": 2**53, "bytes_in": number}
          for time_s, number in ((0.0, 0), (0.001, 2**53))),
        {"time": 1e11, "kind": "progress", "iteration": 0, "max_iter": 2**53, "rate": 2**-53},
        {"time": 5, "kind": "train", "iteration": 2**53, "loss": 1e300, "rate": -1e300, "outputs": {"\ud800<b>": 0}},
    ],
    "script": [
        {**START, "job": "<script>alert(1)</script>"},
        *({**WORKER, "time": 2.0 + n} for n in range(3)),
        {"time": 3.0, "kind": "snapshot", "iteration": 1, "path": "<script>alert(1)</script>"},
        {"time": 3.0, "kind": "end", "outcome": '" onmouseover=alert(1) "', "iteration": None},
    ],
    "surrogates": [{**START, "job": "\ud800"}, {"time": 1, "kind": "end", "outcome": "\ud800"}],
}  # fmt: skip
"""Records of other users, by the name of their folder."""


def test_a_hostile_folder_spoils_no_other_jobs_page(folder: Path, tmp_path: Path) -> None:
    for name, records in HOSTILE.items():
        (folder / name).mkdir()
        lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
        (folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    for name in ("fifo", "endless", "linked", "<script>alert(1)"):
        (folder / name).mkdir()
    os.mkfifo(folder / "fifo" / "metrics.jsonl")
    os.mkfifo(folder / "fifo" / "worker_0.log")
    os.mkfifo(folder / "fifo" / "trace_worker_0.json")
    (folder / "endless" / "metrics.jsonl").symlink_to("/dev/zero")
    (folder / "endless" / "statistics.json").symlink_to("/dev/zero")
    (folder / "<script>alert(1)" / "metrics.jsonl").write_text(json.dumps(START) + "\n")
    (folder / "linked" / "metrics.jsonl").write_text(json.dumps(START) + "\n")
    for name in ("worker_0.log", "trace_worker_0.json", "statistics.json"):
        (folder / "linked" / name).symlink_to(secret)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "metrics.jsonl").write_text(json.dumps(START) + "\n")
    (folder / "link of a folder").symlink_to(tmp_path / "private")
    with served(folder) as address:
        jobs = get(f"{address}/api/jobs")
        names = {row["name"] for row in jobs}
        assert names == {path.name for path in folder.iterdir()} - {"link of a folder"}
        for name in sorted(names):
            job = urllib.parse.quote(name)
            for path in (f"/?job={job}", f"/api/jobs/{job}", f"/api/jobs/{job}/log"):
                with urllib.request.urlopen(address + path, timeout=60) as answer:
                    content = answer.read()
                assert b"SECRET" not in content
                assert b"<script>alert" not in content or path.startswith("/api"), path
                assert b'" onmouseover' not in content or path.startswith("/api"), path
        events = [
            get(f"{address}/api/jobs/{name}")["summary"]["events"] for name in ("fifo", "endless")
        ]
        assert [event[-1]["text"] for event in events] == [
            "metrics.jsonl cannot be read: it is not a regular file",
            "metrics.jsonl cannot be read: it is a link, or below one",
        ]


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return json.loads(answer.read())


def test_a_job_is_listed_and_shown_with_its_curves(folder: Path) -> None:
    with served(folder) as address:
        (listed,) = get(f"{address}/api/jobs")
        assert (listed["name"], listed["state"]) == ("lenet-1", "finished")
        job = get(f"{address}/api/jobs/lenet-1")
        assert job["series"]["loss"] == {"from": 0, "points": [[20, 2.0]], "panel": "Loss"}
        assert job["summary"]["state"] == "finished"
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"<title>finished: lenet-1</title>" in page.read()
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            assert page.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (200, ["localhost", "LOCALHOST:8300", "127.0.0.1:80", "[::1]:8300"]),
        (403, ["evil.example", "127.0.0.1.evil.example:8300", "localhost.evil.example", ""]),
    ],
)
def test_on_loopback_another_host_is_refused(folder: Path, status: int, hosts: list[str]) -> None:
    """As from a page whose name was rebound to 127.0.0.1."""
    with served(folder) as address:
        for host in hosts:
            request = urllib.request.Request(f"{address}/api/jobs", headers={"Host": host})
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    assert answer.status == status
            except urllib.error.HTTPError as error:
                with error:
                    assert error.code == status
                    assert f"not for host '{host}'" in error.read().decode()


def test_with_a_token_any_host_is_answered(folder: Path) -> None:
    with served(folder, token="secret") as address:
        headers = {"Host": "node0:8300", "Cookie": "poseidon_dashboard=secret"}
        request = urllib.request.Request(f"{address}/api/jobs", headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200


def refusal(request: str | urllib.request.Request) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        return answer.code


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as page:
        return str(page.read().decode())


def test_the_page_itself_shows_a_job(folder: Path, tmp_path: Path) -> None:
    """For a browser without scripts, or before the stream begins: the newest job, or another by
    its name.
    """
    other = folder / "a&b"
    other.mkdir()
    (other / "metrics.jsonl").write_text(json.dumps({**RECORDS[0], "job": "a&b"}) + "\n")
    (other / "worker_0.log").write_text("I0105 20:40:16.000000  7 solver.cpp:1] only <here>\n")
    os.utime(other / "metrics.jsonl", (1, 1))
    with served(folder) as address:
        page = read(address)
        assert '<option value="lenet-1" selected>lenet-1 (finished)</option>' in page
        assert "<dt>Iteration</dt><dd>20</dd>" in page
        assert '<dl id="last-values"><div><dt>loss</dt><dd>2</dd></div>' in page
        assert "the job finished at iteration 20" in page
        assert page.count("worker 0: I0105") == 2
        page = read(f"{address}/?job=lenet-1&search=SNAPSHOT")
        assert 'value="SNAPSHOT"' in page and page.count("worker 0: I0105") == 1
        page = read(f"{address}/?job=a%26b")
        assert '<option value="a&amp;b" selected>' in page
        assert "solver.cpp:1] only &lt;here&gt;</pre>" in page
        assert "{{" not in page
    (tmp_path / "empty").mkdir()
    with served(tmp_path / "empty") as address:
        page = read(address)
        assert "No job has written metrics here yet." in page and "{{" not in page


def test_the_stream_sends_new_points_only(folder: Path) -> None:
    with (
        served(folder) as address,
        urllib.request.urlopen(f"{address}/api/jobs/lenet-1/stream", timeout=20) as stream,
    ):
        first = _next_event(stream)
        assert first["series"]["loss"]["points"] == [[20, 2.0]]
        assert (first["state"], first["parts"]["state"]) == (
            "finished",
            '<span class="state finished">finished</span>',
        )
        with (folder / "lenet-1" / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({**RECORDS[1], "time": 103.0, "iteration": 40, "loss": 1.5}) + "\n"
            )
        assert _next_event(stream)["series"]["loss"] == {
            "from": 1,
            "points": [[40, 1.5]],
            "panel": "Loss",
        }


def _next_event(stream: Any) -> Any:
    for line in stream:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream has ended")


def test_names_and_lines_that_are_not_utf_8(folder: Path) -> None:
    job = folder / "lenet-1"
    record = {"time": 101.0, "kind": "snapshot", "iteration": 20, "path": "caf\udce9"}
    with (job / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    (job / "worker_0.log").write_bytes(b"I0105 20:40:16.000000  7 x.cpp:1] no caf\xe9.jpg\n")
    job.rename(folder / os.fsdecode(b"lenet-\xe9"))
    with served(folder) as address:
        (listed,) = get(f"{address}/api/jobs")
        with urllib.request.urlopen(address, timeout=20) as answer:
            page = answer.read().decode()
        job = get(f"{address}/api/jobs/{urllib.parse.quote(listed['name'])}")
    assert job["name"] == listed["name"] == r"lenet-\udce9"
    assert r"no caf\xe9.jpg" in page


def test_logs_are_searched(folder: Path) -> None:
    with served(folder) as address:
        assert len(get(f"{address}/api/jobs/lenet-1/log")) == 2
        (line,) = get(f"{address}/api/jobs/lenet-1/log?search=snapshot")
        assert line.startswith("worker 0: ")


def test_what_does_not_exist_is_not_found_and_nothing_can_be_changed(folder: Path) -> None:
    paths = ("jobs/other", "jobs/lenet-1/timeline", "../static/../app.py", "jobs/..%2f..")
    with served(folder) as address:
        for path in paths:
            assert refusal(f"{address}/api/{path}") == 404
        assert refusal(urllib.request.Request(f"{address}/api/jobs", method="POST")) == 405


def test_a_token_is_asked_for_once(folder: Path) -> None:
    with served(folder, token="secret") as address:
        for path in ("/", "/api/jobs", "/static/page.js", "/?token=wrong"):
            assert refusal(address + path) == 403
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with browser.open(f"{address}/?token=secret", timeout=20) as page:
            assert "token" not in page.url
        with browser.open(f"{address}/api/jobs", timeout=20) as answer:
            assert json.loads(answer.read())[0]["name"] == "lenet-1"


def test_a_job_that_begins_later_is_found(folder: Path) -> None:
    with served(folder) as address:
        assert len(get(f"{address}/api/jobs")) == 1
        (folder / "later").mkdir()
        (folder / "later" / "metrics.jsonl").write_text(
            json.dumps({**RECORDS[0], "job": "later"}) + '\n{"time": 1'
        )
        assert {job["name"] for job in get(f"{address}/api/jobs")} == {"lenet-1", "later"}


def test_folders_of_one_name_are_two_jobs(folder: Path) -> None:
    other = folder / "other"
    with served(folder, other) as address:
        assert [job["name"] for job in get(f"{address}/api/jobs")] == ["lenet-1"]
        (other / "lenet-1").mkdir(parents=True)
        (other / "lenet-1" / "metrics.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
        listed = {job["name"]: job["state"] for job in get(f"{address}/api/jobs")}
        assert listed == {"lenet-1": "finished", "lenet-1 (2)": "lost"}
        job = get(f"{address}/api/jobs/lenet-1%20(2)")
        assert (job["name"], job["summary"]["state"]) == ("lenet-1 (2)", "lost")


def test_what_cannot_be_read_hides_no_other_job(folder: Path) -> None:
    (folder / "odd" / "metrics.jsonl").mkdir(parents=True)
    with served(folder) as address:
        listed = {job["name"]: job["state"] for job in get(f"{address}/api/jobs")}
    assert listed == {"lenet-1": "finished", "odd": "never started"}


def test_folders_that_cannot_be_looked_into_hold_no_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(Path, "lstat", refuse)
    assert folders.find_folders([folder]) == []
