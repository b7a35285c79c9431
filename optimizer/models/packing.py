"""Names the model types that can part the samples of a packed row. Torch-free.

Such a model takes ``position_ids``, and attention is cut where they start over: transformers makes the mask from them, each layer
kind its own. Models with recurrent layers or convolutions, or whose positions are distances (ALiBi), cannot part samples so; a
test holds each type on the list to the losses of its samples alone.
"""

from optimizer.base.errors import InvalidWorkload

PACKING_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)


def check_packs(model_type: str) -> None:
    """Raise InvalidWorkload for a model type that is not known to part the samples of a row."""
    if model_type not in PACKING_TYPES:
        raise InvalidWorkload(
            f"workload.packing is best_fit; models of type {model_type} cannot keep the samples of a row apart",
            field="workload.packing",
            value="best_fit",
            allowed=["off", "wrapped"],
            hint="Give each sample a row of its own: workload.packing off.",
        )
