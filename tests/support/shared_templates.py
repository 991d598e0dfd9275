"""One template for the jobs of all tests whose agents are in the test's own process
(`poseidon.cluster.agent.template`): importing torch takes longer than what most tests compute.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from poseidon.cluster.agent import host
from poseidon.cluster.agent.template import Template, Templates
from poseidon.engine.document import WorkKind
from poseidon.launcher.processes import imports_of

READ_BY_IMPORTS = (
    *("PATH", "HOME", "PYTHON", "LD_", "LANG", "LC_", "OMP_", "MKL_", "MALLOC_", "GLIBC_"),
    *("TORCH", "KMP_", "POSEIDON_NATIVE"),
)
"""How the names of variables begin that imports read; a fork is given the others."""
IMPORTS = tuple(dict.fromkeys(name for kind in WorkKind for name in imports_of(kind)))
"""Jobs of all kinds share a template: beside torch, what each of them imports takes no time."""
MOST = 4
"""Templates at a time: each holds the memory of its imports."""


class SharedTemplates(Templates):
    """Templates that outlive their agents; see `Templates`.

    Attributes:
        more: what a template imports besides.
    """

    more: Sequence[str] = ()

    def of(
        self,
        python: str,
        imports: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None,
    ) -> Template:
        read = {
            name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)
        }
        modules = tuple(dict.fromkeys((*IMPORTS, *imports, *self.more)))
        template = super().of(python, modules, read, "/")
        with self._lock:
            key = next(key for key, known in self._known.items() if known is template)
            self._known[key] = self._known.pop(key)  # one that is in use is closed last
            while len(self._known) > MOST:
                self._known.pop(next(iter(self._known))).close()
        return template

    def close(self) -> None:
        pass

    @contextmanager
    def importing(self, *modules: str) -> Iterator[None]:
        """Let templates import these modules, too, in this block."""
        self.more = modules
        try:
            yield
        finally:
            self.more = ()


SHARED = SharedTemplates()
atexit.register(Templates.close, SHARED)


def share_templates() -> None:
    """Let all agents of this process share their templates from now on."""
    host.Templates = lambda: SHARED  # type: ignore[assignment,misc]
