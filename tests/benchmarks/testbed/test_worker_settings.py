"""What a worker reads is what was written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed.worker_settings import (
    DdpSettings,
    PoseidonSettings,
    TrainingSettings,
    WorkerSettings,
    read_settings,
    write_settings,
)
from poseidon.plan.shapes import LayerShape

LAYERS = (LayerShape(name="fc", tensors=((2, 3), (2,)), work=6, fully_connected=True),)


@pytest.mark.parametrize(
    "how",
    [
        DdpSettings(),
        DdpSettings(bucket_mb=5.0),
        DdpSettings(hook="powersgd:2"),
        PoseidonSettings(),
        PoseidonSettings(exchange="ps", wait_free=False, servers=2, shards=3, trace=Path("/traces")),
    ],
)
def test_settings_survive_the_file(how: DdpSettings | PoseidonSettings, tmp_path: Path) -> None:
    settings = WorkerSettings(
        training=TrainingSettings(layers=LAYERS, batch=4, compute_s=0.5),
        how=how,
        control=tmp_path / "control",
        hosts=("10.0.0.1", "10.0.0.2"),
        shards=("tcp://10.0.0.1:9000",),
        homes=(-1,),
        token="ab",
    )
    write_settings(settings, tmp_path / "settings.json")
    assert read_settings(tmp_path / "settings.json") == settings
    assert settings.workers == 2
