"""Which modules of each model type can have adapters, by the names that ``workload.adapter.targets`` takes. Torch-free.

A test compares the names with the built modules of every type.
"""

from optimizer.errors import InvalidWorkload
from optimizer.workload import Adapter

_GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Of Mixtral: all experts of a layer in one tensor each, which is a parameter and no module of its own."""
ADAPTER_TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "llama": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "mistral": _GATED,
    "gemma": _GATED,
    "gemma2": _GATED,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_PARAMETERS),
}


def check_targets(adapter: Adapter, model_type: str) -> None:
    """Raise InvalidWorkload for a target that this type lacks, or for dropout on what cannot have it.

    Types that are not listed are left to ``attach_adapters``, which sees the modules themselves.
    """
    known = ADAPTER_TARGETS.get(model_type)
    if known is None:
        return
    for target in adapter.targets:
        if target not in known:
            raise InvalidWorkload(
                f"workload.adapter.targets names {target!r:.80}; the matrices in the blocks of {model_type} that can have "
                f"adapters are: {', '.join(known)}",
                field="workload.adapter.targets",
                value=str(target)[:80],
                allowed=list(known),
            )
    experts = [name for name in adapter.targets or known if model_type == "mixtral" and name in EXPERT_PARAMETERS]
    if adapter.dropout and experts:
        raise dropout_on_experts(adapter, ", ".join(experts))


def dropout_on_experts(adapter: Adapter, where: str) -> InvalidWorkload:
    return InvalidWorkload(
        f"workload.adapter.dropout is {adapter.dropout:g}; adapters of experts ({where}) can have none",
        field="workload.adapter.dropout",
        value=adapter.dropout,
        allowed=0,
        hint="Set dropout to 0, or name targets that are no experts.",
    )
