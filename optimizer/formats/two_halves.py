"""Types of causal decoders that run as a backbone and a head (``models/anatomy.py``): those that can be cut for training."""

from typing import Final

IN_TWO_HALVES: Final = frozenset(
    {
        "headroom_decoder",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "stablelm",
        "starcoder2",
    }
)
"""Model types whose head is the output projection of the backbone's last hidden state, with a soft cap or without."""
RETURN_TUPLES: Final = frozenset({"falcon"})
"""Model types whose blocks return hidden states in a tuple."""
