"""One small profile, traced once for these tests."""

from typing import Any

import pytest

from optimizer.models.spec import read_model_spec
from optimizer.profile.profile import Profile

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def profile() -> Profile:
    from optimizer.profile.trace.trace import profile_model

    return profile_model(read_model_spec(LLAMA))
