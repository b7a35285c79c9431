"""Resolves what a price needs: the model's profile and the machines with what finished runs taught of them.

``resolve`` is the one road from what was asked, of either kind of work, to complete questions, or to what they wait for. A
worker is asked to profile a model that never was. ``training.py`` and ``generation.py`` read what is asked from a job's spec,
``asked.py`` reads it from what the API and the plans' page send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from optimizer.hardware.machine import Machine as MachineSpec
from webapp.catalog.models import Machine, Profile
from webapp.jobs.specs.joining import Joining
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.profiles import ProfileNeed
from webapp.planning.search.question import Place

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


def joined_place(joining: Joining) -> Place:
    """The machines as one. What each one's finished runs taught of it is left out: corrections are of a whole machine."""
    return Place(machine=joining.machine)


def place_of(machine: Machine) -> Place:
    return Place(machine=MachineSpec.from_json(machine.document), calibration=machine.calibration)
