"""Counts the branches of protocol code that some seeds take.

    python -m tests.simulation.branches --seeds 60
    python -m tests.simulation.branches --seeds 6 --missing poseidon.launcher    # lines, too

A branch is one of the two ways that a conditional jump of the bytecode may go. Jumps that only
ask whether an exception is the one that an `except` or `with` takes do not count.
"""

from __future__ import annotations

import argparse
import dis
import importlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

from tests.simulation.runs import SCENARIOS, prepare, run

MODULES = (
    "ps_server.protocol.shard",
    "ps_server.protocol.shard_rows",
    "ps_server.protocol.cell",
    "ps_server.protocol.row_cell",
    "ps_server.protocol.members",
    "ps_server.protocol.clock",
    "ps_server.protocol.norm",
    "ps_server.protocol.bandwidth",
    "ps_server.protocol.schedule",
    "ps_server.protocol.values",
    "ps_server.protocol.worker_rows",
    "ps_server.protocol.worker_session",
    "ps_server.protocol.collections_and_signals",
    "ps_server.protocol.virtual_workers",
    "ps_server.protocol.asked_history",
    "ps_server.interruption",
    "ps_server.pump",
    "ps_server.server",
    "poseidon.exchange.worker_links",
    "poseidon.exchange.factors.factor_rounds",
    "poseidon.exchange.factors.weight",
    "poseidon.exchange.factors.carrier",
    "poseidon.exchange.peers",
    "poseidon.exchange.allreduce.sum_rounds",
    "poseidon.exchange.allreduce.sums",
    "ps_server.transport.sealed_ends",
    "ps_server.transport.sealing",
    "poseidon.cluster.supervision.state_machine",
    "poseidon.cluster.supervision.restarts",
    "poseidon.cluster.supervision.loop",
    "poseidon.cluster.agent.agent",
    "poseidon.cluster.agent.remote",
    "poseidon.cluster.agent.remote_process",
    "poseidon.cluster.agent.host",
    "poseidon.cluster.dial.channel",
    "poseidon.cluster.dial.tasks",
    "poseidon.cluster.rendezvous",
    "ps_server.client",
    "ps_server.monitor",
    "poseidon.exchange.allreduce.carrier",
    "poseidon.exchange.job_control",
    "poseidon.exchange.host.carrier",
    "poseidon.exchange.host.group",
    "poseidon.exchange.host.links",
    "poseidon.exchange.host.owner",
    "poseidon.exchange.host.state",
    "poseidon.exchange.rounds.local_steps",
    "poseidon.engine.work",
    "poseidon.engine.memory",
    "poseidon.engine.launcher_connection",
    "poseidon.engine.kept_state",
    "poseidon.engine.memory",
    "poseidon.caffe.solver.worker",
    "poseidon.launcher.host_changes",
    "poseidon.launcher.survivors",
)
OF_EXCEPTIONS = ("WITH_EXCEPT_START", "CHECK_EXC_MATCH")
"""What comes before a jump that does not count."""
Taken = dict[CodeType, set[tuple[int, int]]]


def codes_of(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of all functions of a module."""
    assert module.__file__ is not None
    with open(module.__file__) as source:
        waiting = [compile(source.read(), module.__file__, "exec")]
    while waiting:
        code = waiting.pop()
        inner = [const for const in code.co_consts if isinstance(const, CodeType)]
        waiting += inner
        yield from inner


def jumps_of(code: CodeType) -> set[int]:
    """Return the offsets of the conditional jumps of a function."""
    names, before, found = ("_IF_", "FOR_ITER"), "", set()
    for step in dis.get_instructions(code):
        if any(name in step.opname for name in names) and before not in OF_EXCEPTIONS:
            found.add(step.offset)
        before = step.opname
    return found


def lines_of(code: CodeType, taken: set[tuple[int, int]]) -> Iterator[int]:
    """Yield the lines of the conditional jumps of a function of which a way is not taken."""
    jumps, line = jumps_of(code), code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.offset in jumps and sum(at == step.offset for at, _ in taken) < 2:
            yield line


class Recorder:
    """Records which ways conditional jumps have gone; give it to `sys.settrace`."""

    def __init__(self, files: set[str]) -> None:
        self.taken: Taken = {}
        self._files = files
        self._jumps: dict[CodeType, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        if code not in self._jumps:
            self._jumps[code] = jumps_of(code)
        jumps, taken = self._jumps[code], self.taken.setdefault(code, set())
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        last = -1

        def follow(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal last
            if event == "opcode":
                if last in jumps:
                    taken.add((last, frame.f_lasti))
                last = frame.f_lasti
            return follow

        return follow


def main(arguments: list[str] | None = None) -> int:
    """Run seeds of all scenarios and print what they cover; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.branches", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=60, help="of each scenario")
    parser.add_argument("--missing", help="print lines with a branch that is not taken, of modules")
    parser.add_argument("--scenario", choices=SCENARIOS, help="this one alone")
    flags = parser.parse_args(arguments)
    prepare()
    modules = [importlib.import_module(name) for name in MODULES]
    recorder = Recorder({str(module.__file__) for module in modules})
    sys.settrace(recorder)
    threading.settrace(recorder)
    for scenario in [flags.scenario] if flags.scenario else SCENARIOS:
        for seed in range(flags.seeds):
            run(scenario, seed)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    found = {(c.co_filename, c.co_qualname, c.co_firstlineno): t for c, t in recorder.taken.items()}
    covered = total = 0
    for name, module in zip(MODULES, modules, strict=True):
        ways, taken, missing = 0, 0, set[int]()
        for code in codes_of(module):
            ways += 2 * len(jumps_of(code))
            key = (code.co_filename, code.co_qualname, code.co_firstlineno)
            taken += len(found.get(key, ()))
            missing.update(lines_of(code, found.get(key, set())))
        print(f"{name}: {taken} of {ways} branches")
        if flags.missing and name.startswith(flags.missing):
            print(f"    lines {sorted(missing)}")
        covered, total = covered + taken, total + ways
    print(f"together: {covered} of {total} branches, {100 * covered / total:.0f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
