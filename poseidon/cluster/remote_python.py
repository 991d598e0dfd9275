"""The command that runs Python on a remote host: with which interpreter, and in which folder.

The machinefile's `python=` and `workdir=` decide. Without them it is the launcher's own
interpreter, checkout and folder where the host has them under the same paths (as with a shared file
system), else `python3` and the user's home.

Law: pure. A shell script on the host makes the choice, so no question need be asked beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.cluster.machinefile import Host

NO_FOLDER = 125
"""Exit status: the machinefile's `workdir` cannot be entered."""

# One line, since a remote command holds no line ends. Its arguments are the five of
# `remote_command`, then Python's.
_SCRIPT = (
    "; ".join(
        (
            "own=$1 checkout=$2 python=$3 folder=$4 here=$5 && shift 5 || exit 125",
            'case $python in "~/"*) python=$HOME/${python#"~/"};; esac',
            'case $folder in "~/"*) folder=$HOME/${folder#"~/"};; esac',
            'if [ -n "$folder" ]',
            'then cd "$folder" 2>/dev/null || {',
            'echo "workdir=$folder cannot be entered on this host: is it there?" >&2',
            f"exit {NO_FOLDER}",
            "}",
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
    )
    .replace("then; ", "then ")
    .replace("{; ", "{ ")
)


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


def remote_command(host: Host, launcher: LauncherEnvironment, *arguments: str) -> tuple[str, ...]:
    """Return the argv that runs Python with arguments on a host of the machinefile."""
    chosen = (
        launcher.python,
        launcher.checkout,
        host.python or "",
        host.workdir or "",
        launcher.folder,
    )
    return ("sh", "-c", _SCRIPT, "poseidon", *chosen, *arguments)
