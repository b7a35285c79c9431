"""A model's profile with compiled blocks beside its ordinary one: asked of a worker where a search wants it, never waited for.

It is a row of its own for each set of forms of the weights (decision 0058). Whether a run is long enough to want it is decided by
``optimizer/api/try_compiled.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.api.compiled_needs import SECONDS_TO_TRACE
from optimizer.base.errors import HeadroomError
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Model
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.profiles import ProfileNeed, read_profile


class BeingTraced(HeadroomError):
    """Compiled blocks were asked for and have no profile yet."""

    code = "profile_pending"


class NotKnownToCompile(HeadroomError):
    """Nobody has looked yet whether the machine has a compiler."""

    code = "invalid_plan"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A profile at hand."""

    profile: ModelProfile
    sha256: str
    fingerprint: str


def compiled_profile(model: Model, workload: TrainingWorkload, forms: Sequence[str]) -> Traced:
    """The profile with compiled blocks in these forms of the weights; where it is not there it is asked for.

    Raises ProfileFailed with the trace's own words for a model that was found to refuse, and BeingTraced.
    """
    row = ready_profile(ProfileNeed.of_training(model, workload, compiled=tuple(forms)))
    if row is None:
        raise BeingTraced(
            f"a worker traces compiled blocks now, which takes about {SECONDS_TO_TRACE * len(forms)} s; "
            "price again to see what they come to"
        )
    return Traced(profile=read_profile(row.pk, row.document_sha256), sha256=row.document_sha256, fingerprint=row.pk)


def check_known_to_compile(machine: MachineSpec) -> None:
    """Raise NotKnownToCompile for a machine that was probed before anybody looked for a compiler."""
    if not machine.is_known_to_compile:
        raise NotKnownToCompile(f"whether {machine.name} has a compiler is known once its worker has started again")
