#!/usr/bin/env python3
"""Compare Poseidon and DDP on a cluster of namespaces on one machine.

    sudo python benchmarks/cluster.py bytes                        # bytes per host beside the formula
    sudo python benchmarks/cluster.py speed --net alexnet --rates 250,1000
    sudo python benchmarks/cluster.py speed --compute real --net gpt-20m --rates 100,1000
    sudo python benchmarks/cluster.py speed --net resnet50 --exchange ps --rates 250,1000,none
    sudo python benchmarks/cluster.py speed --net resnet50 --exchange ps --rates 250 --servers 4
    sudo python benchmarks/cluster.py speed --net gpt2 --exchange ps --rates 100,250,1000,10000 --hooks all
    sudo python benchmarks/cluster.py speed --net gpt2 --ours hybrid,hybrid+int8,ps+powersgd:4,ps+H32+int8 --hooks all
    sudo python benchmarks/cluster.py overlap                      # iteration beside max(compute, bytes / rate)
    sudo python benchmarks/cluster.py paper                        # VGG19-22K on 1 to 8 hosts, a fortieth of its size
    sudo python benchmarks/cluster.py links --net resnet50         # how busy each link is, interval by interval
    sudo python benchmarks/cluster.py clean                        # remove what a killed measurement left

Hosts are network namespaces on a bridge; their links have the given rate in both directions (tc
tbf). Nets are emulated: each layer sleeps for its share of a given time and hands over gradients of
the real size, so that a few processors can stand for many accelerators; the same modules serve
Poseidon and torch's DistributedDataParallel. What remains real is everything between the gradients
and the new weights. With `--compute real` nets are computed, on one thread a host: byte-level GPTs
(gpt-2m, gpt-20m) by AdamW, AlexNet and ResNet-50 by SGD, on two hosts. Each job's result is the
median of several rounds, and jobs that are compared run by turns on the same hosts.

A job of `--ours` is EXCHANGE[+CODEC...][+float16|bfloat16][+H32[+P4][+D8]]. A CODEC is one of
`--compress`; H, P and D are `--local_steps=H,fragments=P,delay=D`. EXCHANGE may be
`default`. Our traffic between hosts is encrypted, as in every job, unless `--in_clear` is given;
DDP's, over gloo, never is.

Needs root, iproute2, and memory for all hosts' models; --json FILE keeps the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.testbed.computed import COMPUTED, computed_layers
from benchmarks.testbed.hooks import ALL_HOOKS, Hook
from benchmarks.testbed.hosts import remove_leftovers
from benchmarks.testbed.measurement import Effort
from benchmarks.testbed.measurement_lock import alone
from benchmarks.testbed.point_bytes import measure_bytes
from benchmarks.testbed.point_overlap import measure_overlap
from benchmarks.testbed.point_paper import measure_paper
from benchmarks.testbed.point_speed import Comparison, compare
from benchmarks.testbed.shapes import NETS, default_rows, layers_of
from benchmarks.testbed.tables import Table, write_json
from benchmarks.testbed.timeline import measure_links
from benchmarks.testbed.worker_settings import (
    EXCHANGES,
    DdpSettings,
    PoseidonSettings,
    TrainingSettings,
)
from poseidon.errors import PoseidonError, UsageError

Report = Callable[[str], None]
ITERATIONS = 5
REAL = "real"
REAL_DEFAULTS = {
    "net": "gpt-20m",
    "hosts": 2,
    "rates": "100,1000",
    "rounds": 3,
    "warm": 1,
    "ours": "default,default+int8,default+powersgd:4:start=2,default+H20+int8",
    "hooks": "fp16,powersgd:4,diloco:20",
    "buckets": (),
}
"""Defaults of `speed --compute real`."""


def numbers(text: str) -> list[int]:
    """`2,4,8`."""
    return [int(word) for word in text.split(",")]


def sizes(text: str) -> tuple[float, ...]:
    """`1,5,25`; nothing for an empty text."""
    return tuple(float(word) for word in text.split(",") if word)


def rates(text: str) -> list[float | None]:
    """`250,1000,none`: Mbit/s, `none` for unshaped links."""
    return [None if word == "none" else float(word) for word in text.split(",")]


def hooks(text: str) -> tuple[str, ...]:
    """`fp16,powersgd:2,post-local:8`, `all`, or nothing for an empty text."""
    words = ALL_HOOKS if text == "all" else tuple(word for word in text.split(",") if word)
    for word in words:
        try:
            Hook.parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"'{word}' is none of fp16, powersgd:RANK, post-local:H, diloco:H, all"
            ) from error
    return words


def exchanges(text: str) -> list[str]:
    """`ps,svb,hybrid`."""
    words = text.split(",")
    unknown = [word for word in words if word not in EXCHANGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(EXCHANGES)}")
    return words


def our_jobs(text: str) -> tuple[PoseidonSettings, ...]:
    """`hybrid,hybrid+int8,ps+H32+P4+D8+int8`."""
    try:
        return tuple(PoseidonSettings.parse(word) for word in text.split(","))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def compute(text: str) -> float | str:
    """`50`: milliseconds of emulated compute; `real`."""
    return REAL if text == REAL else float(text)


def training(flags: argparse.Namespace) -> TrainingSettings:
    """Return the net that the flags name."""
    if _is_real(flags):
        return TrainingSettings(
            layers=computed_layers(flags.net),
            batch=rows(flags),
            compute_s=0.0,
            rate=COMPUTED[flags.net].rate,
            computed=flags.net,
        )
    return TrainingSettings(
        layers=layers_of(flags.net), batch=rows(flags), compute_s=flags.compute / 1000
    )


def rows(flags: argparse.Namespace) -> int:
    """Return the rows of a host's batch: images, samples or tokens."""
    if _is_real(flags):
        return flags.batch or COMPUTED[flags.net].rows
    return flags.batch or default_rows(flags.net)


def effort(flags: argparse.Namespace) -> Effort:
    """How much the flags want."""
    usual = COMPUTED[flags.net].iterations if _is_real(flags) else ITERATIONS
    return Effort(rounds=flags.rounds, iterations=flags.iterations or usual, warm=flags.warm)


def _is_real(flags: argparse.Namespace) -> bool:
    return getattr(flags, "compute", None) == REAL


def run_bytes(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Point 1."""
    jobs = [PoseidonSettings(exchange=each, in_clear=flags.in_clear) for each in flags.exchange]
    return [measure_bytes(training(flags), jobs, flags.hosts, effort(flags), report)]


def run_speed(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Points 2 and 3."""
    ours = flags.ours or tuple(PoseidonSettings(exchange=exchange) for exchange in flags.exchange)
    net = replace(training(flags), steady=flags.steady, emulated_update=flags.emulated_update)
    beside = f" and {flags.servers} that only serve" if flags.servers else ""
    spent = "computed" if _is_real(flags) else f"compute {flags.compute:g} ms"
    ours = tuple(
        replace(how, servers=flags.servers, shards=flags.shards, in_clear=flags.in_clear)
        for how in ours
    )
    comparison = Comparison(
        title=f"{flags.net}, batch {rows(flags)}, {flags.hosts} hosts{beside}, {spent}, "
        f"{'in clear' if flags.in_clear else 'ours encrypted'}",
        training=net,
        workers=flags.hosts,
        rates_mbit=tuple(flags.rates),
        ours=ours,
        with_ddp=flags.ddp,
        hooks=flags.hooks,
        buckets_mb=flags.buckets,
        effort=replace(effort(flags), warm_ddp=flags.warm_ddp),
        limit_s=60 * flags.minutes,
    )
    return compare(comparison, report)


def run_overlap(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Point 4."""
    net = TrainingSettings(layers=layers_of(flags.net), batch=rows(flags), compute_s=0.0)
    how = PoseidonSettings(exchange=flags.exchange[0], trace=flags.trace, in_clear=flags.in_clear)
    return [measure_overlap(net, how, flags.hosts, flags.rate, flags.ratios, effort(flags), report)]


def run_paper(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Point 5."""
    return [measure_paper(flags.hosts, effort(flags), report, in_clear=flags.in_clear)]


def run_links(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Watch the links of one job."""
    how = (
        DdpSettings()
        if flags.ddp
        else PoseidonSettings(
            exchange=flags.exchange[0], servers=flags.servers, in_clear=flags.in_clear
        )
    )
    table = measure_links(
        training(flags),
        how,
        flags.hosts,
        flags.rate,
        iterations=flags.iterations or ITERATIONS,
        every_s=flags.every / 1000,
        report=report,
    )
    return [table]


def run_clean(flags: argparse.Namespace, report: Report) -> list[Table]:
    """Remove leftovers."""
    for name in remove_leftovers():
        print(f"removed {name}")
    return []


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace, Report], list[Table]], words: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=words)
        added.add_argument("--rounds", type=int, default=5, help="of each job (5)")
        added.add_argument(
            "--iterations", type=int, help="that count in a round (5; a computed net has its own)"
        )
        added.add_argument(
            "--in_clear", action="store_true", help="our traffic is not encrypted, as DDP's is not"
        )
        added.add_argument("--warm", type=int, default=2, help="before those, that do not (2)")
        added.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
        added.set_defaults(run=run)
        return added

    def net(added: argparse.ArgumentParser, default: str, exchange: str) -> None:
        added.add_argument("--net", choices=sorted({*NETS, *COMPUTED}), default=default)
        added.add_argument(
            "--batch",
            type=int,
            help="rows of each host: images (32), tokens (gpt2: 8192), samples (dlrm: 2048); a "
            "computed net has its own",
        )
        added.add_argument(
            "--exchange", type=exchanges, default=exchange, help=f"of {', '.join(EXCHANGES)}"
        )

    added = command("bytes", run_bytes, "bytes per host beside the formula")
    net(added, "vgg19-22k/40", "ps,svb,hybrid")
    added.add_argument("--hosts", type=numbers, default="2,4,8")
    added.add_argument("--compute", type=float, default=0.0, metavar="MS")
    added = speed = command("speed", run_speed, "ours and DDP by turns")
    net(added, "alexnet", "hybrid")
    added.add_argument("--hosts", type=int, default=4, help="that work (4)")
    added.add_argument(
        "--servers", type=int, default=0, help="hosts beside those that only serve (0)"
    )
    added.add_argument("--shards", type=int, default=1, help="on each host that serves (1)")
    added.add_argument("--rates", type=rates, default="250,1000", help="Mbit/s, or none (250,1000)")
    added.add_argument(
        "--compute",
        type=compute,
        default=50.0,
        metavar="MS",
        help="of an iteration, emulated (50); real: the net is computed, with other defaults of "
        "the flags",
    )
    added.add_argument(
        "--buckets", type=sizes, default="1,5,25", help="MB, DDP's beside its default (1,5,25)"
    )
    added.add_argument(
        "--hooks",
        type=hooks,
        default=(),
        help=f"DDP's communication hooks: all, or of {','.join(ALL_HOOKS)}",
    )
    added.add_argument("--ours", type=our_jobs, help="our jobs in place of --exchange, see above")
    added.add_argument(
        "--ddp", action=argparse.BooleanOptionalAction, default=True, help="plain DDP too (yes)"
    )
    added.add_argument(
        "--warm_ddp", type=int, help="DDP's --warm: its iterations do not overlap (as --warm)"
    )
    added.add_argument(
        "--minutes", type=float, default=math.inf, help="no job starts after that (no limit)"
    )
    added.add_argument(
        "--steady",
        action="store_true",
        help="the emulated accelerator has priority on this machine's processors",
    )
    added.add_argument(
        "--emulated_update",
        action="store_true",
        help="updates of DDP and of local steps are a part of the emulated compute",
    )
    added = command("overlap", run_overlap, "an iteration beside max(compute, bytes / rate)")
    net(added, "resnet50", "ps")
    added.add_argument("--hosts", type=int, default=4)
    added.add_argument("--rate", type=float, default=250.0, metavar="MBIT")
    added.add_argument(
        "--ratios", type=sizes, default="0.5,1,2", help="compute / wire time (0.5,1,2)"
    )
    added.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="traces of the wait-free job, for `poseidon stats`",
    )
    added = command("paper", run_paper, "Poseidon's own experiment, a fortieth of its size")
    added.add_argument("--hosts", type=numbers, default="1,2,4,8")
    added = command("links", run_links, "how busy each link is, interval by interval")
    net(added, "resnet50", "ps")
    added.add_argument("--ddp", action="store_true", help="DDP instead of ours")
    added.add_argument("--hosts", type=int, default=4, help="that work (4)")
    added.add_argument(
        "--servers", type=int, default=0, help="hosts beside those that only serve (0)"
    )
    added.add_argument("--rate", type=float, default=250.0, metavar="MBIT")
    added.add_argument(
        "--compute", type=float, default=100.0, metavar="MS", help="of an iteration (100)"
    )
    added.add_argument(
        "--every", type=float, default=200.0, metavar="MS", help="the interval (200)"
    )
    command("clean", run_clean, "remove what a killed measurement left")
    flags = parser.parse_args(arguments)
    if _is_real(flags):
        speed.set_defaults(**REAL_DEFAULTS)
        flags = parser.parse_args(arguments)
    known = COMPUTED if _is_real(flags) else NETS
    if getattr(flags, "net", None) not in (None, *known):
        how = "compute" if _is_real(flags) else "emulate"
        parser.error(f"--net={flags.net}: the nets to {how} are {', '.join(known)}")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    flags = parse(arguments)
    try:
        report = partial(print, file=sys.stderr, flush=True)
        with contextlib.nullcontext() if flags.run is run_clean else alone(report):
            tables = flags.run(flags, report)
    except PoseidonError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1
    for table in tables:
        print(f"\n{table}")
    if flags.json is not None:
        write_json(tables, flags.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
