"""Searches for a training job's plan, remembered: what is asked again within minutes, or under another budget, need not wait.

Kept in this process. What is kept is what a new search would find, because a search is a function of its question.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.recent import Recent
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.workload import TrainingWorkload

if TYPE_CHECKING:
    from optimizer.search.problem import SearchProblem
    from optimizer.search.questions.alternatives import Obtain
    from optimizer.search.questions.objectives import ObjectiveAnswer
    from optimizer.search.questions.price_cache import PriceMemory

MAX_ANSWERS = 6
MAX_MEMORIES = 2
"""Pairs of a model and a machine whose prices are kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingQuestion:
    """What work, on what, for what."""

    profile: ModelProfile
    profile_sha256: str
    workload: TrainingWorkload
    goal: Goal
    machine: MachineSpec
    calibration: dict[str, Any] | None

    @property
    def place(self) -> str:
        """Hash of what prices rest on besides the workload."""
        facts = [self.profile_sha256, self.machine.to_json(), self.calibration]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def key(self) -> tuple[object, ...]:
        """What the best plan rests on: not the name of a schedule, nor how many steps there are."""
        from optimizer.search.questions.price_cache import priced_part

        return self.place, priced_part(self.workload), self.goal


@dataclass(frozen=True, kw_only=True)
class NothingFits:
    """What NoFeasiblePlan says; the error itself would keep alive the frames that it passed through."""

    hint: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: NoFeasiblePlan) -> "NothingFits":
        return cls(hint=error.hint, fields=dict(error.fields))

    def error(self) -> NoFeasiblePlan:
        """A new one each time: whoever catches it may add to its fields."""
        facts = {name: self.fields[name] for name in ("budget_bytes", "smallest_feasible_bytes", "bytes_by_category")}
        error = NoFeasiblePlan(**facts, hint=self.hint)
        error.fields.update(self.fields)
        return error


_answers: "Recent[tuple[object, ...], ObjectiveAnswer | NothingFits]" = Recent(MAX_ANSWERS)
_memories: "Recent[str, PriceMemory]" = Recent(MAX_MEMORIES)


def find_answer(question: TrainingQuestion, *, obtain: "Obtain") -> "ObjectiveAnswer":
    """The best plan. Raises NoFeasiblePlan with what would fit."""
    from optimizer.search.questions.price_cache import for_run

    found = _answers.obtain(question.key, lambda: _search(question, obtain))
    if isinstance(found, NothingFits):
        raise found.error()
    return for_run(found, question.workload)


def is_answered(question: TrainingQuestion) -> bool:
    """Whether ``find_answer`` will answer at once."""
    return _answers.get(question.key) is not None


def problem_of(question: TrainingQuestion) -> "SearchProblem":
    """For prices of single plans; from memory where a search has asked for them."""
    # here and below, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.search.search import training_problem

    problem = training_problem(
        question.profile,
        workload=question.workload,
        goal=question.goal,
        machine=question.machine,
        calibration=question.calibration,
    )
    return _memory(question).bind(problem)


def _search(question: TrainingQuestion, obtain: "Obtain") -> "ObjectiveAnswer | NothingFits":
    from optimizer.api.plan import plan_profiled

    try:
        return plan_profiled(
            question.profile,
            workload=question.workload,
            goal=question.goal,
            machine=question.machine,
            calibration=question.calibration,
            obtain=obtain,
            memory=_memory(question),
        )
    except NoFeasiblePlan as error:
        return NothingFits.of(error)


def _memory(question: TrainingQuestion) -> "PriceMemory":
    from optimizer.search.questions.price_cache import PriceMemory

    return _memories.obtain(question.place, PriceMemory)
