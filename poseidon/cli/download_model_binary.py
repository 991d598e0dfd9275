"""`poseidon download_model_binary`: fetch the weights that a model folder's readme names."""

from __future__ import annotations

import argparse

from poseidon.caffe.data.prepare.download import fetch_model, is_complete, read_model_folder
from poseidon.cli.progress_bar import progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Fetch; 0 when the model is there."""
    model = read_model_folder(arguments.dirname)
    if is_complete(model):
        print("Model already exists.")
        return 0
    with progress_bar(arguments.progress) as report:
        fetch_model(model, report)
    print(f"{model.path} is ready")
    return 0
