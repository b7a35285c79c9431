"""Cards of the table for one piece of work, looked at one after the other: a search for each takes a second, and there are many.

A process of its own looks (``card_process.py``), for as long as somebody asks again, and an answer holds what was found until
then. It is kept, so that whoever asks later gets it at once.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Literal

from optimizer.base.recent import remembered
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import known_devices
from optimizer.search.questions.cards import CardAnswer, in_order
from webapp.planning.card_process import CardProcess, CardQuestion, look_at_card
from webapp.planning.search.generation import GenerationQuestion
from webapp.planning.search.training import TrainingQuestion

MAX_KEPT = 400
LOOK_FOR_S = 0.1
"""After so long an answer is given with what there is. A page is to answer within 0.3 s."""
WANTED_S = 1.5
"""Without a further question for so long, nobody waits for the rest of the cards. The page asks twice as often."""


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
    """All of the table that are known after ``LOOK_FOR_S``; the rest is looked at meanwhile.

    question: its machine is not looked at; each card has all its memory, and the goal's other wishes hold. Raises what the search
    for one of the cards raised.
    """
    if any(_look_at.at_hand(question, name) is None for name in card_names()):
        _lookout.ask_for(question)
    known = {name: _look_at.at_hand(question, name) for name in card_names()}
    found = [answer for answer in known.values() if answer is not None]
    left = [name for name, answer in known.items() if answer is None]
    return CardsSoFar(answers=in_order(found, order), num_left=len(left), next_card=left[0] if left else "")


class _Lookout:
    """The thread that has cards looked at: those of the question that was asked last come first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: OrderedDict[tuple[object, ...], tuple[TrainingQuestion | GenerationQuestion, float]] = OrderedDict()
        """By key, the question and until when somebody waits for it."""
        self._errors: dict[tuple[object, ...], Exception] = {}
        self._is_looking = False

    def ask_for(self, question: TrainingQuestion | GenerationQuestion) -> None:
        """Have the question's cards looked at; return when all are, or after ``LOOK_FOR_S``."""
        key, until_s = _key(question, ""), time.monotonic() + LOOK_FOR_S
        with self._changed:
            self._wanted[key] = question, max(until_s, time.monotonic() + WANTED_S)
            self._wanted.move_to_end(key)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="cards", daemon=True).start()
            while key in self._wanted and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            error = self._errors.pop(key, None)
        if error is not None:
            raise error

    def _look(self) -> None:
        while (found := self._next()) is not None:
            question, name = found
            try:
                _look_at(question, name)
            except Exception as error:  # whoever asks next is to see it, and not this thread to die of it
                with self._changed:
                    self._wanted.pop(_key(question, ""), None)
                    self._errors = {_key(question, ""): error}  # of one question: the next one to ask finds its own again
                    self._changed.notify_all()

    def _next(self) -> tuple[TrainingQuestion | GenerationQuestion, str] | None:
        """None where nothing is left that anybody waits for; then the thread ends."""
        with self._changed:
            for key, (question, until_s) in reversed(list(self._wanted.items())):
                left = [name for name in card_names() if _look_at.at_hand(question, name) is None]
                if left and time.monotonic() < until_s:
                    return question, left[0]
                del self._wanted[key]
                self._changed.notify_all()
            self._is_looking = False
            return None


_lookout = _Lookout()


def card_names() -> list[str]:
    """All of the table, in its order."""
    return list(known_devices())


def _key(question: TrainingQuestion | GenerationQuestion, name: str) -> tuple[object, ...]:
    return question.profile_sha256, question.workload, replace(question.goal, device_budget_bytes=1), name


_process = CardProcess()


@remembered(most=MAX_KEPT, key=_key)
def _look_at(question: TrainingQuestion | GenerationQuestion, name: str) -> CardAnswer:
    goal = replace(question.goal, device_budget_bytes=UNLIMITED_BYTES)
    if isinstance(goal, Goal):
        goal = replace(goal, objective="fastest_step")
    asked = CardQuestion(
        card=name,
        profile=question.profile,
        profile_sha256=question.profile_sha256,
        workload=question.workload,
        goal=goal,
    )
    found = _process.look(asked)
    return look_at_card(asked) if found is None else found
