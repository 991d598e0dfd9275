"""One template for the jobs of many tests (`poseidon.cluster.agent.template`): importing torch
takes longer than what most tests compute.

Jobs whose launcher is not the test's own process, or whose workers have an agent of their own, have
templates of their own.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

from poseidon.cluster.agent import host
from poseidon.cluster.agent.template import Template, Templates

OF_ONE_TEST = ("POSEIDON_HOME", "PYTEST_CURRENT_TEST")
"""Variables that no import reads."""


class SharedTemplates(Templates):
    """Templates that outlive their agents; see `Templates`."""

    def of(
        self,
        python: str,
        imports: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None,
    ) -> Template:
        common = {name: value for name, value in environment.items() if name not in OF_ONE_TEST}
        return super().of(python, imports, common, "/")

    def close(self) -> None:
        pass


SHARED = SharedTemplates()
atexit.register(Templates.close, SHARED)


@contextmanager
def shared_templates() -> Iterator[None]:
    """In this block, let agents of this process share their templates."""
    with mock.patch.object(host, "Templates", lambda: SHARED):
        yield
