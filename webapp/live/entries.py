"""Events as browsers read them, and entries of the Redis stream: each is decoded and encoded once, for all who watch."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a job's stream."""

    identifier: str
    position: tuple[int, int]
    """Orders entries: milliseconds, and a number within them."""
    kind: str
    data: dict[str, Any]
    event: bytes


def read_entry(identifier: str, text: str) -> Entry:
    """From the id and the JSON text that Redis holds."""
    document = json.loads(text)
    kind, data = document["type"], document["data"]
    event = encode_event(kind, data, identifier=identifier)
    return Entry(identifier=identifier, position=position_of(identifier), kind=kind, data=data, event=event)


def position_of(identifier: str) -> tuple[int, int]:
    milliseconds, _, number = identifier.partition("-")
    return int(milliseconds), int(number or 0)


def encode_event(kind: str, document: dict[str, Any], *, identifier: str = "") -> bytes:
    """JSON on one line has no newline, so one ``data:`` line is enough."""
    head = f"id: {identifier}\n" if identifier else ""
    return f"{head}event: {kind}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
