"""Gathers the lengths of a file's texts, and its first ones, while it is read once. Torch-free."""

from collections import Counter
from dataclasses import dataclass, field

MAX_RECORDS = 5
MAX_RECORD_CHARACTERS = 300


@dataclass(kw_only=True)
class Texts:
    """Feed it text after text; a text may come in pieces."""

    records: list[str] = field(default_factory=list)
    """The beginnings of the first MAX_RECORDS."""
    _doublings: Counter[int] = field(default_factory=Counter)
    _pieces_length: int | None = None
    """Length of the pieces so far of a text that goes on."""

    def add(self, text: str, *, continues: bool = False) -> None:
        """continues: the next one belongs to the same text."""
        is_new = self._pieces_length is None
        if is_new and len(self.records) < MAX_RECORDS:
            self.records.append(text[:MAX_RECORD_CHARACTERS])
        elif not is_new and not self._is_past_records:
            self.records[-1] = (self.records[-1] + text)[:MAX_RECORD_CHARACTERS]
        length = (self._pieces_length or 0) + len(text)
        self._pieces_length = length if continues else None
        if not continues:
            self._doublings[length.bit_length()] += 1

    def lengths(self) -> tuple[tuple[int, int], ...]:
        """``(characters, texts)``: so many texts are shorter than this power of two and not shorter than half of it."""
        return tuple((2**doubling, count) for doubling, count in sorted(self._doublings.items()))

    @property
    def _is_past_records(self) -> bool:
        return self._doublings.total() >= MAX_RECORDS
