"""Lists the modules of each model type that can have adapters, by the names that ``workload.adapter.targets`` takes. Torch-free.

A test compares the names with the built modules of every type.
"""

from optimizer.base.errors import InvalidWorkload
from optimizer.workload import Adapter

_GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Targets of Mixtral and its like: all experts of a layer in one tensor each, which is a parameter and no module of its own."""
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
    "cohere": _GATED,
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma3_text": _GATED,
    "gpt_bigcode": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "granite": _GATED,
    "olmo2": _GATED,
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_PARAMETERS),
    "stablelm": _GATED,
    "starcoder2": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
    "bert": ("query", "key", "value", "dense"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
    "electra": ("query", "key", "value", "dense"),
    "roberta": ("query", "key", "value", "dense"),
    "bart": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
_WITH_EXPERTS = ("mixtral", "qwen3_moe")


def check_targets(adapter: Adapter, model_type: str) -> None:
    """Raise InvalidWorkload for a target that this type lacks, or for dropout on what cannot have it.

    Types that are not listed are left to ``attach_adapters``, which sees the modules themselves (T5's depend on its activation).
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
    experts = [name for name in adapter.targets or known if model_type in _WITH_EXPERTS and name in EXPERT_PARAMETERS]
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
