"""The command that runs Python on a remote host: with which interpreter, and in which folder.

The machinefile's `python=` and `workdir=` decide. Without them it is the launcher's own
interpreter, checkout and folder where the host has them under the same paths (as with a shared file
system), else `python3` and the user's home.

Law: pure. A shell script on the host makes the choice, so no question need be asked beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.cluster.machinefile import Host
from poseidon.cluster.python_command import module_arguments

# One line, since a remote command holds no line ends. Its arguments are the five of
# `RemotePython.command`, then Python's.
_SCRIPT = "; ".join(
    (
        "own=$1 checkout=$2 python=$3 folder=$4 here=$5 && shift 5 || exit 125",
        'case $python in "~/"*) python=$HOME/${python#"~/"};; esac',
        'case $folder in "~/"*) folder=$HOME/${folder#"~/"};; esac',
        'if [ -n "$folder" ]',
        'then cd "$folder" || exit 125',
        'else cd "$here" 2>/dev/null || cd',
        "fi",
        'if [ -z "$python" ]',
        "then python=python3",
        'if [ -x "$own" ]',
        "then python=$own",
        'if [ -d "$checkout/poseidon" ]',
        "then PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}",
        "export PYTHONPATH",
        "fi",
        "fi",
        "fi",
        'exec "$python" "$@"',
    )
).replace("then; ", "then ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnvironment:
    """Where the launcher itself runs.

    Attributes:
        python: its interpreter, an absolute path.
        checkout: the folder of the source; empty when the package is installed.
        folder: its working directory.
    """

    python: str
    checkout: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePython:
    """How Python is run on a host.

    Attributes:
        launcher: the defaults.
        python: the host's interpreter, as the machinefile has it; None: the launcher's.
        workdir: the working directory, as the machinefile has it; None: the launcher's.
    """

    launcher: LauncherEnvironment
    python: str | None = None
    workdir: str | None = None

    @classmethod
    def of(cls, host: Host, launcher: LauncherEnvironment) -> RemotePython:
        """Return how Python is run on a host of the machinefile."""
        return cls(launcher=launcher, python=host.python, workdir=host.workdir)

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the argv that runs the interpreter with arguments."""
        defaults = self.launcher
        chosen = (
            defaults.python,
            defaults.checkout,
            self.python or "",
            self.workdir or "",
            defaults.folder,
        )
        return ("sh", "-c", _SCRIPT, "poseidon", *chosen, *arguments)

    def module_command(self, module: str, *arguments: str) -> tuple[str, ...]:
        """Return the argv that runs a module with arguments."""
        return self.command(*module_arguments(module, *arguments))
