"""Requests of all lengths, run under a plan: each gets the tokens it gets alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from optimizer.base.errors import InvalidWorkload, OutOfDeviceMemory
from optimizer.formats.sampling import Sampling
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.arrange import arrange_passes
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.generation.run_requests import Finished, Request, open_generator, run_requests
from optimizer.runtime.meter.meter import Meter
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.test_generator import MODELS, build

CPU = torch.device("cpu")
LENGTHS = (3, 9, 20, 9, 5, 12, 30, 1, 17)
"""Windows are 16 and 12: some prompts fill them, some do not."""
NUM_NEW = (6, 9, 4, 12, 8, 5, 7, 10, 14)


def requests_of(**sampling: Any) -> list[Request]:
    random = torch.Generator().manual_seed(5)
    return [
        Request(
            id=f"request {index}",
            token_ids=tuple(torch.randint(128, (length,), generator=random).tolist()),
            sampling=Sampling(max_new_tokens=num_new, seed=index, **sampling),
        )
        for index, (length, num_new) in enumerate(zip(LENGTHS, NUM_NEW, strict=True))
    ]


def run(model: Any, requests: list[Request], *, meter: Any = None, **choices: Any) -> dict[str, Finished]:
    """Run the requests and return their answers by id."""
    generator = Generator(model, plan=GenerationPlan(**choices), device=CPU, meter=meter)
    finished: list[Any] = []
    try:
        result = run_requests(generator, requests, on_finished=finished.append)
    finally:
        generator.close()
    assert result.num_finished == len(finished) == len({each.id for each in finished})
    return {each.id: each for each in finished}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers_for_each_prompt_alone(name: str) -> None:
    model = build(SMALL_CONFIGS[name])
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    requests = requests_of()
    finished = run(model, requests, batch_size=4, num_micro_batches=2, weights=WeightsPlan(place="host"))
    for request in requests:
        ids = torch.tensor([request.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.sampling.max_new_tokens, do_sample=False
        )
        made = finished[request.id]
        assert list(made.token_ids) == expected[0, ids.shape[1] :].tolist(), request.id
        assert (made.finish_reason, made.prompt_tokens) == ("length", len(request.token_ids))


@pytest.fixture(scope="module")
def model() -> Any:
    return build(SMALL_CONFIGS["llama"])


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_company(model: Any) -> None:
    requests = requests_of(temperature=0.9, top_p=0.95)
    expected = run(model, requests, batch_size=9)
    assert run(model, requests, batch_size=1) == expected
    assert run(model, requests[::-1], batch_size=2, num_micro_batches=3) == expected
    assert run(model, requests[:3] + requests[7:], batch_size=3) == {
        request.id: expected[request.id] for request in requests[:3] + requests[7:]
    }
    greedy = run(model, requests_of(), batch_size=9)
    assert all(greedy[name].token_ids != each.token_ids for name, each in expected.items())


def test_a_stop_token_ends_its_own_sequence_alone(model: Any) -> None:
    free = run(model, requests_of(), batch_size=4)
    stops = tuple({each.token_ids[len(each.token_ids) // 2] for each in free.values()})
    stopped = run(model, requests_of(stop_token_ids=stops), batch_size=4, num_micro_batches=2)
    reasons = set()
    for name, each in free.items():
        places = [index for index, token in enumerate(each.token_ids) if token in stops]
        end = places[0] + 1 if places else len(each.token_ids)
        assert stopped[name].token_ids == each.token_ids[:end]
        assert stopped[name].finish_reason == ("stop" if places else "length")
        reasons.add(stopped[name].finish_reason)
    assert "stop" in reasons


def test_a_pass_ends_with_its_last_sequence(model: Any) -> None:
    ids = (5, 6, 7, 8)
    first = run(model, [Request(id="free", token_ids=ids, sampling=Sampling(max_new_tokens=30))], batch_size=1)
    stop = first["free"].token_ids[2]
    end = first["free"].token_ids.index(stop) + 1
    with open_generator(read_model_spec(SMALL_CONFIGS["llama"]), plan=GenerationPlan(batch_size=2)) as generator:
        generator.model.load_state_dict(model.state_dict())
        requests = [
            Request(id=str(index), token_ids=ids, sampling=Sampling(max_new_tokens=30, stop_token_ids=(stop,)))
            for index in range(2)
        ]
        result = run_requests(generator, requests, on_finished=lambda finished: None)
    assert (result.num_steps, result.num_new_tokens) == (end, 2 * end)


def test_a_watch_ends_its_own_sequence_alone_and_sees_its_new_tokens_in_order(model: Any) -> None:
    free = run(model, requests_of(), batch_size=4)
    seen: dict[str, Any] = {request.id: [] for request in requests_of()}

    def watching(name: str) -> Callable[..., bool]:
        def watch(token: int) -> bool:
            seen[name].append(token)
            return len(seen[name]) == 3

        return watch

    requests = [
        replace(request, make_watch=partial(watching, request.id)) if index % 2 else request
        for index, request in enumerate(requests_of())
    ]
    watched = run(model, requests, batch_size=4, num_micro_batches=2)
    for name, each in free.items():
        number = int(name.removeprefix("request "))
        end = 3 if number % 2 else len(each.token_ids)
        assert watched[name].token_ids == each.token_ids[:end]
        assert watched[name].finish_reason == ("stop" if number % 2 else "length")
        assert tuple(seen[name]) == (each.token_ids[:3] if number % 2 else ())


def test_a_sequence_that_is_over_leaves_and_the_others_go_on_with_the_tokens_they_get_alone(model: Any) -> None:
    requests = [
        Request(id=str(index), token_ids=(5, 6, index), sampling=Sampling(max_new_tokens=num_new, temperature=0.8, seed=index))
        for index, num_new in enumerate((30, 2, 4, 30, 9, 1))
    ]
    alone = run(model, requests, batch_size=1)
    num_rows = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: num_rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        assert run(model, requests, batch_size=6) == alone
        # Three are over after 4 steps; another after 9, which is no half of those that run.
        assert num_rows == [6] * 4 + [3] * 26
        num_rows.clear()
        assert run(model, requests, batch_size=6, kv_cache=KvCachePlan(place="host")) == alone
        assert num_rows == [6] * 30
    finally:
        handle.remove()


def test_a_stopped_sequence_leaves_too(model: Any) -> None:
    requests = [
        Request(
            id=str(index),
            token_ids=(5, 6, 7, index),
            sampling=Sampling(max_new_tokens=40, temperature=0.8, seed=index),
            make_watch=None if index % 2 else lambda: lambda token: True,
        )
        for index in range(4)
    ]
    num_rows = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: num_rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        finished = run(model, requests, batch_size=4)
    finally:
        handle.remove()
    assert num_rows == [4] + [2] * 39
    assert [len(finished[str(index)].token_ids) for index in range(4)] == [1, 40, 1, 40]


def test_streamed_weights_come_once_a_step_for_all_micro_batches(model: Any) -> None:
    meter = Meter(device=CPU)
    plan = GenerationPlan(batch_size=1, num_micro_batches=4, weights=WeightsPlan(place="host"))
    requests = [
        Request(id=str(index), token_ids=tuple(range(3 + index, 10 + index)), sampling=Sampling(max_new_tokens=5))
        for index in range(8)
    ]
    generator = Generator(model, plan=plan, device=CPU, meter=meter)
    try:
        result = run_requests(generator, requests, on_finished=lambda finished: None)
    finally:
        generator.close()
    block_bytes = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".layers." in name)
    assert (result.num_passes, result.num_steps) == (2, 10)
    assert result.copied_bytes == {"host_to_device": 10 * block_bytes}


def test_samples_report_progress(model: Any) -> None:
    samples: list[Any] = []
    finished: list[Any] = []
    generator = Generator(model, plan=GenerationPlan(batch_size=3), device=CPU, meter=Meter(device=CPU))
    try:
        run_requests(
            generator, requests_of(), on_finished=finished.append, report=samples.append, report_every_s=0.0
        )
    finally:
        generator.close()
    assert [sample["prompts_done"] for sample in samples] == sorted(sample["prompts_done"] for sample in samples)
    assert len(samples) > 20
    last = samples[-1]
    assert last.keys() == {
        "prompts_done", "num_prompts", "num_new_tokens", "tokens_per_s", "prefill_ms", "decode_ms", "device_bytes",
        "device_peak_bytes", "host_bytes", "run_ms", "copied_bytes", "lane_ms", "stall_ms",
    }  # fmt: skip
    assert sum(last["lane_ms"].values()) == pytest.approx(last["run_ms"], abs=0.2)
    assert (last["prompts_done"], last["num_prompts"], last["num_new_tokens"]) == (9, 9, sum(NUM_NEW))
    assert last["tokens_per_s"] > 0
    assert samples[0]["prefill_ms"] is None
    assert samples[3]["device_bytes"]["kv_cache"] > 0
    assert sum(last["device_bytes"].values()) < last["device_peak_bytes"]


def test_a_sequence_is_handed_over_as_it_ends(model: Any) -> None:
    events = []
    generator = Generator(model, plan=GenerationPlan(batch_size=3), device=CPU)
    requests = [
        Request(id=str(num_new), token_ids=(4, 5, 6), sampling=Sampling(max_new_tokens=num_new)) for num_new in (3, 9, 6)
    ]

    def step() -> bool:
        events.append("step")
        return False

    try:
        run_requests(generator, requests, on_finished=lambda each: events.append(each.id), should_stop=step)
    finally:
        generator.close()
    # Asked once before the pass, and before each decode.
    assert events == ["step"] * 3 + ["3", "step", "step", "step", "6", "step", "step", "step", "9"]


def test_steps_that_are_not_counted_change_neither_the_peak_nor_what_is_left(model: Any) -> None:
    plan = GenerationPlan(batch_size=2, num_micro_batches=2, weights=WeightsPlan(place="host"))
    meter = Meter(device=CPU)
    generator = Generator(model, plan=plan, device=CPU, meter=meter)
    before_bytes = meter.device_bytes
    requests = requests_of()
    result = run_requests(generator, requests, on_finished=lambda finished: None)
    assert meter.device_bytes == before_bytes
    meter.reset_peak()
    lengths = [(len(each.token_ids), each.sampling.max_new_tokens) for each in requests]
    for micro_batches in arrange_passes(lengths, batch_size=2, num_micro_batches=2):
        generator.run_pass(
            [
                generator.micro_batch(
                    [requests[index].token_ids for index in group],
                    samplings=[requests[index].sampling for index in group],
                )
                for group in micro_batches
            ]
        )
    generator.close()
    assert (result.device_peak_bytes, result.peak_moment) == (meter.peak().device_bytes, meter.peak().moment)


def test_it_stops_between_two_steps_and_goes_on_without_what_has_finished(model: Any) -> None:
    requests = requests_of(temperature=0.7)
    expected = run(model, requests, batch_size=2)
    generator = Generator(model, plan=GenerationPlan(batch_size=2), device=CPU)
    asked = iter(range(1000))
    finished: list[Any] = []
    try:
        result = run_requests(
            generator, requests, on_finished=finished.append, should_stop=lambda: next(asked) >= 30
        )
        assert result.was_stopped
        assert 0 < result.num_finished == len(finished) < len(requests)
        done = {each.id for each in finished}
        rest = [request for request in requests if request.id not in done]
        result = run_requests(generator, rest, on_finished=finished.append)
    finally:
        generator.close()
    assert not result.was_stopped
    assert {each.id: each for each in finished} == expected


def test_an_error_of_one_micro_batch_leaves_nothing_of_the_others() -> None:
    spec = read_model_spec(SMALL_CONFIGS["llama"])
    plan = GenerationPlan(batch_size=2, num_micro_batches=3, weights=WeightsPlan(place="host"))
    requests = [
        Request(id=str(index), token_ids=tuple(range(20)), sampling=Sampling(max_new_tokens=4)) for index in range(6)
    ]
    with open_generator(spec, plan=plan) as generator:
        peak_bytes = run_requests(generator, requests, on_finished=lambda finished: None).device_peak_bytes
    with open_generator(spec, plan=plan, cap_bytes=peak_bytes - 1) as generator:
        before_bytes = generator.meter.device_bytes
        with pytest.raises(OutOfDeviceMemory):
            run_requests(generator, requests, on_finished=lambda finished: None)
        assert generator.meter.device_bytes == before_bytes


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request(id="a", token_ids=()), "it has no tokens"),
        (Request(id="a", token_ids=(1, 128)), "token 128 is outside the vocabulary of 128"),
        (Request(id="a", token_ids=(1,) * 40, sampling=Sampling(max_new_tokens=30)), "make 70; this model has positions for 64"),
        (Request(id="b", token_ids=(1,), sampling=Sampling(max_new_tokens=3)), "its id is given twice"),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_anything_runs(model: Any, request_: Request, why: str) -> None:
    good = Request(id="b", token_ids=(1, 2), sampling=Sampling(max_new_tokens=3))
    generator = Generator(model, plan=GenerationPlan(), device=CPU)
    finished: list[Any] = []
    with pytest.raises(InvalidWorkload, match=why):
        run_requests(generator, [good, request_], on_finished=finished.append)
    generator.close()
    assert finished == []
