"""What a part of the benchmark is: rows as they come, and the goals that they meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.record import Row


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    quick: bool = False
    seed: int = 0
    """Of everything drawn by chance."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where real steps run; the other parts need none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One name of ``--only``."""

    name: str
    measure: Callable[[Options], Iterator[Row]]
    """Each row has ``part``: the name."""
    summarize: Callable[[Sequence[Row]], Mapping[str, dict[str, Any]]]
    """Goals (``record.goal``) by what they say, of this part's rows. A goal without a row is missed."""
