"""The tokens and blocks whose keys and values may be made again."""

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.formats.kv_packing import KvLayout, KvShape
from optimizer.formats.kv_prefix import can_rebuild, count_rebuilt, prefix_refusal


@pytest.mark.parametrize(
    ("window", "elements", "can"), [(None, 64, True), (None, 33, True), (None, 32, False), (None, 16, False), (8, 64, False)]
)
def test_only_hidden_states_that_weigh_less_and_stay_are_kept(window: int | None, elements: int, can: bool) -> None:
    assert can_rebuild(window=window, hidden_size=32, elements_per_token=elements) is can


@pytest.mark.parametrize(("asked", "prompt", "found"), [(0, 9, 0), (4, 9, 4), (20, 9, 9), (4, 2, 2), (4, 1, 0)])
def test_as_many_tokens_are_made_again_as_the_prompt_has_and_never_one_alone(
    asked: int, prompt: int, found: int
) -> None:
    assert count_rebuilt(asked, prompt_length=prompt) == found


def test_a_home_is_smaller_by_what_hidden_states_weigh_less() -> None:
    shape = KvShape(batch_size=3, num_heads=4, key_dim=8, value_dim=8, element_bytes=2)
    layout = KvLayout(shape=shape, dtype="same", capacity=20, window=None, prefix_tokens=5, state_bytes=3 * 32 * 2)
    assert layout.record_bytes == 2 * layout.state_bytes
    assert layout.saved_bytes == layout.prefix_bytes == 5 * 192
    assert layout.home_bytes == 15 * 384 + 5 * 192
    assert layout.store_bytes == 20 * 384


@pytest.mark.parametrize(
    ("has_windows", "why"),
    [
        (True, "all blocks of this model have a sliding window"),
        (False, "a hidden state of this model weighs 128 B, a token's keys and values 64 B a block"),
    ],
)
def test_a_model_that_gains_nothing_is_refused_with_the_reason(has_windows: bool, why: str) -> None:
    error = prefix_refusal(8, has_windows=has_windows, state_bytes=128, token_bytes=64)
    assert isinstance(error, InvalidPlan)
    assert str(error).startswith("plan.kv_cache.prefix_tokens is 8; ")
    assert why in str(error)
