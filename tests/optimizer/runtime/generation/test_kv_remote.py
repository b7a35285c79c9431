"""Keys and values in a remote store that is lost, full or left behind: named, and nothing that was finished is lost."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from optimizer.base.errors import RemoteStoreFull, RemoteStoreLost
from optimizer.formats.sampling import Sampling
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.generation.run_requests import Finished, Request, open_generator, run_requests
from optimizer.runtime.tiers.remote import EXPIRY_S
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import CPU, build, expected_tokens, generate, prompts_of
from tests.valkey import Valkey

SPEC = read_model_spec(SMALL_CONFIGS["llama"])
CACHE = KvCachePlan(place="remote", prefetch=1)
PLAN = GenerationPlan(batch_size=2, kv_cache=CACHE)


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    """A store of the test's own, which the remote tier is configured for and the test may kill, empty or fill."""
    server = Valkey()
    monkeypatch.setenv("HEADROOM_REMOTE_URL", server.url)
    yield server
    server.close()


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(SPEC.vocab_size, (4, 12), generator=generator)
    return [
        Request(id=str(row), token_ids=tuple(given), sampling=Sampling(max_new_tokens=6))
        for row, given in enumerate(ids.tolist())
    ]


def run(
    requests: list[Request],
    *,
    plan: GenerationPlan = PLAN,
    on_finished: Callable[..., Any] = lambda finished: None,
    should_stop: Callable[..., Any] = lambda: False,
) -> dict[str, Any]:
    """Run the requests and return their answers by id, as they were reported."""
    told = {}

    def tell(finished: Finished) -> None:
        told[finished.id] = finished.token_ids
        on_finished(finished)

    with open_generator(SPEC, plan=plan) as generator:
        run_requests(generator, requests, on_finished=tell, should_stop=should_stop)
    return told


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_packed_tokens_are_those_of_the_same_cache_on_the_device(name: str, dtype: str, remote: Valkey) -> None:
    model = build({**SMALL_CONFIGS[name], "max_position_embeddings": 256, **({"n_positions": 256} if name == "gpt2" else {})})
    prompts = prompts_of(120)
    here, away = (
        generate(model, prompts, GenerationPlan(batch_size=3, kv_cache=KvCachePlan(dtype=dtype, place=place)), num_new=70)
        for place in ("device", "remote")
    )
    assert torch.equal(here, away)
    assert len(here.unique()) > 2


def test_the_store_holds_the_cache_and_nothing_of_it_afterwards(remote: Valkey) -> None:
    model, prompts = build(SMALL_CONFIGS["llama"]), prompts_of(12, 2)
    generator = Generator(model, plan=PLAN, device=CPU)
    generator.generate(prompts, num_new_tokens=4)
    # The last token is nobody's past.
    assert generator.tiers.remote_peak_bytes == SPEC.num_blocks * 2 * (2 * 2 * 8 * 4) * (12 + 3)
    assert len(remote.list_keys()) == SPEC.num_blocks
    with remote.client() as client:
        assert all(0 < client.ttl(key) <= EXPIRY_S for key in remote.list_keys())
    generator.close()
    assert remote.list_keys() == []


def test_what_was_finished_before_the_store_died_stays_and_the_rest_is_done_by_the_next_run(mortal: Valkey) -> None:
    requests = make_requests()
    expected = run(requests, plan=GenerationPlan(batch_size=2))
    told = {}

    def kill_after_the_first_pass(finished: Finished) -> None:
        told[finished.id] = finished.token_ids
        if len(told) == 2:
            mortal.kill()

    with pytest.raises(RemoteStoreLost, match="does not answer"):
        run(requests, on_finished=kill_after_the_first_pass)
    assert len(told) == 2
    mortal.start()
    told |= run([request for request in requests if request.id not in told])
    assert told == expected


@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_a_store_that_forgets_in_the_middle_of_a_pass_stops_it(mortal: Valkey, dtype: str) -> None:
    """However it forgot, no token is made of zeros."""
    asked: list[Any] = []

    def forget_after_a_few_tokens() -> bool:
        asked.append(None)
        if len(asked) == 4:
            with mortal.client() as client:
                client.flushall()
        return False

    plan = GenerationPlan(kv_cache=KvCachePlan(place="remote", dtype=dtype, prefetch=2))
    spec = read_model_spec({**SMALL_CONFIGS["llama"], "max_position_embeddings": 512})
    request = Request(id="long", token_ids=(5,) * 200, sampling=Sampling(max_new_tokens=20))
    told: list[Any] = []
    with open_generator(spec, plan=plan) as generator, pytest.raises(RemoteStoreLost, match="no longer holds"):
        run_requests(generator, [request], on_finished=told.append, should_stop=forget_after_a_few_tokens)
    assert told == []


def test_a_full_store_is_named_and_what_was_written_is_removed(mortal: Valkey) -> None:
    with mortal.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 20_000)
    with pytest.raises(RemoteStoreFull, match="is full") as caught:
        run(make_requests(), plan=GenerationPlan(batch_size=4, kv_cache=CACHE))
    assert "maxmemory" in caught.value.hint
    assert mortal.list_keys() == []


def test_a_store_that_is_away_is_named_before_anything_is_loaded_onto_the_device(mortal: Valkey) -> None:
    mortal.kill()
    model = build(SMALL_CONFIGS["llama"])
    with pytest.raises(RemoteStoreLost, match="does not answer"):
        Generator(model, plan=PLAN, device=CPU)


def test_without_an_address_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_REMOTE_URL", raising=False)
    with pytest.raises(RemoteStoreLost, match="HEADROOM_REMOTE_URL is not set"):
        Generator(build(SMALL_CONFIGS["llama"]), plan=PLAN, device=CPU)


def test_two_runs_share_a_store(remote: Valkey) -> None:
    model, prompts = build(SMALL_CONFIGS["llama"]), prompts_of(12, 2)
    expected = expected_tokens(model, prompts, 4)
    first, second = (Generator(build(SMALL_CONFIGS["llama"]), plan=PLAN, device=CPU) for _ in range(2))
    assert torch.equal(first.generate(prompts, num_new_tokens=4), expected)
    assert torch.equal(second.generate(prompts, num_new_tokens=4), expected)
    first.close()
    assert len(remote.list_keys()) == SPEC.num_blocks
    assert torch.equal(second.generate(prompts, num_new_tokens=4), expected)
    second.close()
    assert remote.list_keys() == []
