"""The environment variables of Poseidon, read in one place.

Law: no other module reads an environment variable. Other code gets a `Settings` value, so that a
test, a second job in one process or a remote start can pass its own.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import UsageError

STATUS_FD_VARIABLE = "POSEIDON_STATUS_FD"
EVENTS_FD_VARIABLE = "POSEIDON_EVENTS_FD"
STDIN_FD_VARIABLE = "POSEIDON_STDIN_FD"
PLACE_VARIABLE = "POSEIDON_PLACE"
CAFFE2_ZOO = "https://s3.amazonaws.com/download.caffe2.ai/models"
"""The address of Caffe2's model zoo."""
GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL, unless the user says otherwise."""
_OF_ONE_PROCESS = frozenset({STATUS_FD_VARIABLE, EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE})
_SOCKET_BYTES = 107
"""The length of a Unix socket's path, at most."""
_BELOW_BYTES = 52
"""Room for what stands below the folder: an agent needs 50 bytes, `multiprocessing` 32."""
_TASKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables of a scheduler: the rank of a process, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the environment holds.

    Attributes:
        state_folder: the folder of job records: $POSEIDON_HOME, else $XDG_STATE_HOME/poseidon, else
            ~/.local/state/poseidon. It need not exist yet.
        data_folder: $POSEIDON_DATA, a folder that may hold data sets; None when not set.
        ray_address: $RAY_ADDRESS, the head of a Ray cluster; None when not set.
        status_fd: descriptor on which a launcher in the background reports its start to its parent;
            None in the foreground.
        events_fd: descriptor on which a process reports events to its launcher; None: standard
            output.
        stdin_fd: descriptor of the launcher's standard input; None: the process has none.
        debugger: $PYTHONBREAKPOINT, what `breakpoint()` calls; empty: pdb.
    """

    state_folder: Path
    data_folder: Path | None
    ray_address: str | None
    status_fd: int | None
    events_fd: int | None
    stdin_fd: int | None
    debugger: str


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environment: variables by name; by default this process's. Empty values count as not set.

    Raises:
        UsageError: one of the three descriptors is not a number.
    """
    variables = os.environ if environment is None else environment
    data = variables.get("POSEIDON_DATA")
    return Settings(
        state_folder=_state_folder(variables),
        data_folder=expanded(data) if data else None,
        ray_address=variables.get("RAY_ADDRESS") or None,
        status_fd=_descriptor(variables, STATUS_FD_VARIABLE),
        events_fd=_descriptor(variables, EVENTS_FD_VARIABLE),
        stdin_fd=_descriptor(variables, STDIN_FD_VARIABLE),
        debugger=variables.get("PYTHONBREAKPOINT", ""),
    )


def expanded(path: str | Path) -> Path:
    """Return a path with `~` and `~name` replaced by a home folder, as a shell does.

    In a container the user id may have no name, and $HOME may not be set: then `~` is `/`. `~name`
    of a user who does not exist stays.
    """
    found = os.path.expanduser(path)
    if found == "~" or found.startswith("~/"):
        found = f"/{found[2:]}"
    return Path(found)


def visible_gpus() -> tuple[str, ...] | None:
    """Return the names in $CUDA_VISIBLE_DEVICES: numbers, and names such as `GPU-...` and `MIG-...`;
    None where it is not set.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def model_zoo(variable: str = "CAFFE2_MODELS") -> tuple[Path, str]:
    """Return the folder of Caffe2's trained models, and the address that they are downloaded from.

    The folder is the variable's, else $CAFFE2_HOME/models, else ~/.caffe2/models, as in Caffe2. The
    address is $CAFFE2_MODELS_URL, else Caffe2's own.
    """
    folder = os.environ.get(variable) or f"{os.environ.get('CAFFE2_HOME') or '~/.caffe2'}/models"
    address = os.environ.get("CAFFE2_MODELS_URL") or CAFFE2_ZOO
    return expanded(folder), address.rstrip("/")


def folder_of_sockets() -> str:
    """Return the folder for temporary files; `/tmp` where a socket in it would have too long a path.

    Raises:
        UsageError: there is no `/tmp` to write to either.
    """
    folder = tempfile.gettempdir()
    most = _SOCKET_BYTES - _BELOW_BYTES
    if len(os.fsencode(folder)) <= most:
        return folder
    if os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    raise UsageError(
        f"TMPDIR={folder} is too long for the paths of sockets, and /tmp cannot be written; expected "
        f"at most {most} bytes"
    )


def name_user() -> str:
    """Return the name of this user. A user id without one, as in a container, is named by its
    number, and $USER is set to it: libraries (paramiko, torch's compiler) raise KeyError otherwise.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return os.environ.setdefault("USER", str(os.getuid()))


def inherited_environment() -> dict[str, str]:
    """Return the environment for a child process: this process's, without the variables for it
    alone.
    """
    return {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}


def hide_descriptors() -> None:
    """Keep programs that this process starts from reporting or reading in its place."""
    for name in (EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE):
        os.environ.pop(name, None)


@contextmanager
def set_place(name: str) -> Iterator[None]:
    """Name a worker's place to the processes that its script starts inside the block."""
    os.environ[PLACE_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(PLACE_VARIABLE, None)


def place_of_parent() -> str:
    """Return the place of the worker whose script has started this process; empty: there is none."""
    return os.environ.get(PLACE_VARIABLE, "")


def rank_and_size() -> tuple[int | None, int | None]:
    """Return $RANK and $WORLD_SIZE, as `init_process_group` reads them; None: not a number."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() else None, int(size) if size.isdecimal() else None


def put_on_python_path(*folders: Path) -> None:
    """Put folders at the beginning of PYTHONPATH, for the processes that this one starts."""
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*map(str, folders), *inherited]))


def let_waiting_threads_sleep() -> None:
    """Let OpenMP's waiting threads sleep, unless the user has set OMP_WAIT_POLICY.

    Call it before torch is imported.

    When processes share a processor, waiting threads that spin make a training iteration several
    times longer.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def restrain_ray() -> None:
    """Keep Ray from collecting usage statistics, and from starting a cluster where a call finds
    none, as after `ray.shutdown`. Call it before ray is imported.

    RAY_USAGE_STATS_ENABLED and RAY_ENABLE_AUTO_CONNECT stay as the user has set them.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


def variable_of_tasks() -> str:
    """Return `WORLD_SIZE=2` if torchrun has started this process as one of two;
    likewise for mpirun and srun. Else nothing.
    """
    for rank, size in _TASKS:
        count = os.environ.get(size, "")
        if os.environ.get(rank) and count.isdecimal() and int(count) > 1:
            return f"{size}={count}"
    return ""


def are_threads_set() -> bool:
    """Return whether the user has set the number of threads of torch's arithmetic."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def _state_folder(variables: Mapping[str, str]) -> Path:
    if home := variables.get("POSEIDON_HOME"):
        return expanded(home)
    if state := variables.get("XDG_STATE_HOME"):
        return expanded(state) / "poseidon"
    return expanded(variables.get("HOME") or "~") / ".local" / "state" / "poseidon"


def _descriptor(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"${name} must be the number of an open descriptor, not '{text}'")
    return int(text)
