"""Resolves what a price needs: the model's profile and the machines with what finished runs taught of them.

``resolve`` is the one road from what was asked, of either kind of work, to complete questions, or to what they wait for. A model
that was never profiled is asked of a worker. ``asked_by`` takes a job's spec, ``asked.py`` what the API and the plans' page ask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.workload import GenerationWorkload, TrainingWorkload
from webapp.catalog.models import Machine, Model, Profile
from webapp.jobs.specs.generation import GenerateSpec, generation_workload
from webapp.jobs.specs.training import JobSpec
from webapp.planning.search.generation import GenerationQuestion
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.profiles import ProfileNeed, known_profile_of, read_generation_profile, read_profile
from webapp.planning.search.question import Place
from webapp.planning.search.training import TrainingQuestion

AnyQuestion = TrainingQuestion | GenerationQuestion
Q = TypeVar("Q")
Q_co = TypeVar("Q_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Nothing can be priced yet."""

    waiting_for: Literal["profile", "machine"]


class Asked(Protocol[Q_co]):
    """The work of a model for a goal, without the profile and the place that a question has."""

    @property
    def need(self) -> ProfileNeed: ...

    def complete(self, profile: Profile, places: Sequence[Place]) -> Sequence[Q_co]: ...


def resolve(asked: Asked[Q], places: Sequence[Place]) -> Sequence[Q] | Waiting:
    """A question for each place, or what they wait for; a profile that is not there is asked for. Raises ProfileFailed."""
    profile = ready_profile(asked.need)
    if profile is None:
        return Waiting(waiting_for="profile")
    if not places:
        return Waiting(waiting_for="machine")
    return asked.complete(profile, places)


def asked_by(spec: JobSpec | GenerateSpec) -> Asked[AnyQuestion]:
    """A job's."""
    return asked_by_training(spec) if isinstance(spec, JobSpec) else asked_by_generation(spec)


def asked_by_training(spec: JobSpec) -> "AskedTraining":
    return AskedTraining(model=spec.model, workload=spec.workload, goal=spec.goal)


def asked_by_generation(spec: GenerateSpec) -> "AskedGeneration":
    return AskedGeneration(model=spec.model, goal=spec.goal, read_workload=partial(generation_workload, spec))


def place_of(machine: Machine) -> Place:
    return Place(machine=MachineSpec.from_json(machine.document), calibration=machine.calibration)


@dataclass(frozen=True, kw_only=True)
class AskedTraining:
    """Training, as it was read."""

    model: Model
    workload: TrainingWorkload
    goal: Goal

    @property
    def need(self) -> ProfileNeed:
        return ProfileNeed(model=self.model, adapter=self.workload.adapter)

    def complete(self, profile: Profile, places: Sequence[Place]) -> list[TrainingQuestion]:
        return [
            TrainingQuestion(
                model_name=self.model.name,
                profile=read_profile(profile.pk, profile.document_sha256),
                profile_sha256=profile.document_sha256,
                workload=self.workload,
                goal=self.goal,
                place=place,
                known_profile=partial(known_profile_of, self.model),
            )
            for place in places
        ]


@dataclass(frozen=True, kw_only=True)
class AskedGeneration:
    """A generation, as it was read."""

    model: Model
    goal: GenerationGoal
    read_workload: Callable[[], GenerationWorkload]
    """Called once there is a profile: a file's tokens are counted for it, which may take seconds."""

    @property
    def need(self) -> ProfileNeed:
        return ProfileNeed(model=self.model, generates=True)

    def complete(self, profile: Profile, places: Sequence[Place]) -> list[GenerationQuestion]:
        workload = self.read_workload()
        return [
            GenerationQuestion(
                model_name=self.model.name,
                profile=read_generation_profile(profile.pk, profile.document_sha256),
                profile_sha256=profile.document_sha256,
                workload=workload,
                goal=self.goal,
                place=place,
            )
            for place in places
        ]
