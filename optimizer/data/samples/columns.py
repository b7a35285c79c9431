"""The columns of a file's rows and what each holds: found by their usual names, or said by a person.

A person says it as ``prompt=ask, completion=reply``: parts of a sample with the columns that hold them. The parts decide the
kind of the rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from optimizer.base.errors import InvalidDataset
from optimizer.base.serialize import to_json

Kind = Literal["messages", "prompt_completion", "text", "preference"]
KINDS: tuple[Kind, ...] = ("messages", "prompt_completion", "text", "preference")
Row = Mapping[str, Any]
MAX_NAME_CHARACTERS = 200

_NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "chat"),
    "prompt": ("prompt", "instruction", "question", "query"),
    "input": ("input", "context"),
    "completion": ("completion", "output", "response", "answer"),
    "text": ("text", "content", "document"),
    "chosen": ("chosen", "preferred"),
    "rejected": ("rejected", "dispreferred"),
    "tools": ("tools", "functions"),
    "system": ("system", "system_prompt"),
}
"""Columns by what they hold, the usual names first."""
_NEEDED: Mapping[Kind, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Parts that make up each kind."""
_ALLOWED: Mapping[Kind, tuple[str, ...]] = {
    "preference": ("prompt", "tools", "system"),
    "messages": ("tools", "system"),
    "prompt_completion": ("input", "tools", "system"),
    "text": (),
}
"""Parts that a kind may have besides."""
FORM = "prompt=COLUMN, completion=COLUMN"
_ALLOWED_WORDS = "messages; prompt and completion; chosen and rejected; or text; with input, tools and system where they fit"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The kind of a dataset's rows and the column that holds each part; an empty name where there is none."""

    kind: Kind
    messages: str = ""
    prompt: str = ""
    input: str = ""
    """Alpaca's second half of the instruction."""
    completion: str = ""
    text: str = ""
    chosen: str = ""
    rejected: str = ""
    tools: str = ""
    system: str = ""

    @property
    def main(self) -> str:
        """The column that a row of the kind cannot lack."""
        part = {"prompt_completion": "completion", "preference": "chosen"}.get(self.kind, self.kind)
        return str(getattr(self, part))

    @property
    def by_part(self) -> dict[str, str]:
        """The columns there are, by part; ``read_columns`` reads it."""
        return {part: name for part, name in to_json(self).items() if name and part != "kind"}


def read_columns(document: Any) -> Columns | None:
    """The columns that a person says, as ``{part: column}``, the same as JSON, or one text; None for nothing.

    Raises InvalidDataset that names the part.
    """
    said = _split(document) if isinstance(document, str) else document
    if said is None or said == {}:
        return None
    if not isinstance(said, Mapping):
        raise _refusal(f"columns is a {type(said).__name__}", allowed=FORM)
    parts = {field.name for field in fields(Columns)} - {"kind"}
    for part, name in said.items():
        if part not in parts:
            raise _refusal(f"columns names the part {str(part)[:40]!r}", allowed=", ".join(sorted(parts)))
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise _refusal(f"columns.{part} is {str(name)[:40]!r}", allowed="a column's name")
    for kind, needed in _NEEDED.items():
        if set(needed) <= set(said) <= {*needed, *_ALLOWED[kind]}:
            return Columns(kind=kind, **said)
    raise _refusal(f"columns holds {', '.join(said)}, which together make no sample", allowed=_ALLOWED_WORDS)


def _split(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"columns is no JSON ({str(error)[:80]})", allowed=FORM) from error
    said: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        part, equals, name = (piece.strip() for piece in entry.partition("="))
        if not equals or part in said:
            raise _refusal(f"columns is {text[:80]!r}", allowed=f"{FORM}, each part once")
        said[part] = name
    return said or None


def find_columns(row: Row, *, where: str) -> Columns:
    """The kind of a row by its columns. Raises InvalidDataset that lists them where no kind fits."""
    named = {part: next((name for name in names if name in row), "") for part, names in _NAMES.items()}
    shared = {part: named[part] for part in ("tools", "system")}
    if named["chosen"] and named["rejected"]:
        chosen = {part: named[part] for part in ("chosen", "rejected", "prompt")}
        return Columns(kind="preference", **chosen, **shared)
    if named["messages"] and isinstance(row[named["messages"]], Sequence) and not isinstance(row[named["messages"]], str):
        return Columns(kind="messages", messages=named["messages"], **shared)
    if named["completion"] and (named["prompt"] or named["input"]):
        asked = named["prompt"] or named["input"]
        more = named["input"] if named["input"] != asked else ""
        return Columns(kind="prompt_completion", prompt=asked, input=more, completion=named["completion"], **shared)
    if named["text"]:
        return Columns(kind="text", text=named["text"])
    raise _invalid(
        where,
        f"columns {', '.join(str(name) for name in list(row)[:10]) or 'none'}",
        allowed="messages; prompt and completion; instruction and output; chosen and rejected; or text",
        hint=f"Say which column holds what, if they have other names: columns, as {FORM}.",
    )


def _invalid(where: str, found: str, *, allowed: str, hint: str = "") -> InvalidDataset:
    message = f"dataset, {where}: {found}; allowed: {allowed}"
    return InvalidDataset(message, field=f"dataset.{where}", value=found, allowed=allowed, hint=hint)


def _refusal(found: str, *, allowed: str) -> InvalidDataset:
    return InvalidDataset(f"{found}; allowed: {allowed}", field="columns", value=found, allowed=allowed)
