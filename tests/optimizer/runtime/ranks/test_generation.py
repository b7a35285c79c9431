"""Generations on several devices: the tokens of one device, each device's bytes as predicted, and ranks that stop together."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.hardware.machine import Machine
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.ranks.rank_process import generate_requests

OURS = {
    **SMALL_CONFIGS["headroom_decoder"],
    "layer_types": ["full", "local", "full"],
    "positions": "learned",
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: SMALL_CONFIGS[name] for name in ("gpt2", "opt", "qwen3", "gemma2", "mistral", "gemma", "falcon", "mixtral")},
    "our decoder": OURS,
}
"""Learned positions, narrow embeddings, norms of queries, alternating windows, tied heads, blocks that return tuples, experts."""
FORMS = ("fp32", "bf16/int8", "bf16", "bf16/nf4")
"""Models take turns with these."""
CUTS = ((1, 2), (2, 1), (1, 1, 1))


@pytest.fixture(scope="session")
def machine() -> Machine:
    return make_cpu_machine()


def cut_plan(*stage_blocks: int, **changes: Any) -> GenerationPlan:
    plan = GenerationPlan(batch_size=2, num_micro_batches=2, layout=GenerationLayout(stage_blocks=stage_blocks))
    return replace(plan, **changes)


def weights_in(form: str) -> WeightsPlan:
    dtype, _, frozen = form.partition("/")
    return WeightsPlan(dtype=dtype, frozen=frozen or "same")


def on_one_device(plan: GenerationPlan) -> GenerationPlan:
    return replace(plan, layout=GenerationLayout())


def make_requests(vocab_size: int, *, count: int = 7, multiple: int = 1) -> list[list[Any]]:
    """Prompts of several lengths, some with few and some with many new tokens; every other one is drawn."""
    random = Random(vocab_size)
    lengths = [random.choice((5, 9, 20)) * multiple for _ in range(count)]
    return [
        [[random.randrange(vocab_size) for _ in range(length)], random.choice((1, 4, 12)), 0.8 * (index % 2)]
        for index, length in enumerate(lengths)
    ]


def workload_of(requests: list[list[Any]]) -> GenerationWorkload:
    return GenerationWorkload.of_prompts(
        [len(prompt) for prompt, _, _ in requests], num_new_tokens=[num_new for _, num_new, _ in requests], draws=True
    )


def generate(pool: RankPool, config: dict[str, Any], plan: GenerationPlan, requests: Any, **more: Any) -> list[Any]:
    command = {"kind": "generate", "config": config, "plan": plan.to_json(), "requests": requests, **more}
    return answers_of(pool.run(command, num_ranks=plan.layout.num_devices))


def tokens_of_one(config: dict[str, Any], plan: GenerationPlan, requests: Any, **more: Any) -> Any:
    command = {"config": config, "plan": on_one_device(plan).to_json(), "requests": requests, **more}
    return generate_requests(command, ranks=None)["tokens"]


@pytest.mark.breadth
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cut_model_gives_the_tokens_of_one_device_and_each_stage_takes_the_bytes_predicted(
    name: str, pool: RankPool, machine: Machine
) -> None:
    place = list(CONFIGS).index(name)
    config, form = CONFIGS[name], FORMS[place % len(FORMS)]
    spec = read_model_spec(config)
    plan = cut_plan(*CUTS[place % len(CUTS)], weights=weights_in(form), prefill_tokens=4 if place % 2 else None)
    profile = profile_generation(spec, representations=(form,))
    multiple = profile.prefill.length_multiple
    if multiple > 1:
        plan = replace(plan, prefill_tokens=None)
    requests = make_requests(spec.vocab_size, multiple=multiple)
    answers = generate(pool, config, plan, requests)
    alone = tokens_of_one(config, plan, requests)
    assert [answer["tokens"] for answer in answers] == [alone] * plan.layout.num_devices
    predicted = estimate_generation(profile, plan=plan, workload=workload_of(requests), machine=machine)
    for answer, stage in zip(answers, predicted.stages, strict=True):
        assert answer["device_peak_bytes"] == stage.device_peak_bytes
        assert answer["by_category"] == stage.device_bytes_by_category
        assert answer["peak_moment"] == stage.peak_moment
    assert predicted.device_peak_bytes == max(answer["device_peak_bytes"] for answer in answers)


def test_a_decode_that_is_the_peak_is_predicted_to_the_byte_on_each_stage(pool: RankPool, machine: Machine) -> None:
    config = {**SMALL_CONFIGS["gemma2"], "max_position_embeddings": 128}
    spec = read_model_spec(config)
    plan = cut_plan(2, 1, num_micro_batches=3)
    requests = [[[1, 2, 3, 4], 90, 0.0] for _ in range(6)]
    workload = GenerationWorkload(prompt_length=4, num_new_tokens=90, num_sequences=6)
    profile = profile_generation(spec, representations=("fp32",))
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    answers = generate(pool, config, plan, requests)
    assert [answer["device_peak_bytes"] for answer in answers] == [stage.device_peak_bytes for stage in predicted.stages]
    assert predicted.stages[0].peak_moment.startswith("decode (token 90)")


def test_sequences_that_end_early_leave_each_stage_at_the_same_step(pool: RankPool) -> None:
    config = SMALL_CONFIGS["qwen3"]
    plan = cut_plan(1, 2, batch_size=4)
    requests = [[[index + 1, index + 2, 3], 24, 1.0] for index in range(8)]
    stops = list(range(40))
    answers = generate(pool, config, plan, requests, stops=stops)
    alone = tokens_of_one(config, plan, requests, stops=stops)
    assert len({len(tokens) for tokens in alone.values()}) > 2
    assert answers[0]["tokens"] == answers[1]["tokens"] == alone
    assert answers[0]["num_steps"] == answers[1]["num_steps"]


@pytest.mark.parametrize(("stops_after", "num_done"), [(6, 0), (10, 4)], ids=["in a pass", "between two"])
def test_all_stages_stop_where_the_first_is_asked_to(stops_after: int, num_done: int, pool: RankPool) -> None:
    requests = [[[1, 2, 3], 9, 0.0] for _ in range(8)]
    answers = generate(pool, SMALL_CONFIGS["llama"], cut_plan(1, 2), requests, stops_after=stops_after)
    assert [answer["was_stopped"] for answer in answers] == [True, True]
    assert [len(answer["tokens"]) for answer in answers] == [num_done, num_done]
    assert answers[0]["num_steps"] == answers[1]["num_steps"] <= 9


def test_stages_read_their_own_weights_alone_from_files(pool: RankPool, tmp_path: Path) -> None:
    config = SMALL_CONFIGS["gemma"]
    spec = read_model_spec(config)
    saved: Any = build_model(spec, seed=11)
    saved.save_pretrained(tmp_path)
    plan = cut_plan(1, 2, weights=weights_in("bf16/int8"))
    requests = make_requests(spec.vocab_size)
    answers = generate(pool, config, plan, requests, weights=str(tmp_path))
    assert answers[1]["tokens"] == tokens_of_one(config, plan, requests, weights=str(tmp_path))


def test_a_stage_over_its_budget_is_refused_and_its_neighbour_notices(pool: RankPool) -> None:
    plan, requests = cut_plan(1, 2), [[[1, 2, 3], 4, 0.0]]
    command = {"kind": "generate", "config": SMALL_CONFIGS["llama"], "plan": plan.to_json(), "requests": requests * 4}
    first, second = pool.run({**command, "caps": {"1": 60_000}}, num_ranks=2, timeout_s=5.0)
    assert second["error"]["code"] == "out_of_device_memory"
    assert first["error"]["code"] == "rank_lost"


@pytest.mark.parametrize("place", ["device", "host"])
def test_copies_of_a_model_share_the_prompts_and_stream_weights_from_one_home(
    place: str, pool: RankPool, machine: Machine
) -> None:
    spec = read_model_spec(SMALL_CONFIGS["qwen3"])
    plan = GenerationPlan(batch_size=2, weights=WeightsPlan(place=place), layout=GenerationLayout(num_replicas=2))
    requests = make_requests(spec.vocab_size)
    answers = generate(pool, SMALL_CONFIGS["qwen3"], plan, requests)
    shares = [answer["tokens"] for answer in answers]
    assert [len(share) for share in shares] == [4, 3]
    assert shares[0] | shares[1] == tokens_of_one(SMALL_CONFIGS["qwen3"], plan, requests)
    predicted = _predict(spec, plan, requests, machine)
    assert answers[0]["device_peak_bytes"] == predicted.device_peak_bytes
    assert answers[0]["host_peak_bytes"] == predicted.host_peak_bytes
    alone = _predict(spec, on_one_device(plan), requests, machine)
    assert predicted.host_peak_bytes == -(-alone.host_peak_bytes // 2)


def _predict(spec: ModelSpec, plan: GenerationPlan, requests: list[list[Any]], machine: Machine) -> Any:
    profile = profile_generation(spec, representations=("fp32",))
    return estimate_generation(profile, plan=plan, workload=workload_of(requests), machine=machine)
