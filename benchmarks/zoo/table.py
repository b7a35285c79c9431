"""docs/zoo.md: each model type that plain transformers trains, and how well its training is estimated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import Row

_INTRODUCTION = """\
# Every causal LM that transformers builds

Each model type of transformers' mapping of causal LMs, as a tiny model with every kind of layer it has: {trained} of
{listed} are trained by plain transformers on text, and {estimated} of those are estimated and trained here. Written by
`python -m benchmarks.zoo --table docs/zoo.md`.

- Columns *plain*, *recompute* and *LoRA*: the predicted peak of the device's memory against what torch's profiler counts
  in that step, as (predicted - counted) / counted.
- Column *loss*: the loss here less transformers' own, same weights and tokens. "-" where it was not compared.
- Column *transformers*: this product's plain peak over that of plain transformers' own step with AdamW.

| model type | plain | recompute | LoRA | loss | transformers |
|---|---:|---:|---:|---:|---:|
"""
_LEFT_OUT = "\n## Trained by transformers, not here\n\n"
_NOT_TRAINED = "\n## Not trained by plain transformers on text\n\n"


def write_table(file: Path, rows: Sequence[Row]) -> None:
    """The whole page, from rows that have one type each."""
    by_outcome: dict[str, list[Row]] = {}
    for row in rows:
        by_outcome.setdefault(row["outcome"], []).append(row)
    estimated = by_outcome.get("estimated", [])
    left_out = [*by_outcome.get("refused", []), *by_outcome.get("broken", [])]
    not_trained = by_outcome.get("not trained by transformers", [])
    page = _INTRODUCTION.format(trained=len(estimated) + len(left_out), listed=len(rows), estimated=len(estimated))
    page += "".join(_write_line(row) for row in estimated)
    page += _LEFT_OUT + ("".join(_write_reason(row) for row in left_out) or "None.\n")
    page += _NOT_TRAINED + ("".join(_write_reason(row) for row in not_trained) or "None.\n")
    file.write_text(page)


def _write_line(row: Row) -> str:
    plans = row["plans"]
    cells = [_write_error(plans[name]) for name in ("plain", "recompute", "lora")]
    ratio = plans["plain"]["predicted_bytes"] / row["transformers_bytes"]
    return f"| {row['model_type']} | {' | '.join(cells)} | {_write_loss(row['loss'])} | {ratio:.2f} |\n"


def _write_error(plan: dict[str, Any]) -> str:
    return f"{plan['error']:+.4%}" if plan["outcome"] == "estimated" else str(plan["outcome"])


def _write_loss(loss: dict[str, Any]) -> str:
    return f"{loss['here'] - loss['transformers']:+.0e}" if "here" in loss else "-"


def _write_reason(row: Row) -> str:
    reason = str(row.get("why", "")).replace("|", "\\|")
    return f"- {row['model_type']} ({row['outcome']}): {reason}\n"
