"""A child process that implements the launcher's protocol and does nothing else; started with
`python -c`, no torch.

`child(script)` gives the argv of a Python process in which these names stand ready:
    document    the first line of standard input, decoded
    say(event, **fields)    write an event
    commands()  yields commands until standard input ends
    forever()   wait, saying `alive`, until killed
"""

from __future__ import annotations

import sys

_PRELUDE = """
import contextlib, json, os, select, signal, sys, threading, time
def say(event, **fields):
    line = json.dumps({"event": event, **fields}) + "\\n"
    with contextlib.suppress(BrokenPipeError):  # the launcher may be gone, which ends no child
        os.write(1, line.encode())
def _beat():
    while True:
        say("alive")
        time.sleep(0.1)
def beat():
    threading.Thread(target=_beat, daemon=True).start()
def commands():
    for line in sys.stdin:
        yield json.loads(line)
def forever():
    threading.Event().wait()
document = json.loads(sys.stdin.readline())
"""

SHARD = """
beat()
say("listening", address=f"tcp://127.0.0.1:{40000 + os.getpid() % 1000}")
for command in commands():
    if command["do"] == "stop":
        break
else:
    forever()
"""

WORKER = """
beat()
say("ready")
shards = next(commands())["addresses"]
for iteration in (100, 120):
    say("progress", iteration=iteration, max_iter=120, images=12000, loss=1.5)
say("done")
"""

# A worker that trains until it is asked to stop, or stopped.
ENDLESS_WORKER = """
beat()
say("ready")
for command in commands():
    if command["do"] == "connect":
        say("progress", iteration=120, max_iter=4000, images=12000, loss=1.5)
    if command["do"] == "snapshot":
        say("snapshot_taken")
    if command["do"] == "stop":
        break
else:
    forever()
say("done")
"""


def child(script: str, *arguments: str) -> tuple[str, ...]:
    """Return the argv of a child that runs `script`; the arguments follow, as markers."""
    return (sys.executable, "-I", "-S", "-c", _PRELUDE + script, *arguments)
