"""`python -m ps_server.make_keys FOLDER --workers W --shards P`: a file of keys
for each process of a job started by hand.

`shard_0.keys`, `worker_0.keys`, ...: copy each to its own machine only, over an encrypted
connection.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ps_server.errors import SpecError, visible
from ps_server.keys import JobKeys, write_keyring


def main(arguments: list[str] | None = None) -> int:
    """Write the files; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ps_server.make_keys", description="Make the keys of one job."
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="made if it does not exist; other users cannot enter it",
    )
    parser.add_argument("--workers", type=int, required=True, help="number of workers")
    parser.add_argument("--shards", type=int, default=1, help="number of shards (default 1)")
    flags = parser.parse_args(arguments)
    if min(flags.workers, flags.shards) < 1:
        parser.error("--workers and --shards are 1 or more")
    keys = JobKeys.new(workers=flags.workers, shards=flags.shards)
    rings = {
        flags.folder / f"worker_{rank}.keys": keys.of_worker(rank) for rank in range(flags.workers)
    }
    rings |= {
        flags.folder / f"shard_{index}.keys": keys.of_shard(index) for index in range(flags.shards)
    }
    try:
        _make_folder(flags.folder)
        for path in rings:
            if path.exists():  # keys of two jobs in one folder fit nobody
                raise SpecError(f"{path} exists; remove the old keys, or name a different folder")
        for path, ring in rings.items():
            write_keyring(path, ring)
    except SpecError as error:
        print(f"make_keys: {visible(str(error))}", file=sys.stderr)
        return 1
    return 0


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        for path in reversed(missing):  # each with the mode: `parents` of mkdir has the umask's
            path.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot make the folder {folder}: {error.strerror or error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
