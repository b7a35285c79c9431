"""Large products in fp32 are oneDNN's where that is quicker, and nothing else is."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimizer.formats.matmul_dispatch import LEAST_FLOPS, uses_onednn
from optimizer.runtime.layers import matmul_dispatch as products
from optimizer.runtime.layers.matmul_dispatch import interrupting, making_products, watch_products

MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
SIDE = 128
"""Three of it are large enough."""
needs_library = pytest.mark.skipif(not products.has_quicker_library(), reason="a processor on which torch's own is quick")


def is_on() -> bool:
    return MATMUL.fp32_precision == "bf16"


class Noting(nn.Module):
    """Says in both directions whether the library is asked."""

    def __init__(self, seen: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(("forward", is_on()))
        result = hidden * 1.0
        if result.requires_grad:
            result.register_hook(lambda _: self.seen.append(("backward", is_on())))
        return result


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Pretend a processor of the kind, whatever this one is, and list the values that the switch was set to, in order."""
    monkeypatch.setattr(products, "has_quicker_library", lambda: True)
    settings: list[bool] = []
    turn_on, turn_off = products._SWITCH.turn_on, products._SWITCH.turn_off
    monkeypatch.setattr(products._SWITCH, "turn_on", lambda *_: (settings.append(True), turn_on())[1])
    monkeypatch.setattr(products._SWITCH, "turn_off", lambda *_: (settings.append(False), turn_off())[1])
    yield settings
    assert not is_on()
    assert not products._SWITCH.is_on


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(SIDE, SIDE), (2, SIDE // 2, SIDE)])
def test_a_layer_asks_in_forward_and_in_backward(asked: list[Any], bias: bool, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(SIDE, SIDE, bias=bias)
    undo = watch_products(layer)
    layer(torch.randn(shape)).sum().backward()
    assert asked == [True, False, True, False]
    undo()
    asked.clear()
    layer(torch.randn(shape)).sum().backward()
    assert not asked


class Own(nn.Linear):
    """A layer of models that add the bias by themselves."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T + self.bias


def test_a_layer_of_a_models_own_class_asks_too(asked: list[Any]) -> None:
    layer = Own(SIDE, SIDE)
    undo = watch_products(layer)
    layer(torch.randn(2, SIDE, SIDE)).sum().backward()
    undo()
    assert asked == [True, False, True, False, False]


def test_a_layer_whose_matrix_is_packed_does_not(asked: list[Any]) -> None:
    layer = nn.Linear(SIDE, SIDE)
    layer.weight = nn.Parameter(torch.zeros(SIDE * SIDE // 2, 1))
    watch_products(layer)()
    assert "forward" not in vars(layer)


def test_what_is_small_or_no_layers_is_torchs_own(asked: list[Any]) -> None:
    seen: list[tuple[str, bool]] = []
    model = nn.Sequential(nn.Linear(SIDE, SIDE), Noting(seen), nn.Linear(SIDE, 8), nn.Linear(8, 8))
    undo = watch_products(model)
    model(torch.randn(SIDE, SIDE)).sum().backward()
    undo()
    assert seen == [("forward", False), ("backward", False)]
    assert asked == [True, False, True, False, False]


def test_one_row_is_torchs_own(asked: list[Any]) -> None:
    layer = nn.Linear(2048, 2048)
    undo = watch_products(layer)
    layer(torch.randn(1, 2048))
    assert not asked
    layer(torch.randn(2, 2048))
    undo()
    assert asked == [True, False, False]


def test_what_is_run_again_from_within_a_product_gives_the_switch_back(asked: list[Any]) -> None:
    """The last layer waits for what it saved: its two products come after the second run's, and are still the library's."""
    seen: list[tuple[str, bool]] = []
    block = nn.Sequential(nn.Linear(SIDE, SIDE), Noting(seen), nn.Linear(SIDE, SIDE))
    undo = watch_products(block)
    hidden = torch.randn(SIDE, SIDE, requires_grad=True)
    forward = interrupting(block.forward)
    checkpoint(forward, hidden, use_reentrant=False).sum().backward()
    undo()
    assert [on for way, on in seen if way == "forward"] == [False, False]
    second_forwards = [True, False, True, False]
    assert asked[:4] == second_forwards
    assert asked[4:6] == [True, False], "backward reaches the last layer, which interrupts itself"
    assert asked[-1] is False
    # The switch's setting as each product runs decides its bits: they are those of keeping.
    kept = watch_products(block)
    again = hidden.detach().requires_grad_()
    block(again).sum().backward()
    kept()
    assert torch.equal(again.grad, hidden.grad)


def test_an_error_leaves_the_switch_off(asked: list[Any]) -> None:
    layer = nn.Linear(SIDE, SIDE)
    undo = watch_products(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(SIDE, SIDE, dtype=torch.float32)[:, :64])
    assert not is_on()
    with pytest.raises(RuntimeError), making_products(SIDE, SIDE, SIDE, of=torch.ones(1)):
        torch.ones(2, 3) @ torch.ones(2, 3)
    undo()


def test_a_choice_made_for_the_whole_process_is_kept(asked: list[Any]) -> None:
    layer = nn.Linear(SIDE, SIDE)
    MATMUL.fp32_precision = "tf32"
    try:
        watch_products(layer)()
        with making_products(SIDE, SIDE, SIDE, of=torch.ones(1)):
            assert MATMUL.fp32_precision == "tf32"
    finally:
        MATMUL.fp32_precision = "none"
    assert not asked


@pytest.mark.parametrize("found", ["none", "ieee"])
def test_the_switch_goes_back_to_what_it_was(asked: list[Any], found: str) -> None:
    MATMUL.fp32_precision = found
    try:
        layer = nn.Linear(SIDE, SIDE)
        undo = watch_products(layer)
        layer(torch.randn(SIDE, SIDE))
        undo()
        assert asked[0]
        assert MATMUL.fp32_precision == found
    finally:
        MATMUL.fp32_precision = "none"


def test_all_can_be_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_FP32_PRODUCTS", "torch")
    assert not products.has_quicker_library.__wrapped__()


def test_the_rule_is_the_same_whichever_way_round() -> None:
    sides = (16, 300, 512)
    assert all(uses_onednn(*turned) for turned in permutations(sides))
    assert not uses_onednn(1, 4096, 4096)
    assert not uses_onednn(8, 8, LEAST_FLOPS // 129)


@needs_library
@pytest.mark.parametrize("sides", [(64, 64, 512), (384, 192, 576), (40, 3000, 700), (512, 16, 512)])
def test_sums_are_those_of_fp32(sides: tuple[int, ...]) -> None:
    rows, depth, columns = sides
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, depth, generator=generator)
    right = torch.randn(depth, columns, generator=generator)
    exact = left.double() @ right.double()
    with making_products(*sides, of=left):
        assert is_on()
        made = left @ right
    assert float((made - exact).abs().max()) < 2e-6 * depth
