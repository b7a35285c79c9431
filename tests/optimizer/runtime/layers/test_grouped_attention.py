"""Key heads that are repeated for a fused kernel: torch's results, nothing more saved, and only where no kernel takes groups."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from optimizer.formats.key_heads import FusedAttention
from optimizer.models.build import build_model
from optimizer.runtime.layers import grouped_attention
from optimizer.runtime.layers.grouped_attention import Heads, attend_repeated, watch_attention
from optimizer.runtime.meter.device import prepared_device
from tests.optimizer.runtime.saved import counting_saved
from tests.optimizer.runtime.tiny import make_spec

IDS = torch.arange(80).view(2, 40) % 29
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """The CPU's fused kernel in place of CUDA's; it sees repeated heads alone."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []

    def attend(self, heads: Heads, *, is_saved: bool) -> tuple[torch.Tensor, ...]:
        self.heads.append((heads.key.shape[1], heads.value.shape[1]))
        found: tuple[torch.Tensor, ...] = _flash(*heads[:3], 0.0, heads.is_causal, scale=heads.scale)
        return found

    def go_back(self, gradient: torch.Tensor, heads: Heads, saved: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _flash_backward(
            gradient, *heads[:3], *saved, 0.0, heads.is_causal, scale=heads.scale
        )
        return found


def draw_heads(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def attend_as_torch(*heads: Any, **settings: Any) -> torch.Tensor:
    query, key, value = heads
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **settings)


def gradients_of(result: torch.Tensor, heads: list[torch.Tensor]) -> list[torch.Tensor]:
    result.double().square().sum().backward()
    return [result.detach(), *(head.grad for head in heads if head.grad is not None)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_results_and_gradients_are_torchs(is_causal: bool, scale: float | None) -> None:
    heads, same = draw_heads(), draw_heads()
    found = gradients_of(attend_repeated(*heads, is_causal=is_causal, scale=scale, kernel=CpuKernel()), heads)
    plain = attend_as_torch(*same, is_causal=is_causal, scale=scale)
    for ours, torchs in zip(found, gradients_of(plain, same), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_no_copy_is_saved_for_backward() -> None:
    heads, same = draw_heads(), draw_heads()
    with counting_saved() as ours:
        attend_repeated(*heads, is_causal=True, kernel=CpuKernel())
    with counting_saved() as torchs:
        attend_as_torch(*same, is_causal=True)
    assert ours[0] == torchs[0]


def test_cudas_kernel_takes_the_arguments_that_it_is_given() -> None:
    heads = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((2, 8, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16))]
    found = gradients_of(attend_repeated(*heads, is_causal=True), heads)
    assert [tensor.shape for tensor in found] == [heads[0].shape, *(head.shape for head in heads)]


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> CpuKernel:
    """The CPU as a card without a fused kernel for grouped heads."""
    kernel = CpuKernel()

    class Backend:
        capability = (7, 5)

    def attend(*heads: Any, **settings: Any) -> torch.Tensor:
        query, key, value = heads
        return attend_repeated(query, key, value, **settings, kernel=kernel)

    monkeypatch.setattr(grouped_attention, "backend_of", lambda device: Backend())
    monkeypatch.setattr(grouped_attention, "attend_repeated", attend)
    return kernel


def test_a_watched_model_trains_as_an_unwatched_one(old_card: CpuKernel) -> None:
    model: Any = build_model(make_spec("llama"))
    results = []
    for is_watched in (False, True):
        undo = watch_attention(torch.device("cuda:0")) if is_watched else None
        with counting_saved() as saved:
            logits = model(input_ids=IDS).logits
        logits.square().mean().backward()
        results.append((saved[0], [logits.detach(), *(parameter.grad for parameter in model.parameters())]))
        model.zero_grad(set_to_none=True)
        if undo:
            undo()
            undo()  # of no effect
    assert functional.scaled_dot_product_attention is grouped_attention._PATCH.torchs
    (plain_bytes, plain), (watched_bytes, watched) = results
    assert old_card.heads == [(model.config.num_attention_heads,) * 2] * model.config.num_hidden_layers
    assert watched_bytes == plain_bytes
    for ours, torchs in zip(watched, plain, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_masks_and_equal_heads_are_left_to_torch(old_card: CpuKernel) -> None:
    undo = watch_attention(torch.device("cuda:0"))
    try:
        query, key, value = draw_heads()
        mask = torch.zeros(40, 40)
        functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        functional.scaled_dot_product_attention(query, query, query, None, 0.0, True)
        assert old_card.heads == []
        functional.scaled_dot_product_attention(query, key, value, None, 0.0, True, enable_gqa=True)
        assert old_card.heads == [(8, 8)]
    finally:
        undo()


def test_the_cpu_is_never_watched() -> None:
    watch_attention(torch.device("cpu"))()
    assert grouped_attention._PATCH.num_watched == 0


@pytest.mark.parametrize(
    ("dtype", "capability", "head_dim", "torch_version", "is_repeated"),
    [
        ("fp16", (7, 5), 64, (2, 13), True),
        ("fp32", (8, 9), 128, (2, 13), True),
        ("fp32", (8, 9), 128, (2, 14), False),  # the efficient kernel takes groups
        ("bf16", (8, 9), 128, (2, 13), False),  # flash does
        ("bf16", (7, 5), 64, (2, 13), False),  # no fused kernel at all
        ("fp16", (7, 5), 60, (2, 13), False),
    ],
)
def test_heads_are_repeated_where_only_that_brings_a_fused_kernel(
    dtype: str, capability: tuple[int, int], head_dim: int, torch_version: tuple[int, int], is_repeated: bool
) -> None:
    fused = FusedAttention(dtype=dtype, head_dim=head_dim, capability=capability, torch_version=torch_version)
    assert fused.repeats_key_heads == is_repeated


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_card_results_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    with prepared_device(torch.device("cuda:0")):
        heads, same = draw_heads("cuda:0", dtype), draw_heads("cuda:0", dtype)
        found = gradients_of(attend_repeated(*heads, is_causal=True), heads)
        plain = attend_as_torch(*same, is_causal=True)
        for ours, torchs in zip(found, gradients_of(plain, same), strict=True):
            torch.testing.assert_close(ours, torchs, **bounds_of(torchs))


def bounds_of(torchs: torch.Tensor) -> dict[str, float]:
    """The tolerance between two fused kernels; in fp32 that of ``assert_close``.

    In fp16 (11 bits: 2^-11 of a number is lost each time that it is rounded) either kernel rounds weights, result, the gradient
    of scores and each head's gradient, some eight times for both, and sums cancel: what is lost is a share of the largest number,
    not of each. Both ways of rounding emulated in fp64 differ by up to 2.6 of these roundings.
    """
    return {"rtol": 0.0, "atol": 8 * 2**-11 * float(torchs.abs().max())} if torchs.dtype == torch.float16 else {}
