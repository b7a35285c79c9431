"""Caches that are packed or off the device: what attention sees, what is moved, and that what is packed stays as it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from optimizer.base.errors import InvalidPlan
from optimizer.formats.kv_packing import KV_BLOCK_TOKENS
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.kv_cache import KvCache, chain
from optimizer.runtime.generation.kv_workspace import KvHomes, KvWorkspace
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.tiers import Tiers
from tests.valkey import Valkey

CPU = torch.device("cpu")
BATCH, HEADS, DIM = 2, 2, 8
TOKEN_BYTES = 2 * BATCH * HEADS * DIM * 4
AWAY = [(dtype, place) for dtype in ("same", "int8", "int4") for place in ("device", "host", "disk", "remote")][1:]


@pytest.fixture
def tiers(tmp_path: Path, remote: Valkey) -> Iterator[Tiers]:
    tiers = Tiers(device=CPU, scratch=tmp_path)
    yield tiers
    tiers.close()


def make_cache(
    tiers: Tiers, windows: list[int | None], *, capacity: int, meter: Any = None, workspace: Any = None, **choices: Any
) -> Any:
    plan = KvCachePlan(**choices)
    workspace = workspace or KvWorkspace(device=CPU, prefetch=plan.prefetch, meter=meter)
    return KvCache(
        windows, capacity=capacity, plan=plan, workspace=workspace, homes=KvHomes(tiers), meter=meter
    )


def states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Keys, then values: [batch, heads, tokens, channels]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, BATCH, HEADS, num_tokens, DIM, generator=generator)


def give(
    cache: KvCache, tokens: torch.Tensor, first: int, last: int, *, block: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.update(tokens[0, :, :, first:last], tokens[1, :, :, first:last], block)


# The records that attention sees.


@pytest.mark.parametrize("place", ["host", "disk", "remote"])
@pytest.mark.parametrize("window", [None, 5, 64, 100])
@pytest.mark.parametrize("prompt", [1, 4, 5, 63, 130])
def test_a_place_changes_no_bit(tiers: Tiers, place: str, window: int | None, prompt: int) -> None:
    tokens = states(140)
    plain = KvCache([window, None], capacity=140)
    moved = make_cache(tiers, [window, None], capacity=140, place=place)
    for first, last in ((0, prompt), *((at, at + 1) for at in range(prompt, 140))):
        for block in (0, 1):
            expected, seen = (give(cache, tokens, first, last, block=block) for cache in (plain, moved))
            assert all(torch.equal(*pair) for pair in zip(expected, seen, strict=True)), (first, block)
            assert moved.get_mask_sizes(1, block) == plain.get_mask_sizes(1, block)


@pytest.mark.parametrize(("dtype", "place"), AWAY)
@pytest.mark.parametrize("window", [None, 2, 65, 100])
@pytest.mark.parametrize("prompt", [1, 64, 129])
def test_the_tokens_of_the_window_are_seen_in_order(
    tiers: Tiers, dtype: str, place: str, window: int | None, prompt: int
) -> None:
    """Keys are the positions, which int4 holds to 2: there are 15 steps in 64."""
    last = 200
    positions = torch.arange(float(last)).view(1, 1, -1, 1).expand(1, 1, last, DIM).contiguous()
    cache = make_cache(tiers, [window], capacity=last, dtype=dtype, place=place)
    cache.update(positions[:, :, :prompt], positions[:, :, :prompt], 0)
    for at in range(prompt, last):
        keys, values = cache.update(positions[:, :, at : at + 1], positions[:, :, at : at + 1], 0)
        oldest = 0 if window is None else max(0, at + 1 - window)
        expected = positions[:, :, oldest : at + 1]
        if dtype == "same":
            # A ring: the newest takes the place of the oldest.
            keys, values = keys.sort(dim=2).values, values.sort(dim=2).values
        assert keys.shape == values.shape == expected.shape
        assert (keys - expected).abs().max() <= 2.2
        assert (values - expected).abs().max() <= 2.2


def test_the_newest_tokens_are_seen_as_they_are(tiers: Tiers) -> None:
    tokens = states(200)
    cache = make_cache(tiers, [None], capacity=200, dtype="int4")
    give(cache, tokens, 0, 130)
    for at in range(130, 200):
        keys, _ = give(cache, tokens, at, at + 1)
        num_waiting = at % KV_BLOCK_TOKENS + 1
        assert torch.equal(keys[:, :, -num_waiting:], tokens[0, :, :, at + 1 - num_waiting : at + 1])


def test_a_prompt_is_seen_as_it_is(tiers: Tiers) -> None:
    tokens = states(150)
    cache = make_cache(tiers, [None, 100], capacity=200, dtype="int4", place="host")
    for block in (0, 1):
        keys, values = give(cache, tokens, 0, 150, block=block)
        assert torch.equal(keys, tokens[0])
        assert torch.equal(values, tokens[1])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_attention_is_off_by_no_more_than_scores_and_values_are(tiers: Tiers, dtype: str) -> None:
    """Scores off by d or less change each weight by a factor between exp(-2 d) and exp(2 d)."""
    tokens = states(300)
    cache = make_cache(tiers, [None], capacity=300, dtype=dtype)
    give(cache, tokens, 0, 299)
    keys, values = give(cache, tokens, 299, 300)
    query = states(1, seed=5)[0]
    exact = F.scaled_dot_product_attention(query, tokens[0], tokens[1])
    seen = F.scaled_dot_product_attention(query, keys, values)
    worst_score = ((keys - tokens[0]) @ query.transpose(-1, -2)).abs().max() / DIM**0.5
    bound = (2 * worst_score).expm1() * tokens[1].abs().max() + (values - tokens[1]).abs().max()
    assert (seen - exact).abs().max() <= bound
    relative = (seen - exact).norm() / exact.norm()
    assert relative <= (0.02 if dtype == "int8" else 0.25)


# Records that were packed once.


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("place", ["device", "host", "disk", "remote"])
def test_over_2000_tokens_the_prompts_records_stay_byte_for_byte(tiers: Tiers, dtype: str, place: str) -> None:
    prompt, last = 256, 2256
    tokens = states(last)
    cache = make_cache(tiers, [None], capacity=last, dtype=dtype, place=place)
    give(cache, tokens, 0, prompt)
    give(cache, tokens, prompt, prompt + 1)
    num_records = prompt // KV_BLOCK_TOKENS
    before = cache.layers[0].records[:num_records].clone()
    first_error = None
    for at in range(prompt + 1, last):
        keys, _ = give(cache, tokens, at, at + 1)
        if at in (prompt + 1, last - 1):
            error = (keys[:, :, :prompt] - tokens[0, :, :, :prompt]).abs()
            first_error = error if first_error is None else first_error
            assert torch.equal(error, first_error)
    assert torch.equal(cache.layers[0].records[:num_records], before)


# Records that move.


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("place", ["host", "disk", "remote"])
def test_a_token_is_sent_once_and_those_before_it_are_brought(tiers: Tiers, place: str, prefetch: int) -> None:
    tokens = states(20)
    cache = make_cache(tiers, [None, 6, None], capacity=20, place=place, prefetch=prefetch)
    for block in range(3):
        give(cache, tokens, 0, 10, block=block)
    assert tiers.copied_bytes["device_to_host"] == TOKEN_BYTES * (10 + 6 + 10)
    assert tiers.copied_bytes["host_to_device"] == 0
    before = dict(tiers.copied_bytes)
    for at in range(10, 20):
        for block in range(3):
            give(cache, tokens, at, at + 1, block=block)
        moved: dict[Any, int] = {link: num_bytes - before[link] for link, num_bytes in tiers.copied_bytes.items()}
        before = dict(tiers.copied_bytes)
        assert moved["device_to_host"] == 3 * TOKEN_BYTES
        assert moved["host_to_device"] == TOKEN_BYTES * (at + 6 + at)
        for store in ("disk", "remote"):
            expected = (moved["device_to_host"], moved["host_to_device"]) if place == store else (0, 0)
            assert (moved[f"host_to_{store}"], moved[f"{store}_to_host"]) == expected


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_packed_tokens_travel_packed_and_go_once(tiers: Tiers, dtype: str) -> None:
    tokens = states(260)
    cache = make_cache(tiers, [None], capacity=260, dtype=dtype, place="host")
    give(cache, tokens, 0, 100)
    record_bytes = cache.layers[0].layout.record_bytes
    sent, brought = [], []
    for at in range(100, 260):
        before = dict(tiers.copied_bytes)
        give(cache, tokens, at, at + 1)
        sent.append(tiers.copied_bytes["device_to_host"] - before["device_to_host"])
        brought.append(tiers.copied_bytes["host_to_device"] - before["host_to_device"])
    assert sent == [record_bytes * (at in (128, 192, 256)) for at in range(100, 260)]
    assert brought == [record_bytes * ((at - 1) // KV_BLOCK_TOKENS) for at in range(100, 260)]


def test_the_next_blocks_records_come_before_they_are_asked_for(tiers: Tiers) -> None:
    tokens = states(12)
    cache = make_cache(tiers, [None] * 3, capacity=12, place="host", prefetch=1)
    for block in range(3):
        give(cache, tokens, 0, 10, block=block)
    give(cache, tokens, 10, 11, block=0)
    assert tiers.copied_bytes["host_to_device"] == 2 * 10 * TOKEN_BYTES
    give(cache, tokens, 10, 11, block=1)
    give(cache, tokens, 10, 11, block=2)
    assert tiers.copied_bytes["host_to_device"] == 3 * 10 * TOKEN_BYTES


@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_caches_that_take_turns_share_the_workspace(tiers: Tiers, dtype: str) -> None:
    tokens = [states(140, seed=seed) for seed in (1, 2, 3)]
    plain = [make_cache(tiers, [None, 80], capacity=140, dtype=dtype, place="host", prefetch=0) for _ in tokens]
    workspace = KvWorkspace(device=CPU, prefetch=2, meter=None)
    caches = [
        make_cache(tiers, [None, 80], capacity=140, workspace=workspace, dtype=dtype, place="host", prefetch=2)
        for _ in tokens
    ]
    chain(caches)
    for group in (plain, caches):
        for cache, given in zip(group, tokens, strict=True):
            for block in (0, 1):
                give(cache, given, 0, 90, block=block)
    for at in range(90, 140):
        for block in (0, 1):
            for alone, together, given in zip(plain, caches, tokens, strict=True):
                expected, seen = (give(cache, given, at, at + 1, block=block) for cache in (alone, together))
                assert all(torch.equal(*pair) for pair in zip(expected, seen, strict=True))


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_homes_are_used_again_by_the_next_pass(tiers: Tiers, place: str) -> None:
    homes, plan = KvHomes(tiers), KvCachePlan(place=place)
    for _ in range(3):
        workspace = KvWorkspace(device=CPU, prefetch=1, meter=None)
        cache = KvCache([None], capacity=8, plan=plan, workspace=workspace, homes=homes)
        give(cache, states(8), 0, 8)
        del cache
    assert {"disk": tiers.disk_bytes, "remote": tiers.remote_bytes}[place] == 8 * TOKEN_BYTES


# Memory that is held.


@pytest.mark.parametrize(("window", "records"), [(None, 4), (64, 1), (65, 1), (66, 2), (1000, 4)])
def test_on_the_device_are_the_records_the_newest_tokens_and_the_workspace(
    tmp_path: Path, window: int | None, records: int
) -> None:
    meter = Meter(device=CPU)
    tiers = Tiers(device=CPU, meter=meter, scratch=tmp_path)
    with meter:
        cache = make_cache(tiers, [window], capacity=300, meter=meter, dtype="int8")
        give(cache, torch.zeros(2, BATCH, HEADS, 10, DIM), 0, 10)
        layout = cache.layers[0].layout
        assert layout.num_records == records
        held = records * (2 * 64 * BATCH * HEADS * (DIM + 4)) + 64 * TOKEN_BYTES + layout.front_bytes
        assert meter.bytes_by_category()["kv_cache"] == held
        del cache
    assert meter.bytes_by_category()["kv_cache"] == 0


def test_off_the_device_nothing_is_held_there_but_the_workspace(tmp_path: Path) -> None:
    meter = Meter(device=CPU)
    tiers = Tiers(device=CPU, meter=meter, scratch=tmp_path)
    with meter:
        cache = make_cache(tiers, [None, 6], capacity=20, meter=meter, place="host", prefetch=1)
        tokens = torch.zeros(2, BATCH, HEADS, 20, DIM)
        for block in (0, 1):
            give(cache, tokens, 0, 10, block=block)
        assert meter.bytes_by_category()["kv_cache"] == 20 * TOKEN_BYTES
        give(cache, tokens, 10, 11)
        assert meter.bytes_by_category()["kv_cache"] == 2 * 20 * TOKEN_BYTES
    assert meter.bytes_by_category(tier="host")["kv_cache"] == (20 + 6) * TOKEN_BYTES


@pytest.mark.parametrize(("dtype", "place"), AWAY)
def test_more_tokens_than_there_is_room_for_are_refused(tiers: Tiers, dtype: str, place: str) -> None:
    tokens = states(6)
    cache = make_cache(tiers, [None], capacity=5, dtype=dtype, place=place)
    give(cache, tokens, 0, 4)
    give(cache, tokens, 4, 5)
    with pytest.raises(ValueError, match="6 tokens; the cache was made for 5"):
        give(cache, tokens, 5, 6)


def test_a_prefetch_beyond_all_measure_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.kv_cache\.prefetch is 9; allowed: 0 to 8"):
        KvCachePlan(prefetch=9)
