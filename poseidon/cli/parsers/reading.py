"""How a command line is read: argparse reads it, in gflags' spellings, as Caffe's tools take them.

A flag is -flag or --flag, its value =value or the next word, and a switch -flag, -flag=true or
-noflag; dashes within a name are underscores. A flag may not be cut short: what `--max` stands for
would change with every new flag.
"""

from __future__ import annotations

import argparse
import re
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from poseidon.errors import nearest
from poseidon.flags.flag import Flag, Takes
from poseidon.flags.values import TRUTH, one_of, stated

_COUNTS = {
    Takes.OPTIONAL_WORD: argparse.OPTIONAL,
    Takes.WORDS: argparse.ZERO_OR_MORE,
    Takes.REST: argparse.REMAINDER,
}


class Mistake(Exception):
    """The command line is not legal; the text is a sentence that says why."""


class HelpWanted(Exception):
    """The command line asks for help; the text is the topic, or empty."""


class _Help(argparse.Action):
    def __call__(self, *given: Any) -> NoReturn:
        raise HelpWanted(given[2] or "")


class _Parts(argparse.Action):
    def __call__(self, _: object, given: argparse.Namespace, values: Any, *__: object) -> None:
        vars(given).update(values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def parser_of(flags: Sequence[Flag]) -> argparse.ArgumentParser:
    """Return a parser of argparse, which raises ArgumentError and has no defaults: it would read
    those that are texts.
    """
    parser = _Parser(
        usage="", add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS
    )
    topic = one_of(topics_of(flags) or ("all",))
    parser.add_argument("--help", "--h", action=_Help, nargs="?", type=topic, metavar="TOPIC")
    for flag in flags:
        if flag.of:
            continue
        names = [f"--{name}" for name in flag.names]
        shown: dict[str, Any] = {"help": flag.text.replace("%", "%%") or SUPPRESS}
        if flag.takes is Takes.SWITCH:
            shown |= {"dest": flag.attribute, "action": "store_const"}
            parser.add_argument(*names, const=True, **shown)
            shown["help"] = SUPPRESS
            parser.add_argument(*(f"--no{name}" for name in flag.names), const=False, **shown)
            continue
        parts = [part for part in flags if part.head == flag.name]
        shown |= {"metavar": flag.metavar, "type": flag.read}
        if flag.required or flag.takes in (Takes.OPTIONAL_WORD, Takes.WORDS):
            shown["type"] = stated(flag.read)  # not "$JOB", which is not set
        if flag.takes.is_word:
            count = _COUNTS.get(flag.takes)
            parser.add_argument(flag.attribute, nargs=count, default=None, **shown)
            continue
        if parts:
            shown |= {"action": _Parts, "type": partial(_with_parts, flag, parts)}
        elif flag.takes is Takes.VALUES:
            shown["action"] = "append"
        parser.add_argument(*names, dest=flag.attribute, **shown)
    return parser


def read(flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """Return the value of each flag by its attribute, and `notes`, a sentence for each flag that is
    given without effect.

    Raises:
        Mistake: a word is not a flag or a value of this command, or one is missing.
        HelpWanted: it asks for help.
    """
    parser = parser_of(flags)
    switches = {name for flag in flags if flag.takes is Takes.SWITCH for name in flag.names}
    ours = list(words).index("--") if "--" in words else len(words)  # flags end here
    spelled = [*(_spelled(word, switches) for word in words[:ours]), *words[ours:]]
    rest = next((flag for flag in flags if flag.takes is Takes.REST), None)
    try:
        parse = parser.parse_known_args if rest else parser.parse_known_intermixed_args
        given, unknown = parse(spelled)
    except argparse.ArgumentError as error:
        raise Mistake(_sentence(error)) from error
    if unknown:
        _refuse([words[spelled.index(word)] for word in unknown], flags)
    found = {name: value for name, value in vars(given).items() if value is not None}
    if rest:  # the words of another program, as they were
        found[rest.attribute] = words[len(words) - len(found.get(rest.attribute, ())) :]
    missing = [flag.title for flag in flags if flag.required and flag.attribute not in found]
    if missing:
        raise Mistake(_are_missing(missing))
    values = {flag.attribute: flag.default for flag in flags} | found
    for flag in flags:
        if flag.takes in (Takes.VALUES, Takes.WORDS, Takes.REST):
            values[flag.attribute] = tuple(values[flag.attribute] or ())
    values["notes"] = [flag.note for flag in flags if flag.note and flag.attribute in found]
    return values


def topics_of(flags: Iterable[Flag]) -> tuple[str, ...]:
    """Return the topics of the help; empty: it shows all flags."""
    rare = dict.fromkeys(flag.section.topic for flag in flags if flag.rare or flag.of)
    return (*filter(None, rare), "all") if rare else ()


def _with_parts(flag: Flag, parts: Sequence[Flag], text: str) -> dict[str, Any]:
    """Return the value of a flag and of its parts, by attribute: `20,outer_lr=0.7`."""
    found = re.fullmatch("([^=:,]*)(?:[:,](.*))?", text, re.DOTALL)
    own, rest = found.groups() if found else ("", text)
    values = {flag.attribute: flag.read(own)} if own else {}
    by_name = {part.name: part for part in parts}
    for word in (rest or "").split(","):
        name, equals, value = word.partition("=")
        if word and not (equals and name in by_name):
            near = nearest(name, by_name)
            hint = f"; did you mean {near}?" if near else f"; expected one of {', '.join(by_name)}"
            raise argparse.ArgumentTypeError(f"it has no '{word}'{hint}")
        try:
            values |= {by_name[name].attribute: by_name[name].read(value)} if word else {}
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error
    return values


def _spelled(word: str, switches: set[str]) -> str:
    """Return a word of a command line in argparse's spelling."""
    if not re.match("--?[a-zA-Z]", word):
        return word
    name, equals, text = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name in switches and text.lower() in TRUTH:
        return f"--{'' if TRUTH[text.lower()] else 'no'}{name}"
    return f"--{name}{equals}{text}"


def _sentence(error: argparse.ArgumentError) -> str:
    """Return what argparse complains about, in the words of the other messages."""
    if error.argument_name is None:
        names = error.message.rpartition(": ")[2].split(", ")
        return _are_missing([name for name in names if name != "..."])
    if found := re.fullmatch(r"ignored explicit argument ('.*')", error.message, re.DOTALL):
        message = f"expected true or false, found {found[1]}"
    else:
        message = error.message.replace("expected one argument", "expected a value")
    return f"{error.argument_name.partition('/')[0]}: {message}"


def _are_missing(titles: Sequence[str]) -> str:
    return f"{' and '.join(titles)} {'is' if len(titles) == 1 else 'are'} missing"


def _refuse(words: Sequence[str], flags: Sequence[Flag]) -> NoReturn:
    """Raise Mistake because of words that no flag of this command takes."""
    shown = [flag for flag in flags if flag.text and not flag.takes.is_word]
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is None:
        files = [flag for flag in shown if flag.required and flag.metavar == "FILE"]
        hint = f"; did you mean {files[0].title}={words[0]}?" if files else ""
        raise Mistake(f"did not expect '{' '.join(words)}'{hint}")
    name, _, text = unknown.partition("=")
    plain = name.lstrip("-").replace("-", "_")
    titles = {flag.name: flag.title for flag in shown}
    near = nearest(plain, titles)
    hint = f"; did you mean {titles[near]}?" if near else ""
    if "set" in titles:
        hint = _setting(plain, text) or hint
    if not near and any(flag.name == "script" for flag in flags):
        hint = "; the script's own flags come after the script"
    raise Mistake(f"unknown flag {name}{hint}")


def _setting(name: str, value: str) -> str:
    """Return a hint for a flag that is named like a field of the solver; empty for another flag."""
    # an import of protobuf takes longer than the flags
    from poseidon.caffe.proto.caffe_pb2 import SolverParameter

    field = {"lr": "base_lr", "learning_rate": "base_lr", "iterations": "max_iter"}.get(name, name)
    if field not in SolverParameter.DESCRIPTOR.fields_by_name:
        return ""
    return f"; did you mean --set {field}={value or 'VALUE'}?"


OF_GLOG_SWITCHES = ("logtostderr", "alsologtostderr", "colorlogtostderr", "log_prefix")
"""Flags of Caffe's logging library that ask for what happens in any case: the log is on standard
error, in its form.
"""
OF_GLOG = {
    "log_dir": "logs are in the job's folder, --output",
    "minloglevel": "--progress=logs=WHOSE says whose log is shown",
    "stderrthreshold": "--progress=logs=WHOSE says whose log is shown",
    "v": "",
    "vmodule": "",
    "logbuflevel": "",
    "logbufsecs": "",
    "max_log_size": "",
}
RETIRED = {
    "num_table_threads": "--workers is the number of workers of a client on CPU, --gpu "
    "names its GPUs",
    "num_clients": "the machinefile, --hostfile, says how many clients there are",
    "stats_path": "statistics are in the job's folder; poseidon stats shows them",
    "svb_timeout_ms": "nothing is polled; --stall_timeout is for a process that hangs",
    "snapshot_clock": "the solver's snapshot says how often",
    "resume_clock": "--snapshot=FILE.solverstate continues from a run",
    "snapshot_dir": "the solver's snapshot_prefix says where",
    "resume_dir": "--snapshot=FILE.solverstate continues from a run",
    "server_bandwidth_mbps": "--bandwidth_mbps is the budget of each client",
}
"""Flags of the original Poseidon, and what to use instead."""
RETIRED_VALUES = (
    "num_zmq_threads",
    "row_type",
    "row_oplog_type",
    "oplog_type",
    "append_only_oplog_type",
    "append_only_buffer_capacity",
    "append_only_buffer_pool_size",
    "bg_apply_append_oplog_freq",
    "process_storage_type",
    "thread_oplog_batch_size",
    "server_table_logic",
    "bg_idle_milli",
    "server_idle_milli",
    "row_candidate_factor",
    "update_sort_policy",
    "numa_index",
    "numa_policy",
    "server_push_row_upper_bound",
    "client_send_oplog_upper_bound",
)
"""Those that need no replacement."""
RETIRED_SWITCHES = (
    "init_thread_access_table",
    "oplog_dense_serialized",
    "no_oplog_replay",
    "version_maintain",
    "numa_opt",
    "naive_table_oplog_meta",
    "suppression_on",
    "use_approx_sort",
)
"""Those that may have no value."""


def retired(name: str, instead: str = "", *, alone: bool = False) -> Flag:
    """Return a flag without effect.

    Args:
        instead: half a sentence on what to use; may be empty.
        alone: it may stand without a value.
    """
    note = f"--{name} has no effect here" + (f": {instead}" if instead else "")
    return Flag(name=name, note=note, takes=Takes.SWITCH if alone else Takes.VALUE)


def of_every_command() -> Iterable[Flag]:
    for name in OF_GLOG_SWITCHES:
        yield Flag(name=name, takes=Takes.SWITCH)
    for name, instead in OF_GLOG.items():
        yield retired(name, instead)


def of_jobs(*more: str) -> Iterable[Flag]:
    for name, instead in RETIRED.items():
        yield retired(name, instead)
    for name in (*RETIRED_VALUES, *more):
        yield retired(name)
    for name in RETIRED_SWITCHES:
        yield retired(name, alone=True)
