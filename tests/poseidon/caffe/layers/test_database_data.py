"""Data: shapes, labels, shares and errors, on databases written for the test."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from poseidon.caffe.data.boxes import Box, Object
from poseidon.caffe.data.cursor import write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_annotated, encode_datum
from poseidon.caffe.layers.base import LayerContext, LayerError
from poseidon.caffe.layers.database_data import MemoryData
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    AnnotatedDatum,
    Datum,
    LayerParameter,
    MemoryDataParameter,
)
from poseidon.errors import DataError, DefinitionError, PoseidonError
from ps_server.protocol.seats import Seat
from tests.support.databases import SECOND_OF_TWO, make_database, make_pictures, picture
from tests.support.nets import build, inputs, layer, noise

RECORDS = 8


def write(path: Path, backend: Backend = Backend.LMDB, start: int = 0) -> None:
    """Record i is a 2 x 3 x 4 picture of value i with label i."""
    with write_database(path, backend) as writer:
        for index in range(start, start + RECORDS):
            record = encode_datum(np.full((2, 3, 4), index, np.uint8), index)
            writer.put(f"{index:08d}".encode(), record)


def net(
    folder: Path,
    body: str,
    *,
    tops: str = "data label",
    rest: str = "",
    above: str = "",
    **place: Any,
) -> Net:
    text = (
        layer("Data", "", tops, f'data_param {{ source: "{folder / "db"}" {body} }} {rest}') + above
    )
    return build(text, **place)


@pytest.mark.parametrize("backend", list(Backend))
def test_the_layers_above_follow_the_size_of_each_record(tmp_path: Path, backend: Backend) -> None:
    sizes = [(3, 4), (6, 5), (5, 7), (3, 4)]
    images = [np.full((2, *size), index, np.uint8) for index, size in enumerate(sizes)]
    records = ((b"%d" % index, encode_datum(image, index)) for index, image in enumerate(images))
    make_database(tmp_path / "db", backend, records)
    weights = "weight_filler { type: 'constant' value: 1 }"
    conv = f"convolution_param {{ num_output: 1 kernel_size: 3 {weights} }}"
    above = layer("Convolution", "data", "c", conv, name="conv")
    with closing(net(tmp_path, f"batch_size: 1 backend: {backend.name}", above=above)) as compiled:
        for index in (0, 1, 2, 3, 0, 1):
            tops = compiled()
            high, wide = sizes[index]
            assert torch.equal(tops["c"], torch.full((1, 1, high - 2, wide - 2), 18.0 * index))
            assert tops["label"].tolist() == [index]
            assert compiled.blob_shapes["data"] == (1, 2, high, wide)
    fixed = net(
        tmp_path, f"batch_size: 1 backend: {backend.name}", rest="transform_param { crop_size: 3 }"
    )
    assert not fixed.changing_slots  # such nets are fused
    fixed.close()


def test_workers_of_a_shared_database_stride(tmp_path: Path) -> None:
    write(tmp_path / "db")
    labels = []
    for rank in range(2):
        place, body = (
            Seat(host=rank, host_count=2),
            "batch_size: 2 backend: LMDB shared_file_system: true",
        )
        compiled = net(tmp_path, body, rank=rank, workers=2, seat=place)
        labels.append(compiled()["label"].tolist())
        compiled.close()
    assert labels == [[0, 2], [1, 3]]


def test_a_part_alone_decides_which_folder_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "db_1", start=50)
    text = layer(
        "Data", "", "data label", 'data_param { source: "db" batch_size: 2 backend: LMDB }'
    )
    compiled = build(text, seat=SECOND_OF_TWO)
    assert compiled()["label"].tolist() == [50, 51]
    compiled.close()


def test_a_missing_database_is_named_before_its_mean_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the database .*db does not exist"):
        net(
            tmp_path,
            "batch_size: 2 backend: LMDB",
            rest='transform_param { mean_file: "mean.binaryproto" }',
        )


def test_a_net_that_fails_to_compile_lets_go_of_its_database(tmp_path: Path) -> None:
    write(tmp_path / "db", Backend.LEVELDB)
    with pytest.raises(DefinitionError, match="missing num_output"):
        net(
            tmp_path,
            "batch_size: 2",
            rest='} layer { name: "r" type: "InnerProduct" bottom: "data" top: "y"',
        )
    net(tmp_path, "batch_size: 2").close()


@pytest.mark.parametrize(("flag", "channels"), [("", 1), ("force_encoded_color: true", 3)])
def test_gray_images_become_color_with_force_encoded_color(
    tmp_path: Path, flag: str, channels: int
) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.full((3, 4), 7, np.uint8)).save(picture, "PNG")
    with write_database(tmp_path / "db", Backend.LMDB) as writer:
        writer.put(b"0", Datum(data=picture.getvalue(), encoded=True, label=1).SerializeToString())
    compiled = net(tmp_path, f"batch_size: 2 backend: LMDB {flag}")
    try:
        assert compiled()["data"].shape == (2, channels, 3, 4)
    finally:
        compiled.close()


SIZE = (32, 40)
COUNT = 6


def scene(number: int) -> tuple[np.ndarray, list[Object]]:  # type: ignore[type-arg]
    """A gray image with `number % 3` white objects."""
    image = np.full((3, *SIZE), 40, np.uint8)
    objects = []
    for index in range(number % 3):
        top, left = 4 + 12 * index, 3 + 5 * number
        image[:, top : top + 10, left : left + 8] = 250
        corners = (left / SIZE[1], top / SIZE[0], (left + 8) / SIZE[1], (top + 10) / SIZE[0])
        objects.append(Object(index + 1, 0, Box(*corners), index == 1))
    return image, objects


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def record(number: int) -> bytes:
        image, objects = scene(number)
        return encode_annotated(Datum.FromString(encode_datum(image, 0)), objects)

    path = tmp_path_factory.mktemp("annotated") / "db"
    return make_database(path, Backend.LMDB, [(b"%05d" % n, record(n)) for n in range(COUNT)])


def annotated_net(
    source: Path, body: str = "", *, batch: int = 3, tops: str = "data label", **place: Any
) -> Net:
    param = f'source: "{source}" batch_size: {batch} backend: LMDB shared_file_system: true'
    text = layer("AnnotatedData", "", tops, f"data_param {{ {param} }} {body}")
    return build(text, seed=3, **place)


def batches(compiled: Net, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    try:
        return [
            (found["data"].clone(), found["label"].clone())
            for found in (compiled() for _ in range(count))
        ]
    finally:
        compiled.close()


def test_images_and_objects_as_stored(database: Path) -> None:
    compiled = annotated_net(database)
    assert compiled.blob_shapes == {"data": (3, 3, *SIZE), "label": (1, 1, 1, 8)}
    for first, (data, label) in zip((0, 3), batches(compiled, 2), strict=True):
        rows = []
        for item in range(3):
            image, objects = scene(first + item)
            assert np.array_equal(data[item].numpy(), image)
            rows += [[item, o.label, o.instance, *o.box, o.difficult] for o in objects]
        np.testing.assert_allclose(label[0, 0], rows, rtol=1e-6)


def test_a_batch_without_objects_has_a_row_of_minus_one(database: Path) -> None:
    ((_, label), *_) = batches(annotated_net(database, batch=1), 1)
    assert label.tolist() == [[[[-1] * 8]]]


def test_images_of_many_sizes_without_resizing(tmp_path: Path) -> None:
    shapes = [(3, 4, 5), (3, 9, 7), (3, 6, 6)]
    records = (
        encode_annotated(
            Datum.FromString(encode_datum(picture(n, shape), 0)),
            [Object(1, 0, Box(0, 0, 0.5, 1), False)],
        )
        for n, shape in enumerate(shapes)
    )
    path = make_database(
        tmp_path / "db", Backend.LMDB, ((b"%d" % n, record) for n, record in enumerate(records))
    )
    for number, (data, label) in enumerate(batches(annotated_net(path, batch=1), 5)):
        assert np.array_equal(data[0].numpy(), picture(number % 3, shapes[number % 3]))
        assert label[0, 0].tolist() == [[0, 1, 0, 0, 0, 0.5, 1, 0]]
    message = r"record 1 \(key '1'\) is 3 x 9 x 7 .* first record of its batch is 3 x 4 x 5; set .*batch_size: 1"
    with pytest.raises(DataError, match=message):
        batches(annotated_net(path, batch=2), 1)


ALL = """
transform_param {
  mirror: true mean_value: 40 resize_param { height: 48 width: 56 interp_mode: LINEAR interp_mode: AREA }
  distort_param { brightness_prob: 0.5 brightness_delta: 10 } expand_param { prob: 0.5 max_expand_ratio: 2 }
  emit_constraint { emit_type: CENTER }
}
annotated_data_param {
  batch_sampler { max_sample: 1 max_trials: 1 }
  batch_sampler {
    sampler { min_scale: 0.3 max_scale: 1 min_aspect_ratio: 0.5 max_aspect_ratio: 2 }
    sample_constraint { min_jaccard_overlap: 0.1 } max_sample: 1 max_trials: 50
  }
  label_map_file: "labels"
}
"""


def test_boxes_follow_their_objects_through_all_steps(database: Path) -> None:
    seen = 0
    for data, label in batches(annotated_net(database, ALL), 20):
        assert data.shape == (3, 3, 48, 56)
        for image, _, _, xmin, ymin, xmax, ymax, _ in label[0, 0].tolist():
            if image < 0:
                continue
            light = data[int(image), 0] > 150
            left, right = round(xmin * 56), round(xmax * 56)
            top, bottom = round(ymin * 48), round(ymax * 48)
            inside = (
                light[top:bottom, left:right].float().mean() if top < bottom and left < right else 1
            )
            assert inside > 0.55
            seen += 1
    assert seen > 30


def test_workers_see_what_one_process_sees(database: Path) -> None:
    whole = batches(annotated_net(database, ALL, batch=4), 5)
    for rank in range(2):
        part = batches(annotated_net(database, ALL, batch=2, rank=rank, workers=2), 5)
        for (all_data, all_label), (data, label) in zip(whole, part, strict=True):
            assert torch.equal(data, all_data[rank::2])
            rows = all_label[0, 0][all_label[0, 0, :, 0] % 2 == rank]
            own = label[0, 0][label[0, 0, :, 0] >= 0]
            assert torch.equal(own[:, 1:], rows[rows[:, 0] >= 0][:, 1:])


def test_tests_are_repeatable_and_images_alone_will_do(database: Path) -> None:
    body = "transform_param { resize_param { height: 20 width: 20 } }"
    with closing(annotated_net(database, body, tops="data", phase=TEST)) as compiled:
        first = compiled()["data"].clone()
        compiled()
        assert torch.equal(first, compiled()["data"])


def test_labels_of_images(tmp_path: Path) -> None:
    records = [
        (
            b"%d" % n,
            AnnotatedDatum(datum=Datum.FromString(encode_datum(picture(n), n))).SerializeToString(),
        )
        for n in range(3)
    ]
    path = make_database(tmp_path / "db", Backend.LMDB, records)
    ((_, label),) = batches(annotated_net(path), 1)
    assert label.tolist() == [0, 1, 2]
    # With anno_type they are images without objects.
    ((_, label),) = batches(annotated_net(path, "annotated_data_param { anno_type: BBOX }"), 1)
    assert label.tolist() == [[[[-1] * 8]]]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "annotated_data_param { batch_sampler { sampler { min_scale: 0 } } }",
            DataError,
            "scales",
        ),
        ("transform_param { crop_size: 50 }", DataError, "crop_size 50 is larger"),
        ("transform_param { resize_param { height: 5 } }", DataError, "height 5 and width 0"),
    ],
)
def test_illegal_parameters_of_annotated_data_are_refused(
    database: Path, body: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        annotated_net(database, body)


def test_a_database_of_other_records(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 2)
    with pytest.raises(DataError, match=r"record 0 \(key '00000'\)"):
        annotated_net(path)
    with pytest.raises(DefinitionError, match="missing source"):
        build(layer("AnnotatedData", "", "data"))


RECORDS_OF_MEMORY_DATA = np.arange(4 * 6, dtype=np.float32).reshape(4, 1, 2, 3)
LABELS = np.array([3, 1, 2, 0])


def memory(batch: int = 2) -> MemoryData:
    param = MemoryDataParameter(batch_size=batch, channels=1, height=2, width=3)
    made = MemoryData(
        LayerParameter(type="MemoryData", top=["data", "label"], memory_data_param=param),
        LayerContext(phase=TRAIN, seed=1),
    )
    assert made.setup([]) == [(batch, 1, 2, 3), (batch,)]
    return made


def test_batches_go_round_and_a_reset_begins_anew() -> None:
    made = memory()
    made.reset(RECORDS_OF_MEMORY_DATA, LABELS)
    for first in (0, 2, 0):
        data, labels = made()
        assert data.numpy().tolist() == RECORDS_OF_MEMORY_DATA[first : first + 2].tolist()
        assert labels.tolist() == LABELS[first : first + 2].tolist()
    made.reset(RECORDS_OF_MEMORY_DATA + 1, LABELS)
    data, _ = made()
    assert data.numpy().tolist() == (RECORDS_OF_MEMORY_DATA[:2] + 1).tolist()


def test_writing_into_a_top_leaves_the_records() -> None:
    made = memory()
    records = RECORDS_OF_MEMORY_DATA.copy()
    made.reset(records, LABELS)
    made()[0].zero_()
    assert np.array_equal(records, RECORDS_OF_MEMORY_DATA)


@pytest.mark.parametrize(
    ("records", "labels", "message"),
    [
        (RECORDS_OF_MEMORY_DATA[:3], LABELS[:3], "got 3 records, expected a multiple"),
        (RECORDS_OF_MEMORY_DATA[:0], LABELS[:0], "got 0 records"),
        (RECORDS_OF_MEMORY_DATA, LABELS[:2], "4 records and 2 labels"),
        (
            RECORDS_OF_MEMORY_DATA[..., :2],
            LABELS,
            "the array of records has shape 4x1x2x2, expected Nx1x2x3",
        ),
    ],
)
def test_records_that_do_not_fit(
    records: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        memory().reset(records, labels)


def test_a_pass_before_reset() -> None:
    with pytest.raises(LayerError, match="has no records"):
        memory()()


def test_extents_must_be_positive() -> None:
    with pytest.raises(PoseidonError, match="2x1x0x3, expected all four to be positive"):
        param = "memory_data_param { batch_size: 2 channels: 1 width: 3 }"
        build(layer("MemoryData", "", "a b", param))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(10.0).reshape(5, 2)
        file["y"] = np.arange(5)
    (tmp_path / "list").write_text("rows.h5\n")
    return tmp_path


def net_of_hdf5_data(folder: Path, tops: str, body: str, rest: str = "", **place: Any) -> Net:
    text = layer(
        "HDF5Data", "", tops, f'hdf5_data_param {{ source: "{folder}/list" {body} }} {rest}'
    )
    return build(text, **place)


def test_tops_are_the_datasets_of_their_names(folder: Path) -> None:
    with closing(net_of_hdf5_data(folder, "y x", "batch_size: 3")) as compiled:
        assert compiled.blob_shapes == {"y": (3,), "x": (3, 2)}
        compiled()
        tops = compiled()
        assert tops["y"].tolist() == [3, 4, 0] and tops["x"].tolist() == [[6, 7], [8, 9], [0, 1]]
        assert [reader.batches_done for _, reader in compiled.readers()] == [2]


@pytest.mark.parametrize(
    ("tops", "body", "rest", "message"),
    [
        ("x", "", "", "missing batch_size"),
        ("z", "batch_size: 1", "", "has no dataset 'z'"),
        ("x", "batch_size: 1", "transform_param { }", "does not transform"),
    ],
)
def test_mistakes_of_hdf5_data(folder: Path, tops: str, body: str, rest: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        net_of_hdf5_data(folder, tops, body, rest)


def output(path: str, **place: Any) -> Net:
    text = inputs(x=(2, 3), y=(2,)) + layer(
        "HDF5Output", "x y", "", f'hdf5_output_param {{ file_name: "{path}" }}'
    )
    return build(text, **place)


def test_every_pass_adds_its_rows(tmp_path: Path) -> None:
    x, y = noise(4, 3), torch.arange(4.0)
    compiled = output(f"{tmp_path}/out.h5")
    for start in (0, 2):
        compiled({"x": x[start : start + 2], "y": y[start : start + 2]})
    compiled.close()
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["data"], x.numpy())
        np.testing.assert_array_equal(file["label"], y.numpy())


def test_each_worker_writes_a_file_of_its_own(tmp_path: Path) -> None:
    compiled = output(f"{tmp_path}/out.h5", rank=1, workers=2)
    compiled({"x": noise(2, 3), "y": torch.zeros(2)})
    compiled.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.h5_1"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="missing file_name"):
        output("")
    with pytest.raises(DefinitionError, match="there is no folder"):
        output(f"{tmp_path}/no/such/out.h5")


def test_a_shuffle_reaches_the_reader(folder: Path) -> None:
    with closing(net_of_hdf5_data(folder, "y", "batch_size: 5 shuffle: true")) as compiled:
        passes = [compiled()["y"].tolist() for _ in range(4)]
    assert all(sorted(found) == [0, 1, 2, 3, 4] for found in passes)
    assert len({tuple(found) for found in passes}) > 1
