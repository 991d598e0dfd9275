"""`poseidon convert_cifar`: published CIFAR-10 into databases elsewhere than in the example's
folder.
"""

from __future__ import annotations

import argparse

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.cifar10 import Cifar10Request
from poseidon.cli.prepare_cifar10 import prepare_and_print


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the databases are in place."""
    backend = Backend.parse(arguments.db_type)
    request = Cifar10Request(
        folder=arguments.output_folder, backend=backend, data=arguments.input, url=""
    )
    prepare_and_print(request, arguments.progress)
    return 0
