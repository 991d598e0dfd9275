"""Past races can be put back into the code of today; `races.py` looks for them."""

from __future__ import annotations

import pytest

from tests.simulation import runs
from tests.simulation.races import RACES, Race, older, source_of


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.commit)
def test_a_race_can_be_put_back(race: Race) -> None:
    text = older(race)
    assert text != source_of(race).read_text()
    compile(text, race.module, "exec")
    assert race.scenario in runs.SCENARIOS
