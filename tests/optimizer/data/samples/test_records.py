"""Files of rows become records; what cannot be used is refused with its line."""

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from optimizer.base.errors import InvalidDataset
from optimizer.data.samples.columns import Columns
from optimizer.data.samples.records import Record, read_records

Write = Callable[[bytes | str], Path]
TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: bytes | str) -> Path:
        path = tmp_path / "dataset"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def _one(write: Write, row: dict[str, Any], columns: Columns | None = None) -> Record:
    [record] = read_records(write(json.dumps(row)), format="jsonl", columns=columns)
    return record


def _refusal(path: Path, format: Any) -> InvalidDataset:
    with pytest.raises(InvalidDataset) as caught:
        list(read_records(path, format=format))
    assert caught.value.fields["allowed"]
    return caught.value


def test_jsonl_gives_texts_and_messages_and_passes_over_empty_ones(write: Write) -> None:
    lines = [{"text": "one", "other": 1}, {"text": ""}, {"messages": [{**TURN[0], "extra": 1}, TURN[1]]}]
    read = list(read_records(write("\n".join(map(json.dumps, lines)) + "\n\n"), format="jsonl"))
    assert [record.text for record in read] == ["one", ""]
    assert read[1].messages == tuple(TURN)
    assert [record.where for record in read] == ["line 1", "line 3"]


def test_messages_keep_tools_calls_and_parts_of_text(write: Write) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answer = {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
    record = _one(write, {"messages": [TURN[0], call, answer, TURN[1]], "tools": [{"name": "f"}]})
    assert record.tools == ({"name": "f"},)
    assert record.messages[1] == {**call, "content": ""}
    assert record.messages[2] == {"role": "tool", "content": "42"}


def test_sharegpt_is_read_as_messages(write: Write) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "there"}]
    assert _one(write, {"conversations": turns, "system": "Be kind."}).messages == (
        {"role": "system", "content": "Be kind."},
        *TURN,
    )


def test_alpaca_is_a_prompt_with_its_input_and_a_completion(write: Write) -> None:
    record = _one(write, {"instruction": "Add.", "input": "1 and 2", "output": "3"})
    assert (record.prompt, record.completion) == ("Add.\n\n1 and 2", "3")
    assert _one(write, {"instruction": "Add.", "input": "", "output": "3"}).prompt == "Add."


def test_a_prompt_and_a_completion_may_be_messages(write: Write) -> None:
    assert _one(write, {"prompt": [TURN[0]], "completion": [TURN[1]]}).messages == tuple(TURN)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "there", "rejected": "no"},
        {"chosen": TURN, "rejected": [TURN[0], {"role": "assistant", "content": "no"}]},
        {"prompt": [TURN[0]], "chosen": TURN, "rejected": [{"role": "assistant", "content": "no"}]},
    ],
)
def test_preference_pairs_hold_both_answers_after_the_same_prompt(write: Write, row: dict[str, Any]) -> None:
    record = _one(write, row)
    assert record.messages == tuple(TURN)
    assert record.rejected is not None
    assert record.rejected.messages == (TURN[0], {"role": "assistant", "content": "no"})


def test_columns_can_be_named(write: Write) -> None:
    columns = Columns(kind="prompt_completion", prompt="frage", completion="antwort")
    record = _one(write, {"frage": "hi", "antwort": "there", "text": "x"}, columns)
    assert (record.prompt, record.completion) == ("hi", "there")


def test_a_json_array_and_csv_are_read_row_by_row(write: Write) -> None:
    [record] = read_records(write(json.dumps([{"messages": TURN}])), format="json")
    assert (record.where, record.messages) == ("entry 1", tuple(TURN))
    read = list(read_records(write('prompt,completion\nhi,"there, you"\na,b\n'), format="csv"))
    assert [(record.prompt, record.completion) for record in read] == [("hi", "there, you"), ("a", "b")]
    assert read[1].where == "row 2"


def test_parquet_gives_structs_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table({"id": [1], "messages": [TURN]}), path)
    assert [record.messages for record in read_records(path, format="parquet")] == [tuple(TURN)]
    parquet.write_table(pa.table({"text": [f"text {row}" for row in range(199)] + [""]}), path)
    assert [record.text for record in read_records(path, format="parquet")] == [f"text {row}" for row in range(199)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{bad", "not JSON"),
        ("[1]", "a JSON list"),
        ("{}", "columns none"),
        ('{"body": "x"}', "columns body"),
        ('{"text": 7}', "text is 7"),
        ('{"text": "a\\u0000b"}', "text holds a NUL character"),
        ('{"text": "\\ud800"}', "text holds half a surrogate pair"),
        ('{"messages": []}', "messages is not a list with entries"),
        ('{"messages": ["hi"]}', "messages[0] is not an object"),
        ('{"messages": [{"role": "user"}]}', "no messages[0].content"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "messages[0].role is 1"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "parts other than text"),
        ('{"prompt": "hi", "completion": " "}', "completion is empty"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "nothing"}', "tools is a text that is no JSON"),
        ('{"text": "x", "deep": ' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32"),
        ('{"deep": ' + "[" * 200_000, "not JSON"),
        ('{"number": ' + "9" * 10_000 + "}", "not JSON"),
    ],
)
def test_a_bad_line_of_jsonl_is_refused_by_number(line: str, found: str, write: Write) -> None:
    error = _refusal(write('{"text": "fine"}\n' + line + "\n"), "jsonl")
    assert error.fields["field"] == "dataset.line 2"
    assert found in str(error)


@pytest.mark.parametrize(
    ("content", "format", "found"),
    [
        ("[1, 2]", "json", "a JSON int"),
        ('"text"', "json", "no JSON array"),
        ("{bad", "json", "not JSON"),
        ("prompt,completion\na,b,c\n", "csv", "another number of fields"),
        ('prompt,completion\n"a,b\n', "csv", "not CSV"),
    ],
)
def test_what_is_no_table_is_refused(content: str, format: str, found: str, write: Write) -> None:
    assert found in str(_refusal(write(content), format))


@pytest.mark.parametrize(
    ("columns", "where", "found"),
    [
        ({"body": ["x"]}, "row 1", "columns body"),
        ({"text": [1, 2]}, "row 1", "text is 1"),
        ({"text": ["x", None]}, "row 2", "no text"),
        ({"text": ["x", "a\0b"]}, "row 2", "text holds a NUL character"),
        ({"text": ["x" * 1_000_001]}, "row 1", "text of 1,000,001 characters"),
        ({f"c{index}": [1] for index in range(1_001)}, "the file", "1,001 columns"),
    ],
)
def test_bad_parquet_is_refused_by_row_or_column(columns: dict[str, Any], where: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table(columns), path)
    error = _refusal(path, "parquet")
    assert error.fields["field"] == f"dataset.{where}"
    assert found in str(error)


@pytest.mark.parametrize(
    "columns",
    [{"text": ["x" * 500_000] * 2, "note": ["y" * 4_000_000] * 2}, {"text": ["x"] * 2, "more": [["y" * 500_000] * 10] * 2}],
    ids=["flat", "beside a list"],
)
def test_rows_that_unpack_to_much_are_refused_whichever_column_it_is(columns: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table(columns), path, compression="zstd", use_dictionary=False)
    found = str(_refusal(path, "parquet"))
    assert "unpack to" in found
    assert "allowed: at most 4,000,000 bytes a row" in found


def test_too_many_row_groups_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table({"text": ["x"] * 10_001}), path, row_group_size=1)
    assert "10,001 row groups; allowed: at most 10,000" in str(_refusal(path, "parquet"))


def test_what_is_no_parquet_at_all_is_refused(write: Write) -> None:
    assert "not readable as parquet" in str(_refusal(write(b"PAR1 and nothing else"), "parquet"))


def test_a_column_that_contradicts_its_statistics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset.parquet"
    parquet.write_table(pa.table({"text": [f"text {row}" for row in range(50)]}), path)
    content, (texts, numbers) = path.read_bytes(), (b"\x15\x0c%\x02\x18\x04text", b"\x15\x02%\x02\x18\x04text")
    assert content.count(texts) == 1  # the schema says what the column is
    path.write_bytes(content.replace(texts, numbers))
    assert "not readable as parquet" in str(_refusal(path, "parquet"))


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 100_000), value=st.integers(0, 255))
def test_a_broken_parquet_is_read_or_refused_but_never_crashes(position: int, value: int) -> None:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        parquet.write_table(pa.table({"text": [f"text {row}" for row in range(50)]}), file.name, write_page_checksum=True)
        content = bytearray(Path(file.name).read_bytes())
        content[position % len(content)] = value
        Path(file.name).write_bytes(content)
        with contextlib.suppress(InvalidDataset):
            assert all(isinstance(record.text, str) for record in read_records(file.name, format="parquet"))
