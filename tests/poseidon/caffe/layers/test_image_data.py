"""ImageData in a net: shapes, roots of lists, sizes that change, workers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.databases import SECOND_OF_TWO
from tests.support.nets import build, layer

CONV = layer(
    "Convolution", "data", "c", "convolution_param { num_output: 2 kernel_size: 3 }", name="conv"
) + layer("Reduction", "c", "sum", "reduction_param { axis: 1 }", name="sum")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = [(5, 6), (4, 4), (6, 5), (5, 5)]
    for index, size in enumerate(sizes):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((*size, 3), index, np.uint8))
    (tmp_path / "list").write_text("".join(f"{index}.png {index}\n" for index in range(len(sizes))))
    return tmp_path


def net(folder: Path, body: str, rest: str = "", above: str = "", **place: Any) -> Net:
    param = f'image_data_param {{ source: "{folder}/list" {body} }} {rest}'
    return build(layer("ImageData", "", "data label", param) + above, **place)


def labels(compiled: Net, passes: int) -> list[int]:
    try:
        return [int(label) for _ in range(passes) for label in compiled()["label"]]
    finally:
        compiled.close()


def test_all_of_one_size(folder: Path) -> None:
    compiled = net(folder, "batch_size: 3 new_height: 7 new_width: 8")
    assert compiled.blob_shapes == {"data": (3, 3, 7, 8), "label": (3,)}
    assert labels(compiled, 2) == [0, 1, 2, 3, 0, 1]
    assert [(name, reader.batches_done) for name, reader in compiled.readers()] == [("layer", 2)]


def test_the_layers_above_follow_the_size_of_each_picture(folder: Path) -> None:
    with closing(net(folder, "batch_size: 1", above=CONV)) as compiled:
        sizes = []
        for _ in range(5):
            compiled()
            sizes.append(compiled.blob_shapes["c"])
    assert sizes == [(1, 2, 3, 4), (1, 2, 2, 2), (1, 2, 4, 3), (1, 2, 3, 3), (1, 2, 3, 4)]


def test_resized_images_of_several_sizes_fill_a_batch(folder: Path) -> None:
    """SSD's resize_param in place of new_height and new_width; a crop of a fixed size does the
    same.
    """
    compiled = net(
        folder, "batch_size: 4", "transform_param { resize_param { height: 7 width: 8 } }"
    )
    assert compiled.blob_shapes["data"] == (4, 3, 7, 8)
    assert labels(compiled, 1) == [0, 1, 2, 3]
    fitted = "resize_param { height: 7 width: 8 resize_mode: FIT_SMALL_SIZE } crop_h: 7 crop_w: 8"
    compiled = net(folder, "batch_size: 4", f"transform_param {{ {fitted} }}")
    assert compiled.blob_shapes["data"] == (4, 3, 7, 8)


def test_the_layers_above_follow_an_image_that_is_resized_in_proportion(folder: Path) -> None:
    text = "transform_param { resize_param { height: 8 width: 8 resize_mode: FIT_SMALL_SIZE } }"
    with closing(net(folder, "batch_size: 1", text, above=CONV)) as compiled:
        sizes = [compiled()["label"].shape and compiled.blob_shapes["data"][2:] for _ in range(3)]
    assert sizes == [(8, 9), (8, 8), (9, 8)]


def test_workers_share_the_list_or_have_parts(folder: Path) -> None:
    size = "new_height: 4 new_width: 4"
    both = [
        labels(net(folder, f"batch_size: 1 shared_file_system: true {size}", rank=g, workers=2), 2)
        for g in range(2)
    ]
    assert both == [[0, 2], [1, 3]]
    (folder / "list_0").write_text("2.png 2\n")
    (folder / "list_1").write_text("3.png 3\n")
    part = net(folder, f"batch_size: 1 {size}", seat=SECOND_OF_TWO, rank=1, workers=2)
    assert labels(part, 1) == [3]


def test_where_pictures_are_looked_for(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lists = tmp_path_factory.mktemp("lists")
    (lists / "list").write_text("0.png 0\n")
    assert labels(net(lists, f'batch_size: 1 root_folder: "{folder}/"'), 1) == [0]
    with pytest.raises(DataError, match="list:1: there is no image"):
        net(lists, "batch_size: 1")


@pytest.mark.parametrize(
    ("path", "root"),
    [("./0.png", ""), (".//0.png", ""), ("0.png", "./"), ("./0.png", "./"), ("png", "0.")],
)
def test_a_list_of_find_beside_its_images_is_read(folder: Path, path: str, root: str) -> None:
    """`find . -name '*.png'` writes ./0.png."""
    (folder / "list").write_text(f"{path} 0\n")
    assert labels(net(folder, f'batch_size: 1 root_folder: "{root}"'), 1) == [0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("batch_size: 0", "batch_size is 0"),
        ("new_height: 3", "only one of new_height and new_width"),
        (
            "new_height: 60000 new_width: 50000",
            "3,000,000,000 pixels, expected at most 134,217,728",
        ),
    ],
)
def test_illegal_parameters_of_image_data_are_refused(
    folder: Path, body: str, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        net(folder, body)


def test_fields_reach_the_reader(folder: Path) -> None:
    """is_color, shuffle and rand_skip; tests/poseidon/caffe/data/batches/test_pictures.py has what
    they do.
    """
    compiled = net(folder, "batch_size: 4 new_height: 4 new_width: 4 is_color: false shuffle: true")
    assert compiled.blob_shapes["data"] == (4, 1, 4, 4)
    assert sorted(labels(compiled, 1)) == [0, 1, 2, 3]
    starts = {
        labels(net(folder, f"batch_size: 1 new_height: 4 new_width: 4 rand_skip: {n}"), 1)[0]
        for n in (1, 2, 3, 4)
    }
    assert 0 in starts and len(starts) > 1
