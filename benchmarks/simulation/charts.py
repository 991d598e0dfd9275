"""The curves as a picture, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.simulation.curves import (
    GBIT_PER_S,
    HOSTS,
    LINES,
    NETS,
    NetFacts,
    Point,
    in_ranges,
    winners,
)

STYLES = {
    "ps": ("#d55e00", "-"),
    "svb": ("#009e73", "-"),
    "hybrid": ("#0072b2", "-"),
    "ring": ("#777777", "-"),
    "ps + servers": ("#d55e00", "--"),
    "hybrid + servers": ("#0072b2", "--"),
}
SHOWN = (8, 32, 128, 1024)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw a grid: a row for each net, a column for each rate; equal heights are equal ratios."""
    with matplotlib.rc_context(
        {"svg.hashsalt": "poseidon", "svg.fonttype": "none", "font.size": 9}
    ):
        figure = Figure(figsize=(11, 12), layout="constrained")
        axes = figure.subplots(len(NETS), len(GBIT_PER_S), sharex=True, sharey=True)
        for row, net in enumerate(NETS):
            for column, rate in enumerate(GBIT_PER_S):
                axis = axes[row][column]
                for line in LINES:
                    here = [
                        p
                        for p in points
                        if (p.net, p.gbit_per_s, p.label) == (net, rate, line.label)
                    ]
                    color, dash = STYLES[line.label]
                    axis.plot(
                        [p.hosts for p in here],
                        [100 * p.efficiency for p in here],
                        dash,
                        color=color,
                        label=line.label,
                    )
                axis.set_xscale("log", base=2)
                axis.set_xticks(HOSTS[::2], [str(hosts) for hosts in HOSTS[::2]])
                axis.set_yscale("log")
                axis.set_yticks([1, 10, 100], ["1", "10", "100"])
                axis.set_ylim(0.3, 130)
                axis.grid(alpha=0.3)
                axis.set_title(f"{net}, {rate} Gbit/s", fontsize=9)
        figure.supxlabel("hosts")
        figure.supylabel("speed-up / hosts, %")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(LINES))
        figure.savefig(path, metadata={"Date": None})


def fact_table(facts: Sequence[NetFacts]) -> str:
    """Return the table of facts that the curves follow from."""
    rows = [
        (
            fact.net,
            f"{fact.parameters / 1e6:.1f} M",
            f"{fact.fully_connected:.0%}",
            f"{1000 * fact.compute_s:.0f} ms",
            ", ".join(f"{name} {hosts}" for name, hosts in fact.factors_up_to),
        )
        for fact in facts
    ]
    head = (
        "net",
        "parameters",
        "fully connected",
        "compute",
        "factors are fewer bytes up to hosts",
    )
    return _markdown(head, rows)


def efficiency_table(points: Sequence[Point]) -> str:
    """Return the table of efficiencies in percent of linear speed-up: hybrid, ring, and hybrid
    with serving hosts.
    """
    by_key = {(p.net, p.gbit_per_s, p.label, p.hosts): p.efficiency for p in points}
    labels = ("hybrid", "ring", "hybrid + servers")
    rows = [
        (
            net,
            f"{rate}",
            *(
                " / ".join(_percent(by_key[net, rate, label, hosts]) for label in labels)
                for hosts in SHOWN
            ),
        )
        for net in NETS
        for rate in GBIT_PER_S
    ]
    return _markdown(("net", "Gbit/s", *(f"{hosts} hosts" for hosts in SHOWN)), rows)


def winner_table(points: Sequence[Point]) -> str:
    """Return the table of the fastest exchanges."""
    rows = [
        (
            net,
            f"{rate}",
            in_ranges(winners([p for p in points if (p.net, p.gbit_per_s) == (net, rate)])),
        )
        for net in NETS
        for rate in GBIT_PER_S
    ]
    return _markdown(("net", "Gbit/s", "fastest, by the number of hosts"), rows)


def _percent(part: float) -> str:
    return f"{100 * part:.1f}" if part < 0.0995 else f"{100 * part:.0f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
