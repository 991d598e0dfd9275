"""Flags that scripts of Caffe and of the original Poseidon pass, and nothing here needs."""

from __future__ import annotations

from collections.abc import Iterable

from poseidon.flags.flag import Flag, Takes

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
