"""Projects: the files of each, and what is not overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.projects import (
    project_files,
    project_title,
    projects,
    training_commands,
    write_project,
)
from poseidon.errors import DataError, UsageError


def test_each_project_has_a_title_and_the_files_of_its_commands() -> None:
    known = projects()
    assert {"lenet", "cifar10", "torch_cnn"} <= known.keys()
    for name, folder in known.items():
        files = project_files(name, folder)
        assert project_title(folder) in files["README.md"]
        *_, command = training_commands(name, folder)
        assert command in files["README.md"]
        named = {
            word.partition("=")[2] if word.startswith("--") else word for word in command.split()
        }
        assert files.keys() & (named - {"machinefile"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "inception_v3",
            [
                "    poseidon convert_imageset --resize_height=342 --resize_width=342 --shuffle "
                "PICTURES/ train.txt ilsvrc12_train_lmdb\n",
                "    poseidon convert_imageset --resize_height=342 --resize_width=342 PICTURES/ "
                "val.txt ilsvrc12_val_lmdb\n",
                "not be smaller than `crop_size`, 299",
            ],
        ),
        (
            "alexnet",
            [
                "--resize_height=256 --resize_width=256 --shuffle PICTURES/ train.txt "
                "ilsvrc12_train_lmdb\n",
                "    poseidon compute_image_mean ilsvrc12_train_lmdb "
                "data/ilsvrc12/imagenet_mean.binaryproto\n",
            ],
        ),
    ],
)
def test_the_readme_makes_the_databases_that_the_nets_read(name: str, words: list[str]) -> None:
    files = project_files(name, projects()[name])
    assert all(part in files["README.md"] for part in words), files["README.md"]
    assert 'source: "ilsvrc12_train_lmdb"' in files["train_val.prototxt"]


def test_a_project_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_project(tmp_path / "new" / "mine", {"a": "text"})
    assert (tmp_path / "new" / "mine" / "a").read_text() == "text"
    with pytest.raises(UsageError, match="exists already and is not overwritten"):
        write_project(tmp_path / "new" / "mine", {"a": "other"})
    with pytest.raises(DataError, match=r"cannot make .*second: No such file or directory"):
        write_project(tmp_path / "second", {"missing/a": "text"})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
