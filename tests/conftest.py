"""What every test stands on: what it needs of the machine, a check that nothing is left running,
and how much is run.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from poseidon.base.text_files import escaped
from tests.support import needs

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tensors of tests are small, and three tests run at a time: a second thread of torch only takes a
core from another test.
"""
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
"""As in the processes of a job, whose bits are compared with training in the test's own process."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""Shells start what a script leaves in the background with Ctrl-C ignored; tests press it."""

os.environ["PATH"] = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
)
"""Hints name this installation's command as `poseidon`, however the tests are started."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is not UTF-8 in captured texts: the processes of the tests send reports as
    UTF-8.
    """
    report = yield
    report.sections = [(title, escaped(text)) for title, text in report.sections]
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough` runs every combination."""
    parser.addoption("--thorough", action="store_true", help="also what is marked as thorough")


def pytest_configure(config: pytest.Config) -> None:
    """Hide programs, as `tests/support/needs.py` explains."""
    try:
        config.add_cleanup(needs.hide_programs())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print last which groups of tests were skipped, and what to do."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    line = needs.summary(report.longrepr[2] for report in reporter.stats.get("skipped", []))
    if line:
        reporter.write_line(line, yellow=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs are not met, before its fixtures are made."""
    for marker in item.iter_markers("needs"):
        needs.require(*marker.args)


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are imported: there is little, and looking for it takes
    long.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Share templates. Collect garbage from here on, but not among what the tests have imported:
    that stays to the end.
    """
    if "poseidon.cluster.agent.host" in sys.modules:  # some test may start a job
        from tests.support.shared_templates import share_templates

        share_templates()
    gc.enable()
    gc.freeze()


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
    """A test that needs LevelDB is skipped where its library is not installed."""
    return (yield from _skipped_without_leveldb())


def _skipped_without_leveldb() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if type(error).__name__ == "LevelDbMissingError":  # importing it here would import torch
            needs.require("leveldb")
        raise


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and recorded Caffe results; the test is skipped where it is
    absent.
    """
    needs.require("data")
    return needs.SHARED


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small databases of pictures whose brightness tells their label."""
    from tests.support.training_processes import make_data  # which imports torch

    folder = tmp_path_factory.mktemp("databases")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def imports_of_ddp() -> Iterator[None]:
    """Jobs of the module fork processes that have what DDP and FSDP import, for a second each."""
    from tests.support.shared_templates import SHARED

    names = ("fsdp", "checkpoint", "nn")
    with SHARED.importing("torch._dynamo", *(f"torch.distributed.{name}" for name in names)):
        yield


@pytest.fixture
def data_folder(tmp_path: Path, databases: Path) -> Path:
    """The test's own folder, where these databases are, too."""
    for name in ("train_lmdb", "test_lmdb"):
        (tmp_path / name).symlink_to(databases / name)
    return tmp_path


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`caffe`, `caffe2` and `caffe_pb2` are names of nothing, until the test calls
    `poseidon.bind()`.
    """
    finders = [one for one in sys.meta_path if type(one).__module__ != "poseidon.binding"]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    _forget_caffe()
    yield
    _forget_caffe()


def _forget_caffe() -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("caffe", "caffe2", "caffe_pb2")
    ]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Run torch on one thread again, whatever an earlier test has set."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread of this project running."""
    before = set(threading.enumerate())
    yield
    left = []
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("poseidon", "ps-", "factors-", "rebuild-", "local-", "pushes-")):
            thread.join(timeout=30)
            if thread.is_alive():
                left.append(thread.name)
    assert not left, f"threads left running: {left}"
