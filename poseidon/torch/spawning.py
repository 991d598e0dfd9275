"""Scripts under `poseidon run --ddp` that start their own workers, by `torch.multiprocessing.spawn` or
`multiprocessing`: the processes take the places of the job's workers on this machine.

All workers run the script. On each machine the processes of one of them, the first, take the places
of all; `spawned.py` has their side. Those of the others wait for the end of the first one's script.

    a process that calls init_process_group(rank=r, world_size=W)
      -> its parent's place: {"do": "place", "rank": r, "size": W}
      <- {"do": "take" or "wait", "of": a place}, or {"error": a sentence}
      -> that place: {"do": "take"}
      <- {"document": ..., "rounds": ...}, then the launcher's lines, both ways
         or the end of the connection, once the process that has the place has left it
    a process, or worker, that waits for the first worker's script
      -> that place: {"do": "wait"}, of a worker that starts processes with "number": how often by now
      <- {"free": true} once that script starts none that take part
         or the end of the connection, at the end of that script

Laws:
* A place is lent to one process at a time. It speaks for the worker then, whose heartbeats pause.
* A process that ends without a word, or with a wrong rank, ends the job.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import torch.distributed
import torch.distributed.distributed_c10d
import torch.multiprocessing

from poseidon.base.settings import set_place
from poseidon.engine.document import ScriptDocument
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.errors import UsageError, counted
from poseidon.torch import spawned
from poseidon.torch.process_group.functions import replaced, standing_for
from poseidon.torch.spawned import Link, name_of

LOGGER = logging.getLogger(__name__)
_CREDENTIALS = struct.Struct("3i")
_START = "poseidon.torch.spawned_start"
OTHER_SIZE = (
    "init_process_group() is called for {asked}, and the job has {workers}: the script starts its "
    "workers itself, and must start that many; change the machinefile, the devices, or the number "
    "in the script"
)
OTHER_RANK = (
    "a process on {own} calls init_process_group() with rank {asked}; expected one of the ranks of "
    "this machine's workers: {ranks}"
)
FIRST_STARTS_NONE = (
    "worker {own} starts processes that call init_process_group(), but worker {first}, the first "
    "of its machine, starts none; all workers must do the same"
)
WITHOUT_A_WORD = (
    "the process that the script has started for this worker has ended without a message"
)
OWN_GROUP = (
    "the script calls init_process_group() both itself and in processes that it has started; do "
    "one of the two"
)


class ScriptEnd:
    """The end of this worker's script, for workers and processes that wait for it.

    Attributes:
        gave: whether a process was told to take a place. Other workers and processes then wait for
            the end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.gave = False
        self._released = 0.0  # spawns by now that have taken no place; inf: all that may follow
        self._has_come = False
        self._waiting: list[threading.Thread] = []

    def release(self, spawns: float = math.inf) -> None:
        """Let the others start processes, unless those of this worker have taken places."""
        with self._changed:
            if not self.gave:
                self._released = spawns
                self._changed.notify_all()

    def wait(self, spawns: float) -> bool:
        """Wait for the end, or until the script has started processes so often, none of which takes
        a place; return whether it is the latter.
        """
        self._waiting.append(threading.current_thread())
        with self._changed:
            self._changed.wait_for(lambda: self._released >= spawns or self._has_come)
            return self._released >= spawns

    def come(self) -> None:
        """Let all go, and wait until they have been told."""
        self.release()
        with self._changed:
            self._has_come = True
            self._changed.notify_all()
        for answering in self._waiting:
            answering.join()


class ScriptPlace:
    """The place of this worker, and what its script starts.

    It listens before the workers' scripts begin: they look for each other's places.

    Args:
        launcher: its connection, which is lent.
    """

    def __init__(self, document: ScriptDocument, launcher: LauncherConnection) -> None:
        self._document = document
        self._launcher = launcher
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._here: list[int] = []
        self._follows = self._lent = False
        self.was_taken = False
        """Whether a process has taken this worker's place."""
        self._spawned = 0
        self._end = ScriptEnd()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name_of(document.rank)}")
        self._listener.listen(128)

    def _name_of(self, rank: int) -> str:
        return name_of(self._document.member.network.token, rank)

    def open(self, machines: Sequence[str]) -> None:
        """Begin to answer.

        Args:
            machines: `this_machine` of each worker.
        """
        own = machines[self._document.rank]
        self._here = [rank for rank, machine in enumerate(machines) if machine == own]
        threading.Thread(target=self._accept, name="poseidon-place", daemon=True).start()

    def close(self) -> None:
        """Let the others go that wait for the end of this worker's script."""
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._end.come()

    @contextmanager
    def spawns(self, undo: ExitStack) -> Iterator[None]:
        """Let processes that are started inside the block take places. At its end wait for them,
        as Python does at the end of a script.

        Args:
            undo: takes back, in a fork, what was replaced in torch for this worker.
        """
        distributed: Any = torch.distributed
        initialize = distributed.init_process_group

        @standing_for(initialize)
        def init_process_group(*arguments: Any, **named: Any) -> None:
            if os.getpid() != self._pid:
                undo.close()
                spawned.JOINED.init_process_group(*arguments, **named)
                return
            self._begin_own()
            initialize(*arguments, **named)

        def command_line(**named: Any) -> list[Any]:
            *python, program, mark = get_command_line(**named)
            return [*python, f"import {_START}; {program}", mark]

        get_command_line = multiprocessing.spawn.get_command_line
        with ExitStack() as stack:
            stack.callback(self._wait_for_children)
            for owner in (distributed, distributed.distributed_c10d):
                stack.enter_context(replaced(owner, "init_process_group", init_process_group))
            for name in ("spawn", "start_processes"):
                start = getattr(torch.multiprocessing, name)
                stack.enter_context(replaced(torch.multiprocessing, name, self._starting(start)))
            stack.enter_context(replaced(multiprocessing.spawn, "get_command_line", command_line))
            multiprocessing.forkserver.set_forkserver_preload([_START])
            stack.callback(multiprocessing.forkserver.set_forkserver_preload, ["__main__"])
            stack.enter_context(set_place(self._name_of(self._document.rank)))
            yield

    def _wait_for_children(self) -> None:
        if os.getpid() == self._pid:
            for child in multiprocessing.active_children():
                if not child.daemon:
                    child.join()

    def _starting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stands for one of torch.multiprocessing that starts processes."""

        @standing_for(start)
        def stand_in(*arguments: Any, **named: Any) -> Any:
            if os.getpid() != self._pid or torch.distributed.is_initialized():
                return start(*arguments, **named)
            leader = self._here[0]
            self._spawned += 1
            if leader == self._document.rank:
                try:
                    return start(*arguments, **named)
                finally:
                    if named.get("join", True):
                        self._end.release(self._spawned)
            if self._wait_for(leader, number=self._spawned):
                return start(*arguments, **named)
            raise SystemExit(0)

        return stand_in

    def _begin_own(self) -> None:
        """Note that this worker calls `init_process_group` itself."""
        if self._end.gave or self.was_taken:
            raise UsageError(OWN_GROUP)
        self._end.release()

    def _wait_for(self, leader: int, **spawned: int) -> bool:
        """Wait for the end of the leader's script, or until it starts no process that takes a
        place; return whether it is the latter.
        """
        try:
            link = Link.to(self._name_of(leader))
        except OSError:  # it has ended
            return not self.was_taken
        with closing(link):
            return bool(link.ask(do="wait", **spawned))

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="poseidon-place", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(found)[1] != os.getuid():
                return
            with closing(Link.over(connection)) as link:
                question = link.read()
                do = question.get("do")
                if do == "place":
                    reply = self._place_for(question["rank"], question["size"])
                    if "error" in reply:  # the script may end the others before it raises this
                        self._fail(reply["error"], exit_code=UsageError.exit_code)
                    link.write(**reply)
                elif do == "take":
                    self._take(link)
                elif do == "wait" and self._end.wait(question.get("number", math.inf)):
                    link.write(free=True)

    def _place_for(self, rank: int | None, size: int | None) -> dict[str, Any]:
        """Return where a process of this worker's script finds its place."""
        workers, own = self._document.workers, self._document.rank
        if torch.distributed.is_initialized():
            return {"error": OWN_GROUP}
        if size != workers:
            asked = "no number of workers" if size is None else counted(size, "worker")
            return {"error": OTHER_SIZE.format(asked=asked, workers=counted(workers, "worker"))}
        leader = self._here[0]
        if rank not in self._here:
            ranks = ", ".join(map(str, self._here))
            host = self._document.member.network.host
            return {"error": OTHER_RANK.format(own=host, asked=rank, ranks=ranks)}
        if leader != own:
            self._follow(leader)
            return {
                "do": "wait",
                "of": self._name_of(leader),
                "alone": FIRST_STARTS_NONE.format(own=own, first=leader),
                "was_taken": self.was_taken,
            }
        self._end.gave = True
        return {"do": "take", "of": self._name_of(rank)}

    def _follow(self, leader: int) -> None:
        """End this worker with the leader's script: its own waits for processes that wait."""
        with self._changed:
            begins, self._follows = not self._follows, True
        if begins:
            threading.Thread(
                target=self._end_with, args=(leader,), name="poseidon-follower", daemon=True
            ).start()

    def _end_with(self, leader: int) -> None:
        if not self._wait_for(leader):
            self._launcher.send("done")
            os._exit(0)

    def _take(self, link: Link) -> None:
        """Lend this worker's place to a process, until it leaves; if an earlier one still has it,
        wait for its end.
        """
        with self._changed:
            is_free, self._lent = not self._lent, True
            if not is_free:
                self._changed.wait_for(lambda: not self._lent)
                return
        self.was_taken = True
        try:
            self._relay(link)
        finally:
            with self._changed:
                self._lent = False
                self._changed.notify_all()

    def _relay(self, link: Link) -> None:
        lock = threading.Lock()

        def send(line: str) -> None:
            with lock, suppress(OSError, ValueError):
                link.writer.write(line)
                link.writer.flush()

        document = json.loads(self._document.to_json())
        with self._launcher.lent(
            send, lambda rounds: send(json.dumps({"document": document, "rounds": rounds}) + "\n")
        ) as events:
            for line in link.reader:
                event = json.loads(line)
                if event["event"] == spawned.LEFT:
                    self._launcher.rounds.update(event["rounds"])
                    return
                events(line)
        self._fail(WITHOUT_A_WORD, exit_code=1, peer_lost=True)  # the script may raise the cause

    def _fail(self, sentence: str, **fields: object) -> None:
        message = f"worker {self._document.rank}: {sentence}"
        self._launcher.send("error", message=message, **fields)
