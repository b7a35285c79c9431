"""Names under which profiles are kept: one for each model, its adapters, and whether it trains or generates. Torch-free."""

import hashlib
import json
from collections.abc import Sequence

from optimizer.workload import Adapter, TrainingObjective


def profile_fingerprint(
    model_fingerprint: str,
    adapter: Adapter | None,
    *,
    is_packed: bool = False,
    objective: TrainingObjective = "next_token",
    compiled: Sequence[str] = (),
    sharing: int = 1,
) -> str:
    """Name under which the profile of a model, or of a model with adapters, is kept: 64 hex digits.

    Without adapters the model's own. Not of ``alpha``, which changes numbers but no size. is_packed: for rows of samples that do
    not attend to each other. objective: of the training, whose loss is traced. compiled: representations of the weights in which
    compiled blocks are traced too. sharing: devices that share each block, the part of one of which is traced too.
    """
    if sharing > 1:
        whole = profile_fingerprint(model_fingerprint, adapter, is_packed=is_packed, objective=objective, compiled=compiled)
        return hashlib.sha256(f"{whole} shared by {sharing}".encode()).hexdigest()
    if compiled:
        whole = profile_fingerprint(model_fingerprint, adapter, is_packed=is_packed, objective=objective)
        return hashlib.sha256(f"{whole} compiled {' '.join(sorted(compiled))}".encode()).hexdigest()
    if objective != "next_token":
        whole = profile_fingerprint(model_fingerprint, adapter, is_packed=is_packed)
        return hashlib.sha256(f"{whole} {objective}".encode()).hexdigest()
    if is_packed:
        whole = profile_fingerprint(model_fingerprint, adapter)
        return hashlib.sha256(f"{whole} packed".encode()).hexdigest()
    if adapter is None:
        return model_fingerprint
    facts = [model_fingerprint, adapter.rank, adapter.dropout > 0, sorted(adapter.targets)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def generation_fingerprint(model_fingerprint: str) -> str:
    """Name under which the profile of a model that generates is kept: 64 hex digits, beside that of training it."""
    return hashlib.sha256(f"{model_fingerprint} generates".encode()).hexdigest()


def traced_fingerprint(
    model_fingerprint: str,
    *,
    adapter: Adapter | None,
    generates: bool,
    is_packed: bool = False,
    objective: TrainingObjective = "next_token",
    compiled: Sequence[str] = (),
    sharing: int = 1,
) -> str:
    """Name of what a trace is asked for: training, with these adapters or none, or generating."""
    if generates:
        return generation_fingerprint(model_fingerprint)
    return profile_fingerprint(
        model_fingerprint, adapter, is_packed=is_packed, objective=objective, compiled=compiled, sharing=sharing
    )
