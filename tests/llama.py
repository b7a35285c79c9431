"""The tiny Llama whose real profile the tests share: small enough that every plan of it can be priced."""

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
FOLDER_VARIABLE = "HEADROOM_TESTS_LLAMA"
"""Names the folder of the profile that an outer run of tests has made, for a run within it."""
