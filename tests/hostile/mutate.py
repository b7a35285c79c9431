"""Makes hostile uploads of valid ones without end: bytes flipped, cut, put in or doubled, JSON with a thing or two changed.

The same seed and number give the same upload.
"""

import json
import random
import struct
from typing import Any

from tests.fuzzing import JUNK, change_document, list_paths
from tests.hostile.upload import Part, Upload
from tests.hostile.valid import VALID

KINDS = tuple(VALID)
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_MARKS = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b'"', b"[" * 2_000, b"{{", b"PK\x03\x04")
_NAMES = ("../x.safetensors", "a/b.safetensors", "ä.safetensors", "model.bin", ".safetensors", "x" * 300, "con\x01fig")


def mutated(seed: int, number: int) -> tuple[str, Upload]:
    """The kind it was made of, and the upload."""
    drawn = random.Random(f"{seed} {number}")
    kind = drawn.choice(KINDS)
    parts = list(VALID[kind])
    for _ in range(drawn.choice((1, 1, 1, 2, 3))):
        index = drawn.randrange(len(parts))
        # a model's other files are of more interest than its config, which each of them has
        index = index or drawn.randrange(len(parts))
        parts[index] = _change(parts[index], drawn)
    if drawn.random() < 0.02:
        parts.append(drawn.choice(parts))
    return kind, tuple(parts)


def _change(part: Part, drawn: random.Random) -> Part:
    if drawn.random() < 0.03:
        return Part(field=part.field, name=drawn.choice(_NAMES), content=part.content)
    return Part(field=part.field, name=part.name, content=_change_content(part, drawn))


def _change_content(part: Part, drawn: random.Random) -> bytes:
    if drawn.random() < 0.6:
        if part.name.endswith(".safetensors") and len(part.content) > 8:
            return _change_header(part.content, drawn)
        if part.name.endswith(".json"):
            return _change_json(part.content, drawn)
        if part.name.endswith(".jsonl"):
            rows = part.content.splitlines() or [b"{}"]
            row = drawn.randrange(len(rows))
            rows[row] = _change_json(rows[row], drawn)
            return b"\n".join(rows)
    return _change_bytes(part.content, drawn)


def _change_header(content: bytes, drawn: random.Random) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + length], content[8 + length :]
    changed = _change_json(header, drawn)
    told = drawn.choice(_NUMBERS) if drawn.random() < 0.1 else len(changed)
    return struct.pack("<Q", told) + changed + data


def _change_json(content: bytes, drawn: random.Random) -> bytes:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _change_bytes(content, drawn)
    paths = list(list_paths(document))
    if not paths or drawn.random() < 0.05:
        return json.dumps(drawn.choice(JUNK)).encode()
    changes = []
    for _ in range(drawn.choice((1, 1, 2))):
        value: Any = drawn.choice(JUNK) if drawn.random() < 0.7 else drawn.choice(_NUMBERS)
        changes.append((drawn.choice(("replace", "replace", "leave out", "add")), drawn.choice(paths), value))
    text = json.dumps(change_document(document, changes))
    if drawn.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]  # each key twice
    return text.encode()


def _change_bytes(content: bytes, drawn: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(drawn.choice((1, 1, 2, 4))):
        place, end = drawn.randrange(len(changed) + 1), drawn.randrange(len(changed) + 1)
        how = drawn.randrange(7)
        if how == 0 and place < len(changed):
            changed[place] ^= 1 << drawn.randrange(8)
        elif how == 1:
            del changed[place:]
        elif how == 2:
            del changed[min(place, end) : min(place, end) + drawn.randrange(1, 9)]
        elif how == 3:
            changed[place:place] = drawn.randbytes(drawn.randrange(1, 9))
        elif how == 4:
            changed[place:place] = changed[min(place, end) : max(place, end)]
        elif how == 5:
            number = struct.pack("<Q", drawn.choice(_NUMBERS))[: drawn.choice((1, 2, 4, 8))]
            changed[place : place + len(number)] = number
        else:
            changed[place:place] = drawn.choice(_MARKS)
    return bytes(changed)
