"""Attention on the host: what it makes of keys and values there, what crosses the link, and which models it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import optimizer.formats.host_attention as sizes
from optimizer.base.errors import InvalidModel, OutOfHostMemory
from optimizer.models.build import build_model
from optimizer.models.decoder.attention_hook import attend_of, set_attend
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.generation.kv_cache import KvCache, chain
from optimizer.runtime.generation.kv_host_attention import attend_on_host
from optimizer.runtime.generation.kv_workspace import KvHomes, KvWorkspace
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.models.small_configs import SMALL_CONFIGS

CPU = torch.device("cpu")
PLAN = KvCachePlan(place="host", attention="host")
BATCH, HEADS, GROUP, DIM = 2, 2, 3, 8
RECORD_BYTES = 2 * BATCH * HEADS * DIM * 4
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Half a step of what comes back, and what sums in another order differ by."""
QUERY_BYTES = BATCH * HEADS * GROUP * DIM * 4


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    tiers = Tiers(device=CPU)
    yield tiers
    tiers.close()


def make_cache(tiers: Tiers, windows: list[int | None], *, capacity: int, meter: Any = None, homes: Any = None) -> Any:
    workspace = KvWorkspace(device=CPU, prefetch=PLAN.prefetch, meter=meter)
    return KvCache(
        windows, capacity=capacity, plan=PLAN, workspace=workspace, homes=homes or KvHomes(tiers), meter=meter
    )


def states(num_tokens: int, *, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [2, batch, heads, tokens, channels], and queries [batch, heads, tokens, channels]."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(2, BATCH, HEADS, num_tokens, DIM, generator=generator)
    return kept.to(dtype), torch.randn(BATCH, HEADS * GROUP, num_tokens, DIM, generator=generator).to(dtype)


def expected_of(
    tokens: torch.Tensor, queries: torch.Tensor, position: int, window: int | None, *, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention's output by torch's own function, [batch, 1, heads, channels]."""
    first = 0 if window is None else max(0, position + 1 - window)
    keys, values = (part[:, :, first : position + 1].float().repeat_interleave(GROUP, 1) for part in tokens)
    scores = queries[:, :, position : position + 1].float() @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def give_prompt(cache: KvCache, tokens: torch.Tensor, length: int) -> None:
    for block in range(len(cache.layers)):
        cache.update(*tokens[:, :, :, :length], block)


def attend(
    cache: KvCache,
    tokens: torch.Tensor,
    queries: torch.Tensor,
    position: int,
    *,
    block: int = 0,
    scaling: Any = None,
    softcap: Any = None,
) -> torch.Tensor:
    key, _ = cache.update(*tokens[:, :, :, position : position + 1], block)
    return attend_of(key)(queries[:, :, position : position + 1], scaling=scaling, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("prompt", [1, 4, 5, 70])
@pytest.mark.parametrize(("scaling", "softcap"), [(None, None), (0.7, 2.0)])
def test_each_token_sees_what_its_block_keeps(
    tiers: Tiers,
    dtype: torch.dtype,
    window: int | None,
    prompt: int,
    scaling: float | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits the output agrees to within its rounding; slices have 11 tokens, so that sums go over several."""
    monkeypatch.setattr(sizes, "SLICE_BYTES", 11 * BATCH * HEADS * DIM * 4)
    tokens, queries = states(80, dtype=dtype)
    cache = make_cache(tiers, [window, None], capacity=80)
    give_prompt(cache, tokens, prompt)
    for position in range(prompt, 80):
        for block in (0, 1):
            made = attend(cache, tokens, queries, position, block=block, scaling=scaling, softcap=softcap)
            expected = expected_of(
                tokens,
                queries,
                position,
                (window, None)[block],
                scale=DIM**-0.5 if scaling is None else scaling,
                softcap=softcap,
            )
            assert made.dtype == dtype
            assert torch.allclose(made.float(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype]), position


def test_each_token_sends_its_record_and_query_and_brings_its_output(tiers: Tiers) -> None:
    tokens, queries = states(20)
    cache = make_cache(tiers, [None, 6], capacity=20)
    give_prompt(cache, tokens, 12)
    assert tiers.copied_bytes["device_to_host"] == (12 + 6) * RECORD_BYTES
    for position in range(12, 20):
        before = dict(tiers.copied_bytes)
        for block in (0, 1):
            attend(cache, tokens, queries, position, block=block)
        assert tiers.copied_bytes["device_to_host"] - before["device_to_host"] == 2 * (RECORD_BYTES + QUERY_BYTES)
        assert tiers.copied_bytes["host_to_device"] - before["host_to_device"] == 2 * QUERY_BYTES


def test_the_host_holds_records_and_one_room_which_caches_of_later_passes_use_again() -> None:
    meter = Meter(device=CPU)
    tiers = Tiers(device=CPU, meter=meter)
    homes = KvHomes(tiers)
    for _ in range(2):
        with meter:
            cache = make_cache(tiers, [None, 6], capacity=20, meter=meter, homes=homes)
            tokens, queries = states(20)
            give_prompt(cache, tokens, 12)
            for position in range(12, 20):
                for block in (1, 0):
                    attend(cache, tokens, queries, position, block=block)
        largest = sizes.HostAttention(kept=cache.layers[0].layout, num_query_heads=HEADS * GROUP)
        assert meter.peak().host_bytes == (20 + 6) * RECORD_BYTES + largest.num_bytes
        del cache
    tiers.close()


def test_the_device_keeps_no_more_than_a_prompts_records() -> None:
    meter = Meter(device=CPU)
    tiers = Tiers(device=CPU, meter=meter)
    tokens, queries = states(40)
    with meter:
        cache = make_cache(tiers, [None], capacity=40, meter=meter)
        give_prompt(cache, tokens, 12)
        for position in range(12, 40):
            attend(cache, tokens, queries, position)
        assert meter.bytes_by_category()["kv_cache"] == 12 * RECORD_BYTES
    tiers.close()


def test_a_host_without_room_is_refused_before_anything_is_overwritten() -> None:
    meter = Meter(device=CPU, host_cap_bytes=20 * RECORD_BYTES + 100)
    tiers = Tiers(device=CPU, meter=meter)
    tokens, queries = states(20)
    with meter:
        cache = make_cache(tiers, [None], capacity=20, meter=meter)
        give_prompt(cache, tokens, 12)
        with pytest.raises(OutOfHostMemory):
            attend(cache, tokens, queries, 12)
    tiers.close()


def test_more_tokens_than_there_is_room_for_are_refused(tiers: Tiers) -> None:
    tokens, queries = states(4)
    cache = make_cache(tiers, [None], capacity=3)
    give_prompt(cache, tokens, 2)
    attend(cache, tokens, queries, 2)
    with pytest.raises(ValueError, match="4 tokens; the cache was made for 3"):
        attend(cache, tokens, queries, 3)


def test_caches_that_take_turns_share_the_room(tiers: Tiers) -> None:
    homes, (tokens, queries) = KvHomes(tiers), states(20)
    workspace = KvWorkspace(device=CPU, prefetch=1, meter=None)
    caches = [
        KvCache([None, 4], capacity=20, plan=PLAN, workspace=workspace, homes=homes, turn=turn) for turn in (0, 1)
    ]
    chain(caches)
    for cache in caches:
        give_prompt(cache, tokens, 9)
    for position in range(9, 20):
        for block in (0, 1):
            for cache in caches:
                made = attend(cache, tokens, queries, position, block=block)
                expected = expected_of(tokens, queries, position, (None, 4)[block], scale=DIM**-0.5, softcap=None)
                assert torch.allclose(made, expected, rtol=1e-5, atol=2e-6)


class _Names(TorchDispatchMode):
    """Records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[torch.Tensor] | torch.Tensor:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, None), (torch.float32, 3.0), (torch.bfloat16, None)])
@pytest.mark.parametrize("slice_tokens", [100, 7])
def test_the_host_is_asked_for_as_many_ops_as_are_priced(
    tiers: Tiers, dtype: torch.dtype, softcap: float | None, slice_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "SLICE_BYTES", slice_tokens * BATCH * HEADS * DIM * 4)
    tokens, queries = states(22, dtype=dtype)
    cache = make_cache(tiers, [None], capacity=22)
    give_prompt(cache, tokens, 20)
    attend(cache, tokens, queries, 20, softcap=softcap)
    counted = _Names()
    with counted:
        attend(cache, tokens, queries, 21, softcap=softcap)
    device = counted.names.index("aten.cat.default") + 2
    host = sizes.HostAttention(kept=cache.layers[0].layout, num_query_heads=HEADS * GROUP)
    assert host.num_slices(22) == (1 if dtype == torch.float32 or slice_tokens == 100 else 4)
    assert len(counted.names) - device == host.num_ops(22, caps_scores=softcap is not None)


# Models.


def test_a_model_that_attends_in_code_of_its_own_is_refused() -> None:
    model = build_model(read_model_spec(SMALL_CONFIGS["falcon"])).eval()
    with pytest.raises(InvalidModel, match="FalconDecoderLayer attends in code of its own; attention on the host takes"):
        Generator(model, plan=GenerationPlan(kv_cache=PLAN), device=CPU)


def test_a_model_that_does_not_ask_for_attention_is_found_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_model(read_model_spec(SMALL_CONFIGS["llama"])).eval()
    module = model.model.layers[1].self_attn
    own = module.forward

    def attends_itself(
        hidden_states: torch.Tensor, past_key_values: KvCache | None = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        if hidden_states.shape[1] > 1:
            return own(hidden_states, past_key_values=past_key_values, **others)
        key = torch.zeros(1, 2, 1, 8)
        past_key_values.update(key, key, 1)
        return hidden_states, None

    monkeypatch.setattr(module, "forward", attends_itself)
    generator = Generator(model, plan=GenerationPlan(kv_cache=PLAN), device=CPU)
    with pytest.raises(InvalidModel, match="llama attends in code of its own"):
        generator.generate(torch.zeros(1, 3, dtype=torch.long), num_new_tokens=3)
    generator.close()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
        ({"attention_mask": None, "s_aux": torch.zeros(1)}, "s_aux"),
        ({"attention_mask": None, "position_bias": torch.zeros(1), "position_ids": torch.zeros(1)}, "position_bias"),
    ],
)
def test_attention_that_wants_more_is_refused_with_what_it_wants(given: dict[str, Any], names: str) -> None:
    key = torch.zeros(1, 2, 1, 8)
    set_attend(key, lambda query, **options: query)
    with pytest.raises(InvalidModel, match=f"Linear gives attention {names}; attention on the host takes"):
        attend_on_host(torch.nn.Linear(1, 1), key, key, key, **given)


def test_keys_that_are_not_the_caches_are_refused() -> None:
    key = torch.zeros(1, 2, 1, 8)
    with pytest.raises(InvalidModel, match="keys that are not those of the cache"):
        attend_on_host(torch.nn.Linear(1, 1), key, key, key, None)


def test_queries_in_another_dtype_are_refused(tiers: Tiers) -> None:
    tokens, queries = states(4)
    cache = make_cache(tiers, [None], capacity=4)
    give_prompt(cache, tokens, 2)
    with pytest.raises(InvalidModel, match=r"queries are 6 heads of 8 torch\.float64, keys 2 of 8 torch\.float32"):
        attend(cache, tokens, queries.double(), 2)


def test_a_reset_cache_can_be_used_again(tiers: Tiers) -> None:
    tokens, queries = states(12)
    cache = make_cache(tiers, [None], capacity=12)
    for _ in range(2):
        give_prompt(cache, tokens, 5)
        made = attend(cache, tokens, queries, 5)
        assert torch.allclose(made, expected_of(tokens, queries, 5, None, scale=DIM**-0.5, softcap=None), atol=2e-6)
        cache.reset()


def test_scores_of_one_token_are_one(tiers: Tiers) -> None:
    tokens, queries = states(3)
    cache = make_cache(tiers, [1], capacity=3)
    give_prompt(cache, tokens, 1)
    made = attend(cache, tokens, queries, 1)
    assert torch.equal(made.squeeze(1), tokens[1, :, :, 1].repeat_interleave(GROUP, 1))
