"""What tests need of the machine beside Python: programs, root, a GPU, real data; the one list
of all of it.

    @pytest.mark.needs("sshd")    # skips the test where sshd cannot run, and says which Debian package brings it
    require("sshd")               # the same from inside a fixture or helper

`python3 tests/support/needs.py` prints the Debian packages that this machine lacks, one per line;
it uses the standard library only, so that CI can call it before anything is installed. Two
environment variables change what tests find:

* `POSEIDON_TEST_HIDE=sshd,dot` hides programs from the tests and from all that they start.
* `POSEIDON_TEST_STRICT=1` fails a test whose needs are not met instead of skipping it. Still
  skipped are tests of a GPU, and of real data whose folder is absent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

HIDE = "POSEIDON_TEST_HIDE"
STRICT = "POSEIDON_TEST_STRICT"
SHARED = Path(os.environ.get("POSEIDON_SHARED", Path(__file__).parents[3] / "shared"))
"""The folder of real data and recorded Caffe results."""
PACKAGES = {
    "cc": "gcc libc6-dev",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "dot": "graphviz",
    "faketime": "faketime",
    "fish": "fish",
    "ip": "iproute2",
    "ksh": "ksh",
    "mount": "mount",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "nft": "nftables",
    "nsenter": "util-linux",
    "redis-cli": "redis-tools",
    "redis-server": "redis-server",
    "scancel": "slurm-client",
    "setpriv": "util-linux",
    "shellcheck": "shellcheck",
    "sinfo": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "squeue": "slurm-client",
    "srun": "slurm-client",
    "ss": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "tcsh": "tcsh",
    "unshare": "util-linux",
    "yamllint": "yamllint",
    "zsh": "zsh",
}
"""The Debian package of each program."""
_SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
_SSH = ("ssh", "ssh-keygen", "sshd")
_NAMESPACES = ("ip", "tc", "unshare")


@dataclass(frozen=True, slots=True)
class Need:
    """One group of tests by what it needs.

    Attributes:
        title: of the group, in the summary.
        programs: each a key of `PACKAGES`.
        root: whether only root can run these tests.
        check: for a need that is not a program: what to do where it is absent, None where it is
            there.
        required: whether `POSEIDON_TEST_STRICT` fails the tests of the group where it is not met.
        in_ci: whether CI installs the programs; if not, all tests of the group are marked thorough.
    """

    title: str
    programs: tuple[str, ...] = ()
    root: bool = False
    check: Callable[[], str | None] = lambda: None
    required: Callable[[], bool] = lambda: True
    in_ci: bool = True


def _namespaces() -> str | None:
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"]
    works = (
        shutil.which("unshare")
        and subprocess.run(words, check=False, capture_output=True).returncode == 0
    )
    return None if works else "run on a kernel that allows namespaces"


DEV_ALL = "make setup EXTRA=dev-all"


def _native() -> str | None:
    from ps_server import native

    return None if native.LIBRARY is not None else "pip install -e . (with a C compiler)"


def _leveldb() -> str | None:
    return None if find_spec("plyvel_next") or find_spec("plyvel") else "pip install -e .[dev]"


def _packages(*names: str) -> Callable[[], str | None]:
    """Return a check for packages of Python that `make setup` installs with dev-all alone."""
    return lambda: None if all(map(find_spec, names)) else DEV_ALL


def _container_linters() -> str | None:
    programs = ("hadolint", "check-jsonschema", "kubernetes-validate")
    return None if all(map(shutil.which, programs)) else DEV_ALL


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "run on a machine with a CUDA GPU"


def _data() -> str | None:
    return (
        None if (SHARED / "golden").is_dir() else "set POSEIDON_SHARED to the folder of real data"
    )


NEEDS = {
    "sshd": Need("SSH", _SSH, root=True),
    "hosts": Need(
        "hosts in namespaces with SSH",
        (*_SSH, *_NAMESPACES, "mount", "nsenter", "setpriv", "ss"),
        root=True,
        check=_namespaces,
    ),
    "networks": Need("networks in namespaces", _NAMESPACES, root=True, check=_namespaces),
    "firewall": Need("firewalls in namespaces", ("nft",), root=True),
    "clock": Need("a host with another clock", ("faketime",)),
    "browser": Need(
        "pages in a browser", ("chromedriver", "chromium"), check=_packages("selenium")
    ),
    "dot": Need("drawings of nets", ("dot",)),
    "linters": Need("scripts of schedulers and containers", ("shellcheck", "yamllint")),
    "container linters": Need("schemas of container files", check=_container_linters),
    "fish": Need("the shell fish", ("fish",)),
    "ksh": Need("the shell ksh", ("ksh",)),
    "tcsh": Need("the shell tcsh", ("tcsh",)),
    "zsh": Need("the shell zsh", ("zsh",)),
    "ray": Need("a Ray cluster", check=_packages("ray")),
    "ray train": Need("Ray Train", check=_packages("ray", "pandas", "pyarrow")),
    "lightning": Need("Lightning", check=_packages("lightning")),
    "huggingface": Need(
        "packages of Hugging Face", check=_packages("accelerate", "peft", "transformers")
    ),
    "redis": Need("Redis", ("redis-cli", "redis-server")),
    "root": Need("root", root=True),
    "native": Need("compiled codecs", ("cc",), check=_native),
    "mpirun": Need("Open MPI", ("mpirun",), in_ci=False),
    "slurm": Need(
        "Slurm",
        ("munged", "scancel", "sinfo", "slurmctld", "slurmd", "squeue", "srun"),
        root=True,
        in_ci=False,
    ),
    "leveldb": Need("LevelDB", check=_leveldb),
    "gpu": Need("a GPU", check=_gpu, required=lambda: False),
    "data": Need("real data", check=_data, required=SHARED.is_dir),
}


def find(program: str) -> str | None:
    """Where a program is, in the folders of the system's own programs too; None where it is
    absent or hidden.
    """
    assert program in PACKAGES, f"{program}: add it to PACKAGES in tests/support/needs.py"
    return (
        shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SYSTEM}")
        if not _hidden(program)
        else None
    )


@cache
def lacking(name: str) -> tuple[str, ...]:
    """What to do so that a need is met: `apt-get install <package>`, or other advice; empty
    where it is met.
    """
    need = NEEDS[name]
    packages = {PACKAGES[program] for program in need.programs if find(program) is None}
    advice = [f"apt-get install {package}" for package in sorted(packages)]
    if need.root and os.geteuid() != 0:
        advice.append("run as root")
    if not advice:
        advice += filter(None, [need.check()])
    return tuple(advice)


def require(*names: str) -> None:
    """Skip the running test unless these needs are met; see the head of the module for the
    strict way.
    """
    import pytest

    for name in names:
        advice = lacking(name)
        if not advice:
            continue
        reason = f"{_PREFIX}{NEEDS[name].title}: {'; '.join(advice)}"
        if os.environ.get(STRICT) and NEEDS[name].required():
            pytest.fail(f"{reason} ({STRICT} is set)", pytrace=False)
        pytest.skip(reason)


def summary(reasons: Iterable[str]) -> str | None:
    """One line for the reasons of all skipped tests: which groups, and what to do; None where no
    need was unmet.
    """
    titles = Counter(
        reason.partition(_PREFIX)[2].partition(": ")[0] for reason in reasons if _PREFIX in reason
    )
    names = [name for name, need in NEEDS.items() if need.title in titles]
    if not names:
        return None
    groups = ", ".join(f"{NEEDS[name].title} ({titles[NEEDS[name].title]})" for name in names)
    return f"Skipped tests: {groups}. To run them: {_joined(names)}."


def hide_programs() -> Callable[[], None]:
    """Take what `POSEIDON_TEST_HIDE` names from `PATH`, for this process and all that it starts.

    Each folder of `PATH` that has such a program is replaced by one with links to all of its
    others.

    Returns:
        what removes these folders.

    Raises:
        ValueError: for a name that is not in `PACKAGES`.
    """
    hidden = [name for name in os.environ.get(HIDE, "").split(",") if name]
    unknown = sorted(set(hidden) - set(PACKAGES))
    if unknown:
        raise ValueError(
            f"{HIDE}: no test needs {', '.join(unknown)}; known are {', '.join(sorted(PACKAGES))}"
        )
    places = os.environ.get("PATH", "").split(os.pathsep)
    with ExitStack() as stack:
        for number, place in enumerate(places):
            if any(Path(place, name).exists() for name in hidden):
                places[number] = stack.enter_context(TemporaryDirectory(prefix="poseidon-path-"))
                for program in Path(place).iterdir():
                    if program.name not in hidden:
                        Path(places[number], program.name).symlink_to(program.absolute())
        os.environ["PATH"] = os.pathsep.join(places)
        return stack.pop_all().close


_PREFIX = "needs "


def _hidden(program: str) -> bool:
    return program in os.environ.get(HIDE, "").split(",")


def _joined(names: Iterable[str]) -> str:
    """The advice for several needs: their packages in one command."""
    install = "apt-get install "
    advice = sorted({line for name in names for line in lacking(name)})
    packages = [line.removeprefix(install) for line in advice if line.startswith(install)]
    others = [line for line in advice if not line.startswith(install)]
    return "; ".join([*([install + " ".join(packages)] if packages else []), *others])


if __name__ == "__main__":
    used = {program for need in NEEDS.values() if need.in_ci for program in need.programs}
    print(*sorted({PACKAGES[program] for program in used if find(program) is None}), sep="\n")
