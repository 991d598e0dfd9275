"""The program that `poseidon plan` sends to a host: it starts
`poseidon.plan.costs` there with the environment of a job.

It reads one line of JSON: `environment`, variables of a job's processes, and what
`poseidon.plan.costs` needs.
"""

from __future__ import annotations

import json
import os
import sys

from poseidon.cluster.python_command import module_arguments


def main() -> None:
    """Replace this process by the one that measures."""
    line = sys.stdin.readline()
    if line:
        environment = {**os.environ, **json.loads(line)["environment"]}
        arguments = module_arguments("poseidon.plan.costs", line)
        os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    main()
