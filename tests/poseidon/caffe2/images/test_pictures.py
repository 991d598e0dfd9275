"""`poseidon make_db`: picture files into databases of all kinds, read back by ImageInput."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.caffe2 import workspace
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto, TensorProtos
from poseidon.caffe2.runtime.databases import records
from poseidon.cli.main import main
from tests.support.caffe2_images import image_input, picture, reader

SIZE = (12, 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two pictures each, one of them in a folder of its own, and a file that is
    no picture.
    """
    root = tmp_path / "pictures"
    for number, name in enumerate(("boats/a.png", "boats/more/b.png", "cars/c.png", "cars/d.png")):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), picture(number, *SIZE))
    (root / "cars" / "notes.txt").write_text("no picture")
    return root


def make(*arguments: object) -> int:
    return main(["make_db", *map(str, arguments)])


@pytest.mark.parametrize("db_type", ["lmdb", "leveldb", "minidb"])
@pytest.mark.parametrize("form", ["caffe2", "caffe"])
@pytest.mark.parametrize("raw", [False, True])
def test_what_is_made_is_read(
    folder: Path, tmp_path: Path, db_type: str, form: str, raw: bool
) -> None:
    path = tmp_path / "db"
    flags = [f"--backend={db_type}", f"--format={form}", "-noshuffle", *(["--raw"] if raw else [])]
    assert make(*flags, folder, path) == 0
    workspace.ResetWorkspace()
    reader(str(path), db_type)
    data, label = image_input(batch_size=4, use_caffe_datum=int(form == "caffe"))
    assert label.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(data, np.stack([picture(n, *SIZE)[2:10, 4:12] for n in range(4)]))


def test_what_is_printed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(folder, tmp_path / "db") == 0
    assert capsys.readouterr().out.splitlines() == [
        "label 0 boats: 2 pictures",
        "label 1 cars: 2 pictures",
        f"Wrote 4 records to {tmp_path / 'db'} (lmdb, TensorProtos).",
    ]


def test_the_order_follows_the_seed(folder: Path, tmp_path: Path) -> None:
    keys = {}
    for name, flags in {"a": [], "b": ["--seed=0"], "c": ["--seed=3"], "d": ["-noshuffle"]}.items():
        make(*flags, "--backend=minidb", folder, tmp_path / name)
        keys[name] = [key for key, _ in records(str(tmp_path / name), "minidb")]
        assert [int(key[:8]) for key in keys[name]] == [0, 1, 2, 3]
    assert keys["a"] == keys["b"] != keys["c"]
    assert keys["d"][1] == b"00000001_boats/more/b.png"


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (["--raw"], (12, 16, 3)),
        (["--raw", "--shorter_side=6"], (6, 8, 3)),
        (["--raw", "--resize_width=5"], (12, 5, 3)),
        (["--raw", "--gray"], (12, 16)),
        (["--shorter_side=24"], (24, 32, 3)),
        (["--encode_type=jpg"], (12, 16, 3)),
    ],
)
def test_sizes_and_encodings(
    folder: Path, tmp_path: Path, flags: list[str], shape: tuple[int, ...]
) -> None:
    make(*flags, "--backend=minidb", folder, tmp_path / "db")
    for _, value in records(str(tmp_path / "db"), "minidb"):
        image = TensorProtos.FromString(value).protos[0]
        if "--raw" in flags:
            assert image.data_type == TensorProto.BYTE
            assert tuple(image.dims) == shape
        else:
            content = image.string_data[0]
            assert content.startswith(b"\xff\xd8" if "--encode_type=jpg" in flags else b"\x89PNG")
            assert cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR).shape == shape


def test_a_list_file(folder: Path, tmp_path: Path) -> None:
    listed = folder / "list.txt"
    listed.write_text("cars/c.png 7\nboats/a.png 3\n")
    make("-noshuffle", "--format=caffe", "--backend=minidb", listed, tmp_path / "db")
    found = [Datum.FromString(value) for _, value in records(str(tmp_path / "db"), "minidb")]
    assert [datum.label for datum in found] == [7, 3]
    assert found[0].data == (folder / "cars/c.png").read_bytes()
    listed = tmp_path / "elsewhere"
    listed.write_text("cars/c.png 7\n")
    assert make(f"--root_folder={folder}/", "--backend=minidb", listed, tmp_path / "second") == 0


def empty_class(folder: Path) -> None:
    (folder / "planes").mkdir()


def no_classes(folder: Path) -> None:
    for name in ("boats", "cars"):
        (folder / name).rename(folder / f".{name}")


def damaged(folder: Path) -> None:
    (folder / "cars" / "c.png").write_bytes(b"no picture")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (empty_class, "pictures/planes has no pictures such as .jpg"),
        (no_classes, "pictures has no sub-folders: expected one for each class"),
        (damaged, "cars/c.png cannot be decoded: it is damaged"),
    ],
)
def test_a_mistake_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
) -> None:
    change(folder)
    for backend in ("lmdb", "minidb"):
        assert make(f"--backend={backend}", folder, tmp_path / "db") == 1
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures"]


def test_a_line_of_a_list_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = folder / "list.txt"
    listed.write_text("cars/c.png 7\ncars/nothing.png 3\n")
    assert make(listed, tmp_path / "db") == 1
    assert f"{listed}:2: the image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give PICTURES and DB_NAME"),
        (["nothing"], "give PICTURES and DB_NAME"),
        (["nothing", "db"], "nothing: there is no such file or folder; expected a folder"),
        (["--shorter_side=3", "--resize_width=3", "a", "b"], "exclude each other"),
        (["--generate=two_class"], "takes one argument"),
        (["--generate=two_class", "a", "b"], "takes one argument"),
        (["--generate=two_class", "--count=1", "a"], "must be 2 or more"),
    ],
)
def test_arguments_that_make_no_sense(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(*arguments) in (1, 2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_drawn_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--generate=two_class", "--count=6", "--test_count=4"]
    assert make(*flags, tmp_path / "a") == make(*flags, tmp_path / "b") == 0
    assert "Wrote 6 records to" in capsys.readouterr().out
    seen = set()
    for part, count in (("train", 6), ("val", 4)):
        found, again = (
            list(records(str(tmp_path / name / f"two_class_{part}"), "lmdb")) for name in "ab"
        )
        assert found == again
        assert len(found) == count
        labels = [TensorProtos.FromString(value).protos[1].int32_data[0] for _, value in found]
        assert sorted(labels) == [0] * (count // 2) + [1] * (count // 2)
        seen.update(TensorProtos.FromString(value).protos[0].string_data[0] for _, value in found)
    assert len(seen) == 10
    assert make(*flags, tmp_path / "a") == 1
    assert "exists already and is not overwritten" in capsys.readouterr().err
