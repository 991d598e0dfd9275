"""WindowData in a net: fields, and its errors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.blob import from_array
from poseidon.errors import DefinitionError
from ps_server.protocol.seats import Seat
from tests.support.nets import build, layer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cv2.imwrite(str(tmp_path / "0.png"), np.full((20, 30, 3), 7, np.uint8))
    (tmp_path / "windows").write_text(
        "# 0\n0.png\n3\n20\n30\n2\n2 0.9 1 2 10 12\n0 0.1 0 0 29 19\n"
    )
    return tmp_path


def net(folder: Path, body: str = "", transform: str = "crop_size: 8") -> Net:
    param = f'source: "{folder}/windows" root_folder: "{folder}/" batch_size: 4 {body}'
    body = f"window_data_param {{ {param} }} transform_param {{ {transform} }}"
    return build(layer("WindowData", "", "data label", body))


@pytest.mark.parametrize(
    ("body", "labels"),
    [
        ("", [0, 0, 0, 2]),
        ("fg_fraction: 0.5 cache_images: true", [0, 0, 2, 2]),
        ("fg_threshold: 0.05 bg_threshold: 0.01 fg_fraction: 1", None),
    ],
)
def test_labels(folder: Path, body: str, labels: list[int] | None) -> None:
    if labels is None:
        with pytest.raises(Exception, match="a foreground window has class 0"):
            net(folder, body)
        return
    with closing(net(folder, body)) as compiled:
        assert compiled.blob_shapes == {"data": (4, 3, 8, 8), "label": (4,)}
        assert compiled()["label"].tolist() == labels
        assert [reader.batches_done for _, reader in compiled.readers()] == [1]


@pytest.mark.parametrize("how", ["mean_value: 3", "mean_file"])
def test_means_scale_and_context(folder: Path, how: str) -> None:
    (folder / "mean").write_bytes(from_array(np.full((1, 3, 10, 10), 3.0)).SerializeToString())
    mean = how if "value" in how else f'mean_file: "{folder}/mean"'
    body = "fg_fraction: 1 context_pad: 1 crop_mode: 'square'"
    with closing(net(folder, body, f"crop_size: 8 scale: 0.5 mirror: true {mean}")) as compiled:
        values = set(compiled()["data"].unique().tolist())
    # What lies outside the picture stays 0; the rest is (7 - 3) / 2.
    assert values <= {0.0, 2.0} and 2.0 in values


def test_a_client_may_have_a_window_file_of_its_own(folder: Path) -> None:
    """As shared_file_system: false says; with true all read one file."""
    (folder / "windows").rename(folder / "windows_0")
    text = f'window_data_param {{ source: "{folder}/windows" root_folder: "{folder}/" batch_size: 1 }} '
    text = layer("WindowData", "", "data label", text + "transform_param { crop_size: 8 }")
    build(text, seat=Seat(host_count=2), workers=2).close()


@pytest.mark.parametrize(
    ("body", "transform", "message"),
    [
        ("", "", "missing crop_size"),
        ("context_pad: 4", "crop_size: 8", "context_pad is 4, expected less than half"),
        ("crop_mode: 'round'", "crop_size: 8", "crop_mode is 'round', expected warp or square"),
        ("fg_fraction: 2", "crop_size: 8", "fg_fraction is 2"),
        ("", "crop_size: 8 mean_value: 1 mean_value: 2", "mean_value occurs 2 times"),
    ],
)
def test_illegal_parameters_of_window_data_are_refused(
    folder: Path, body: str, transform: str, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        net(folder, body, transform)
