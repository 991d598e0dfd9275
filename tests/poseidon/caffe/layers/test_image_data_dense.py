"""DenseImageData and ImageSegData in a net: shapes, labels that follow their images, workers,
mistakes.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.databases import SECOND_OF_TWO, make_pictures
from tests.support.nets import build, layer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images whose first channel is their label image plus 100."""
    for index in range(4):
        label = (np.arange(30).reshape(5, 6) + index).astype(np.uint8)
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.dstack([label + 100, label, label]))
        cv2.imwrite(str(tmp_path / f"{index}_label.png"), label)
    (tmp_path / "list").write_text("".join(f"{i}.png {i}_label.png\n" for i in range(4)))
    return tmp_path


def net(folder: Path, body: str, rest: str = "", **place: Any) -> Net:
    param = f'dense_image_data_param {{ source: "{folder}/list" {body} }} {rest}'
    return build(layer("DenseImageData", "", "data label", param), **place)


def firsts(compiled: Net, passes: int) -> list[int]:
    """The label of the first pixel of each image."""
    try:
        return [int(label[0, 0, 0]) for _ in range(passes) for label in compiled()["label"]]
    finally:
        compiled.close()


def test_images_and_their_labels(folder: Path) -> None:
    with closing(net(folder, "batch_size: 3")) as compiled:
        assert compiled.blob_shapes == {"data": (3, 3, 5, 6), "label": (3, 1, 5, 6)}
        tops = compiled()
    assert tops["label"][1, 0].flatten().tolist() == list(range(1, 31))
    assert (tops["data"][:, :1] == tops["label"] + 100).all()


def test_labels_are_cropped_and_mirrored_like_their_images(folder: Path) -> None:
    transform = "transform_param { crop_size: 3 mirror: true mean_value: 100 scale: 0.5 }"
    with closing(net(folder, "batch_size: 4", transform)) as compiled:
        batches = [compiled() for _ in range(4)]
    for tops in batches:
        assert tops["label"].shape == (4, 1, 3, 3)
        assert (tops["data"][:, :1] == tops["label"] / 2).all()
    steps = {
        float(tops["label"][i, 0, 0, 1] - tops["label"][i, 0, 0, 0])
        for tops in batches
        for i in range(4)
    }
    assert steps == {1, -1}


SCALES = "scale_factors: 0.5 scale_factors: 1 scale_factors: 2.3"


def test_images_and_labels_are_scaled_by_one_of_some_factors(folder: Path) -> None:
    """DeepLab's: the extents are truncated; labels have no values between the image's."""
    with closing(net(folder, "batch_size: 1", f"transform_param {{ {SCALES} }}")) as compiled:
        shapes, stored = set(), [cv2.imread(str(folder / f"{index}.png")) for index in range(4)]
        for number in range(24):
            tops = compiled()
            data, label = tops["data"][0].numpy(), tops["label"][0, 0].numpy()
            high, wide = data.shape[1:]
            shapes.add((high, wide))
            image = cv2.resize(stored[number % 4], (wide, high), interpolation=cv2.INTER_LINEAR)
            assert np.array_equal(data, image.transpose(2, 0, 1))
            labels = cv2.resize(
                stored[number % 4][..., 1], (wide, high), interpolation=cv2.INTER_NEAREST
            )
            assert np.array_equal(label, labels)
    assert shapes == {(2, 3), (5, 6), (11, 13)}


def test_factors_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    def tops(**place: Any) -> list[torch.Tensor]:
        transform = f"transform_param {{ {SCALES} mirror: true }}"
        body = "batch_size: 1 shared_file_system: true"
        with closing(net(folder, body, transform, **place)) as compiled:
            return [compiled()["data"].clone() for _ in range(12 // place.get("workers", 1))]

    whole = tops()
    for rank in range(3):
        for expected, found in zip(whole[rank::3], tops(rank=rank, workers=3), strict=True):
            assert torch.equal(expected, found)


def test_scaled_images_are_cropped(folder: Path) -> None:
    transform = f"transform_param {{ {SCALES.replace('0.5', '1.5')} crop_size: 5 }}"
    with closing(net(folder, "batch_size: 4", transform)) as compiled:
        assert not compiled.changing_slots
        for _ in range(4):
            assert compiled()["label"].shape == (4, 1, 5, 5)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Data", "data_param { source: 'db' batch_size: 1 backend: LMDB }"),
        ("ImageData", "image_data_param { source: 'list' }"),
    ],
)
def test_factors_that_a_layer_does_not_read(folder: Path, kind: str, body: str) -> None:
    make_pictures(folder / "db", 2)
    body = body.replace("source: '", f"source: '{folder}/")
    text = layer(kind, "", "data label", f"{body} transform_param {{ {SCALES} }}")
    with pytest.raises(DataError, match="scale_factors, which only DenseImageData"):
        build(text)
    with pytest.raises(DataError, match="scale_factors has -1, expected positive numbers"):
        net(folder, "batch_size: 1", "transform_param { scale_factors: -1 }")


def test_labels_are_resized_by_the_nearest_neighbour(folder: Path) -> None:
    body = "batch_size: 1 new_height: 9 new_width: 11 is_color: false"
    with closing(net(folder, body)) as compiled:
        tops = compiled()
    assert tops["data"].shape == (1, 1, 9, 11)
    assert set(tops["label"].flatten().tolist()) == set(range(30))


def test_workers_share_the_list_or_have_parts(folder: Path) -> None:
    both = [
        firsts(net(folder, "batch_size: 1 shared_file_system: true", rank=g, workers=2), 2)
        for g in range(2)
    ]
    assert both == [[0, 2], [1, 3]]
    (folder / "list_1").write_text("3.png 3_label.png\n")
    (folder / "list_0").write_text("2.png 2_label.png\n")
    assert firsts(net(folder, "batch_size: 1", seat=SECOND_OF_TWO, rank=1, workers=2), 1) == [3]


def test_order_and_start(folder: Path) -> None:
    assert sorted(firsts(net(folder, "batch_size: 4 shuffle: true"), 1)) == [0, 1, 2, 3]
    assert firsts(net(folder, "batch_size: 1 rand_skip: 1"), 1) == [0]
    assert firsts(net(folder, f'batch_size: 1 root_folder: "{folder}/"'), 1) == [0]
    (folder / "list").write_text("./0.png ./0_label.png\n")
    assert firsts(net(folder, 'batch_size: 1 root_folder: "./"'), 1) == [0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("batch_size: 0", "batch_size is 0"),
        ("batch_size: 1 new_width: 3", "only one of new_height and new_width"),
        ('batch_size: 1 mean_file: "m"', "has mean_file in dense_image_data_param"),
    ],
)
def test_illegal_parameters_of_dense_image_data_are_refused(
    folder: Path, body: str, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        net(folder, body, 'transform_param { mean_file: "n" }')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0.png", "list:1: '0.png' is not the path of an image and of its label image"),
        ("0.png none.png", "list:1: there is no image"),
        ("0.png small.png", "list:1: the image is 5x6 and its label image 2x2, expected one size"),
        ("", "the list .* is empty"),
    ],
)
def test_mistakes_of_lists(folder: Path, line: str, message: str) -> None:
    cv2.imwrite(str(folder / "small.png"), np.zeros((2, 2), np.uint8))
    (folder / "list").write_text(f"{line}\n")
    with pytest.raises(DataError, match=message):
        net(folder, "batch_size: 1")


def test_augmentation_that_would_not_change_the_labels(folder: Path) -> None:
    with pytest.raises(DefinitionError, match="transform_param has resize_param"):
        net(folder, "batch_size: 1", "transform_param { resize_param { height: 3 width: 3 } }")
    compiled = net(folder, "batch_size: 1", "transform_param { crop_h: 2 crop_w: 3 }")
    assert compiled.blob_shapes["label"] == (1, 1, 2, 3)


def segments(folder: Path, body: str, rest: str = "", tops: str = "data label extents") -> Net:
    text = layer(
        "ImageSegData", "", tops, f'image_data_param {{ source: "{folder}/list" {body} }} {rest}'
    )
    return build(text)


def test_small_images_are_extended_below_and_on_the_right(folder: Path) -> None:
    transform = (
        "transform_param { crop_size: 8 scale: 0.5 mean_value: 1 mean_value: 2 mean_value: 3 }"
    )
    with closing(segments(folder, "batch_size: 2 label_type: PIXEL", transform)) as compiled:
        shapes = {"data": (2, 3, 8, 8), "label": (2, 1, 8, 8), "extents": (2, 1, 1, 2)}
        assert compiled.blob_shapes == shapes
        tops = compiled()
    pixels = torch.arange(30.0).reshape(5, 6) + 1
    assert tops["extents"].flatten().tolist() == [5, 6, 5, 6]
    assert torch.equal(tops["label"][1, 0, :5, :6], pixels)
    assert torch.equal(tops["data"][1, 2, :5, :6], (pixels - 3) / 2)
    assert (tops["data"][:, :, 5:] == 0).all() and (tops["data"][..., 6:] == 0).all()
    assert (tops["label"][:, :, 5:] == 255).all() and (tops["label"][..., 6:] == 255).all()


def test_scaled_images_are_extended(folder: Path) -> None:
    transform = "transform_param { crop_size: 8 mean_value: 9 scale_factors: 0.5 }"
    (folder / "list").write_text("0.png 7\n")
    with closing(segments(folder, "batch_size: 1 label_type: IMAGE", transform)) as compiled:
        tops = compiled()
    assert tops["extents"].flatten().tolist() == [2, 3]
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[:2, :3] = True
    assert torch.equal(tops["label"][0, 0], torch.where(inside, 7.0, 255.0))
    assert (tops["data"][0, 0][inside] > 90).all() and (tops["data"][0, :, ~inside] == 0).all()


def test_larger_images_are_cropped_with_their_labels(folder: Path) -> None:
    body = "batch_size: 4 label_type: PIXEL shuffle: true"
    with closing(segments(folder, body, "transform_param { crop_h: 3 crop_w: 9 }")) as compiled:
        tops = compiled()
    assert tops["extents"].flatten().tolist() == [3, 6] * 4
    assert torch.equal(tops["data"][:, :1, :, :6], tops["label"][..., :6] + 100)
    assert (tops["label"][..., 6:] == 255).all()


@pytest.mark.parametrize(
    ("kind", "line", "label"), [("IMAGE", "7", 7), ("NONE", "", 9), ("NONE", "unused", 9)]
)
def test_labels_of_whole_images(folder: Path, kind: str, line: str, label: int) -> None:
    (folder / "list").write_text(f"0.png {line}\n")
    with closing(
        segments(folder, f"batch_size: 1 label_type: {kind} ignore_label: 9", tops="data label")
    ) as compiled:
        assert (compiled()["label"] == label).all()


def test_mistakes_of_image_seg_data(folder: Path) -> None:
    with pytest.raises(DefinitionError, match="transform_param has mean_file, expected mean_value"):
        segments(folder, "label_type: PIXEL", 'transform_param { mean_file: "m" }')
    with pytest.raises(DataError, match=r"list:1: '.*' is not the path of an image and its label"):
        segments(folder, "")
