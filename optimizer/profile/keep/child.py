"""Traces one model in a process of its own: ``python -m optimizer.profile.keep.child``, started by ``asking.py``.

Reads one JSON object from standard input when torch is imported, writes one to standard output: a profile, an error of the tree,
or that it must be asked again in full (``meta_ops/stub_imports.py``). The caller stays free of torch, and gets back all memory
that this took.
"""

import contextlib
import gc
import json
import os
import sys
from typing import Any

from optimizer.base.errors import HeadroomError, InvalidModel, InvalidPlan, InvalidWorkload
from optimizer.base.serialize import from_json
from optimizer.profile.extent import Extent
from optimizer.profile.meta_ops.stub_imports import import_lean
from optimizer.workload import Adapter

LEAN_OPTION = "--lean"
MAX_PROCESSES = 8
"""Each takes about 150 MB beside what they share."""
_SAME_IN_FULL = (InvalidPlan, InvalidWorkload)
"""Errors that lie in what was asked, however much is imported. MissingExtra is none: peft needs more than is imported here."""


def main(arguments: list[str]) -> int:
    """Exit code 0 whenever an answer was written."""
    is_lean = LEAN_OPTION in arguments
    # Nothing here makes cycles that matter; looking for them takes a tenth of the time.
    gc.disable()
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(is_lean=is_lean)
    json.dump(answer, sys.stdout, separators=(",", ":"))
    return 0


def _answer(*, is_lean: bool) -> dict[str, Any]:
    try:
        if is_lean:
            import_lean()
        return {"profile": _trace()}
    except _SAME_IN_FULL as error:
        return {"error": error.to_json()}
    except (MemoryError, OSError):
        raise  # no fault of the model
    except Exception as error:
        if is_lean:
            return {"again": f"{type(error).__name__}: {error}"}
        if not isinstance(error, HeadroomError):
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            error = InvalidModel(
                f"the model cannot be traced: {text}",
                field="config",
                hint="An operation of this architecture does not run without data, or not with these sizes.",
            )
        return {"error": error.to_json()}


def _trace() -> dict[str, Any]:
    import torch

    from optimizer.models.any_spec import read_any_spec
    from optimizer.profile.trace.trace import profile_model

    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    if "representations" in request:
        from optimizer.profile.trace.generation import profile_generation

        spec = read_any_spec(request["config"])
        return profile_generation(spec, representations=request["representations"]).to_json()
    adapter = None if request["adapter"] is None else from_json(Adapter, request["adapter"])
    spec = read_any_spec(request["config"])
    extent = from_json(Extent, request["extent"])
    rows = {name: bool(request.get(name)) for name in ("is_padded", "is_packed")}
    objective = request.get("objective", "next_token")
    traced = profile_model(
        spec,
        adapter=adapter,
        extent=extent,
        objective=objective,
        num_sharing=request.get("num_sharing", 1),
        num_processes=min(len(os.sched_getaffinity(0)), MAX_PROCESSES),
        **rows,
    )
    return traced.to_json()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
