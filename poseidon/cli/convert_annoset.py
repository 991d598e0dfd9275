"""`poseidon convert_annoset`: pictures with annotated objects into a database, as SSD's tool of
that name.
"""

from __future__ import annotations

import argparse

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.annoset import Annotations, convert_annoset
from poseidon.caffe.data.prepare.annotations import AnnotationFormat
from poseidon.caffe.data.prepare.imageset import Conversion
from poseidon.cli.progress_bar import progress_bar
from poseidon.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the database is in place."""
    detection = arguments.anno_type == "detection"
    form = AnnotationFormat(arguments.label_type) if detection else None
    if form is not None and form.has_names and arguments.label_map_file is None:
        raise UsageError(
            "--label_map_file is missing: it has the label of each name in the annotations"
        )
    conversion = Conversion(
        gray=arguments.gray,
        size=(arguments.resize_height, arguments.resize_width),
        least_side=arguments.min_dim,
        most_side=arguments.max_dim,
        encoded=arguments.encoded,
        encode_type=arguments.encode_type,
        check_size=arguments.check_size,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
    )
    annotations = Annotations(
        form=form, label_map=arguments.label_map_file, check_label=arguments.check_label
    )
    with progress_bar(arguments.progress) as report:
        count = convert_annoset(
            arguments.root_folder,
            arguments.list_file,
            arguments.db_name,
            Backend.parse(arguments.backend),
            conversion,
            annotations,
            name_size_file=arguments.name_size_file,
            report=report,
        )
    print(f"Processed {count} files.")
    return 0
