"""Sentences that explain a generation's plan."""

from types import SimpleNamespace
from typing import Any

from optimizer.base.units import GIB, MIB
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload

WORKLOAD = GenerationWorkload(prompt_length=512, num_new_tokens=128, num_sequences=10)


def costs(**changes: Any) -> SimpleNamespace:
    facts = {
        "device_peak_bytes": 3 * GIB,
        "device_peak_high_bytes": 4 * GIB,
        "host_peak_bytes": 0,
        "disk_peak_bytes": 0,
        "remote_peak_bytes": 0,
        "kv_cache_bytes": 512 * MIB,
        "copied_bytes_per_token": {},
        "exposed_ms": {},
        "peak_moment": "prefill of block 2 of 32",
        "prefill_ms": 40.0,
        "decode_ms": 2.5,
        "tokens_per_s": 1234.5,
    }
    return SimpleNamespace(**{**facts, **changes})


def explain(prediction: Any = None, workload: GenerationWorkload = WORKLOAD, **choices: Any) -> list[str]:
    return explain_generation_plan(GenerationPlan(**choices), workload=workload, prediction=prediction or costs())


def test_a_plain_plan_names_passes_cache_time_and_peak() -> None:
    assert explain(batch_size=4) == [
        "10 sequences run in 3 passes of 4, the last with 2",
        "the numbers are those of plain fp32",
        "keys and values of 639 tokens take 512 MiB on the device, allocated once with the prompt",
        "the first token comes after 40.0 ms, then one every 2.50 ms: 1,234.5 tokens/s in all",
        "the peak of 3.00 GiB (at most 4.00 GiB) falls in prefill of block 2 of 32",
    ]


def test_lines_that_ask_for_fewer_tokens_are_mentioned() -> None:
    workload = GenerationWorkload.of_prompts([100, 100, 100], num_new_tokens=[8, 128, 8])
    assert explain(batch_size=2, workload=workload)[0] == (
        "3 sequences run in 2 passes of up to 2: 8 to 128 new tokens each, similar numbers together if that saves steps"
    )


def test_streamed_weights_say_what_each_token_copies_and_waits_for() -> None:
    prediction = costs(
        host_peak_bytes=12 * GIB, copied_bytes_per_token={"host_to_device": 12 * GIB}, exposed_ms={"copy_in": 70.0}
    )
    sentences = explain(prediction, batch_size=5, weights=WeightsPlan(dtype="bf16", place="host", frozen="nf4"))
    assert sentences[0] == "10 sequences run in 2 passes of 5"
    assert "each block's weights come from the host for the prompt and again for every token, one block ahead" in sentences
    assert any(sentence.startswith("the matrices inside the blocks are held in nf4") for sentence in sentences)
    assert sentences[-2:] == [
        "other memory holds up to 12.0 GiB on the host",
        "each token copies 12.0 GiB to the device; compute waits 70.0 ms a pass for that",
    ]


def test_one_token_has_no_time_between_tokens() -> None:
    one = GenerationWorkload(prompt_length=8, num_new_tokens=1)
    sentences = explain(costs(decode_ms=0.0), workload=one)
    assert sentences[0] == "one sequence runs"
    assert "the first token comes after 40.0 ms: 1,234.5 tokens/s in all" in sentences
