"""Plain tables on a terminal: columns as wide as their widest cell."""

from collections.abc import Sequence


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """empty: what is printed where there are no rows."""
    if not rows:
        print(empty)
        return
    widths = [max(len(str(row[index])) for row in [heads, *rows]) for index in range(len(heads))]
    for row in [heads, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
