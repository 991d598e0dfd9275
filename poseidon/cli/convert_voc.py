"""`poseidon convert_voc`: a folder in the form of PASCAL VOC into databases, as
SSD's create_list.sh and create_data.sh.
"""

from __future__ import annotations

import argparse

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.voc import VocRequest, convert_voc
from poseidon.cli.progress_bar import progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when all databases are in place."""
    request = VocRequest(
        root=arguments.voc_folder,
        folder=arguments.output_folder,
        backend=Backend.parse(arguments.backend),
        parts=tuple(part for part in arguments.parts.split(",") if part),
        label_map=arguments.label_map_file,
        seed=arguments.seed,
    )
    with progress_bar(arguments.progress) as report:
        label_map, parts = convert_voc(request, report=report)
    print(f"The label map is {label_map}")
    for part in parts:
        print(f"{part.database}: {part.images} images")
    return 0
