"""Shows on the terminal what training on a dataset would learn."""

from rich.console import Console
from rich.text import Text

from headroom.client import Row


def print_preview(found: Row, *, sequence_length: int, console: Console, num_samples: int | None = None) -> None:
    """num_samples: of those found, how many are shown; None for all."""
    for sample in found["samples"][:num_samples]:
        text = Text.assemble(*((part, "bold green" if learnt else "dim") for part, learnt in sample["parts"]))
        console.rule(f"{sample['num_tokens']} tokens; what is learnt is bold", align="left")
        console.print(text, soft_wrap=True)
    console.rule(align="left")
    more = "" if found["is_whole"] else " of the first"
    samples = (
        f"{found['num_samples']:,} samples{more}: {found['median_tokens']:,} tokens in the median, "
        f"{found['longest_tokens']:,} at most; {100 * found['learnt_share']:.0f} % of the tokens are learnt"
    )
    rows = (
        f"rows of {sequence_length:,}: {found['packed_rows']:,} packed, "
        f"{found['num_samples'] - found['num_left_out']:,} padded; "
        f"{found['num_cut']:,} samples are cut, {found['num_left_out']:,} left out"
    )
    lines = [samples, rows]
    if found["template"] == "default":
        lines.append("the model has no chat template of its own: plain lines are used")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
