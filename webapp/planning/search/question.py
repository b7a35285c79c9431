"""A complete question about plans, of training or of a generation: what work, on what machine, for what goal.

An answer is a function of its question, so whoever asks may remember it by the question's ``key``. ``resolve.py`` makes
questions, ``training.py`` and ``generation.py`` answer them.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from optimizer.base.errors import NoFeasiblePlan
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.plan import Plan
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.search.problem import PricedPlan

P = TypeVar("P")
W = TypeVar("W")
G = TypeVar("G")
AnyPriced = PricedPlan | PricedGenerationPlan


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine on which the work is to run."""

    machine: MachineSpec
    calibration: dict[str, Any] | None = None
    """Corrections learned from the machine's finished runs; None for a card of the table."""

    @cached_property
    def sha256(self) -> str:
        facts = [self.machine.to_json(), self.calibration]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan that a search or a baseline came to, in words as well."""

    priced: AnyPriced
    explanation: list[str]
    profile_sha256: str
    """Hash of the profile that it was priced with."""


@dataclass(frozen=True, kw_only=True)
class FoundPlans:
    """The best plan on one machine, and beside it those that people write by hand."""

    chosen: FoundPlan | None
    by_hand: list[FoundPlan]
    nothing_fits: NoFeasiblePlan | None = None
    """Why there is no best plan."""
    awaits_compiled: bool = False
    """Compiled blocks may be better; a worker traces them now."""

    @property
    def all(self) -> list[FoundPlan]:
        return self.by_hand if self.chosen is None else [self.chosen, *self.by_hand]


@dataclass(frozen=True, kw_only=True)
class Question(ABC, Generic[P, W, G]):
    """All that a price needs."""

    model_name: str
    profile: P
    profile_sha256: str
    workload: W
    goal: G
    place: Place

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The facts on which the best plan rests."""

    @property
    def here(self) -> dict[str, Any]:
        """Arguments for the library, beside the profile."""
        return {
            "workload": self.workload,
            "goal": self.goal,
            "machine": self.place.machine,
            "calibration": self.place.calibration,
        }

    @abstractmethod
    def find_plans(self) -> FoundPlans:
        """The best plan and the baselines; from memory where they were asked for before."""

    @property
    @abstractmethod
    def is_answered(self) -> bool:
        """True where ``find_plans`` will answer at once."""

    @abstractmethod
    def find_by_hand(self, *, taken: Plan | None) -> AnyPriced | None:
        """The fastest that fits among plans written by hand and the one taken before; None where none does.

        A few prices, without what the process takes besides tensors.
        """


@dataclass(frozen=True, kw_only=True)
class NothingFits:
    """The facts of a NoFeasiblePlan; the error itself would keep alive the frames that it passed through."""

    hint: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: NoFeasiblePlan) -> "NothingFits":
        return cls(hint=error.hint, fields=dict(error.fields))

    def error(self) -> NoFeasiblePlan:
        """A new one each time: whoever catches it may add to its fields."""
        facts = {name: self.fields[name] for name in ("budget_bytes", "smallest_feasible_bytes", "bytes_by_category")}
        error = NoFeasiblePlan(**facts, hint=self.hint, short_of=self.fields["short_of"])
        error.fields.update(self.fields)
        return error
