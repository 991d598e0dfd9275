"""The flags of the commands that start processes.

Law: the flags of a job are the fields of its request and of the options of its exchange.
"""

from __future__ import annotations

import argparse
from typing import Any

from poseidon.cli.parsers.form import FlagGroup, Parser, flag, switch, word
from poseidon.cli.parsers.reading import of_jobs
from poseidon.exchange.options import ExchangeOptions
from poseidon.flags.flag import Section, Takes, flags_of
from poseidon.flags.values import count, number, one_of, port
from poseidon.launcher.request import ExtractionRequest, ScriptRequest, TrainRequest


def _solver_flag(group: FlagGroup, name: str, text: str, **settings: Any) -> None:
    """Add a flag for a field of the solver: --display=5 for --set display=5."""
    read = settings.pop("read", str)
    settings = {"dest": "settings", "default": (), "takes": Takes.VALUES, "rare": True, **settings}
    flag(group, name, text, read=lambda value: f"{name}={read(value)}", **settings)


def _no_model(_: str) -> str:
    """Refuse -model, which is for test and time and often tried here."""
    raise argparse.ArgumentTypeError("the solver names the net; give --solver=FILE")


TERMS = {
    Section.SETTINGS: "They replace fields of the solver's file, for this job and its restarts alone. A "
    "value is written as in the file, the field of a block as --set train_state.level=1.",
    Section.MACHINES: "A client is a line '<id> <host> <port>' of the machinefile: workers and "
    "shards on that host. A worker is a process with a copy of the net, on one device. A shard is a "
    "server process that holds a part of the parameters.",
    Section.EXCHANGE: "ps: through the parameter server. svb: gradients of fully-connected layers as "
    "sufficient factors, two small matrices, to each other worker. hybrid: per layer the one with "
    "fewer bytes. allreduce: workers sum slices of the gradients for each other. auto: per layer "
    "the fastest of the three, by a measurement at the start. local: not at all, for one worker. "
    "With staleness S a worker begins an iteration at most S ahead of the slowest; 0 gives the "
    "weights of one process with all workers' batches.",
    Section.ROUNDS: "Each worker trains alone for H iterations, a round, then an outer rule applies "
    "the mean of their changes: docs/local_steps.md. --staleness then counts rounds.",
    Section.RAY: "Ray starts the job's processes on nodes of its cluster, which this command only "
    "connects to: docs/ray.md.",
    Section.ELASTIC: "A job on several hosts keeps snapshots in memory, and continues from them when a worker, "
    "a host or a link is lost: docs/elastic_jobs.md. --elastic=0: it restarts instead.",
    Section.FAILURES: "A restart starts all processes again from the newest snapshot, when a process, "
    "a host or a link was lost.",
}
"""The meaning of the terms of a job's flags."""


def _fields(parser: Parser, *kinds: type) -> None:
    """Add the flags that the fields of these dataclasses declare, by section; those that must be
    given come first.
    """
    declared = [flag for kind in kinds for flag in flags_of(kind)]
    for section in Section:
        found = [flag for flag in declared if flag.section is section]
        if found:
            group = parser.section(section.title, TERMS.get(section, ""))
            group.add(*sorted(found, key=lambda flag: not flag.required))


def train(parser: Parser) -> None:
    _fields(parser, TrainRequest, ExchangeOptions)
    switch(parser.arguments, "svb", "", default=None)
    group = parser.section(Section.SETTINGS.title)
    for name, text in (
        ("max_iter", "iterations to train for"),
        ("display", "iterations from one log line to the next"),
        ("test_interval", "iterations from one test to the next"),
    ):
        _solver_flag(group, name, text, metavar="N")
    modes = ("CPU", "GPU")
    _solver_flag(
        group, "solver_mode", "CPU or GPU", choices=modes, read=one_of(modes), metavar="MODE"
    )
    flag(parser.arguments, "model", "", read=_no_model)
    flag(parser.arguments, "client_id", "", read=count, default=0)
    parser.arguments.add(*of_jobs())


def run(parser: Parser) -> None:
    _fields(parser, ScriptRequest, ExchangeOptions)
    switch(parser.arguments, "svb", "", default=None)


def worker(parser: Parser) -> None:
    text = "train or run and its flags, without --hostfile"
    word(parser, "job_arguments", text, takes=Takes.REST, metavar="train|run ...")
    group = parser.section("Rendezvous")
    flag(group, "key_file", "the key: a file that every task can read, no one else", metavar="FILE")
    flag(group, "new_key", "make such a file, and end", metavar="FILE")
    flag(group, "rendezvous_port", "port of rank 0; default: $MASTER_PORT", read=port, metavar="P")
    text = "seconds until all tasks have connected (300)"
    flag(group, "rendezvous_timeout", text, read=number, default=300.0, metavar="S")


def extract_features(parser: Parser) -> None:
    text = "as Caffe's tool takes them, see above"
    word(parser, "caffe_arguments", text, takes=Takes.WORDS, metavar="ARGUMENT")
    _fields(parser, ExtractionRequest)
    parser.arguments.add(*of_jobs("num_rows_per_table", "table_staleness", "client_id"))


def python(parser: Parser) -> None:
    text = (
        "as Python takes them: its options, then a script, -m MODULE or -c CODE, then its arguments"
    )
    word(parser, "words", text, takes=Takes.WORDS, metavar="WORD")
