"""What the READMEs show works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MOST_LINES = 30


def test_the_example_of_the_server_is_short_and_trains(repository: Path, tmp_path: Path) -> None:
    (code,) = PYTHON_BLOCK.findall(
        (repository / "ps_server" / "README.md").read_text(encoding="utf-8")
    )
    assert len(code.splitlines()) <= MOST_LINES
    (tmp_path / "fit.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    shard = subprocess.Popen(
        [sys.executable, "-m", "ps_server", "--listen", "tcp://127.0.0.1:0", "--workers", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    workers = []
    try:
        assert shard.stdout is not None
        address = json.loads(shard.stdout.readline())["address"]
        for rank in range(2):
            words = [sys.executable, str(tmp_path / "fit.py"), str(rank), address]
            workers.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
            )
        for worker in workers:
            output, _ = worker.communicate(timeout=150)
            found = re.search(r"largest error: (\S+)", output)
            assert found, output
            assert float(found[1]) < 1e-3
        assert shard.wait(60) == 0  # it ends when its workers have left
    finally:
        for process in (shard, *workers):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def test_the_front_page_stays_short(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if not line.startswith("<!--")]) <= 70
