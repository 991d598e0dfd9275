"""What a script finds in its process: the variables of torchrun, and torch's optimizers without torch's
compiler.

* The variables that torchrun sets are for scripts that were written for it, and for their libraries.
* Each optimizer of torch imports `torch._dynamo` at its first call: to keep the compiler out of its
  methods, and to break the graph that is compiled at its step. The import takes 2.2 seconds of a processor
  and 72 MB in each worker, twice the time of `import torch` (torch 2.13), and torch has no switch for it.
  While nothing has imported `torch._dynamo`, a method computes what torch's own method computes; once
  something has, it is torch's own. A version of torch with other decorators keeps them.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import random
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.optim import SGD, Optimizer

from poseidon.engine.document import ScriptDocument
from poseidon.errors import JobError
from poseidon.torch.process_group.functions import replaced

LOGGER = logging.getLogger(__name__)


FIRST_PORT, LAST_PORT = 15_000, 32_767
"""Below the ports that kernels give to connections: one that is free now stays free until the
script listens there.
"""
TRIES = 1_000


def torchrun_variables(document: ScriptDocument, master: str) -> Mapping[str, str]:
    """Return the variables of torchrun for one worker.

    Args:
        master: HOST:PORT on the host of worker 0, where nothing listens.
    """
    address, _, port = master.rpartition(":")
    seat = document.member.seat
    values: dict[str, object] = {
        "RANK": document.rank,
        "WORLD_SIZE": document.workers,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_workers,
        "GROUP_RANK": seat.host,
        "GROUP_WORLD_SIZE": seat.host_count,
        "ROLE_NAME": "default",
        "ROLE_RANK": document.rank,
        "ROLE_WORLD_SIZE": document.workers,
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": document.restarts,
        "TORCHELASTIC_MAX_RESTARTS": document.max_restarts,
        "TORCHELASTIC_RUN_ID": document.job,
        # torchrun's own process listens at the address; here a script does, in worker 0
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    if document.device == "cpu":
        # without it accelerate and transformers train alone where there is no GPU
        values["ACCELERATE_USE_CPU"] = "true"
    return {name: str(value) for name, value in values.items()}


def free_address(host: str) -> str:
    """Return HOST:PORT with a port of this host that nothing uses.

    Args:
        host: the address at which others reach it; an IPv6 address in brackets.

    Raises:
        JobError: there is no such port.
    """
    ports = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), TRIES)
    for port in ports:
        if _is_free(port):
            return f"{host}:{port}"
    raise JobError(f"{host} has no free port from {FIRST_PORT} to {LAST_PORT} for MASTER_PORT")


def _is_free(port: int) -> bool:
    """Return whether a script can listen at a port, as torch's TCPStore does: on all addresses."""
    for family, every in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((every, port))
            except OSError:
                return False
    return True


COMPILER = "torch._dynamo"
_Method = Callable[..., Any]


def import_compiler_late() -> None:
    """Let torch's optimizers import the compiler only where something else imports it.

    A second call changes nothing.
    """
    disabled = _code_of(Optimizer.zero_grad)
    stepping = _code_of(SGD.step)
    for kind in (Optimizer, *_optimizers()):
        for name, method in list(vars(kind).items()):
            code = _code_of(method)
            if code is not None and code is disabled and code.co_name == "inner":
                setattr(kind, name, _method_of(method))
            elif code is not None and code is stepping and code.co_name == "_use_grad":
                setattr(kind, name, _step_of(method))


def _optimizers() -> list[type[Optimizer]]:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]


def _code_of(method: object) -> Any:
    """Return the code of a decorated function, which all functions with the decorator share."""
    return getattr(method, "__code__", None) if hasattr(method, "__wrapped__") else None


def _method_of(torchs: Any) -> _Method:
    """Return a method that torch has decorated with `torch._disable_dynamo`."""
    plain = torchs.__wrapped__

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (torchs if COMPILER in sys.modules else plain)(*args, **kwargs)

    return method


def _step_of(torchs: Any) -> _Method:
    """Return a step that torch has decorated with `_use_grad_for_differentiable`."""
    plain = torchs.__wrapped__

    @wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return torchs(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return step


def run_script(document: ScriptDocument) -> None:
    """Run a script as `python SCRIPT` does, or a module as `python -m` does.

    A process that the script forks ends here: what follows in the worker is not its work.
    """
    worker = os.getpid()
    sys.modules["__mp_main__"] = _PresentMain("__mp_main__")
    try:
        if document.module:
            runpy.run_module(document.script, run_name="__main__", alter_sys=True)
        elif get_importer(document.script) is None:
            _run_file(document.script)
        else:  # a folder or an archive
            runpy.run_path(document.script, run_name="__main__")
    except BaseException as error:
        if os.getpid() != worker:
            _end_fork(error)
        raise
    if os.getpid() != worker:
        _end_fork(SystemExit())


def silent_excepthook() -> AbstractContextManager[None]:
    """Let `sys.excepthook` print nothing in this process inside the block, unless the script sets one
    of its own: its error is reported to the launcher. torch's, which `init_process_group` sets,
    prints what the hook before it prints. Forks have the hook from before the block.
    """
    before, worker = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != worker:
            before(kind, error, trace)

    return replaced(sys, "excepthook", hook)


def call_excepthook(error: BaseException, script: str) -> None:
    """Call `sys.excepthook` with a traceback that begins in the script. What it raises is logged."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error, trace or error.__traceback__)
    except Exception:
        LOGGER.exception("the script's sys.excepthook failed")


class _PresentMain(ModuleType):
    """The module of a process that `multiprocessing` has spawned, by whose name it sends objects of
    the script's classes: here they are in the present `__main__`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def _run_file(script: str) -> None:
    """Run a file as the module `__main__`, with the names that it has under `python SCRIPT`.

    `runpy` gives it others, and takes the module away from threads and exit functions of the
    script, which need it to pickle.
    """
    loader, main = SourceFileLoader("__main__", script), ModuleType("__main__")
    names = {"__builtins__": builtins, "__file__": script, "__cached__": None}
    vars(main).update(names, __loader__=loader)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(script), script), vars(main))


def _end_fork(error: BaseException) -> NoReturn:
    """End this process as Python does after an exception, save for what is registered for the
    worker's exit.
    """
    status, text = 1, None
    if isinstance(error, SystemExit):
        text = error.code if not isinstance(error.code, int | None) else None
        status = 1 if text is not None else int(error.code or 0) & 0xFF
    try:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif text is not None:
            print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where a hook of the script fails, or it has closed its streams
        os._exit(status)


class ExitedAtOnce(SystemExit):
    """The script has called `os._exit`."""


def exits_by_error() -> AbstractContextManager[None]:
    """Let `os._exit` of the script's main thread raise an error inside the block, so that the end of
    the script is reported. In other threads, and in forks, it ends the process.
    """
    at_once, worker = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == worker and threading.current_thread() is threading.main_thread():
            raise ExitedAtOnce(status)
        at_once(status)

    return replaced(os, "_exit", end)


def search_as_plain_python(document: ScriptDocument) -> None:
    """Let a script find modules in its own folder first, and not in the current folder, as
    `python SCRIPT` does; a module in the current folder first, as `python -m` does.
    """
    first = os.getcwd() if document.module else str(Path(document.script).resolve().parent)
    is_safe = getattr(sys.flags, "safe_path", False)  # Python 3.10 has none
    sys.path[:] = [*([] if is_safe else [first]), *(path for path in sys.path if path)]
