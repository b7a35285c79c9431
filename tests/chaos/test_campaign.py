"""Sixty rounds of faults against the whole service, of which a longer run is ``python -m benchmarks.chaos``."""

from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.campaign import Report, run_campaign
from tests.chaos.world import running_world

pytestmark = pytest.mark.slow

ROUNDS = 30
"""On each database."""
SEED = 20261125
LEAST_KINDS = 20
"""Fewest kinds that must have struck on each database; which of them find something to hit is up to the machine."""
PAUSE_S = 0.5
MOST_AT_ONCE = 2


def test_there_are_as_many_kinds_of_faults_as_are_wanted() -> None:
    assert len({fault.name for fault in faults.ALL}) == len(faults.ALL)
    for database in ("sqlite", "postgresql"):
        assert sum(database in fault.on for fault in faults.ALL) >= 30


@pytest.mark.breadth
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_nothing_is_lost(llama_folder: Path, database: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("own_postgresql_url") if database == "postgresql" else None
    check(run(llama_folder, postgresql_url=url, seed=SEED if url is None else SEED + 1))


def run(llama_folder: Path, *, postgresql_url: str | None, seed: int) -> Report:
    with running_world(postgresql_url=postgresql_url) as world:
        report = run_campaign(
            world,
            rounds=ROUNDS,
            seed=seed,
            profile_file=llama_folder / "profile.json",
            pause_s=PAUSE_S,
            most_at_once=MOST_AT_ONCE,
        )
        if report.broken or report.ended_alone:
            print(world.logs())
    return report


def check(report: Report) -> None:
    assert not report.broken
    assert not report.ended_alone
    assert report.rounds == ROUNDS
    assert len(report.struck) >= LEAST_KINDS
    assert report.facts["ends"]["succeeded"] > 0
