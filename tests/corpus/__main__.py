"""The verdicts on every file of the corpus of real definitions: python -m tests.corpus [--out
benchmarks/results/corpus.md] [PART ...]

Each file is read, upgraded, printed and read back; each net is built and run, in a process of its
own and on one core, with random inputs where its data is not there. PART: only files whose path has
one of these in it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.corpus.verdicts import Verdict, verdict_of
from tests.support.needs import SHARED
from tests.support.own_process import in_own_process

SECONDS = 120.0
HEAD = """# The corpus of real definitions

`python -m tests.corpus` generates this page. The corpus is the `prototxt-corpus` of the shared
data: files of BVLC Caffe, of its forks and of papers' repositories. Each `.prototxt` is read,
upgraded to today's grammar, printed and read back. Then the net is built and run: forward and
backward in the phase TRAIN, then forward in TEST with the same weights and with BatchNorm's means
of that moment.

Layers that read data (Data, ImageData, HDF5Data, WindowData, and Python layers without bottoms) are
replaced by random inputs: two records at a time, pictures of 32 x 32 where whole ones are read,
labels 0 or 1. Everything else is as in the file.

"Run" means that all passes gave finite numbers. The recorded cases of real Caffe test whether the
numbers are Caffe's; this page does not.
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, help="the report; default: the terminal")
    arguments = parser.parse_args()
    corpus = SHARED / "data" / "prototxt-corpus"
    if not corpus.is_dir():
        print(
            f"there is no corpus: {corpus} is absent; set POSEIDON_SHARED to the folder that has it"
        )
        return 1
    found: dict[str, Verdict] = {}
    for path in sorted(corpus.rglob("*.prototxt")):
        name = str(path.relative_to(corpus))
        if not arguments.parts or any(part in name for part in arguments.parts):
            found[name] = in_own_process(
                _verdict, path, seconds=SECONDS, otherwise=_absent, method="fork"
            )
            print(f"{name}: {'; '.join(found[name].words)}", file=sys.stderr, flush=True)
    report = f"{HEAD}\n{_summary(found)}\n{_table(found)}"
    if arguments.out:
        arguments.out.write_text(report, encoding="utf-8")
    else:
        print(report)
    return 0


def _verdict(path: Path) -> Verdict:
    torch.set_num_threads(1)
    return verdict_of(path)


def _absent(why: str) -> Verdict:
    return Verdict(kind="net", grammar="?", words=[why])


def _summary(found: dict[str, Verdict]) -> str:
    """Return the counts."""
    nets = [verdict for verdict in found.values() if verdict.kind == "net"]
    solvers = [verdict for verdict in found.values() if verdict.kind == "solver"]
    lines = [
        "| | files | read and upgraded | print and read back equal | built | run |",
        "|---|---|---|---|---|---|",
    ]
    for name, verdicts in (("nets", nets), ("solvers", solvers)):
        counts = [
            sum(bool(getattr(v, field)) for v in verdicts)
            for field in ("read", "printed", "built", "ran")
        ]
        shown = (
            [str(count) for count in counts]
            if name == "nets"
            else [*map(str, counts[:2]), "-", "-"]
        )
        lines.append(f"| {name} | {len(verdicts)} | {' | '.join(shown)} |")
    grammars = Counter(verdict.grammar for verdict in found.values())
    spoken = ", ".join(f"{name} {count}" for name, count in grammars.most_common())
    return "\n".join([*lines, "", f"Grammars: {spoken}.", ""])


def _table(found: dict[str, Verdict]) -> str:
    """Return one line for each file."""
    lines = [
        "| file | grammar | read | prints back | built | run | what ran, or why not |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, verdict in found.items():
        marks = (verdict.read, verdict.printed, verdict.built, verdict.ran)
        shown = " | ".join("-" if mark is None else "yes" if mark else "no" for mark in marks)
        lines.append(f"| {name} | {verdict.grammar} | {shown} | {'; '.join(verdict.words)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
