"""A process of its own that looks at cards, so that its search and the requests of the web process share no interpreter.

``python -m webapp.planning.card_process``: one JSON line with a question about one card in, one with its answer out, until there
are no more or nobody has asked for ``IDLE_S``. It knows no database and imports no torch. It gives way to other processes, since
whoever looks at cards sees them come one by one.
"""

import atexit
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from optimizer.api.plan import rank_cards_profiled
from optimizer.api.plan_generation import rank_cards_to_generate
from optimizer.base.serialize import from_json, to_json
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.rental import Cost
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.profile import Profile
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.cards import CardAnswer
from optimizer.workload import GenerationWorkload, TrainingWorkload

IDLE_S = 60.0
_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class CardQuestion:
    """The question how well one card of the table does one piece of work, with all of the card's memory."""

    card: str
    profile: Profile | GenerationProfile
    profile_sha256: str
    workload: TrainingWorkload | GenerationWorkload
    goal: Goal | GenerationGoal

    @property
    def generates(self) -> bool:
        return isinstance(self.profile, GenerationProfile)


def look_at_card(question: CardQuestion) -> CardAnswer:
    """Without the moments of its plan's step or pass, which are most of its bytes. Raises what its search raises."""
    profile, workload, goal = question.profile, question.workload, question.goal
    if isinstance(profile, GenerationProfile):
        work, aim = cast(GenerationWorkload, workload), cast(GenerationGoal, goal)
        (answer,) = rank_cards_to_generate(profile, [question.card], workload=work, goal=aim)
    else:
        (answer,) = rank_cards_profiled(
            profile, [question.card], workload=cast(TrainingWorkload, workload), goal=cast(Goal, goal)
        )
    if answer.chosen is None:
        return answer
    prediction = answer.chosen.prediction
    if isinstance(prediction, Prediction):
        trained = replace(prediction, timeline=(), peaks=())
        return replace(answer, chosen=replace(cast(PricedPlan, answer.chosen), prediction=trained))
    generated = replace(prediction, timeline=(), decode=())
    return replace(answer, chosen=replace(cast(PricedGenerationPlan, answer.chosen), prediction=generated))


class CardProcess:
    """The process, started when it is asked and not there. For one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._profile_sha256 = ""
        """The hash of the profile that the process was sent last."""

    def look(self, question: CardQuestion) -> CardAnswer | None:
        """None where the search raised an error, or the process cannot be had: whoever asks then looks by itself."""
        for _ in range(2):  # it may have ended between two questions
            try:
                document = self._ask(question)
            except (OSError, ValueError):
                self.close()
            else:
                return _read_answer(document["answer"], generates=question.generates) if "answer" in document else None
        return None

    def close(self) -> None:
        """End it, in the midst of a search too."""
        process, self._process, self._profile_sha256 = self._process, None, ""
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, question: CardQuestion) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        asked = {name: to_json(getattr(question, name)) for name in ("card", "workload", "goal")}
        asked |= {"generates": question.generates}
        if question.profile_sha256 != self._profile_sha256:
            asked["profile"] = question.profile.to_json()
        to_process, from_process = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        to_process.write(json.dumps(asked).encode() + b"\n")
        to_process.flush()
        answer: dict[str, Any] = json.loads(from_process.readline())  # a ValueError where it has ended
        self._profile_sha256 = question.profile_sha256
        return answer


def _start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "webapp.planning.card_process"]
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(_end, started)
    return started


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def _read_answer(document: dict[str, Any], *, generates: bool) -> CardAnswer:
    chosen = document["chosen"]
    if chosen is not None:
        plan, prediction = chosen["plan"], chosen["prediction"]
        if generates:
            read = {"plan": GenerationPlan.from_json(plan), "prediction": GenerationPrediction.from_json(prediction)}
            chosen = PricedGenerationPlan(**{**chosen, **read})
        else:
            chosen = PricedPlan(**{**chosen, "plan": Plan.from_json(plan), "prediction": Prediction.from_json(prediction)})
    costs = tuple(from_json(Cost, cost) for cost in document["costs"])
    return CardAnswer(**{**document, "chosen": chosen, "costs": costs})


def main() -> None:
    os.nice(_NICENESS)
    profile: Profile | GenerationProfile | None = None
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        asked = json.loads(line)
        try:
            if "profile" in asked:
                profile = None  # not to be taken for the new one where that cannot be read
                profile = (GenerationProfile if asked["generates"] else Profile).from_json(asked["profile"])
            document = {"answer": to_json(look_at_card(_read_question(asked, profile)))}
        except Exception as error:  # whoever asked looks by itself, and meets it there
            document = {"failed": repr(error)}
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def _read_question(document: dict[str, Any], profile: Profile | GenerationProfile | None) -> CardQuestion:
    if profile is None:
        raise ValueError("no profile came with this question or before it")
    workload, goal = document["workload"], document["goal"]
    return CardQuestion(
        card=document["card"],
        profile=profile,
        profile_sha256="",
        workload=from_json(GenerationWorkload, workload) if document["generates"] else from_json(TrainingWorkload, workload),
        goal=from_json(GenerationGoal, goal) if document["generates"] else from_json(Goal, goal),
    )


if __name__ == "__main__":
    main()
