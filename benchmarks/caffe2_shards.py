#!/usr/bin/env python3
"""Time the ResNet-50 trainer on one, two and three hosts of equal and unequal speed, started by
hand on each.

    sudo python benchmarks/caffe2_shards.py [--images 32] [--batch 4] [--fast 0.5] [--slow 0.3]
    [--redis PORT]

Hosts are network namespaces of this machine. A host gets a part of a core, by a control group
(version 1). The shards meet in a folder, or with --redis in a Redis server that is started on the
first host. An epoch has as many images for any number of hosts. Seconds are the time of the epoch,
from the trainer's log: without the start of Python. The last column says whether gradients are
weighted: batch sizes by the speed of each host (`--shard_batch_sizes=auto`).

Needs root, `ip` and `tc`. Cores that other processes use change the times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.testbed.hosts import Host, Hosts
from poseidon.caffe2.experiment_util import read_log
from poseidon.caffe2.images.pictures import make_two_class

TRAINER = ROOT / "examples" / "resnet50" / "resnet50_trainer.py"
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
LIMIT_S = 600
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: the speed of each host by name, images of a host in a batch, and
    whether sizes follow speed.
    """

    hosts: tuple[str, ...]
    batch: int
    weighted: bool = False


@contextmanager
def cores(name: str, share: float) -> Iterator[Path]:
    """Make a control group whose processes get a share of a core; yield the file that takes
    their numbers.
    """
    group = CPU_GROUPS / name
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def start(host: Host, group: Path, words: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    """Start a command on a host, in a folder."""
    place.mkdir()
    script = f'echo $$ > {group}; exec "$@"'
    with (place / "console").open("wb") as console:
        return subprocess.Popen(
            [*host.enter, "sh", "-c", script, "sh", *words],
            cwd=place,
            stdout=console,
            stderr=console,
        )


@contextmanager
def redis(host: Host, port: int) -> Iterator[None]:
    """Run a Redis server on a host; the block begins when it answers."""
    words = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        host.address,
        "--protected-mode",
        "no",
        "--save",
        "",
    ]
    ping = [*host.enter, "redis-cli", "-h", host.address, "-p", str(port), "ping"]
    with subprocess.Popen([*host.enter, *words], stdout=subprocess.DEVNULL) as server:
        try:
            while subprocess.run(ping, capture_output=True, check=False).stdout != b"PONG\n":
                if server.poll() is not None:
                    sys.exit(f"redis-server has ended with {server.returncode}")
                time.sleep(POLL_S)
            yield
        finally:
            server.kill()


def seconds(row: Row, shares: dict[str, float], args: argparse.Namespace, folder: Path) -> float:
    """Return the seconds of an epoch of the slowest shard.

    Raises:
        SystemExit: a trainer has failed.
    """
    count = len(row.hosts)
    words = [
        sys.executable,
        str(TRAINER),
        f"--train_data={folder.parent / 'train'}",
        "--num_labels=2",
    ]
    words += [f"--batch_size={row.batch}", f"--epoch_size={args.images}", "--num_epochs=1"]
    words += ["--num_layers=18", f"--image_size={args.side}", f"--image_scale={args.side + 8}"]
    words += ["--base_learning_rate=0.001", f"--file_store_path={folder}", "--timeout=300"]
    if count > 1:
        words += [
            f"--num_shards={count}",
            "--run_id=1",
            *(["--shard_batch_sizes=auto"] if row.weighted else []),
        ]
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(count))
        if count > 1 and args.redis:
            stack.enter_context(redis(hosts[0], args.redis))
            words += [f"--redis_host={hosts[0].address}", f"--redis_port={args.redis}"]
        started = []
        for shard, (host, speed) in enumerate(zip(hosts, row.hosts, strict=True)):
            group = stack.enter_context(cores(f"{host.name}_cpu", shares[speed]))
            own = [*words, *([f"--shard_id={shard}"] if count > 1 else [])]
            started.append(start(host, group, own, folder / f"shard_{shard}"))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        codes = [process.wait(LIMIT_S) for process in started]
    for shard, code in enumerate(codes):
        if code:
            sys.exit(
                f"shard {shard}: "
                f"{(folder / f'shard_{shard}' / 'console').read_text().splitlines()[-1]}"
            )
    logs = [path for shard in range(count) for path in (folder / f"shard_{shard}").glob("*.log")]
    return max(float(read_log(path)[-1]["time_spent"]) for path in logs)


def main() -> None:
    """Print the table, a line when it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=32, help="of an epoch")
    parser.add_argument("--batch", type=int, default=4, help="images of a host")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--fast", type=float, default=0.5, help="cores of a fast host")
    parser.add_argument("--slow", type=float, default=0.3, help="cores of a slow host")
    parser.add_argument(
        "--redis", type=int, default=0, metavar="PORT", help="meet in Redis, not in a folder"
    )
    args = parser.parse_args()
    shares = {"fast": args.fast, "slow": args.slow}
    rows = [
        Row(("fast",), args.batch),
        Row(("fast",), 2 * args.batch),
        Row(("slow",), args.batch),
        Row(("slow", "fast"), args.batch),
        Row(("slow", "fast"), args.batch, weighted=True),
        Row(("fast", "fast"), args.batch),
        Row(("fast", "fast", "slow"), args.batch),
        Row(("fast", "fast", "slow"), args.batch, weighted=True),
    ]
    print(
        "| hosts | speeds | batch of a host | weighted | seconds |\n|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as top:
        make_two_class(Path(top) / "train", "lmdb", "caffe2", args.images, seed=0)
        for number, row in enumerate(rows):
            folder = Path(top) / f"row_{number}"
            folder.mkdir()
            found = seconds(row, shares, args, folder)
            weighted = "yes" if row.weighted else "no"
            print(
                f"| {len(row.hosts)} | {', '.join(row.hosts)} | {row.batch} | {weighted} | "
                f"{found:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
