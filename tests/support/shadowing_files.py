"""Files in a user's folder with the names of modules that Poseidon imports; each raises when it
is imported.
"""

from __future__ import annotations

from pathlib import Path

LIBRARY = ("json", "numbers", "queue", "random", "tempfile")
"""Modules of Python's library."""
PACKAGES = ("poseidon", "ps_server")


def write_shadowing_files(folder: Path, *, packages: bool) -> None:
    """Write the files.

    Args:
        folder: where; it exists.
        packages: whether folders `poseidon` and `ps_server` are among them.
    """
    files = [folder / f"{name}.py" for name in LIBRARY]
    files += [folder / name / "__init__.py" for name in PACKAGES if packages]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise RuntimeError('{file.name} was imported')\n", encoding="utf-8")
