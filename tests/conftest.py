"""What every test stands on: the shared real data, a check that nothing is left running, and how much is run."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from poseidon.data.leveldb import LevelDbMissingError

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough` runs every combination."""
    parser.addoption("--thorough", action="store_true", help="also what is marked as thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as thorough, unless it is asked for."""
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """As `pytest_runtest_call`."""
    return (yield from _skipped_without_leveldb())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test that needs LevelDB is skipped where plyvel is not installed, as on Python 3.13."""
    return (yield from _skipped_without_leveldb())


def _skipped_without_leveldb() -> Generator[None, object, object]:
    try:
        return (yield)
    except LevelDbMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and recorded Caffe results; the test is skipped where it is absent."""
    folder = Path(os.environ.get("POSEIDON_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        pytest.skip(f"no real data: {folder} is absent; set POSEIDON_SHARED to the folder that has it")
    return folder


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread of this project running."""
    before = set(threading.enumerate())
    yield
    left = []
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("poseidon", "ps-", "factors-", "rebuild-", "local-", "pushes-")):
            thread.join(timeout=5)
            if thread.is_alive():
                left.append(thread.name)
    assert not left, f"threads left running: {left}"
