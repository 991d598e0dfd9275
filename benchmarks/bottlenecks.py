#!/usr/bin/env python3
"""Count how often the page of a job names its bottleneck, in jobs whose bottleneck is known.

    python benchmarks/bottlenecks.py
    python benchmarks/bottlenecks.py --cases 9 14 --markdown benchmarks/results/bottlenecks.md

Needs root: a case is a job over SSH on up to four hosts, each a network namespace. The driver
injects one bottleneck: all workers or one compute for longer (a layer that sleeps), links get a
rate, a shard gets a part of a processor, or a reader is slow. The page's sentence (`poseidon
dashboard`) is read 25 s after the first iteration. A case takes about 40 s on two idle cores.

How to read it: one row for each case: the job, what was injected, the page's sentence, the seconds
after which the page named the cause and went on to do so, and whether it was right at the end: the
cause, and the worker, shard or host.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.bottleneck_cases.cases import CASES, Case
from benchmarks.bottleneck_cases.harness import Answer, BottleneckHarness
from tests.support.ssh_hosts import SshHosts

MEASURED_S = 25.0
HEAD = (
    "| case | job | injected | the page after {:g} s | right after | right |",
    "|---|---|---|---|---|---|",
)

PAGE = """\
# Bottlenecks

`python benchmarks/bottlenecks.py --markdown=benchmarks/results/bottlenecks.md` starts jobs over SSH
on hosts that are network namespaces of one machine, injects one bottleneck into each, and reads the
sentence of the job's page ([docs/dashboard.md](../../docs/dashboard.md)). "Right after" is the time
since the first iteration after which the page named the cause and went on to do so. A sentence is
right if it names the cause and the worker, shard or host.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, and print a table. Return 0 if all but one of twenty were named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = range(1, len(CASES) + 1)
    parser.add_argument(
        "--cases", type=int, nargs="+", choices=numbers, default=list(numbers), metavar="N"
    )
    parser.add_argument(
        "--seconds", type=float, default=MEASURED_S, help="until the sentence is read (25)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="copy the metrics and logs of the jobs there"
    )
    flags = parser.parse_args(arguments)
    began_s = time.monotonic()
    rows, right = [], 0
    most = max(len(CASES[number - 1].roles) for number in flags.cases)
    with (
        tempfile.TemporaryDirectory(prefix="poseidon-hosts-") as place,
        SshHosts(Path(place), most + 1) as hosts,
    ):
        harness = BottleneckHarness(hosts, flags.seconds, flags.keep)
        for number in flags.cases:
            case = CASES[number - 1]
            answer = harness.run(number, case)
            right += case.is_named(answer.found)
            rows.append(row(number, case, answer))
            print(f"{rows[-1]}  (started in {answer.start_s:.0f} s)", file=sys.stderr, flush=True)
    took_s = time.monotonic() - began_s
    lines = [HEAD[0].format(flags.seconds), HEAD[1], *rows, ""]
    lines.append(f"{right} of {len(rows)} named rightly; {took_s / 60:.1f} minutes in total.")
    print("\n".join(lines))
    if flags.markdown:
        flags.markdown.write_text("\n".join([PAGE, *lines, ""]), encoding="utf-8")
    return 0 if right >= 0.95 * len(rows) else 1


def row(number: int, case: Case, answer: Answer) -> str:
    """Return a row of the table."""
    since = "-" if answer.named_s is None else f"{answer.named_s:.0f} s"
    right = "yes" if case.is_named(answer.found) else "**no**"
    return (
        f"| {number} | {case.job()} | {case.name} | {answer.found.sentence} | {since} | {right} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
