"""A stored profile is read strictly, and is small."""

import json
from typing import Any

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.profile.profile import PROFILE_VERSION, Profile


@pytest.fixture(scope="module")
def document(profile: Profile) -> str:
    return json.dumps(profile.to_json())


def test_each_op_change_and_part_is_held_once(profile: Profile) -> None:
    assert len(set(profile.ops)) == len(profile.ops)
    assert len(set(profile.changes)) == len(profile.changes)
    assert len(set(profile.parts)) == len(profile.parts)


def test_a_profile_is_small_enough_to_keep_in_a_database_row(document: str) -> None:
    assert len(document) < 512 * 1024


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("parts", 0, "ops"), r"profile.parts\[0\].ops points to -1"),
        (("parts", 0, "changes"), r"profile.parts\[0\].changes points to -1"),
        (("regimes", "fp32", 0, "block_templates"), r"profile.regimes.fp32\[0\].block_templates points to -1"),
    ],
)
def test_an_index_that_points_to_nothing_is_refused_by_name(
    document: str, place: tuple[Any, ...], message: str
) -> None:
    changed = json.loads(document)
    indices = changed
    for key in place:
        indices = indices[key]
    indices[0] = -1
    with pytest.raises(InvalidModel, match=message):
        Profile.from_json(changed)


def test_a_profile_of_an_earlier_version_is_refused(document: str) -> None:
    with pytest.raises(InvalidModel, match=f"profile.version is 1; allowed: {PROFILE_VERSION}"):
        Profile.from_json({**json.loads(document), "version": 1})
