"""The command that runs a module of ours on another host: with which interpreter, and in which folder.

The machinefile's `python=` and `workdir=` count. Without them it is the launcher's own interpreter, checkout and folder,
where that host has them at the same places (as with a shared file system), else `python3` and the user's home.

Law: pure. The choice is made on the host itself, so that it takes no question beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.cluster.machinefile import Host

# One line, for a remote command holds no line ends. The words are the four of `module_words`, then those of Python.
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
        checkout: the folder of the source; empty when it is installed.
        folder: where it was started.
    """

    python: str
    checkout: str
    folder: str


def module_words(host: Host, own: LauncherEnvironment, module: str, *arguments: str) -> tuple[str, ...]:
    """The argv that runs a module on a client's host.

    Args:
        host: says `python=` and `workdir=`, or does not.
        own: what is taken where it does not.
        module: what is run, `python -m`.
        arguments: of the module.
    """
    return python_words(host, own, "-m", module, *arguments)


def python_words(host: Host, own: LauncherEnvironment, *arguments: str) -> tuple[str, ...]:
    """The argv that runs the interpreter on a client's host; see `module_words`.

    Args:
        host: says `python=` and `workdir=`, or does not.
        own: what is taken where it does not.
        arguments: of the interpreter.
    """
    places = (own.python, own.checkout, host.python or "", host.workdir or "", own.folder)
    return ("sh", "-c", _SCRIPT, "poseidon", *places, *arguments)
