"""Profiles that several tests price, each traced once in a process: a trace takes seconds of processor time.

Of what a model may do most tests price a part, and trace no more: the representations and the shapes of their plans. The
choices of blocks stay whole, because what blocks share depends on which choices are traced together. That such a part prices as
the whole does is held in tests/optimizer/profile/test_extent.py.
"""

from typing import Any

from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import Profile
from optimizer.workload import Adapter, TrainingWorkload

_traced: dict[Any, Any] = {}


def trace(
    spec: ModelSpec,
    *,
    adapter: Adapter | None = None,
    is_padded: bool = False,
    extent: Extent = EVERYTHING,
    num_sharing: int = 1,
) -> Profile:
    """``profile_model``, or what it returned for the same before."""
    from optimizer.profile.trace.trace import profile_model

    key = (spec.fingerprint, adapter, is_padded, extent, num_sharing)
    if key not in _traced:
        _traced[key] = profile_model(spec, adapter=adapter, is_padded=is_padded, extent=extent, num_sharing=num_sharing)
    return _traced[key]


def extent_of(cases: list[tuple[Plan, TrainingWorkload]]) -> Extent:
    """The extent of a profile that covers these plans with their workloads, with every choice."""
    extents = [extent_of_plans([plan], workload=workload) for plan, workload in cases]
    return Extent(
        representations=tuple(sorted({name for extent in extents for name in extent.representations})),
        shapes=tuple(sorted({shape for extent in extents for shape in extent.shapes})),
    )
