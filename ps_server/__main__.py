"""`python -m ps_server`: run one shard.

By hand, give every worker the printed address:

    python -m ps_server --listen tcp://127.0.0.1:5555 --workers 2

A launcher writes one line of JSON to standard input instead ({"token": ..., "workers": W,
"address": ...}, see `network.ShardDocument`), so that the job's secret is in no argument list, and
keeps the pipe open: {"do": "stop"} stops the shard, which stays until then; {"do": "listen", "round": 1} lets it serve the
same workers once more, at a different address of its host (`rounds.py`). {"do": "pause"} closes all
that, and {"do": "go_on", "document": {...}} opens a shard of the next start of the job in the same
process: its document is such a first line, with "shard": its number. It may add "keys": the fields
of a `Keyring`, with which only the job's workers are admitted and everything is encrypted, and
"trace": the path of a trace to write. Events leave on standard output as JSON lines:
{"event": "listening", "address": ..., "round": 0}, {"event": "paused", "snapshot": null},
{"event": "statistics", ...}, {"event": "done"}, {"event": "error", "message": ...}.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import ipaddress
import json
import signal
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ps_server.process_environment import collector_paused

with collector_paused():  # torch is among them
    from ps_server.errors import ServerError, SpecError, visible
    from ps_server.json_fields import value_of
    from ps_server.keys import read_keyring, read_secret
    from ps_server.meters import StallMeter
    from ps_server.monitor import owned_thread
    from ps_server.network import ShardDocument
    from ps_server.numerics import prepare_process
    from ps_server.protocol.settings import MAX_WORKERS
    from ps_server.protocol.shard import Shard
    from ps_server.rounds import Rounds
    from ps_server.server import MAX_TOKEN_BYTES, Server
    from ps_server.statistics import sending_s
    from ps_server.trace import NO_TRACE, Trace, Tracer
    from ps_server.transport.zmq_sockets import ZmqServerTransport

ALIVE_S = 2.0
SHARDS_BELOW = 100_000
"""In a trace the shards are below all workers."""
ORPHAN_IDLE_S = 20.0
"""A shard whose launcher has gone stays while workers send messages: they are writing their last
snapshot.
"""


def parse(arguments: list[str]) -> ShardDocument:
    """Parse the arguments, and read the launcher's line where there is one."""
    parser = argparse.ArgumentParser(
        prog="python -m ps_server",
        description="Run one shard of a parameter server until all workers have left.",
        epilog="Workers connect with ps_server.Client; README.md of this package has a complete "
        "example.",
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="tcp://host:port; port 0 takes a free port"
    )
    parser.add_argument("--workers", type=int, help="number of workers that will join")
    parser.add_argument(
        "--shard", type=int, default=0, help="this shard's number, from 0 (default 0)"
    )
    parser.add_argument(
        "--token-file", type=Path, help="file with the secret that workers must show"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="this shard's keys, made by python -m ps_server.make_keys",
    )
    parser.add_argument(
        "--stdin", action="store_true", help="read a launcher's line of JSON from standard input"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace that Perfetto opens"
    )
    parser.add_argument("--job", metavar="ID", help="marks the process as part of a job")
    flags = parser.parse_args(arguments)
    if flags.stdin:
        return _from_document(sys.stdin.readline(), flags.shard)
    if flags.listen is None or flags.workers is None:
        parser.error("--listen and --workers are required (or --stdin)")
    if not _is_address(flags.listen):
        parser.error(f"--listen: expected tcp://host:port, found '{flags.listen}'")
    if not 1 <= flags.workers <= MAX_WORKERS:
        parser.error(f"--workers: expected 1 to {MAX_WORKERS}, found {flags.workers}")
    if not 0 <= flags.shard < MAX_WORKERS:
        parser.error(f"--shard: expected 0 to {MAX_WORKERS - 1}, found {flags.shard}")
    token = _read_token(flags.token_file) if flags.token_file else b""
    keys = read_keyring(flags.keys) if flags.keys else None
    if not token and keys is None and not _is_loopback(flags.listen):
        parser.error(
            f"{flags.listen} can be reached from other machines: --keys or --token-file is required"
        )
    return ShardDocument(
        shard=flags.shard,
        workers=flags.workers,
        address=flags.listen,
        token=token,
        supervised=False,
        keys=keys,
        trace=str(flags.trace or ""),
    )


def _read_token(path: Path) -> bytes:
    try:
        token = read_secret(path).strip()
    except SpecError as error:
        raise SpecError(f"--token-file: {error}") from error
    if not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise SpecError(
            f"--token-file: {path} has a secret of {len(token)} bytes; expected 1 to "
            f"{MAX_TOKEN_BYTES}"
        )
    return token


def _from_document(given: object, shard: int | None = None) -> ShardDocument:
    """Return the document of a supervised shard.

    Args:
        given: the fields; or a line of JSON, which need not have the number of the shard.
        shard: that number.

    Raises:
        SpecError: a field is missing or has a different type.
    """
    try:
        fields = {"shard": shard, **json.loads(given)} if isinstance(given, str) else given
        return value_of(ShardDocument, fields)
    except (ValueError, TypeError) as error:
        raise SpecError(f"the launcher's document is not what a shard expects: {error}") from error


def _is_address(address: str) -> bool:
    parts = urlsplit(address)
    try:
        return parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None
    except ValueError:  # the port is not a number, or too large
        return False


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Reporter:
    """Reports events and heartbeats to the launcher, as JSON lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._rounds: Rounds | None = None
        self._stall = StallMeter()

    def report(self, event: str, **fields: object) -> None:
        """Write one event."""
        with self._lock, contextlib.suppress(OSError):  # the launcher has gone
            print(json.dumps({"event": event, **fields}), flush=True)

    def start_heartbeat(self, rounds: Rounds) -> None:
        """Report statistics, which are heartbeats too, every few seconds until `close`."""
        self._rounds = rounds
        failed = rounds.failing("reporting to the launcher failed")
        self._thread = owned_thread("ps-alive", self._beat, failed)
        self._thread.start()

    def _beat(self) -> None:
        assert self._rounds is not None
        due_s = time.monotonic() + ALIVE_S
        while not self._stall.sleep(self._over):
            if time.monotonic() < due_s:
                continue
            due_s = time.monotonic() + ALIVE_S
            if self._rounds.moves():  # a shard that hangs sends no heartbeat
                self.report_statistics()

    def report_statistics(self) -> None:
        """Report what the shard has done so far."""
        if self._rounds is not None:
            statistics = asdict(self._rounds.statistics())
            stalled_s = round(self._stall.stalled_s, 3)
            self.report("statistics", **statistics, sending_s=sending_s(), stalled_s=stalled_s)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()


def _follow_launcher(rounds: Rounds, reporter: Reporter, trace: ShardTrace) -> None:
    """Listen once more, pause, continue and stop at the launcher's commands; when it has gone (its
    end of the pipe closes), stop once the workers send nothing.
    """
    for line in sys.stdin:
        command = _command(line)
        if command.get("do") == "listen":
            reporter.report("listening", address=rounds.listen(), round=command.get("round"))
        if command.get("do") == "pause":
            rounds.pause()
            reporter.report("paused", snapshot=None)
        if command.get("do") == "go_on":
            document = _from_document(command.get("document"))
            trace.open(document)
            address = rounds.go_on(partial(_server, document, trace.tracer))
            reporter.report("listening", address=address, round=0)
        if command.get("do") == "stop":
            rounds.stop()
            return
    rounds.stop_when_idle(ORPHAN_IDLE_S)


def _command(line: str) -> dict[str, Any]:
    try:
        command = json.loads(line)
    except ValueError:
        return {}
    return command if isinstance(command, dict) else {}


class ShardTrace:
    """The trace of the start that the shard's process takes part in."""

    def __init__(self) -> None:
        self.tracer: Tracer = NO_TRACE

    def open(self, document: ShardDocument) -> None:
        """Close the trace of the start before, and begin one of the shard with this document."""
        self.close()
        if document.trace:
            order = SHARDS_BELOW + document.shard
            self.tracer = Trace(
                Path(document.trace), process=f"shard {document.shard}", order=order
            )

    def close(self) -> None:
        """Write what is left."""
        self.tracer.close()
        self.tracer = NO_TRACE


def _server(document: ShardDocument, trace: Tracer, number: int) -> Server:
    """Return the server of a round. A fixed port is the first round's."""
    shard = Shard(document.shard, document.workers, document.token)
    host, _, _ = document.address.rpartition(":")
    address = f"{host}:0" if number else document.address
    transport = ZmqServerTransport(address, document.keys)
    return Server(shard, transport, trace=trace)


def main(arguments: list[str] | None = None) -> int:
    """Run a shard; returns the exit code."""
    reporter = Reporter()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_process(threads=1)  # workers on the same machine need the cores
    try:
        document = parse(sys.argv[1:] if arguments is None else arguments)
        with contextlib.closing(ShardTrace()) as trace:
            trace.open(document)
            rounds = Rounds(partial(_server, document, trace.tracer))
            reporter.report("listening", address=rounds.listen(), round=0)
            # else another process handles it for this one
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
                signal.signal(signal.SIGTERM, lambda *_: rounds.stop())
            if document.supervised:
                follow = partial(_follow_launcher, rounds, reporter, trace)
                failed = rounds.failing("reading the launcher's commands failed")
                owned_thread("ps-stdin", follow, failed).start()
                reporter.start_heartbeat(rounds)
            gc.freeze()  # imported modules stay: the collector need not traverse them again
            rounds.wait(stays=document.supervised)
        reporter.close()
        reporter.report_statistics()
        reporter.report("done")
    except (ServerError, OSError) as error:
        reporter.close()
        reporter.report("error", message=str(error), exit_code=1)
        print(f"ps_server: {visible(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
