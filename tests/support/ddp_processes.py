"""A script as torchrun runs it, over gloo: what scripts under Poseidon are compared with.

One process imports packages and is then forked, so that only one of them pays for the imports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.training_processes import ROOT, WAIT_S

ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
PARENT = """
import importlib, os, runpy, socket, sys
names, size, script = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
for name in filter(None, names):
    importlib.import_module(name)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
children = []
for rank in range(size):
    child = os.fork()
    if child:
        children.append(child)
        continue
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = sys.argv[3:]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def run_by_gloo(
    folder: Path, script: Path, *arguments: object, size: int = 2, imports: Sequence[str] = ()
) -> str:
    """Run a script in `folder` as processes that find each other by torchrun's variables.

    Args:
        folder: the current folder of the processes.
        script: the script.
        arguments: of the script.
        size: the number of processes.
        imports: packages to import once for all of them.

    Returns:
        what rank 0 has printed.
    """
    words = [",".join(["torch.distributed", *imports]), size, script, *arguments]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *map(str, words)],
        cwd=folder,
        env={**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            out, err = parent.communicate(timeout=2 * WAIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 0, err
    return out
