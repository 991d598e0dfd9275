"""The commands that begin with a net of the zoo: init copies its definition, download_model_binary
gets its model.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from poseidon.base.paths import own_command, own_python
from poseidon.caffe.data.prepare.download import fetch_model, is_complete, read_model_folder
from poseidon.caffe.proto.projects import (
    project_files,
    project_title,
    projects,
    training_commands,
    write_project,
)
from poseidon.cli.progress_bar import progress_bar
from poseidon.errors import UsageError, nearest

ALIASES = {"mnist": "lenet"}


def run_init(arguments: argparse.Namespace) -> int:
    """Make the project, or list the projects."""
    known = projects()
    if arguments.project is None or arguments.list:
        for name, folder in known.items():
            print(f"{name:20} {project_title(folder)}")
        print(f"\nMake one of them with: {own_command()} init PROJECT [DIR]")
        return 0
    name = ALIASES.get(arguments.project, arguments.project)
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"`{own_command()} init` lists them"
        raise UsageError(f"there is no project '{arguments.project}'; {hint}")
    folder = Path(arguments.folder or name)
    write_project(folder, project_files(name, known[name]))
    print(f"Created {folder}; its README.md describes the files. To train:\n")
    # Paths of programs lead from the new folder.
    typed = {"poseidon": own_command(folder), "python": own_python(folder)}
    lines = [f"cd {shlex.quote(str(folder))}"]
    for command in training_commands(name, known[name]):
        program, _, words = command.partition(" ")
        lines.append(f"{typed.get(program, program)} {words}")
    print("\n".join(f"    {line}" for line in lines))
    return 0


def run_download_model_binary(arguments: argparse.Namespace) -> int:
    """Fetch; 0 when the model is there."""
    model = read_model_folder(arguments.dirname)
    if is_complete(model):
        print("Model already exists.")
        return 0
    with progress_bar(arguments.progress) as report:
        fetch_model(model, report)
    print(f"{model.path} is ready")
    return 0
