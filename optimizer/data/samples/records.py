"""Training examples as people keep them, read from a file into one form: conversations, prompts with completions, texts, pairs.

A row is an object of a JSON or JSONL file, or a row of a CSV or Parquet file. Its kind is found by the names and values of its
columns; ``Columns`` overrides what was found. The first row that cannot be used ends the reading, with its line.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optimizer.base.errors import InvalidDataset
from optimizer.data.documents import MAX_DEPTH, MAX_LINE_BYTES, check_is_file, is_shallow, read_lines
from optimizer.data.samples.columns import Columns, Row, find_columns
from optimizer.data.samples.parquet_rows import read_parquet_rows

RowFormat = Literal["jsonl", "json", "csv", "parquet"]
ROW_FORMATS: tuple[RowFormat, ...] = ("jsonl", "json", "csv", "parquet")
MAX_JSON_BYTES = 1_000_000_000
"""Size of a JSON array, which is read whole."""
MAX_MESSAGES = 10_000

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bot": "assistant",
          "model": "assistant",
          "assistant": "assistant", "system": "system", "developer": "developer", "tool": "tool", "observation": "tool",
          "function": "tool", "function_call": "assistant"}  # fmt: skip
"""ShareGPT's names of who speaks, as templates name them."""
_SAID_BESIDE = frozenset(("tool_calls", "reasoning_content", "thinking"))
"""Parts of a message that templates write besides its content."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: messages that end with an answer, a prompt with its completion, or a text."""

    where: str
    """Line or row, for errors."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""
    text: str = ""
    rejected: "Record | None" = field(default=None)
    """The worse answer of a preference pair; the record itself is the better one."""

    @property
    def has_words(self) -> bool:
        """Anything but blanks to learn: in an answer, or in any message where nobody answers."""
        messages = self.messages if self.rejected is None else (*self.messages, *self.rejected.messages)
        answers = [message for message in messages if message["role"] == "assistant"] or messages
        is_said = any(message["content"].strip() or set(message) & _SAID_BESIDE for message in answers)
        return is_said or bool(self.text.strip() or self.completion.strip())


def read_records(path: str | Path, *, format: RowFormat, columns: Columns | None = None) -> Iterator[Record]:
    """Records in the order of the file; without ``columns`` rows of several kinds may be mixed.

    Raises InvalidDataset, while iterating, at the first row that cannot be used.
    """
    check_is_file(Path(path))
    found = columns
    for where, row in read_rows(Path(path), format=format):
        if found is None or (columns is None and found.main not in row):
            found = find_columns(row, where=where)
        record = _read_record(row, found, where=where)
        if record is not None:
            yield record


def read_rows(path: Path, *, format: RowFormat) -> Iterator[tuple[str, Row]]:
    """Each row with its place in the file."""
    if format == "jsonl":
        return _read_jsonl(path)
    if format == "json":
        return _read_json(path)
    if format == "csv":
        return _read_csv(path)
    return read_parquet_rows(path)


def _read_record(row: Row, columns: Columns, *, where: str) -> Record | None:
    """None for a text of nothing but blanks."""
    tools = _read_tools(row.get(columns.tools), where=where) if columns.tools else ()
    if columns.kind == "messages":
        messages = _read_messages(row.get(columns.messages), name=columns.messages, where=where)
        return Record(where=where, messages=_with_system(messages, row, columns), tools=tools)
    if columns.kind == "preference":
        return _read_pair(row, columns, where=where, tools=tools)
    if columns.kind == "text":
        text = _read_text(row.get(columns.text), name=columns.text, where=where)
        return Record(where=where, text=text) if text.strip() else None
    prompt, completion = row.get(columns.prompt), row.get(columns.completion)
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = _as_messages(prompt, role="user", name=columns.prompt, where=where)
        answered = _as_messages(completion, role="assistant", name=columns.completion, where=where)
        return Record(where=where, messages=_with_system((*asked, *answered), row, columns), tools=tools)
    asked_text = _read_text(prompt, name=columns.prompt, where=where)
    more = _read_text(row.get(columns.input) or "", name=columns.input, where=where) if columns.input else ""
    answer = _read_text(completion, name=columns.completion, where=where)
    if not answer.strip():
        raise _invalid(where, f"{columns.completion} is empty", allowed="an answer to train on")
    return Record(where=where, prompt=f"{asked_text}\n\n{more}" if more.strip() else asked_text, completion=answer)


def _read_pair(row: Row, columns: Columns, *, where: str, tools: tuple[Mapping[str, Any], ...]) -> Record:
    prompt = row.get(columns.prompt) if columns.prompt else None
    asked = () if prompt is None else _as_messages(prompt, role="user", name=columns.prompt, where=where)
    both = []
    for name in (columns.chosen, columns.rejected):
        answered = _as_messages(row.get(name), role="assistant", name=name, where=where)
        whole = answered if asked and answered[: len(asked)] == asked else (*asked, *answered)
        both.append(Record(where=where, messages=_with_system(whole, row, columns), tools=tools))
    return Record(where=where, messages=both[0].messages, tools=tools, rejected=both[1])


def _as_messages(value: Any, *, role: str, name: str, where: str) -> tuple[Message, ...]:
    if isinstance(value, list):
        return _read_messages(value, name=name, where=where)
    return ({"role": role, "content": _read_text(value, name=name, where=where)},)


def _with_system(messages: tuple[Message, ...], row: Row, columns: Columns) -> tuple[Message, ...]:
    system = row.get(columns.system) if columns.system else None
    if isinstance(system, str) and system.strip() and (not messages or messages[0]["role"] != "system"):
        return ({"role": "system", "content": system}, *messages)
    return messages


def _read_messages(value: Any, *, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise _invalid(where, f"{name} is not a list with entries", allowed='a list of {"role", "content"}')
    return tuple(_read_message(entry, f"{name}[{index}]", where=where) for index, entry in enumerate(value))


def _read_message(entry: Any, name: str, *, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise _invalid(where, f"{name} is not an object", allowed='{"role", "content"} or {"from", "value"}')
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    speaker = _read_text(role, name=f"{name}.role", where=where)
    text = _read_content(content, entry, name, where=where)
    message: Message = {"role": _ROLES.get(speaker.lower(), speaker), "content": text}
    for kept in ("tool_calls", "name", "tool_call_id", "reasoning_content", "thinking"):
        if entry.get(kept) is not None:
            message[kept] = entry[kept]
    return message


def _read_content(content: Any, entry: Mapping[str, Any], name: str, *, where: str) -> str:
    """Text, or parts of type text joined; empty where the message calls tools."""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) and part.get("type", "text") == "text" else {} for part in content]
        texts = [part.get("text") for part in parts]
        if texts and all(isinstance(text, str) for text in texts):
            content = "".join(str(text) for text in texts)
        else:
            raise _invalid(where, f"{name}.content has parts other than text", allowed="parts of type text")
    if content is None and entry.get("tool_calls"):
        return ""
    return _read_text(content, name=f"{name}.content", where=where)


def _read_tools(value: Any, *, where: str) -> tuple[Mapping[str, Any], ...]:
    """A list of objects, or the same as JSON in a text, as some datasets keep it."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(where, "tools is a text that is no JSON", allowed="a list of objects") from error
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise _invalid(where, "tools is not a list of objects", allowed="a list of objects")
    return tuple(value)


def _read_text(value: Any, *, name: str, where: str) -> str:
    if not isinstance(value, str):
        found = f"no {name}" if value is None else f"{name} is {str(value)[:60]}"
        raise _invalid(where, found, allowed=f"{name} as a text")
    if len(value) > MAX_LINE_BYTES:
        raise _invalid(where, f"{name} of {len(value):,} characters", allowed=f"at most {MAX_LINE_BYTES:,}")
    if "\0" in value:
        raise _invalid(where, f"{name} holds a NUL character", allowed="text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _invalid(where, f"{name} holds half a surrogate pair", allowed="text that UTF-8 can hold") from error
    return value


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in read_lines(path):
        if line.strip():
            yield f"line {number}", _parse(line, where=f"line {number}")


def _parse(text: str, *, where: str) -> Row:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"not JSON ({error}): {text[:60]!r}", allowed="one JSON object a line") from error
    return _checked_row(row, where=where)


def _checked_row(row: Any, *, where: str) -> Row:
    if not isinstance(row, dict):
        raise _invalid(where, f"a JSON {type(row).__name__}", allowed="an object")
    if not is_shallow(row, MAX_DEPTH):
        raise _invalid(where, f"nested deeper than {MAX_DEPTH}", allowed=f"at most {MAX_DEPTH} levels")
    return row


def _read_json(path: Path) -> Iterator[tuple[str, Row]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        found, allowed = f"{path.stat().st_size:,} bytes", f"at most {MAX_JSON_BYTES:,}"
        raise _invalid("the file", found, allowed=allowed, hint="Send JSONL: one object a line.")
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _invalid("the file", f"not JSON ({str(error)[:200]})", allowed="a JSON array of objects") from error
    if isinstance(rows, dict):
        rows = next((value for value in rows.values() if isinstance(value, list)), None)
    if not isinstance(rows, list):
        raise _invalid("the file", "no JSON array", allowed="a JSON array of objects")
    for number, row in enumerate(rows, start=1):
        yield f"entry {number}", _checked_row(row, where=f"entry {number}")


def _read_csv(path: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = (f"{line}\n" for _, line in read_lines(path))
    reader = csv.DictReader(lines, strict=True)
    try:
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                allowed = f"{len(reader.fieldnames or ())}"
                raise _invalid(f"row {number}", "another number of fields than the header has", allowed=allowed)
            yield f"row {number}", row
    except csv.Error as error:
        allowed = "CSV with a header, quoted by double quotes"
        raise _invalid("the file", f"not CSV ({str(error)[:200]})", allowed=allowed) from error


def _invalid(where: str, found: str, *, allowed: str, hint: str = "") -> InvalidDataset:
    message = f"dataset, {where}: {found}; allowed: {allowed}"
    return InvalidDataset(message, field=f"dataset.{where}", value=found, allowed=allowed, hint=hint)
