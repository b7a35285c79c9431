"""RMS norms with one node of the graph each: the same bits, and less that is saved."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.runtime.layers.norms import _form_of_class, replace_norms
from optimizer.runtime.meter.device import prepared_device
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.saved import counting_saved

WITH_NORMS = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "mixtral", "qwen3_moe",
    "headroom_decoder",
)  # fmt: skip
IDS = torch.arange(24).view(2, 12) % 29


def run_step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits, gradients, bytes saved."""
    ids = IDS.to(next(model.parameters()).device)
    with counting_saved() as saved:
        logits = model(input_ids=ids).logits
    logits.float().square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients, saved[0]


def build(name: str, dtype: torch.dtype, *, device: str = "cpu") -> nn.Module:
    """Weights of norms begin as ones or zeros, which would hide what is done with them: these are others."""
    model = build_model(read_model_spec(SMALL_CONFIGS[name]), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model.to(device)


def assert_equal(
    found: tuple[torch.Tensor, dict[str, torch.Tensor], int],
    expected: tuple[torch.Tensor, dict[str, torch.Tensor], int],
) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WITH_NORMS)
def test_results_and_gradients_have_the_same_bits_and_less_is_saved(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    plain = run_step(model)
    undo = replace_norms(model)
    light = run_step(model)
    undo()
    assert_equal(light, plain)
    assert light[2] < plain[2]
    assert run_step(model)[2] == plain[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_on_a_card_they_do_too(name: str, dtype: torch.dtype) -> None:
    with prepared_device(torch.device("cuda:0")):
        model = build(name, dtype, device="cuda:0")
        plain = run_step(model)
        replace_norms(model)
        light = run_step(model)
    assert_equal(light, plain)
    assert light[2] < plain[2]


def test_rows_in_16_bits_are_saved_once_and_not_in_fp32() -> None:
    norm = LlamaRMSNorm(64).to(torch.bfloat16)
    rows = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with counting_saved() as plain:
        norm(rows).float().sum().backward()
    replace_norms(norm)
    with counting_saved() as light:
        norm(rows).float().sum().backward()
    weight_bytes, rows_bytes = 64 * 2, 32 * 64 * 2
    # Kept beside the rows: one number for each in fp32.
    assert light[0] == rows_bytes + weight_bytes + 32 * 4
    assert plain[0] >= 3 * rows_bytes


@pytest.mark.parametrize(("of_rows", "of_weight"), [(True, False), (False, True)])
def test_only_what_needs_a_gradient_is_given_one(of_rows: bool, of_weight: bool) -> None:
    norm = LlamaRMSNorm(16)
    norm.weight.requires_grad_(of_weight)
    rows = torch.randn(3, 16, requires_grad=of_rows)
    norm(rows).square().sum().backward()
    plain = rows.grad, norm.weight.grad
    rows.grad = norm.weight.grad = None
    replace_norms(norm)
    norm(rows).square().sum().backward()
    for found, expected in zip((rows.grad, norm.weight.grad), plain, strict=True):
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found, expected)


def test_without_autograd_the_models_own_norm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda *args: (calls.append(True), forward(*args))[1])
    norm = LlamaRMSNorm(16)
    replace_norms(norm)
    calls.clear()
    assert norm(torch.randn(3, 16)).requires_grad
    assert not calls
    with torch.no_grad():
        norm(torch.randn(3, 16))
    assert len(calls) == 1


class SquaredRMSNorm(nn.Module):
    """A norm of no known form."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.square()


class ConfiguredRMSNorm(nn.Module):
    """Made from a configuration."""

    def __init__(self, config: Any, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.width))
        self.eps = eps


class NamedOnlyRMSNorm(nn.Module):
    """Cannot be made from a width."""

    def __init__(self, *, size: int, flavour: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6


def test_norms_of_no_known_form_are_left_alone() -> None:
    own = [SquaredRMSNorm(8), ConfiguredRMSNorm(SimpleNamespace(width=8)), NamedOnlyRMSNorm(size=8, flavour="own")]
    model = nn.ModuleList([*own, nn.RMSNorm(8), nn.LayerNorm(8)])
    replace_norms(model)
    assert all("forward" not in vars(module) for module in model)
    assert _form_of_class(SquaredRMSNorm) is None
