"""Finds the few blocks that show everything: each block of a deep model is an instance of one in a short model.

A block's surroundings are its own kind, its neighbours' kinds, and whether it is first or last. Two blocks with equal
surroundings do the same, so a model whose repeated surroundings are cut out profiles like the whole.
"""

from collections.abc import Sequence


def shorten_blocks(kinds: Sequence[str]) -> tuple[list[str], list[int]]:
    """Kinds of a short model's blocks, and for each block of the real model its instance in the short one.

    Greedy: the stretch between two blocks of equal surroundings is cut, as long as every surrounding still appears. The cost is
    that of the short model: 3 blocks for a uniform one, about twice the period for a periodic one.
    """
    short = list(range(len(kinds)))
    wanted = set(_surroundings(kinds))
    changed = True
    while changed:
        changed = False
        for start in range(len(short)):
            for end in range(len(short) - 1, start, -1):
                kept = short[:start] + short[end:]
                if set(_surroundings([kinds[index] for index in kept])) == wanted:
                    short, changed = kept, True
                    break
            if changed:
                break
    short_kinds = [kinds[index] for index in short]
    places = {surrounding: index for index, surrounding in enumerate(_surroundings(short_kinds))}
    return short_kinds, [places[surrounding] for surrounding in _surroundings(kinds)]


def _surroundings(kinds: Sequence[str]) -> list[tuple[str, str, str]]:
    padded = ["first", *kinds, "last"]
    return [(padded[index], padded[index + 1], padded[index + 2]) for index in range(len(kinds))]
