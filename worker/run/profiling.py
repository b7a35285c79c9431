"""Runs a ``profile`` job in the attempt's process."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.base.serialize import from_json
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import COMPILED
from optimizer.profile.assemble.merge import add_compiled
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.profile import Profile
from optimizer.profile.trace.generation import profile_generation
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import Adapter, TrainingObjective


def profile_to_file(
    config: dict[str, Any],
    file: Path,
    *,
    adapter: dict[str, Any] | None = None,
    generates: bool = False,
    is_packed: bool = False,
    objective: TrainingObjective = "next_token",
    compiled: Sequence[str] = (),
    sharing: int = 1,
) -> None:
    """Trace the model that ``config`` describes; the profile's JSON appears at ``file``, whole or not at all.

    adapter: a workload's; the profile is then of the model with these adapters. generates: of a model that
    generates instead. is_packed: for rows of samples that do not attend to each other. objective: of the training.
    compiled: representations of the weights in which compiled blocks are traced too. sharing: devices that share each block, the
    part of one of which is traced too.
    Raises BlockNotCompiled, whose words name the block, where a block cannot be compiled.
    """
    spec = read_model_spec(config)
    read = None if adapter is None else from_json(Adapter, adapter, path="adapter")
    if generates:
        profile: Profile | GenerationProfile = profile_generation(spec)
    else:
        profile = _profile_training(spec, read, is_packed=is_packed, objective=objective, compiled=compiled)
        if sharing > 1:
            part = profile_model(spec, adapter=read, is_packed=is_packed, objective=objective, num_sharing=sharing)
            profile = replace(profile, narrower=(part,))
    document = profile.to_json()
    staged = file.with_name(f".{file.name}")
    staged.write_text(json.dumps(document))
    staged.replace(file)


def _profile_training(
    spec: ModelSpec, adapter: Adapter | None, *, is_packed: bool, objective: TrainingObjective, compiled: Sequence[str]
) -> Profile:
    def trace(extent: Extent) -> Profile:
        return profile_model(spec, adapter=adapter, is_packed=is_packed, objective=objective, extent=extent)

    # first, since it is what may be refused
    more = trace(Extent(representations=tuple(name + COMPILED for name in compiled))) if compiled else None
    profile = trace(EVERYTHING)
    return profile if more is None else add_compiled(profile, more)
