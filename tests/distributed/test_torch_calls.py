"""Every call of torch.distributed in each context, beside gloo: the results are the same, or the
call is refused in a sentence. The table in docs/from_ddp.md is what this test finds;
`python tests/distributed/test_torch_calls.py` writes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.support import torch_calls
from tests.support.training_processes import machinefile, poseidon_here

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "torch_calls.py"
PAGE = ROOT / "docs" / "from_ddp.md"
BEGIN, END = "<!-- table of calls -->", "<!-- end of the table of calls -->"
SIZE = 3
REFUSALS = ("UsageError", "ValueError")
CONTEXTS = {"run --ddp": "`run --ddp`", "run": "`run`", "ray": "Ray Train"}
DIFFERENT = {
    ("`is_torchelastic_launched`", "run --ddp"): "True, as under torchrun",
    (torch_calls.STORES, "run"): "as gloo; `MASTER_ADDR` is not set",
    (torch_calls.STORES, "ray"): "as gloo; `MASTER_ADDR` is not set",
    ("`get_backend`, `get_backend_config`", "run"): "`poseidon`: the script has named none",
    ("`get_backend`, `get_backend_config`", "ray"): "`poseidon`: the script has named none",
}
"""Where a result is another than gloo's."""
WITHOUT_A_CALL = {
    *("AllreduceCoalescedOptions", "AllreduceOptions", "AllToAllOptions", "BarrierOptions"),
    *("BroadcastOptions", "GatherOptions", "GroupName", "ReduceOptions", "ReduceScatterOptions"),
    *("ScatterOptions", "ReduceOp", "ProcessGroup", "DebugLevel", "default_pg_timeout"),
    *("ProcessGroupGloo", "record_comm", "init_process_group"),
}
"""Names of torch.distributed that are types and numbers, or that every case needs."""
Results = list[Mapping[str, Any]]
"""What the cases returned, by rank."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def of_processes(folder: Path, how: str) -> Results:
    """Run the cases on workers that no launcher has started."""
    folder.mkdir()
    place = {"WORLD_SIZE": str(SIZE)}
    if how == "gloo":
        own, of_script = str(free_port()), str(free_port())
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own, "SCRIPT_PORT": of_script}
    workers = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder, how],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": "0",  # as in a job of machines with one worker each
            },
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
    return read(folder)


def of_job(folder: Path, how: str, *flags: str) -> Results:
    """Run the cases on the workers of a job."""
    folder.mkdir()
    hosts = f"--hostfile={machinefile(folder, SIZE, 1)}"
    done = poseidon_here(folder, "run", *flags, hosts, str(SCRIPT), str(folder), how)
    assert done.returncode == 0, done.stderr
    return read(folder)


def read(folder: Path) -> Results:
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(SIZE)]


def free_port() -> int:
    from poseidon.torch.script_process import free_address

    return int(free_address("127.0.0.1").rpartition(":")[2])


def is_error(result: object) -> bool:
    return isinstance(result, dict) and "raises" in result


def outcome(row: str, context: str, gloo: Results, found: Results) -> str:
    """Return the text of one place of the table.

    Raises:
        AssertionError: a result is neither gloo's, nor a refusal, nor known to be different.
    """
    refused, is_equal = "", True
    for rank in range(SIZE):
        for name in [name for name in torch_calls.CASES if name.startswith(f"{row}: ")]:
            expected, got = gloo[rank][name], found[rank][name]
            if got == expected or is_error(expected):
                continue
            is_equal = False
            known = (row, context) in DIFFERENT
            errors = [one for one in (got if isinstance(got, list) else [got]) if is_error(one)]
            refusals = [one for one in errors if one["raises"] in REFUSALS]
            assert known or refusals, f"{context}, rank {rank}: {name}: {got}, and gloo {expected}"
            refused = refused or (refusals[0]["text"] if refusals else "")
    if is_equal:
        return "as gloo"
    if (row, context) in DIFFERENT:
        return DIFFERENT[row, context]
    return f"refused: {refused}"


def table(folder: Path) -> str:
    """Run all cases in all contexts; return the table."""
    with ThreadPoolExecutor(2) as pool:
        gloo = pool.submit(of_processes, folder / "gloo", "gloo")
        job = pool.submit(of_job, folder / "ddp", "gloo", "--ddp")
        found = {
            "run --ddp": job,
            "run": pool.submit(of_job, folder / "run", "made"),
            "ray": pool.submit(of_processes, folder / "ray", "library"),
        }
        expected = gloo.result()
        results = {context: future.result() for context, future in found.items()}
    lines = ["| call | " + " | ".join(CONTEXTS.values()) + " |", "|---" * (len(CONTEXTS) + 1) + "|"]
    for row in torch_calls.NAMES:
        cells = [outcome(row, context, expected, results[context]) for context in CONTEXTS]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_each_name_of_torch_distributed_has_a_row() -> None:
    covered = {name for names in torch_calls.NAMES.values() for name in names}
    public = set(torch.distributed.distributed_c10d.__all__)
    assert public - covered - WITHOUT_A_CALL == set()


@pytest.mark.thorough
def test_calls_in_each_context_are_as_under_gloo_or_refused(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert table(tmp_path) == written


def main() -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    with tempfile.TemporaryDirectory() as folder:
        made = table(Path(folder))
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
