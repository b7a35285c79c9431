"""Plain tables on a terminal: columns as wide as their widest cell, ids and moments as short as people need them."""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

LENGTH_OF_SHORT_ID = 8


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """empty: what is printed where there are no rows."""
    if not rows:
        print(empty)
        return
    widths = [max(len(str(row[index])) for row in [heads, *rows]) for index in range(len(heads))]
    for row in [heads, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="everything the API says, exactly")


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def short_id(long_id: str) -> str:
    """The last characters of an id, which commands take in its place: ids made in the same minute begin alike."""
    return long_id[-LENGTH_OF_SHORT_ID:]


def moment(at: str | None, *, empty: str = "") -> str:
    """A moment in this machine's time zone; of today only the time. at: in ISO 8601, as the API has it."""
    if not at:
        return empty
    local = datetime.fromisoformat(at).astimezone()
    is_today = local.date() == datetime.now(UTC).astimezone().date()
    return f"{local:%H:%M:%S}" if is_today else f"{local:%Y-%m-%d %H:%M}"
