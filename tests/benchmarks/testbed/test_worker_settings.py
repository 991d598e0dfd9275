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
from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS
from poseidon.observe.plan.shapes import LayerShape

LAYERS = (LayerShape(name="fc", tensors=((2, 3), (2,)), work=6, fully_connected=True),)


@pytest.mark.parametrize(
    "how",
    [
        DdpSettings(),
        DdpSettings(bucket_mb=5.0),
        DdpSettings(hook="powersgd:2"),
        DdpSettings(alone=True),
        PoseidonSettings(),
        PoseidonSettings.parse("ps+topk:0.01+int8+H32+P4+D8"),
        PoseidonSettings(in_clear=True),
        PoseidonSettings(
            exchange="ps", wait_free=False, servers=2, shards=3, trace=Path("/traces")
        ),
    ],
)
def test_settings_survive_the_file(how: DdpSettings | PoseidonSettings, tmp_path: Path) -> None:
    settings = WorkerSettings(
        training=TrainingSettings(layers=LAYERS, batch=4, compute_s=0.5, computed="gpt-2m"),
        how=how,
        control=tmp_path / "control",
        hosts=("10.0.0.1", "10.0.0.2"),
        shards=("tcp://10.0.0.1:9000",),
        homes=(-1,),
        token="ab",
        port=9000,
    )
    write_settings(settings, tmp_path / "settings.json")
    assert read_settings(tmp_path / "settings.json") == settings
    assert settings.workers == 2
    assert settings.encrypted == (isinstance(how, PoseidonSettings) and not how.in_clear)
    assert settings.keys_file("shard", 1) == tmp_path / "shard_1.keys"


def test_the_text_of_a_job_gives_the_options_of_its_exchange() -> None:
    how = PoseidonSettings.parse("ps+topk:0.1+int8+H32+P4+D8")
    options = how.options
    assert (options.compress, options.local_steps) == ("topk:0.1,int8", 32)
    assert (options.sync_fragments, options.sync_delay) == (4, 8)
    assert PoseidonSettings.parse("hybrid") == PoseidonSettings()
    assert PoseidonSettings.parse("default").exchange == DEFAULT_OPTIONS.kind.value
    assert PoseidonSettings.parse("ps+float16").options.precision.value == "float16"


@pytest.mark.parametrize(
    "text", ["hybrid", "ps+bfloat16", "hybrid+powersgd:4+int8", "ps+int8+H32+P4+D8"]
)
def test_a_job_is_named_by_its_text(text: str) -> None:
    assert PoseidonSettings.parse(text).name == text
    assert PoseidonSettings.parse(text).lossy == ("+" in text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mpi", "'mpi' is none of default, auto, hybrid, ps"),
        ("ps+zip", "'zip'"),
        ("ps+P4", "--local_steps=fragments needs local steps"),
        ("ps+H4+D4", "--local_steps=4,delay=4"),
        ("allreduce+int8", "--compress is for tensors"),
    ],
)
def test_a_wrong_job_is_one_sentence(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        PoseidonSettings.parse(text)
