"""One rank's part of a generate job: the lines that are its own, what it writes, when it stops, and what it hears of the others.

Copies of the model share the lines that wait, and each writes its answers to a file of its own; the first rank reads the others'
when all have ended. Of a model that is cut every stage runs every line, and the first alone writes. All ranks sort the lines by
themselves, from the same files; nothing is written of what they generate before all have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.workload import deal_sequences

if TYPE_CHECKING:
    from optimizer.runtime.ranks.group import Ranks

Line = TypeVar("Line")
_STOP_FILE = "stop"


@dataclass(frozen=True, kw_only=True)
class GeneratingRank:
    """This process among the ranks of a generate job; alone where there is one device."""

    layout: GenerationLayout
    rank: int = 0
    num_ranks: int = 1
    folder: Path | None = None
    """Folder in which the ranks meet."""

    @classmethod
    def read(cls, attempt: Mapping[str, Any], layout: GenerationLayout) -> "GeneratingRank":
        """attempt: as ``rank.py`` hands it to each of its ranks."""
        place = attempt.get("ranks")
        if place is None:
            return cls(layout=layout)
        return cls(layout=layout, rank=place["rank"], num_ranks=place["num_ranks"], folder=Path(place["folder"]))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    @property
    def writes(self) -> bool:
        """True if the answers that it has are written by it."""
        return self.is_first or not self.layout.is_cut

    @property
    def shares_lines(self) -> bool:
        return self.layout.num_replicas > 1

    def own_part(self, budget_bytes: int | None) -> int | None:
        """Return this rank's part of a budget of all."""
        return None if budget_bytes is None else budget_bytes // self.num_ranks

    def own_lines(self, lines: Sequence[Line], lengths: Sequence[tuple[int, int]]) -> list[Line]:
        """Those that this rank generates for, in their order. lengths: prompt tokens and new tokens of each."""
        if not self.shares_lines:
            return list(lines)
        return [lines[index] for index in sorted(deal_sequences(lengths, num_replicas=self.num_ranks)[self.rank])]

    def stopping(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """The first rank asks as ever and leaves a file for the others; stages pass the wish on by themselves."""
        if self.is_alone or not self.shares_lines:
            return should_stop
        assert self.folder is not None
        file = self.folder / _STOP_FILE

        def asked() -> bool:
            if not self.is_first:
                return file.exists()
            if should_stop():
                file.touch()
                return True
            return False

        return asked

    @contextmanager
    def joined(self, device: str) -> "Iterator[Ranks | None]":
        """Inside, all ranks are there; None where this one is alone. Raises RankLost."""
        if self.is_alone:
            yield None
            return
        from optimizer.runtime.ranks.group import RankPlace, join_ranks

        assert self.folder is not None
        place = RankPlace(rank=self.rank, num_ranks=self.num_ranks, folder=self.folder)
        with join_ranks(place, device=device) as ranks:
            ranks.barrier()
            yield ranks


def measured_together(measured: Sequence[dict[str, Any]], layout: GenerationLayout) -> dict[str, Any]:
    """One attempt's measurements from those of its ranks: bytes of the fullest device, with each one's beside; times of the
    first, and tokens of all.
    """
    first = measured[0]
    fullest = max(measured, key=lambda each: int(each["device_peak_bytes"]))
    num_tokens = first["num_new_tokens"] if layout.is_cut else sum(each["num_new_tokens"] for each in measured)
    total_s = max(float(each["total_s"]) for each in measured)
    return {
        **first,
        **{name: fullest[name] for name in ("device_peak_bytes", "device_bytes_by_category", "host_peak_bytes")},
        "num_new_tokens": num_tokens,
        "total_s": total_s,
        "tokens_per_s": num_tokens / total_s if total_s else 0.0,
        # A machine's calibration learns from one device alone.
        "passes": [],
        "rank_peak_bytes": [each["device_peak_bytes"] for each in measured],
    }
