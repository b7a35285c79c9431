"""Ids sort as rows were made, and are of their own kind."""

import uuid

from webapp.ids import new_id


def test_ids_made_one_after_another_sort_so_within_a_millisecond_too() -> None:
    made = [new_id("audit") for _ in range(2000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_an_id_is_a_uuid_of_version_7_behind_its_prefix() -> None:
    prefix, _, digits = new_id("job").partition("_")
    assert prefix == "job"
    assert uuid.UUID(digits).version == 7
    assert uuid.UUID(digits).variant == uuid.RFC_4122
