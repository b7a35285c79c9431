"""A person's words on which column holds what."""

from typing import Any

import pytest

from optimizer.base.errors import InvalidDataset
from optimizer.data.samples.columns import Columns, read_columns


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("prompt=ask, completion=reply", Columns(kind="prompt_completion", prompt="ask", completion="reply")),
        ({"messages": "turns", "system": "rules"}, Columns(kind="messages", messages="turns", system="rules")),
        ('{"text": "a, b=c"}', Columns(kind="text", text="a, b=c")),
        ("chosen=yes,rejected=no", Columns(kind="preference", chosen="yes", rejected="no")),
        ("", None),
        (" , ", None),
        ({}, None),
        (None, None),
    ],
)
def test_the_parts_decide_the_kind(said: Any, expected: Columns | None) -> None:
    found = read_columns(said)
    assert found == expected
    if found is not None:
        assert read_columns(found.by_part) == found


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("ask", "columns is 'ask'; allowed: prompt=COLUMN, completion=COLUMN, each part once"),
        ("text=a, text=b", "each part once"),
        ("kind=text", "columns names the part 'kind'; allowed: chosen, completion, input"),
        ("prompt=ask", "columns holds prompt, which together make no sample; allowed: messages; prompt and completion"),
        ("text=a, messages=b", "which together make no sample"),
        ("text=", "columns.text is ''; allowed: a column's name"),
        ({"text": 3}, "columns.text is '3'; allowed: a column's name"),
        ("{", "columns is no JSON"),
        (["text"], "columns is a list"),
    ],
)
def test_what_makes_no_sample_is_refused(said: Any, why: str) -> None:
    with pytest.raises(InvalidDataset) as refused:
        read_columns(said)
    assert why in str(refused.value)
    assert refused.value.fields["field"] == "columns"
