"""Cards of the table for one piece of work, looked at a few at a time: a search for each takes a second, and there are many.

What was found is kept in this process, so that whoever asks again gets it and the next few.
"""

import time
from dataclasses import dataclass, replace
from typing import Literal, cast

from optimizer.api.plan import rank_cards_profiled
from optimizer.api.plan_generation import rank_cards_to_generate
from optimizer.base.recent import remembered
from optimizer.estimate.prediction import Prediction
from optimizer.goal import UNLIMITED_BYTES
from optimizer.hardware.devices import known_devices
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.cards import CardAnswer, in_order
from webapp.planning.search.generation import GenerationQuestion
from webapp.planning.search.question import AnyPriced
from webapp.planning.search.training import TrainingQuestion

MAX_KEPT = 400
LOOK_FOR_S = 0.15
"""After so long an answer is given with what there is; the card at hand is finished first. A page is to answer within 0.3 s."""


@dataclass(frozen=True, kw_only=True)
class CardsSoFar:
    """Best first."""

    answers: tuple[CardAnswer, ...]
    num_left: int
    next_card: str
    """Empty where none is left."""

    @property
    def num_all(self) -> int:
        return len(self.answers) + self.num_left

    @property
    def fastest(self) -> CardAnswer | None:
        return max(
            (answer for answer in self.answers if answer.chosen),
            key=lambda answer: answer.tokens_per_s or 0.0,
            default=None,
        )

    @property
    def cheapest(self) -> CardAnswer | None:
        """By the rent of a million tokens, of one currency."""
        ranked = in_order(self.answers, "money")
        return next((answer for answer in ranked if answer.rented_per_million_tokens is not None), None)


def rank_some_cards(question: TrainingQuestion | GenerationQuestion, *, order: Literal["speed", "money"]) -> CardsSoFar:
    """All of the table that are known, and as many more as ``LOOK_FOR_S`` allows, at least one.

    question: its machine is not looked at; each card has all its memory, and the goal's other wishes hold.
    """
    began_s, found, left = time.monotonic(), [], []
    for name in card_names():
        known = _look_at.at_hand(question, name)
        if known is None and (time.monotonic() - began_s < LOOK_FOR_S):
            known = _look_at(question, name)
        if known is None:
            left.append(name)
        else:
            found.append(known)
    return CardsSoFar(answers=in_order(found, order), num_left=len(left), next_card=left[0] if left else "")


def card_names() -> list[str]:
    """All of the table, in its order."""
    return list(known_devices())


def _key(question: TrainingQuestion | GenerationQuestion, name: str) -> tuple[object, ...]:
    return question.profile_sha256, question.workload, replace(question.goal, device_budget_bytes=1), name


@remembered(most=MAX_KEPT, key=_key)
def _look_at(question: TrainingQuestion | GenerationQuestion, name: str) -> CardAnswer:
    """Without the moments of its plan's step or pass, which are most of its bytes."""
    if isinstance(question, GenerationQuestion):
        goal = replace(question.goal, device_budget_bytes=UNLIMITED_BYTES)
        (answer,) = rank_cards_to_generate(question.profile, [name], workload=question.workload, goal=goal)
    else:
        fastest = replace(question.goal, device_budget_bytes=UNLIMITED_BYTES, objective="fastest_step")
        (answer,) = rank_cards_profiled(question.profile, [name], workload=question.workload, goal=fastest)
    if answer.chosen is None:
        return answer
    return replace(answer, chosen=_without_moments(answer.chosen))


def _without_moments(chosen: AnyPriced) -> AnyPriced:
    prediction = chosen.prediction
    if isinstance(prediction, Prediction):
        return replace(cast(PricedPlan, chosen), prediction=replace(prediction, timeline=(), peaks=()))
    return replace(cast(PricedGenerationPlan, chosen), prediction=replace(prediction, timeline=(), decode=()))
