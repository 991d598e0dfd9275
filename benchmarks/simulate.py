#!/usr/bin/env python3
"""Simulate an iteration on hosts that you do not have.

    python benchmarks/simulate.py curves --plot docs/performance_curves.svg
    python benchmarks/simulate.py iteration --net alexnet --hosts 4 --rate 250 --compute 50 --exchange hybrid
    python benchmarks/simulate.py iteration --net resnet50 --hosts 4 --servers 4 --rate 250 --compute 50 --exchange ps

    sudo python benchmarks/simulate.py compare measured.json
    python benchmarks/simulate.py compare measured.json --plan     # with what `poseidon plan` measures and assumes

`curves` predicts five nets on 8 to 1024 hosts at 1 to 100 Gbit/s, prints the tables of
benchmarks/results/simulation.md and draws the picture of docs/performance.md; its assumptions are
in benchmarks/simulation/curves.py. `iteration` predicts one iteration and prints it next to its
bound: the greater of the compute time and the bytes of the busiest link at its rate. `compare`
prints the measurements of `benchmarks/cluster.py --json FILE` next to the predictions for the same
jobs. What this machine's processors take for sums, rules, products, sockets and messages, and what
links carry of their rate, is measured first, since all hosts of a testbed share them. With `--plan`
`poseidon plan`, a formula, makes the predictions; a second table has, for each case, the measured
scheme that they recommend beside the fastest.

The model is in benchmarks/simulation/: the layers' passes, chunks and factors on links in both
directions, shards' sums, the scheduler's order. Weights and gradients themselves are not computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.simulation.calibrate import ROUTE_S, measure_costs, testbed_machine
from benchmarks.simulation.charts import draw, efficiency_table, fact_table, winner_table
from benchmarks.simulation.comparison import ComparisonError, choices, compare
from benchmarks.simulation.curves import NETS as CURVE_NETS
from benchmarks.simulation.curves import facts, points
from benchmarks.simulation.simulator import simulate
from benchmarks.testbed.shapes import NETS, layers_of
from poseidon.errors import PoseidonError
from poseidon.observe.plan.cluster_probe import NetworkLinks, local_costs
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.forecast import PlannedCluster, machine_of
from poseidon.observe.plan.iteration import iteration_of
from poseidon.observe.plan.scenario import PlannedExchange, Scenario, link_bytes
from poseidon.observe.plan.shapes import Machine

Report = Callable[[str], None]


def run_curves(flags: argparse.Namespace, report: Report) -> str:
    """Compute all curves. Return the text of the tables."""
    found = list(points(report=report))
    if flags.plot:
        draw(found, flags.plot)
        report(f"drew {flags.plot}")
    tables = (
        fact_table([facts(net) for net in CURVE_NETS]),
        winner_table(found),
        efficiency_table(found),
    )
    return "\n\n".join(tables)


def run_iteration(flags: argparse.Namespace, _: Report) -> str:
    """Predict one iteration. Return a line with its bound."""
    scenario = Scenario(
        layers=layers_of(flags.net),
        batch=flags.batch,
        compute_s=flags.compute / 1000,
        workers=flags.hosts,
        servers=flags.servers,
        exchange=PlannedExchange(flags.exchange),
        bits_per_s=flags.rate * 1e6,
        wait_free=not flags.no_wait_free,
    )
    wire_s = link_bytes(scenario) / scenario.bytes_per_s
    seconds = simulate(scenario).seconds
    bound_s = max(scenario.compute_s, wire_s)
    return (
        f"{flags.net}, {flags.exchange}, {flags.hosts} hosts: {seconds:.4f} s an iteration; "
        f"compute {scenario.compute_s:.4f} s, wire {wire_s:.4f} s, {seconds / bound_s:.2f} of the "
        "greater"
    )


def run_comparison(flags: argparse.Namespace, report: Report) -> str:
    """Compare measured tables with predictions. Return the table."""
    tables = [table for path in flags.files for table in read_tables(path)]
    if flags.plan:
        machine_of = partial(planned_machine, flags.all_cores)
        found = [
            compare(tables, machine_of, iteration_of, net=flags.net, batch=flags.batch),
            choices(tables, machine_of, net=flags.net, batch=flags.batch),
        ]
        return "\n\n".join(str(table) for table in found if table.rows)
    costs = measure_costs()
    report(str(costs))
    machine_of = partial(testbed_machine, costs)
    return str(compare(tables, machine_of, simulate, net=flags.net, batch=flags.batch))


@cache
def planned_costs(hosts: int) -> HostCosts:
    """Return this machine's costs as `poseidon plan` measures them for so many hosts that share
    it.
    """
    return local_costs(hosts)


def planned_machine(all_cores: bool, hosts: int, rate_mbit: float | None) -> Machine:
    """Return one of several hosts that share this machine, as `poseidon plan` takes it to be.

    Args:
        all_cores: whether all cores are free, whatever the probe found.
        hosts: number of hosts.
        rate_mbit: rate of their links; None: as fast as the processors.
    """
    costs = planned_costs(hosts)
    if all_cores:
        costs = replace(costs, free_cores=float(costs.cores))
    # Frames of the testbed are so large that nearly the whole rate carries values, as in a measured
    # one.
    network = NetworkLinks(bits_per_s=(rate_mbit or 0.0) * 1e6, latency_s=ROUTE_S, measured=True)
    cluster = PlannedCluster(workers=hosts, servers=0, network=network, costs=costs)
    return machine_of(cluster, shared_by=hosts)


def read_tables(path: Path) -> list[dict[str, Any]]:
    """Return the tables of one file of `cluster.py --json`."""
    try:
        tables: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ComparisonError(f"cannot read the tables of '{path}': {reason}") from error
    return tables


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    curves = commands.add_parser("curves", help="all curves, as tables and as a picture")
    curves.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png)")
    curves.set_defaults(run=run_curves)
    one = commands.add_parser("iteration", help="one iteration")
    one.add_argument("--net", choices=list(NETS), default="alexnet")
    one.add_argument("--batch", type=int, default=32, help="images a host (32)")
    one.add_argument(
        "--compute", type=float, default=50.0, metavar="MS", help="forward and backward (50)"
    )
    one.add_argument("--hosts", type=int, default=4, help="with a worker (4)")
    one.add_argument("--servers", type=int, default=0, help="further hosts that only serve (0)")
    one.add_argument(
        "--rate", type=float, default=1000.0, metavar="MBIT", help="of the links (1000)"
    )
    one.add_argument(
        "--exchange",
        choices=[exchange.value for exchange in PlannedExchange],
        default=PlannedExchange.HYBRID.value,
    )
    one.add_argument(
        "--no-wait-free", action="store_true", help="gradients leave after the backward pass"
    )
    one.set_defaults(run=run_iteration)
    other = commands.add_parser("compare", help="compare measured iterations with predicted ones")
    other.add_argument("files", type=Path, nargs="+", metavar="FILE", help="of cluster.py --json")
    other.add_argument(
        "--net", choices=list(NETS), default="resnet50", help="of tables on overlap (resnet50)"
    )
    other.add_argument("--batch", type=int, default=32, help="of tables on overlap (32)")
    other.add_argument(
        "--plan",
        action="store_true",
        help="processors and links as `poseidon plan` takes them; needs no root",
    )
    other.add_argument(
        "--all_cores",
        action="store_true",
        help="with --plan: take all cores to be free, as while tables of an idle machine were "
        "measured",
    )
    other.set_defaults(run=run_comparison)
    flags = parser.parse_args(words)
    try:
        print(flags.run(flags, lambda line: print(line, file=sys.stderr, flush=True)))
    except (ComparisonError, PoseidonError) as error:
        print(f"simulate.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
