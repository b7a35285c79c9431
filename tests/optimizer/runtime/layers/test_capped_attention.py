"""Attention with capped scores as one node of the graph: as exact as transformers' chain, and less that is saved."""

from typing import Any

import pytest
import torch
from torch import nn

from optimizer.models.build import build_model
from optimizer.runtime.layers.capped_attention import replace_capped_attention
from tests.optimizer.runtime.saved import counting_saved
from tests.optimizer.runtime.tiny import make_spec

IDS = torch.arange(80).view(2, 40) % 29
"""Longer than the sliding window."""
STEEP = 20.0
"""Times what queries are drawn with: scores come near the cap."""


def build(dtype: torch.dtype) -> Any:
    model = build_model(make_spec("gemma2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(STEEP)
    return model.to(dtype)


def run_step(model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
    """Logits and gradients, and the bytes saved."""
    with counting_saved() as saved:
        logits = model(input_ids=IDS).logits
    logits.double().square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": logits.detach(), **found}, saved[0]


def error_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The worst tensor's, of its norm."""
    assert found.keys() == exact.keys()
    return max(float((found[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_it_is_as_exact_as_the_models_own_and_saves_less(dtype: torch.dtype, most: float) -> None:
    exact, _ = run_step(build(dtype).double())
    model = build(dtype)
    plain, plain_bytes = run_step(model)
    undo = replace_capped_attention(model)
    assert model.config._attn_implementation != "eager"
    light, light_bytes = run_step(model)
    undo()
    assert model.config._attn_implementation == "eager"
    assert error_of(light, exact) < min(most, 1.25 * error_of(plain, exact))
    assert light_bytes < plain_bytes


def test_under_autocast_and_without_autograd_the_models_own_runs() -> None:
    model = build(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, _ = run_step(model)
    with torch.no_grad():
        without = model(input_ids=IDS).logits
    replace_capped_attention(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        light, _ = run_step(model)
    assert all(torch.equal(light[name], plain[name]) for name in plain)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, without)


def test_models_that_cap_nothing_are_left_alone() -> None:
    model: Any = build_model(make_spec("llama"))
    replace_capped_attention(model)
    assert model.config._attn_implementation == "sdpa"
