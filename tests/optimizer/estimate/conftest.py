"""One small profile, traced once for all tests of the estimate."""

import pytest

from optimizer.hardware.machine import Device, Machine, Rates
from optimizer.models.spec import read_model_spec

OPT = {
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
def spec():
    return read_model_spec(OPT)


@pytest.fixture(scope="session")
def profile(spec):
    from optimizer.profile.trace import profile_model

    return profile_model(spec)


@pytest.fixture(scope="session")
def machine():
    rates = Rates(
        matmul_flops_per_s={"fp32": 5e10, "bf16": 5e10},
        attention_flops_per_s={"fp32": 3e10, "bf16": 3e10},
        memory_bytes_per_s=8e9,
        op_overhead_s=5e-6,
        device_to_host_bytes_per_s=5e9,
        host_to_device_bytes_per_s=5e9,
        optimizer_elements_per_s={"adamw_32": 3e8, "adamw_8": 2e8},
        source="measured",
    )
    device = Device(kind="cpu", name="test", memory_bytes=2**34)
    return Machine(name="test", device=device, host_memory_bytes=2**34, rates=rates)
