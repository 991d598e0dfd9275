"""What a process that a script has spawned needs to act as a worker of the job."""

from __future__ import annotations

import logging
import multiprocessing.util
import sys
from contextlib import ExitStack
from typing import Any

from poseidon.base import glog
from poseidon.engine.document import ScriptDocument, document_of
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.process import report_error
from poseidon.exchange.device import compute_on
from poseidon.torch.script import ScriptWork
from poseidon.torch.spawned import LEFT, Link
from ps_server.numerics import prepare_process

_LAST = -100
"""The priority among the finalizers of `multiprocessing`, which run in decreasing order."""


class SpawnedWorker:
    """A worker of the job in a spawned process.

    Args:
        answer: of the worker: its document, and the exchanges of addresses so far.
    """

    def __init__(self, link: Link, answer: dict[str, Any]) -> None:
        self._process, self._part = ExitStack(), ExitStack()
        self._process.callback(link.end)
        document = document_of(ScriptDocument, answer["document"])
        prepare_process(document.threads)
        if not logging.getLogger("poseidon").handlers:  # a fork has the worker's
            self._process.enter_context(glog.setup(stream=sys.stderr, file=document.log_file))
        self._launcher = LauncherConnection(link.reader, link.writer, notes=ScriptWork.notes)
        self._launcher.rounds.update(answer["rounds"])
        self._work = ScriptWork(document, self._launcher)

    def enter(self) -> None:
        """Take part in the job until this process ends."""
        device = self._launcher.heartbeat.device = self._work.device
        compute_on(device, self._work.document)
        self._launcher.start()
        self._part.enter_context(self._work.taking_part())
        multiprocessing.util.Finalize(None, self._leave, exitpriority=_LAST)

    def _leave(self) -> None:
        """Leave the job, as the process ends. `multiprocessing` calls this while the error that
        ends the process is handled.
        """
        stopped, error = False, sys.exc_info()[1]
        if isinstance(error, SystemExit):  # torch.multiprocessing.spawn has caught the error
            error = error.__context__ if error.code else None
        try:
            with self._part:
                if error is not None:
                    raise error
        except KeyboardInterrupt:  # the job was asked to stop
            stopped = True
        except Exception as last:  # noqa: BLE001 - the outermost frame: the launcher gets one sentence
            report_error(last, self._work)
        self._launcher.close()
        self._launcher.send(LEFT, rounds=dict(self._launcher.rounds))
        self._process.close()
        if stopped:  # as in torch.multiprocessing.spawn: not an error, and the script continues
            raise SystemExit(0)
