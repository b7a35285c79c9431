"""Cards of the table for one piece of work, looked at a few at a time: a search for each takes a second, and there are many.

What was found is kept in this process, so that whoever asks again gets it and the next few.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from optimizer.base.recent import Recent
from optimizer.goal import UNLIMITED_BYTES
from optimizer.hardware.devices import known_devices
from webapp.planning.generation_searches import GenerationQuestion
from webapp.planning.searches import TrainingQuestion

if TYPE_CHECKING:
    from optimizer.search.questions.cards import CardAnswer

MAX_KEPT = 400
LOOK_FOR_S = 1.0
"""After so long an answer is given with what there is; the card at hand is finished first."""

_known: "Recent[tuple[object, ...], CardAnswer]" = Recent(MAX_KEPT)


@dataclass(frozen=True, kw_only=True)
class CardsSoFar:
    """Best first."""

    answers: "tuple[CardAnswer, ...]"
    num_left: int
    next_card: str
    """Empty where none is left."""

    @property
    def num_all(self) -> int:
        return len(self.answers) + self.num_left

    @property
    def fastest(self) -> "CardAnswer | None":
        return max(
            (answer for answer in self.answers if answer.chosen),
            key=lambda answer: answer.tokens_per_s or 0.0,
            default=None,
        )

    @property
    def cheapest(self) -> "CardAnswer | None":
        """By the rent of a million tokens, of one currency."""
        from optimizer.search.questions.cards import in_order

        ranked = in_order(self.answers, "money")
        return next((answer for answer in ranked if answer.rented_per_million_tokens is not None), None)


def rank_some_cards(question: TrainingQuestion | GenerationQuestion, *, order: Literal["speed", "money"]) -> CardsSoFar:
    """All of the table that are known, and as many more as ``LOOK_FOR_S`` allows, at least one.

    question: its machine is not looked at; each card has all its memory, and the goal's other wishes hold.
    """
    # here and below, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.search.questions.cards import in_order

    began_s, found, left = time.monotonic(), [], []
    for name in card_names():
        key = (*_asked(question), name)
        known = _known.get(key)
        if known is None and (time.monotonic() - began_s < LOOK_FOR_S):
            known = _known.obtain(key, lambda name=name: _look_at(question, name))  # type: ignore[misc]
        if known is None:
            left.append(name)
        else:
            found.append(known)
    return CardsSoFar(answers=in_order(found, order), num_left=len(left), next_card=left[0] if left else "")


def card_names() -> list[str]:
    """All of the table, in its order."""
    return list(known_devices())


def _asked(question: TrainingQuestion | GenerationQuestion) -> tuple[object, ...]:
    return question.profile_sha256, question.workload, replace(question.goal, device_budget_bytes=1)


def _look_at(question: TrainingQuestion | GenerationQuestion, name: str) -> "CardAnswer":
    if isinstance(question, GenerationQuestion):
        return _look_at_generation(question, name)
    from optimizer.api.plan import rank_cards_profiled
    from optimizer.search.problem import PricedPlan

    goal = replace(question.goal, device_budget_bytes=UNLIMITED_BYTES, objective="fastest_step")
    (answer,) = rank_cards_profiled(question.profile, [name], workload=question.workload, goal=goal)
    if not isinstance(answer.chosen, PricedPlan):
        return answer
    # without the moments of its step, which are most of its bytes
    light = replace(answer.chosen.prediction, timeline=(), peaks=())
    return replace(answer, chosen=replace(answer.chosen, prediction=light))


def _look_at_generation(question: GenerationQuestion, name: str) -> "CardAnswer":
    from optimizer.api.plan_generation import rank_cards_to_generate
    from optimizer.search.generation.problem import PricedGenerationPlan

    goal = replace(question.goal, device_budget_bytes=UNLIMITED_BYTES)
    (answer,) = rank_cards_to_generate(question.profile, [name], workload=question.workload, goal=goal)
    if not isinstance(answer.chosen, PricedGenerationPlan):
        return answer
    light = replace(answer.chosen.prediction, timeline=(), decode=())
    return replace(answer, chosen=replace(answer.chosen, prediction=light))
