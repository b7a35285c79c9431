"""One small profile, traced once for all tests of the estimate."""

from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.profile.profile import Profile

OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return read_model_spec(OPT)


@pytest.fixture(scope="session")
def profile(spec: ModelSpec) -> Profile:
    from optimizer.profile.trace.trace import profile_model

    return profile_model(spec)


@pytest.fixture(scope="session")
def machine() -> Machine:
    return make_cpu_machine()
