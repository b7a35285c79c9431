"""Runs a ``profile`` job: children of the attempt's process trace, side by side."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.base.serialize import to_json
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import COMPILED
from optimizer.profile.assemble.merge import add_compiled
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.keep.asking import TracingChild, ask_child
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingObjective


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
    Raises BlockNotCompiled, whose words name the block, where a block cannot be compiled; ProfilingFailed for a child that died.
    """
    spec = read_model_spec(config)  # refuses by name what no trace is needed for
    if generates:
        document = ask_child(TracingChild(is_lean=True), {"config": spec.to_config(), "representations": None})
    else:
        asked = {
            "config": spec.to_config(),
            "adapter": adapter,
            "is_packed": is_packed,
            "objective": objective,
        }
        document = _trace_training(asked, compiled=[name + COMPILED for name in compiled], sharing=sharing).to_json()
    staged = file.with_name(f".{file.name}")
    staged.write_text(json.dumps(document))
    staged.replace(file)


def _trace_training(asked: dict[str, Any], *, compiled: Sequence[str], sharing: int) -> Profile:
    def trace(**more: Any) -> Profile:
        # peft, which makes adapters, and the compiler do not import where little is.
        child = TracingChild(is_lean=asked["adapter"] is None and more.get("extent") is None)
        return Profile.from_json(ask_child(child, {**asked, "extent": to_json(EVERYTHING), **more}))

    with ThreadPoolExecutor() as pool:
        with_compiled = pool.submit(trace, extent=to_json(Extent(representations=tuple(compiled)))) if compiled else None
        part = pool.submit(trace, num_sharing=sharing) if sharing > 1 else None
        profile = trace()
    if with_compiled is not None:
        profile = add_compiled(profile, with_compiled.result())
    return profile if part is None else replace(profile, narrower=(part.result(),))
