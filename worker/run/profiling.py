"""Runs a ``profile`` job: children of the attempt's process trace, side by side."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optimizer.base.serialize import from_json
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import COMPILED
from optimizer.profile.assemble.merge import add_compiled
from optimizer.profile.extent import Extent
from optimizer.profile.keep.asking import TracingChild, ask_child
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.profile import Profile
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
    Raises BlockNotCompiled, whose words name the block, where a block cannot be compiled; ProfilingFailed for a child that died.
    """
    spec = read_model_spec(config)  # refuses by name what no trace is needed for
    if generates:
        document = ask_child(TracingChild(is_lean=True), {"config": spec.to_config(), "representations": None})
    else:
        read = None if adapter is None else from_json(Adapter, adapter, path="adapter")
        trace = partial(_trace, spec, adapter=read, is_packed=is_packed, objective=objective)
        document = _trace_all(trace, compiled=[name + COMPILED for name in compiled], sharing=sharing).to_json()
    staged = file.with_name(f".{file.name}")
    staged.write_text(json.dumps(document))
    staged.replace(file)


def _trace(spec: ModelSpec, **asked: Any) -> Profile:
    """``obtain_profile`` in a folder where nothing is found and nothing stays: the service keeps profiles itself."""
    with TemporaryDirectory() as folder:
        return obtain_profile(spec, folder=Path(folder), **asked)


def _trace_all(trace: Callable[..., Profile], *, compiled: Sequence[str], sharing: int) -> Profile:
    with ThreadPoolExecutor() as pool:
        with_compiled = pool.submit(trace, extent=Extent(representations=tuple(compiled))) if compiled else None
        part = pool.submit(trace, num_sharing=sharing) if sharing > 1 else None
        profile = trace()
    if with_compiled is not None:
        profile = add_compiled(profile, with_compiled.result())
    return profile if part is None else replace(profile, narrower=(part.result(),))
