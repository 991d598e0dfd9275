"""The headlines of the help, and the kinds of things that a flag names."""

from __future__ import annotations

from enum import Enum


class Opens(Enum):
    """What a value names that exists before the command begins; the value is its name in messages."""

    NOTHING = ""
    FILE = "file"
    FOLDER = "folder"
    FILE_OR_FOLDER = "file or folder"
    NET = "net"
    """A definition, a database, or FILE.py:FUNCTION or MODULE:FUNCTION, which the command reads."""
    MACHINEFILE = "machinefile"
    MODEL = "model"
    DATABASE = "database"
    SNAPSHOT = "snapshot"
    LOG = "log"


class Section(Enum):
    """A group of flags of a job: its headline in the help of a topic, the topic, and the headline
    in the help of the flags that people need first, where it differs.
    """

    ARGUMENTS = "Arguments", ""
    TRAINED = "What to train", ""
    EXTRACTED = "What to extract", ""
    SETTINGS = "Fields of the solver", "", "What to train"
    MACHINES = "Where it runs", "hosts"
    RAY = "On a Ray cluster: --launcher=ray:NAME=VALUE,...", "ray"
    EXCHANGE = "How gradients are exchanged", "exchange"
    ROUNDS = (
        "Rounds of local steps: --local_steps=H,NAME=VALUE,...",
        "rounds",
        "How gradients are exchanged",
    )
    FAILURES = "Signals and failures", "signals"
    ELASTIC = (
        "Going on after a loss: --elastic=COPIES,NAME=VALUE,...",
        "elastic",
        "Signals and failures",
    )
    OUTPUT = "Output", "output"
    TERMINAL = "On a terminal", "output", "Output"

    def __init__(self, title: str, topic: str, first: str = "") -> None:
        self.title, self.topic, self.first = title, topic, first or title
