"""Calls of tools in an answer that comes piece by piece."""

import json

import pytest

from webapp.serving.tool_calls import CallReader

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def read(pieces: list[str], *, has_tools: bool = True) -> tuple[str, list[tuple[str, object]]]:
    reader = CallReader(has_tools=has_tools)
    text = "".join(reader.add(piece) for piece in pieces) + reader.end()
    return text, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reader.calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_parted_from_the_text_wherever_pieces_end(size: int) -> None:
    whole = f"Let me see.{CALL} and {CALL}!"
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert read(pieces) == ("Let me see. and !", [("look", {"at": 1})] * 2)


def test_what_is_no_call_stays_text() -> None:
    for text in ("<tool_call>soon</tool_call>", "a < b <tool", "<tool_call>{", '<tool_call>{"name": 3}</tool_call>'):
        assert read(list(text)) == (text, [])


def test_a_call_whose_end_never_came_may_be_whole() -> None:
    assert read([CALL.removesuffix("</tool_call>")]) == ("", [("look", {"at": 1})])


def test_without_tools_all_is_text() -> None:
    assert read([CALL], has_tools=False) == (CALL, [])
