"""The agent of a host as a process of its own: `python -m poseidon.cluster.agent [--job ID]`.

It serves the launcher over its standard input and output; `poseidon.cluster.dial.ssh` starts it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType

from poseidon.cluster.agent.host import Agent
from poseidon.cluster.dial.channel import StreamChannel
from poseidon.cluster.jobs.kill import USER_KILL
from poseidon.errors import PoseidonError
from ps_server.process_environment import raise_file_limit


def main(arguments: list[str] | None = None) -> int:
    """Serve a launcher; return the exit code, 0 when the launcher has ended the agent.

    SIGINT and SIGHUP end the agent and all that it started; so does `USER_KILL`, which it reports
    first. SIGTERM, which a machine that shuts down sends, is reported: the launcher decides.
    """
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.cluster.agent", description="The agent of a host."
    )
    parser.add_argument("--job", default="", help="the job's id, a mark for `poseidon kill`")
    parser.parse_args(arguments)
    raise_file_limit()
    # Nothing that this process prints or reads may mix with the messages.
    inlet, outlet = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        agent = Agent(StreamChannel.of_pipes(inlet, outlet))
    except PoseidonError as error:
        print(f"poseidon agent: {error}", file=sys.stderr)
        return error.exit_code

    def stop(number: int, frame: FrameType | None) -> None:
        if number == USER_KILL:
            agent.killed_by_user()
        elif number == signal.SIGTERM:
            agent.signaled(signal.SIGTERM.name)
        else:
            agent.stop(f"it was ended by {signal.Signals(number).name}")

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an agent follows its children's ends
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, USER_KILL):
        signal.signal(number, stop)
    return agent.serve().status


if __name__ == "__main__":
    raise SystemExit(main())
