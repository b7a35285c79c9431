"""Tokens are drawn as asked for, and take the room that is said."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from optimizer.formats.sampling import Sampling
from optimizer.runtime.generation.sampling import Chooser, choose_tokens
from optimizer.runtime.meter.meter import Meter

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0])
NUM_DRAWS = 4000
FAR = 4 / math.sqrt(NUM_DRAWS)
"""Four standard deviations of a share, at the most: one of sixteen thousand runs of another seed would be off by more."""


def shares_of(sampling: Sampling, num_draws: int = NUM_DRAWS) -> dict[int, Any]:
    chooser, into = Chooser(sampling), torch.zeros((), dtype=torch.long)
    counts: Counter[Any] = Counter()
    for _ in range(num_draws):
        chooser.draw(LOGITS, into=into)
        counts[int(into)] += 1
    return {token: count / num_draws for token, count in counts.items()}


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(temperature=1.0), (0, 1, 2, 3)),
        (Sampling(temperature=0.5), (0, 1, 2, 3)),
        (Sampling(temperature=1.0, top_k=2), (1, 3)),
        (Sampling(temperature=2.0, top_k=3), (0, 1, 3)),
        # 0.64, then 0.88.
        (Sampling(temperature=1.0, top_p=0.7), (1, 3)),
        (Sampling(temperature=1.0, top_p=0.9, top_k=2), (1, 3)),
    ],
)
def test_what_is_drawn_follows_the_probabilities_of_what_may_be(sampling: Sampling, tokens: tuple[int, ...]) -> None:
    expected = dict(zip(tokens, (LOGITS[list(tokens)] / sampling.temperature).softmax(dim=0).tolist(), strict=True))
    shares = shares_of(sampling)
    assert shares.keys() <= expected.keys()
    for token, share in expected.items():
        assert shares.get(token, 0) == pytest.approx(share, abs=FAR)


def test_the_likeliest_is_always_among_those_that_may_be_drawn() -> None:
    assert shares_of(Sampling(temperature=1.0, top_p=0.01), 50) == {1: 1.0}
    assert shares_of(Sampling(temperature=5.0, top_k=1), 50) == {1: 1.0}


def test_a_seed_draws_the_same_in_any_company() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.5, seed=11)

    def draws(row: int, company: list[Sampling | Sampling | None]) -> list[int]:
        into = torch.zeros(len(company), dtype=torch.long)
        choosers = [Chooser(each) if each is not None else None for each in company]
        tokens = []
        for _ in range(20):
            choose_tokens(logits[: len(company)].roll(row, dims=0), into=into, choosers=choosers)
            tokens.append(int(into[row]))
        return tokens

    alone = draws(0, [sampling])
    assert draws(1, [Sampling(temperature=1.0, seed=5), sampling, None]) == alone
    assert draws(2, [None, None, sampling]) == alone
    assert draws(0, [Sampling(temperature=1.5, seed=12)]) != alone


def test_a_request_that_does_not_draw_gets_the_likeliest_token() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    into = torch.zeros(3, dtype=torch.long)
    choose_tokens(logits, into=into, choosers=(None, Chooser(Sampling(temperature=1.0))))
    assert into[[0, 2]].tolist() == logits.argmax(dim=-1)[[0, 2]].tolist()


def test_drawing_takes_sixteen_bytes_for_each_token_of_the_vocabulary() -> None:
    logits, into = torch.randn(2, 5000), torch.zeros(2, dtype=torch.long)
    choosers = [Chooser(Sampling(temperature=1.0, top_p=0.5, top_k=9))] * 2
    meter = Meter(device=torch.device("cpu"))
    with meter:
        choose_tokens(logits, into=into, choosers=choosers)
    assert meter.peak().device_bytes == 16 * 5000
