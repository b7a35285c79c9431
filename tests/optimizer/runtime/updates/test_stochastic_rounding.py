"""Rounding at random is right on average, leaves what needs no rounding, and is the same whenever it is repeated."""

import math

import pytest
import torch

from optimizer.plan.weights import ROUNDING_PIECE_ELEMENTS
from optimizer.runtime.updates.stochastic_rounding import StochasticRounding, num_noise_words

NUM_DRAWS = 1 << 18
UNIT = 2.0**-7
"""Size of the last place of a bf16 number from 1 to 2."""


def round_all(value: float, *, seed: int = 0, name: str = "w", times: int = 1) -> torch.Tensor:
    rounding = StochasticRounding(seed=seed, device=torch.device("cpu"))
    wide = torch.full((NUM_DRAWS,), value)
    for _ in range(times):
        rounding.begin(name)
        wide = torch.full((NUM_DRAWS,), value)
        rounding.round_(wide, name=name)
    return wide


@pytest.mark.parametrize("fraction", [2**-16, 0.1, 0.25, 0.5, 0.9, 1 - 2**-16])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_number_itself(fraction: float, sign: int) -> None:
    """Ups are binomial: their share is within five of its standard deviations, which one run in two million is not."""
    value = sign * torch.tensor(1 + fraction * UNIT).item()
    exact = (abs(value) - 1) / UNIT
    rounded = round_all(value)
    assert set(rounded.tolist()) <= {sign * 1.0, sign * (1 + UNIT)}
    share = float((rounded.abs() > 1).double().mean())
    assert abs(share - exact) <= 5 * math.sqrt(exact * (1 - exact) / NUM_DRAWS)


def test_numbers_that_bf16_has_stay() -> None:
    wide = torch.randn(10_000).to(torch.bfloat16).to(torch.float32)
    rounding = StochasticRounding(seed=3, device=torch.device("cpu"))
    rounding.begin("w")
    rounded = wide.clone()
    rounding.round_(rounded, name="w")
    assert torch.equal(rounded, wide)


def test_what_is_rounded_is_a_neighbour_in_bf16() -> None:
    torch.manual_seed(0)
    wide = torch.randn(100_000) * torch.logspace(-20, 20, 100_000)
    rounding = StochasticRounding(seed=3, device=torch.device("cpu"))
    rounding.begin("w")
    rounded = wide.clone()
    rounding.round_(rounded, name="w")
    assert torch.equal(rounded, rounded.to(torch.bfloat16).to(torch.float32))
    assert ((rounded - wide).abs() <= wide.abs() * UNIT).all()


def test_numbers_that_are_not_finite_stay() -> None:
    wide = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    rounding = StochasticRounding(seed=3, device=torch.device("cpu"))
    rounding.begin("w")
    rounding.round_(wide, name="w")
    assert wide.tolist()[:2] == [float("inf"), float("-inf")]
    assert math.isnan(wide[2])
    assert wide[3:].tolist() == [0.0, 0.0]


def test_other_steps_tensors_and_seeds_draw_other_bits() -> None:
    plain = round_all(1 + UNIT / 2)
    assert torch.equal(plain, round_all(1 + UNIT / 2))
    for other in (round_all(1 + UNIT / 2, times=2), round_all(1 + UNIT / 2, name="v"), round_all(1 + UNIT / 2, seed=1)):
        share = float((plain == other).double().mean())
        assert abs(share - 0.5) <= 5 * math.sqrt(0.25 / NUM_DRAWS)


def test_pieces_have_the_bits_of_the_whole() -> None:
    size = ROUNDING_PIECE_ELEMENTS + 1001
    wide = torch.rand(size)
    whole, parts = (StochasticRounding(seed=5, device=torch.device("cpu")) for _ in range(2))
    whole.begin("w")
    parts.begin("w")
    rounded, pieced = wide.clone(), wide.clone()
    whole.round_(rounded, name="w")
    noise = torch.empty(num_noise_words(size), dtype=torch.int64)
    for start in (0, ROUNDING_PIECE_ELEMENTS):
        parts.round_(pieced[start : start + ROUNDING_PIECE_ELEMENTS], name="w", start=start, noise=noise)
    assert torch.equal(rounded, pieced)


def test_updates_that_rounding_to_nearest_loses_arrive_on_average() -> None:
    """A hundred updates of a hundredth of a unit: nearest stays at 1, at random the mean has moved by one unit."""
    torch.manual_seed(0)
    rounding = StochasticRounding(seed=0, device=torch.device("cpu"))
    weight, nearest = torch.ones(NUM_DRAWS), torch.ones(NUM_DRAWS)
    for _ in range(100):
        rounding.begin("w")
        weight += UNIT / 100
        rounding.round_(weight, name="w")
        nearest = (nearest + UNIT / 100).to(torch.bfloat16).to(torch.float32)
    assert nearest.eq(1).all()
    # Each step's rounding has a variance of at most a quarter of a unit squared, and they are independent.
    assert abs(float(weight.double().mean()) - 1 - UNIT) <= 5 * UNIT * math.sqrt(100 / 4 / NUM_DRAWS)
