"""`python -m poseidon.engine KIND`: the process of one worker (`poseidon.engine.process`).

Law: it imports neither torch nor numpy by itself. Where they, or what else the process needs,
cannot be imported on its host, the launcher gets one sentence.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence

from poseidon.base.settings import read_settings
from poseidon.errors import described


def main() -> int:
    """Run a worker. Return the exit code."""
    try:
        from poseidon.engine import process
    except Exception as error:  # noqa: BLE001 - a package's own code has run
        _report(error, sys.argv)
        return 1
    return process.main()


def _report(error: Exception, arguments: Sequence[str]) -> None:
    rank = arguments[arguments.index("--rank") + 1]
    message = (
        f"worker {rank} cannot start on {socket.gethostname()}: {described(error)}; install there "
        "the same packages as on the launcher's host"
    )
    event = json.dumps({"event": "error", "message": message, "exit_code": 1})
    events_fd = read_settings().events_fd
    os.write(1 if events_fd is None else events_fd, f"{event}\n".encode())


if __name__ == "__main__":
    raise SystemExit(main())
