"""The cache of keys and values: what it hands out, what it holds, what it refuses."""

from typing import Any

import pytest
import torch

from optimizer.base.errors import InvalidModel
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.runtime.generation.kv_cache import KvCache, find_windows
from optimizer.runtime.meter.meter import Meter
from tests.optimizer.models.small_configs import SMALL_CONFIGS


def tokens(first: int, last: int) -> torch.Tensor:
    """Keys [1, 1, length, 1] that are the positions."""
    return torch.arange(first, last, dtype=torch.float32).view(1, 1, -1, 1)


def give(cache: KvCache, first: int, last: int) -> list[float]:
    keys, values = cache.update(tokens(first, last), -tokens(first, last), 0)
    assert torch.equal(keys, -values)
    return sorted(keys.flatten().tolist())


def test_every_earlier_token_is_handed_out() -> None:
    cache = KvCache([None], capacity=6)
    assert give(cache, 0, 3) == [0, 1, 2]
    assert give(cache, 3, 4) == [0, 1, 2, 3]
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 6, 9])
def test_a_window_hands_out_the_newest_alone(prompt: int) -> None:
    cache = KvCache([4], capacity=16)
    assert give(cache, 0, prompt) == list(range(prompt))
    for position in range(prompt, 16):
        assert give(cache, position, position + 1) == list(range(max(0, position - 3), position + 1))


def test_tensors_are_made_once_and_handed_out_as_views() -> None:
    cache = KvCache([None], capacity=5)
    first, _ = cache.update(tokens(0, 3), tokens(0, 3), 0)
    later, _ = cache.update(tokens(3, 4), tokens(3, 4), 0)
    assert first.untyped_storage()._cdata == later.untyped_storage()._cdata
    assert later.untyped_storage().nbytes() == 5 * 4


@pytest.mark.parametrize(("window", "slots"), [(None, 10), (4, 4), (16, 10)])
def test_a_window_is_all_that_is_held(window: int | None, slots: int) -> None:
    meter = Meter(device=torch.device("cpu"))
    with meter:
        cache = KvCache([window], capacity=10, meter=meter)
        cache.update(torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 8), 0)
    assert meter.bytes_by_category()["kv_cache"] == 2 * (2 * 3 * slots * 8) * 4


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    cache = KvCache([None], capacity=3)
    give(cache, 0, 3)
    with pytest.raises(ValueError, match="4 tokens; the cache was made for 3"):
        give(cache, 3, 4)


def test_several_tokens_behind_a_prompt_are_refused() -> None:
    cache = KvCache([None], capacity=9)
    give(cache, 0, 3)
    with pytest.raises(ValueError, match="behind a prompt they come one at a time"):
        give(cache, 3, 5)


def test_forgetting_keeps_the_tensors() -> None:
    cache = KvCache([4], capacity=16)
    give(cache, 0, 9)
    layer: Any = cache.layers[0]
    keys = layer.keys
    cache.reset()
    assert cache.get_seq_length() == 0
    assert give(cache, 0, 2) == [0, 1]
    assert layer.keys is keys


@pytest.mark.parametrize(
    ("name", "windows"), [("llama", [None] * 3), ("mistral", [16] * 3), ("gemma2", [16, None, 16])]
)
def test_windows_are_those_of_the_config(name: str, windows: list[int | int | None | None]) -> None:
    model = build_model(read_model_spec(SMALL_CONFIGS[name]), device="meta")
    assert find_windows(model) == windows


def test_a_block_that_keeps_something_else_is_refused() -> None:
    model = build_model(read_model_spec(SMALL_CONFIGS["headroom_decoder"]), device="meta")
    with pytest.raises(InvalidModel, match="layer_types holds linear, .* needs full or local attention"):
        find_windows(model)
