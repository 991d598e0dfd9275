"""Each test of Caffe2's front end has a workspace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from poseidon.caffe2 import workspace


@pytest.fixture(autouse=True)
def own_workspace() -> Iterator[None]:
    workspace.ResetWorkspace()
    yield
    workspace.ResetWorkspace()
