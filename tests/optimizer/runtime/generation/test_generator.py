"""Generation gives the tokens of transformers' own, whatever the plan does with the weights."""

from typing import Any, Never

import pytest
import torch

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.models.anatomy import find_blocks
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator, prepare_for_generation
from optimizer.runtime.job.measure_generation import make_prompts, measure_generation
from optimizer.runtime.meter.meter import Meter
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.counted_card import counted_card
from tests.optimizer.runtime.generation.plans import CPU, build
from tests.valkey import Valkey

MODELS = ("gemma", "gemma2", "gpt2", "llama", "mistral", "mixtral", "opt", "phi3", "qwen2", "qwen3")
NUM_NEW = 14
PROMPT_LENGTHS = (9, 15, 16, 24)
"""The window of those with one is 16: crossed by the new tokens, just not reached, filled and passed by the prompt."""


def prompts_of(length: int, num_sequences: int = 3) -> torch.Tensor:
    return make_prompts(128, GenerationWorkload(prompt_length=length, num_sequences=num_sequences))


def generate(model: Any, prompts: torch.Tensor, num_new: int = NUM_NEW, **choices: Any) -> torch.Tensor:
    generator = Generator(model, plan=GenerationPlan(**choices), device=CPU)
    try:
        return generator.generate(prompts, num_new_tokens=num_new)
    finally:
        generator.close()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = build(SMALL_CONFIGS[name])
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    seen = set()
    for length in PROMPT_LENGTHS:
        prompts = prompts_of(length)
        expected = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_NEW, do_sample=False, use_cache=True
        )
        tokens = generate(model, prompts, batch_size=2)
        assert torch.equal(tokens, expected[:, length:]), length
        seen.update(tokens.flatten().tolist())
    assert len(seen) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full", "local", "full"]},
        {"layer_types": ["local"] * 3, "fused_qkv": True, "norm_place": "both"},
        {"layer_types": ["full"] * 3, "positions": "learned", "share_every": 2},
    ],
)
def test_our_decoders_tokens_are_those_of_the_whole_window_each_time(changes: dict[str, Any]) -> None:
    model = build({**SMALL_CONFIGS["headroom_decoder"], **changes})
    prompts = prompts_of(13)
    ids = prompts
    with torch.no_grad():
        for _ in range(NUM_NEW):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, prompts, batch_size=2), ids[:, 13:])


@pytest.mark.parametrize(
    "weights",
    [
        WeightsPlan(place="host"),
        WeightsPlan(place="host", prefetch=0),
        WeightsPlan(place="disk", prefetch=2),
        WeightsPlan(place="remote"),
    ],
)
def test_streamed_weights_give_the_same_tokens_and_are_the_models_again(remote: Valkey, weights: WeightsPlan) -> None:
    model, prompts = build(SMALL_CONFIGS["llama"]), prompts_of(12)
    expected = generate(model, prompts, batch_size=3)
    assert torch.equal(generate(model, prompts, batch_size=3, weights=weights), expected)
    assert torch.equal(generate(model, prompts, batch_size=3), expected)


def test_packed_weights_stream_packed_and_give_the_tokens_they_give_in_place() -> None:
    model, prompts = build(SMALL_CONFIGS["mixtral"]), prompts_of(12)
    prepare_for_generation(model, weights=WeightsPlan(frozen="int8"))
    expected = generate(model, prompts, batch_size=3, weights=WeightsPlan(frozen="int8"))
    streamed = generate(model, prompts, batch_size=3, weights=WeightsPlan(frozen="int8", place="host"))
    assert torch.equal(streamed, expected)


def test_how_prompts_are_split_into_passes_changes_no_token() -> None:
    model, prompts = build(SMALL_CONFIGS["qwen3"]), prompts_of(12, num_sequences=5)
    expected = generate(model, prompts, batch_size=5)
    assert torch.equal(generate(model, prompts, batch_size=1), expected)
    assert torch.equal(generate(model, prompts, batch_size=2), expected)


def test_a_single_new_token_needs_no_decode() -> None:
    spec = read_model_spec(SMALL_CONFIGS["llama"])
    workload = GenerationWorkload(prompt_length=8, num_new_tokens=1, num_sequences=2)
    measured = measure_generation(spec, plan=GenerationPlan(batch_size=2), workload=workload)
    assert measured.tokens.shape == (2, 1)
    assert measured.decode_ms == 0


def test_the_cap_names_the_moment_and_the_cache() -> None:
    spec = read_model_spec(SMALL_CONFIGS["llama"])
    workload = GenerationWorkload(prompt_length=8, num_new_tokens=8, num_sequences=2)
    peak_bytes = measure_generation(spec, plan=GenerationPlan(batch_size=2), workload=workload).device_peak_bytes
    measure_generation(spec, plan=GenerationPlan(batch_size=2), workload=workload, cap_bytes=peak_bytes)
    with pytest.raises(OutOfDeviceMemory, match=r"in prefill of block 3 of 3: .* kv cache") as caught:
        measure_generation(spec, plan=GenerationPlan(batch_size=2), workload=workload, cap_bytes=peak_bytes - 1)
    assert caught.value.fields["bytes_by_category"]["kv_cache"] == 3 * 2 * 2 * 2 * 15 * 8 * 4


@pytest.mark.parametrize(("spike_at", "num_forward"), [(1, 32), (40, 64), (70, 80)])
def test_a_long_pass_ends_soon_after_a_cards_counters_went_over_the_cap(spike_at: int, num_forward: int) -> None:
    done: list[int] = []
    with counted_card() as memory:
        model = build(SMALL_CONFIGS["llama"])
        generator = Generator(
            model, plan=GenerationPlan(batch_size=2), device=CPU, meter=Meter(device=CPU, cap_bytes=2**30)
        )

        def note(module: Any, args: Any, output: Any) -> None:
            done.append(len(done) + 1)
            if len(done) == spike_at:
                memory.spike(2**30 + 512)

        model.get_submodule("model").register_forward_hook(note)
        with pytest.raises(OutOfDeviceMemory, match="inside an op in .*: 512 B more were needed"):
            generator.generate(prompts_of(8, num_sequences=2), num_new_tokens=80)
        generator.close()
    assert len(done) == num_forward


def test_nothing_is_left_on_the_device_but_the_weights() -> None:
    model, meter = build(SMALL_CONFIGS["llama"]), Meter(device=CPU)
    generator = Generator(model, plan=GenerationPlan(batch_size=2), device=CPU, meter=meter)
    before_bytes = meter.device_bytes
    generator.generate(prompts_of(9), num_new_tokens=5)
    assert meter.device_bytes == before_bytes
    generator.close()


def test_an_error_in_a_pass_leaves_no_streamed_weights_on_the_device() -> None:
    def fail(module: Any, args: Any) -> Never:
        raise RuntimeError("no more")

    model: Any = build(SMALL_CONFIGS["llama"])
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = Generator(model, plan=GenerationPlan(batch_size=2, weights=WeightsPlan(place="host")), device=CPU)
    blocks: Any = find_blocks(model)
    # After the hook that has the block's weights come, and the next one's.
    handle = blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        generator.generate(prompts_of(9), num_new_tokens=5)
    assert not any(parameter.untyped_storage().nbytes() for block in blocks for parameter in block.parameters())
    handle.remove()
    generator.close()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
