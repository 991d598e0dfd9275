"""A script as torchrun runs it, over gloo: what scripts under Poseidon are compared with.

Its processes are forks of the template that jobs of the tests have, too, whose imports they need.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from poseidon.cluster.agent.template import Fork
from poseidon.engine.document import WorkKind
from poseidon.launcher.processes import child_environment, imports_of
from tests.support.free_ports import free_port
from tests.support.shared_templates import SHARED
from tests.support.threads import on_threads
from tests.support.training_processes import ROOT

ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
PROGRAM = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_by_gloo(folder: Path, script: Path, *arguments: object, size: int = 2) -> str:
    """Run a script in `folder` as processes that find each other by torchrun's variables.

    Args:
        folder: the current folder of the processes.
        script: the script.
        arguments: of the script.
        size: the number of processes.

    Returns:
        what rank 0 has printed.
    """
    environment = {**os.environ, **child_environment(1), "PYTHONPATH": str(ROOT)}
    template = SHARED.of(sys.executable, imports_of(WorkKind.SCRIPT), environment, None)
    environment |= {**ON_CPU, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    environment |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        template.fork(
            [sys.executable, "-c", PROGRAM, *map(str, (script, *arguments))],
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            folder=str(folder),
            passed=(),
            ignores_signals=False,
        )
        for rank in range(size)
    ]
    out = [b""] * (2 * size)

    def read(number: int) -> None:
        process = processes[number // 2]
        with process.stderr if number % 2 else process.stdout as stream:
            out[number] = stream.read()

    def end(process: Fork) -> int:
        process.stdin.close()
        return process.wait()

    try:
        on_threads(2 * size, read)
    except BaseException:  # the time of the test is over
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        codes = [end(process) for process in processes]
    assert not any(codes), b"".join(out[1::2]).decode()
    return out[0].decode()
