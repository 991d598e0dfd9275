"""The benchmark of tables: its two jobs, its lines, and when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.tables import Worker


@pytest.mark.parametrize(("bytes_out", "status"), [(1_400_000, 0), (1_500_000, 1)])
def test_bytes_beyond_the_limit_fail(
    bytes_out: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs: list[tuple[str, int, int, int]] = []

    def run(part: str, rows: int, size: int, steps: int) -> tuple[list[Worker], list[int]]:
        jobs.append((part, rows, size, steps))
        worker = Worker(
            distinct=20_000, peak=600_000_000, seconds=9.0, bytes_out=bytes_out, bytes_in=1_300_000
        )
        return [worker], [700_000_000]

    monkeypatch.setattr(tables, "run", run)
    written = tmp_path / "tables.md"
    assert tables.main(["--gigabytes=0.1", f"--markdown={written}"]) == status
    assert jobs == [("bytes", 10_000_000, 32_768, 20), ("memory", 1_562_500, 262_144, 3)]
    lines = written.read_text(encoding="utf-8").splitlines()
    assert lines[2] == f"| 0 | 1,000 | {bytes_out / 20:,.0f} | 65,000 | 68,000 | " + (
        f"{bytes_out / 1_360_000:.3f} |"
    )
    assert lines[-1] == "| 1,562,500 | 0.10 GB | 0.60 GB | 0.70 GB | 9 |"
    assert capsys.readouterr().out == written.read_text(encoding="utf-8")
