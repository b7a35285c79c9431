"""Sampling settings that a request may ask for."""

import pytest

from optimizer.base.errors import InvalidWorkload
from optimizer.formats.sampling import Sampling


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, "an integer from 1 to 131,072"),
        ("temperature", -0.1, "a number from 0 to 100"),
        ("temperature", float("nan"), "a number from 0 to 100"),
        ("top_k", -1, "an integer from 0 to 2,147,483,647"),
        ("top_k", True, "an integer from 0 to 2,147,483,647"),
        ("top_p", 0, "a number above 0 to 1"),
        ("seed", 1.5, "an integer from 0 to 9,223,372,036,854,775,807"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_what_is_allowed(field: str, value: float, allowed: str) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        Sampling(**{field: value})
    assert str(caught.value) == f"sampling.{field} is {value!r}; allowed: {allowed}"


def test_stop_tokens_are_checked_one_by_one() -> None:
    with pytest.raises(InvalidWorkload, match=r"sampling\.stop_token_ids is -1"):
        Sampling(stop_token_ids=(3, -1))
    with pytest.raises(InvalidWorkload, match="has 1,025 tokens; allowed: at most 1,024"):
        Sampling(stop_token_ids=tuple(range(1025)))


def test_the_default_takes_the_likeliest() -> None:
    assert Sampling().is_greedy
    assert not Sampling(temperature=0.1).is_greedy
