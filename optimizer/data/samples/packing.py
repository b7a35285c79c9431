"""Best-fit decreasing: samples into rows of equal length, each sample whole and in one row.

The longest sample goes first, each into the row whose remaining room it fits best (Johnson 1973; as TRL packs). Costs
O(n log n + n * length / 64) time; a million samples take seconds. Torch-free.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def pack_best_fit(lengths: Sequence[int] | IntArray, *, row_length: int) -> list[list[int]]:
    """Indices of the samples in each row, in the order in which they stand there.

    lengths: from 1 to ``row_length``. The same lengths give the same rows; of equal samples the earlier one goes first.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    """Rows by the room that is left in them."""
    rooms = 0
    """A bit for each room that some row has: the lowest one from a length on is the best fit."""
    for index in order.tolist():
        length = int(lengths[index])
        above = rooms >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - length
        if left:
            open_rows.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows
