"""The server of the dashboard.

The dashboard's web application: a page, its data as JSON, and a stream of changes.

    /?job=NAME&search=         the page, which shows a job as it is now
    /static/NAME               its parts; nothing comes from elsewhere
    /api/jobs                  the jobs, newest first
    /api/jobs/NAME             all curves, the summary, the tensors
    /api/jobs/NAME/stream      curves and parts of the page, then what changes (server-sent events)
    /api/jobs/NAME/log?search= the last lines of the logs
    /api/jobs/NAME/timeline    an iteration as SVG (jobs with --trace)

Law: read-only: every route answers GET alone. With a token each request needs it: in the address
once, then as a cookie. Without one a request must name this machine's loopback as its host: a page
of another site, whose name suddenly resolves to 127.0.0.1 (DNS rebinding), cannot read anything.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from poseidon.base.text_files import escaped
from poseidon.cluster.machinefile import names_loopback
from poseidon.cluster.supervision.signals import handled
from poseidon.errors import JobError
from poseidon.observe.dashboard.folders import JobFolder, find_folders
from poseidon.observe.dashboard.rendering import fill, job_options, job_parts, last_values

STATIC = Path(__file__).with_name("static")
_TEMPLATE = STATIC / "index.html"
PERIOD_S = 1.0
COOKIE = "poseidon_dashboard"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' "
    "'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a server in front passes the stream on at once
}


class Json(JSONResponse):
    """A response in JSON of ASCII: names of files and lines of logs need not be UTF-8."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Dashboard:
    """The jobs below some folders, and what the page asks about them.

    Args:
        folders: of jobs, or folders that hold some.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._names: dict[Path, str] = {}
        self._jobs: dict[str, JobFolder] = {}
        self._lock = asyncio.Lock()

    async def page(self, request: Request) -> Response:
        """Return the page with the state of a job: of `?job=NAME`, else of the newest."""
        wanted, search = (request.query_params.get(name, "") for name in ("job", "search"))
        parts: dict[str, str] = await self._in_thread(lambda: self._page_parts(wanted))
        if parts["name"]:
            log = await asyncio.to_thread(self._jobs[parts["name"]].log, search)
            parts |= {"search": search, "log": "\n".join(log)}
        return HTMLResponse(escaped(fill(_TEMPLATE.read_text(encoding="utf-8"), parts)))

    async def jobs(self, request: Request) -> Response:
        """Return the jobs, newest first."""
        return Json(await self._in_thread(self._list))

    async def job(self, request: Request) -> Response:
        """Return all of a job."""
        job = self._find(request)
        return Json(await self._in_thread(lambda: {**_state(job), "series": _new_points(job, {})}))

    async def stream(self, request: Request) -> Response:
        """Stream a job's summary and its new points until the page goes."""
        return StreamingResponse(
            self._events(request, self._find(request)), media_type="text/event-stream"
        )

    async def log(self, request: Request) -> Response:
        """Return the last lines of a job's logs."""
        job, search = self._find(request), request.query_params.get("search", "")
        return Json(await asyncio.to_thread(job.log, search))

    async def timeline(self, request: Request) -> Response:
        """Return the picture of an iteration."""
        picture = await asyncio.to_thread(self._find(request).timeline)
        if picture is None:
            raise HTTPException(404, "the job has no trace: start it with --trace")
        return Response(picture, media_type="image/svg+xml")

    async def _events(self, request: Request, job: JobFolder) -> AsyncIterator[str]:
        sent: dict[str, tuple[int, int]] = {}
        last = ""
        while not await request.is_disconnected():
            state, points = await self._in_thread(lambda: (_parts(job), _new_points(job, sent)))
            text = json.dumps(state)
            if text != last or points:
                last = text
                yield f"event: job\ndata: {json.dumps({**state, 'series': points})}\n\n"
            else:
                yield ": no change\n\n"
            await asyncio.sleep(PERIOD_S)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Do the work on a thread: files may be slow. A job is read by one thread at a time."""
        async with self._lock:
            return await asyncio.to_thread(work)

    def _list(self) -> list[dict[str, Any]]:
        rows = []
        for path in find_folders(self._folders):
            job = self._jobs[self._name_of(path)]
            job.refresh()
            summary = job.summary()
            keys = ("state", "started", "updated", "iteration", "max_iter", "loss")
            rows.append(
                {"name": job.name, "folder": str(job.folder), **{key: summary[key] for key in keys}}
            )
        return rows

    def _name_of(self, path: Path) -> str:
        """Return the name of a job's folder, which addresses of pages can contain; `run (2)` for a
        second one of that name.
        """
        if path not in self._names:
            own = escaped(path.name)
            numbered = (f"{own} ({number})" for number in itertools.count(2))
            names = itertools.chain([own], numbered)
            name = next(name for name in names if name not in self._jobs)
            self._names[path], self._jobs[name] = name, JobFolder(path, name)
        return self._names[path]

    def _page_parts(self, wanted: str) -> dict[str, str]:
        """Return the parts of the page that shows a job: the wanted one, else the newest."""
        rows = self._list()
        names = [row["name"] for row in rows]
        if not names:
            nothing = "No job has written metrics here yet."
            return {"title": "Poseidon", "name": "", "bottleneck": nothing}
        name = wanted if wanted in names else names[0]
        job = self._jobs[name]
        state = _parts(job)
        return {
            **state["parts"],
            "title": f"{state['state']}: {name}",
            "name": name,
            "jobs": job_options(rows, name),
            "last-values": last_values(
                {curve: each.points for curve, each in job.view.series.items()}
            ),
        }

    def _find(self, request: Request) -> JobFolder:
        name = request.path_params["name"]
        if name not in self._jobs:
            self._list()
        if name not in self._jobs:
            raise HTTPException(404, f"there is no job {name}")
        return self._jobs[name]


def _state(job: JobFolder) -> dict[str, Any]:
    """Return what changes as a whole; reads what is new first."""
    job.refresh()
    return {
        "name": job.name,
        "summary": job.summary(),
        "tensors": job.tensors(),
        "has_trace": job.has_trace(),
    }


def _parts(job: JobFolder) -> dict[str, Any]:
    """Return the job's parts of the page; reads what is new first."""
    state = _state(job)
    summary = state["summary"]
    parts = job_parts(job.name, summary, state["tensors"], has_trace=state["has_trace"])
    return {"name": job.name, "state": summary["state"], "parts": parts}


def _new_points(job: JobFolder, sent: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the points of each curve that were not sent yet, and note them as sent.

    Args:
        sent: the revision and the number of points of each curve that the page has.

    Returns:
        For each curve that has changed: `from`, the position of the first point, `points`, and the
        `panel` of the curve.
    """
    found = {}
    for name, series in job.view.series.items():
        revision, count = sent.get(name, (series.revision, 0))
        start = count if revision == series.revision else 0
        if len(series.points) > start or revision != series.revision:
            points = series.points[start:]
            found[name] = {"from": start, "points": points, "panel": series.panel}
        sent[name] = (series.revision, len(series.points))
    return found


class Guard:
    """Refuses requests without the token; if there is none, those for another host than loopback.

    Args:
        token: in the address (`?token=`), once, or in the cookie that this sets; empty: nothing is
            asked.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (k.lower().encode(), v.encode()) for k, v in _HEADERS.items()
                ]
            await send(message)

        answer = self._check_token(Request(scope)) if self._token else _check_host(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _check_token(self, request: Request) -> Response | None:
        """Return what a request gets in place of the page; None if it has the token as a cookie."""
        given = parse_qs(request.url.query).get("token", [""])[0]
        if hmac.compare_digest(given.encode(), self._token.encode()):
            response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return response
        if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self._token.encode()):
            return None
        return Response("expected ?token= in the address, as `poseidon dashboard` prints it\n", 403)


def _check_host(request: Request) -> Response | None:
    """Return what a request for another host than loopback gets in place of the page; None for
    loopback.
    """
    host = request.headers.get("host", "")
    if names_loopback(host):
        return None
    return Response(
        f"this page is for localhost, 127.0.0.1 and [::1], not for host '{host[:99]}': open it by "
        "one of these names; a server in front must pass one of them on as Host\n",
        403,
        media_type="text/plain",
    )


def make_app(folders: list[Path], *, token: str = "") -> Starlette:
    """Return the application.

    Args:
        folders: of jobs, or folders that hold some.
        token: that each request needs; empty: none, and requests must be for a loopback host.
    """
    dashboard = Dashboard(folders)

    def get(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, endpoint, methods=["GET"])

    return Starlette(
        routes=[
            get("/", dashboard.page),
            get("/api/jobs", dashboard.jobs),
            get("/api/jobs/{name}", dashboard.job),
            get("/api/jobs/{name}/stream", dashboard.stream),
            get("/api/jobs/{name}/log", dashboard.log),
            get("/api/jobs/{name}/timeline", dashboard.timeline),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token)],
    )


MOST = 64
"""Connections at a time."""


class _Visitor(H11Protocol):
    """A connection. When one more than `MOST` comes, the oldest of the others ends, of those
    without a request if there are any: who connects and says nothing takes neither the files nor
    the places of others.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._came_s = self.loop.time()
        if len(self.connections) > MOST:
            others = self.connections - {self}
            oldest = min(others, key=_Visitor._rank)  # type: ignore[arg-type]
            self.connections.discard(oldest)  # its own end comes later, after the next visitor
            oldest.transport.abort()

    def _rank(self) -> tuple[bool, float]:
        return self.cycle is not None and not self.cycle.response_complete, self._came_s


END_S = 3.0
"""From a signal to the end of the process, whatever a request waits for."""
STOPS = (signal.SIGINT, signal.SIGTERM)


def serve(folders: list[Path], *, host: str, port: int, token: str) -> int:
    """Serve the page of jobs until Ctrl-C or SIGTERM; return the exit code.

    Args:
        folders: of jobs, or folders that hold some.
        port: 0 takes a free one.
        token: that each request needs; empty: none.

    Raises:
        JobError: the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter: such as a..b
        # socket.create_server repeats the address.
        why = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        nowhere = isinstance(error, socket.gaierror | UnicodeError)
        elsewhere = nowhere or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
        hint = (
            "expected an address of this machine"
            if elsewhere
            else "choose a different --port, or 0 for a free one"
        )
        raise JobError(f"cannot listen at {host}:{port}: {why}; {hint}") from error
    with listener:
        address = page_address(host, listener.getsockname()[1])
        print(f"dashboard at {address}{f'?token={token}' if token else ''}", flush=True)
        if token:
            print(
                "the connection is not encrypted: use it in a network that you trust, or forward "
                "the port over SSH",
                file=sys.stderr,
            )
        # Requests that are not HTTP would be warnings: with --host anyone could write lines to this
        # terminal.
        config = uvicorn.Config(
            make_app(folders, token=token),
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="off",
            http=_Visitor,
            backlog=MOST // 4,  # asyncio accepts so many before it looks at any
        )
        server = _Server(config)
        server.run(sockets=[listener])
        server.ended.set()
    return 0


class _Server(uvicorn.Server):
    """A server that returns after SIGINT or SIGTERM. uvicorn's own raises the signal again,
    which ends the process. It ends the process where a thread that reads files does not return, as
    from a network's file system.

    Attributes:
        ended: set by the owner when `run` has returned.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = threading.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        threading.Thread(target=self._end_late, name="poseidon-page-end", daemon=True).start()

    def _end_late(self) -> None:
        if not self.ended.wait(END_S):
            os._exit(0)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with handled(STOPS, self.handle_exit):
            yield


def page_address(host: str, port: int) -> str:
    """Return the address of the page for a browser; one that stands for all addresses becomes
    this machine's name.
    """
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
