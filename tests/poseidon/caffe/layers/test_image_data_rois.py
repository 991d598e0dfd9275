"""ROIData in a net: sizes, boxes, workers, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.databases import SECOND_OF_TWO
from tests.support.nets import build, layer

SIZES = [(20, 30), (40, 20), (10, 10)]
BOXES = [["1 1 2 3 10 12", "2 1 0 0 29 19", "1 0.4 0 0 3 3"], ["3 1 5 6 7 8"], ["1 0.2 0 0 3 3"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = []
    for index, (size, boxes) in enumerate(zip(SIZES, BOXES, strict=True)):
        image = np.full((*size, 3), 50 + index, np.uint8)
        image[:, 0] = 200  # the left edge
        cv2.imwrite(str(tmp_path / f"{index}.png"), image)
        lines += [
            f"# {index}",
            f"{tmp_path}/{index}.png",
            "3",
            *map(str, size),
            str(len(boxes)),
            *boxes,
        ]
    (tmp_path / "windows").write_text("\n".join(lines) + "\n")
    return tmp_path


def net(folder: Path, body: str = "scale: 0 shuffle: false", rest: str = "", **place: Any) -> Net:
    text = layer(
        "ROIData",
        "",
        "data im_info gt_boxes",
        f'roi_data_param {{ source: "{folder}/windows" {body} }} {rest}',
    )
    return build(text, **place)


def tops(compiled: Net, passes: int) -> list[dict[str, torch.Tensor]]:
    try:
        return [dict(compiled()) for _ in range(passes)]
    finally:
        compiled.close()


def test_images_with_their_objects(folder: Path) -> None:
    compiled = net(folder, rest="transform_param { mean_value: 50 scale: 0.5 }")
    assert compiled.blob_shapes == {"data": (1, 3, 20, 30), "im_info": (1, 3), "gt_boxes": (2, 5)}
    found = tops(compiled, 3)
    # the third image has no boxes
    assert [top["data"].shape[2:] for top in found] == [(20, 30), (40, 20), (20, 30)]
    assert found[0]["gt_boxes"].tolist() == [[2, 3, 10, 12, 1], [0, 0, 29, 19, 2]]
    assert found[1]["gt_boxes"].tolist() == [[5, 6, 7, 8, 3]]
    assert found[1]["im_info"].tolist() == [[40, 20, 1]]
    assert float(found[1]["data"][0, 0, 5, 5]) == 0.5 and float(found[1]["data"][0, 0, 5, 0]) == 75


def test_images_are_resized_with_their_boxes(folder: Path) -> None:
    first, second = tops(net(folder, "scale: 40 max_size: 60 shuffle: false"), 2)
    assert first["im_info"].tolist() == [[40, 60, 2]]
    assert first["gt_boxes"][0].tolist() == [4, 6, 20, 24, 1]
    assert second["data"].shape == (1, 3, 60, 30) and second["im_info"].tolist() == [[60, 30, 1.5]]


def test_mirrored_images_have_mirrored_boxes(folder: Path) -> None:
    found = tops(net(folder, rest="transform_param { mirror: true }"), 12)
    seen = set()
    for top in found[::2]:
        mirrored = float(top["data"][0, 0, 0, -1]) == 200
        seen.add(mirrored)
        assert top["gt_boxes"][0].tolist() == (
            [19, 3, 27, 12, 1] if mirrored else [2, 3, 10, 12, 1]
        )
    assert seen == {False, True}


def test_workers_share_the_images_or_have_parts(folder: Path) -> None:
    both = [
        tops(net(folder, "scale: 0 shuffle: false shared_file_system: true", rank=g, workers=2), 2)
        for g in range(2)
    ]
    assert [[len(top["gt_boxes"]) for top in worker] for worker in both] == [[2, 2], [1, 1]]
    for client in range(2):
        (folder / f"windows_{client}").write_text(
            (folder / "windows").read_text().replace(f"{folder}/", "")
        )
    part = net(
        folder,
        f'scale: 0 shuffle: false root_folder: "{folder}/"',
        seat=SECOND_OF_TWO,
        rank=1,
        workers=2,
    )
    assert len(tops(part, 1)[0]["gt_boxes"]) == 2


@pytest.mark.parametrize(
    ("body", "rest", "message"),
    [
        ("max_size: 0", "", "max_size is 0"),
        ("", "transform_param { crop_size: 3 }", "transform_param has crop_size"),
        ("", "transform_param { mean_value: 3 mean_value: 4 }", "mean_value occurs 2 times"),
    ],
)
def test_illegal_parameters_of_rois_are_refused(
    folder: Path, body: str, rest: str, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        net(folder, body, rest)


def test_a_file_without_objects(folder: Path) -> None:
    text = (folder / "windows").read_text()
    (folder / "windows").write_text(text[text.index("# 2") :].replace("# 2", "# 0"))
    with pytest.raises(DataError, match="has no objects"):
        net(folder)
