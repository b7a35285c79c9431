"""Keys and values made again of hidden states: transformers' tokens, what moves, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optimizer.base.errors import InvalidModel, InvalidPlan, OutOfHostMemory
from optimizer.formats.sampling import Sampling
from optimizer.models.anatomy import find_blocks
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator, prepare_for_generation
from optimizer.runtime.generation.kv_prefix import BlockInputs, Positions, make_again
from optimizer.runtime.meter.meter import Meter
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import CPU, build, expected_tokens, generate, prompts_of
from tests.optimizer.runtime.generation.test_kv_generation import MODELS as KV_MODELS
from tests.valkey import Valkey

LENGTH = 14
MODELS = sorted({*KV_MODELS, "olmo2", "phi"} - {"mistral", "starcoder2"})
PLANS = [
    GenerationPlan(
        batch_size=2,
        num_micro_batches=micro_batches,
        weights=WeightsPlan(place=weights),
        kv_cache=KvCachePlan(place=place, prefetch=prefetch, prefix_tokens=prefix),
    )
    for prefix, place, prefetch, micro_batches, weights in (
        (2, "host", 0, 1, "device"),
        (9, "host", 1, 2, "host"),
        (9, "disk", 2, 1, "disk"),
        (9, "remote", 1, 2, "device"),
        (14, "host", 1, 1, "device"),
        (40, "disk", 0, 2, "host"),
    )
]


def config_of(name: str) -> dict[str, Any]:
    """A config with as many heads of keys as of queries, so that keys and values weigh twice as much as hidden states."""
    config = SMALL_CONFIGS[name]
    return {**config, "num_key_value_heads": 4} if "num_key_value_heads" in config else config


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, remote: Valkey) -> None:
    model, prompts = build(config_of(name)), prompts_of(LENGTH)
    expected = expected_tokens(model, prompts)
    assert len(expected.unique()) > 2
    for plan in PLANS:
        assert torch.equal(generate(copy.deepcopy(model), prompts, plan, scratch=tmp_path), expected), plan


def test_our_decoder_does_it_in_its_blocks_of_full_attention() -> None:
    model = build({**config_of("headroom_decoder"), "layer_types": ["full", "local", "full"]})
    prompts = prompts_of(16)
    assert torch.equal(generate(model, prompts, PLANS[1]), generate(model, prompts, GenerationPlan()))


@pytest.mark.parametrize("frozen", ["int8", "int4"])
def test_packed_projections_make_them_too(frozen: str) -> None:
    model, prompts = build(config_of("llama")), prompts_of(LENGTH)
    prepare_for_generation(model, weights=WeightsPlan(frozen=frozen))
    weights = WeightsPlan(frozen=frozen)
    plain = generate(model, prompts, GenerationPlan(weights=weights))
    again = GenerationPlan(weights=weights, kv_cache=KvCachePlan(place="host", prefix_tokens=9))
    assert torch.equal(generate(model, prompts, again), plain)


def test_hidden_states_go_once_and_come_in_place_of_keys_and_values() -> None:
    model, prompts = build(config_of("llama")), prompts_of(LENGTH, 2)
    plan = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place="host", prefix_tokens=9))
    generator = Generator(model, plan=plan, device=CPU)
    generator.generate(prompts, num_new_tokens=4)
    state, kept = 2 * 32 * 4, 2 * 2 * 32 * 4
    copied = generator.tiers.copied_bytes
    assert copied["device_to_host"] == 3 * (9 * state + (LENGTH - 9 + 3) * kept)
    assert copied["host_to_device"] == 3 * sum(9 * state + (seen - 9) * kept for seen in (14, 15, 16))
    generator.close()


def test_prompts_of_several_lengths_have_prefixes_of_their_own() -> None:
    model = build(config_of("llama"))
    plan = GenerationPlan(batch_size=1, num_micro_batches=3, kv_cache=KvCachePlan(place="host", prefix_tokens=9))
    prompts = [prompts_of(LENGTH, 1)[:, :length] for length in (14, 5, 1)]
    generator = Generator(model, plan=plan, device=CPU)
    parts = [generator.micro_batch(each.tolist(), samplings=[Sampling(max_new_tokens=6)]) for each in prompts]
    generator.run_pass(parts)
    made = [part.take_ended()[0][1].token_ids for part in parts]
    generator.close()
    assert made == [tuple(generate(model, each, GenerationPlan(), num_new=6)[0].tolist()) for each in prompts]


@pytest.mark.parametrize(("name", "num_products"), [("llama", 2), ("opt", 2), ("gpt_neox", 3)])
def test_queries_are_left_out_where_they_have_a_projection_of_their_own(name: str, num_products: int) -> None:
    model = build(config_of(name))
    block, given = find_blocks(model)[0], []
    handle = block.register_forward_pre_hook(lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    generator = Generator(model, plan=GenerationPlan(), device=CPU)
    into = torch.zeros(2, 4, 2, 4, 8)
    with torch.no_grad():
        model.get_decoder()(input_ids=prompts_of(6, 2), past_key_values=generator.make_cache(capacity=6), use_cache=True)
        handle.remove()
        args, kwargs = given[0]
        inputs = BlockInputs.of_prompt(args, kwargs, positions=Positions(meter=None), num_tokens=4)
        forwards = [vars(module).get("forward") for module in block.modules()]
        with FlopCounterMode(display=False) as counter:
            make_again(block, args[0][:, :4], inputs, into=(into[0], into[1]))
    assert counter.get_total_flops() == num_products * 2 * (2 * 4) * 32 * 32
    assert [vars(module).get("forward") for module in block.modules()] == forwards
    generator.close()
    assert not any("forward" in vars(module) for module in block.modules())


def test_a_block_that_hands_nothing_to_a_cache_is_refused() -> None:
    inputs = BlockInputs.of_prompt((torch.zeros(1, 4, 8),), {}, positions=Positions(meter=None), num_tokens=4)
    with pytest.raises(InvalidModel, match="a Linear makes no keys and values of its hidden states"):
        make_again(nn.Linear(8, 8), torch.zeros(1, 4, 8), inputs, into=(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize(
    ("name", "why"),
    [("llama", "a hidden state of this model weighs 128 B, a token's keys and values 128 B"), ("mistral", "a sliding window")],
)
def test_a_model_that_gains_nothing_is_refused_before_it_decodes(name: str, why: str) -> None:
    model = build(SMALL_CONFIGS[name])
    with pytest.raises(InvalidPlan, match=why):
        generate(model, prompts_of(LENGTH), PLANS[0])


def test_nothing_of_it_is_left_after_a_pass() -> None:
    meter = Meter(device=CPU)
    model = build(config_of("llama"))
    plan = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place="host", prefix_tokens=9))
    generator = Generator(model, plan=plan, device=CPU, meter=meter)
    before = sum(meter.bytes_by_category().values())
    generator.generate(prompts_of(LENGTH), num_new_tokens=4)
    assert sum(meter.bytes_by_category().values()) == before
    generator.close()


def test_the_host_without_room_says_so() -> None:
    meter = Meter(device=CPU, host_cap_bytes=2000)
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", prefix_tokens=9))
    generator = Generator(build(config_of("llama")), plan=plan, device=CPU, meter=meter)
    with pytest.raises(OutOfHostMemory):
        generator.generate(prompts_of(LENGTH), num_new_tokens=4)
    generator.close()
