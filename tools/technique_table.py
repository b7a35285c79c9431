"""Writes the tables of docs/techniques.md that list every technique and every decision of a plan, from their declarations.

``python -m tools.technique_table`` replaces what stands between the marks; ``--check`` exits 1 where that would change anything.
"""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.knob import Knob
from optimizer.plan.pins.generation_knobs import generation_knobs
from optimizer.plan.pins.training import knob_kinds
from optimizer.plan.techniques import DECLARATIONS, KNOBS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "techniques.md"
BEGIN, END = "<!-- written by python -m tools.technique_table -->", "<!-- end -->"
_LAYOUT: Final = {f"layout.{field.name}": field.type for field in dataclasses.fields(GenerationLayout)}
"""Decisions of generations that the search alone makes."""
_LOSSES: Final = {"none": "same", "rounding": "rounded", "any": "differ"}


def list_rows() -> Iterator[str]:
    """Both tables, line by line."""
    yield "| `--forbid` | what it does | numbers | for |"
    yield "|---|---|---|---|"
    for name, declared in DECLARATIONS.items():
        yield f"| `{name}` | {declared.sentence} | {_LOSSES[declared.loss]} | {', '.join(declared.searches)} |"
    yield ""
    yield "| decision | values | techniques | needs |"
    yield "|---|---|---|---|"
    kinds = {**_LAYOUT, **generation_knobs(), **knob_kinds()}
    for path, knob in KNOBS.items():
        techniques = ", ".join(f"`{name}`" for name in dict.fromkeys(use.technique for use in knob.uses))
        yield f"| `{path}` | {_list_values(kinds[path])} | {techniques} | {_list_packages(knob, kinds[path])} |"


def _list_values(kind: Any) -> str:
    literals = [value for part in (kind, *typing.get_args(kind)) for value in _literals(part)]
    if literals:
        return ", ".join(f"`{value}`" for value in dict.fromkeys(literals))
    if kind == tuple[int, ...]:
        return "a number for each device"
    return "yes or no" if kind is bool else "a number"


def _literals(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _list_packages(knob: Knob, kind: Any) -> str:
    values = _literals(kind)
    found = []
    for package in knob.packages:
        asking = [f"`{value}`" for value in values if package.asks(value)]
        found.append(f"{package.name} for {', '.join(asking)}" if asking else package.name)
    return "; ".join(found)


def write_page(text: str) -> str:
    """The page with its tables as they are declared now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *list_rows(), END + after])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the page is not current")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    written = write_page(text)
    if options.check:
        return int(written != text)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
