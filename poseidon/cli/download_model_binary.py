"""`poseidon download_model_binary`: fetch the weights that a model folder's readme names."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.model_folder import fetch_model, is_complete, read_model_folder


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `download_model_binary` to the commands."""
    parser = subparsers.add_parser(
        "download_model_binary",
        help="fetch the weights of a model's folder",
        description="Fetches the caffemodel that the readme of a model's folder names (caffemodel, caffemodel_url, sha1).",
    )
    parser.add_argument("dirname", metavar="FOLDER", type=Path, help="a model's folder, with a readme.md")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch; 0 when the model is there.

    Raises:
        DataError: the folder is none of a model, or the model cannot be fetched.
    """
    model = read_model_folder(arguments.dirname)
    if is_complete(model):
        print("Model already exists.")
        return 0
    with progress_bar() as report:
        fetch_model(model, report)
    print(f"{model.path} is ready")
    return 0
