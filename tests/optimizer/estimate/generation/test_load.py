"""A model is loaded to generate under the budgets: predicted to the byte, refused at the tensor that does not fit."""

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import NoFeasiblePlan, OutOfDeviceMemory, OutOfHostMemory
from optimizer.estimate.generation.load import estimate_generation_load
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.prediction import StagePeak
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation import GenerationPins
from optimizer.plan.weights import WeightsPins, WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.generation.run_requests import open_generator
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.runtime.serving.opening import open_server
from optimizer.search.generation.one_device import GenerationSearchResult
from optimizer.search.generation.search import search_generation_plans
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

MODELS = [("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32"), ("mixtral", "bfloat16")]
"""The second are the files' dtypes. GPT-2's matrices are turned, its head is tied; Mixtral's files hold experts one by one."""
PACKED = WeightsPlan(dtype="bf16", frozen="int8")
CONFIGS: dict[str, Any] = {
    **SMALL_CONFIGS,
    "wide": {**SMALL_CONFIGS["llama"], "intermediate_size": 256, "tie_word_embeddings": True},
}
"""Packing a matrix of the last takes more than a short pass."""
FORMS = ("bf16", "fp32", "bf16/int8", "fp32/int4", "bf16/nf4")
WORKLOAD = GenerationWorkload(prompt_length=4, num_new_tokens=2)
MACHINE = make_cpu_machine()


def spec_of(name: str, dtype: str) -> ModelSpec:
    return read_model_spec({**CONFIGS[name], "dtype": dtype})


@cache
def profiled(name: str, dtype: str = "bfloat16") -> GenerationProfile:
    return profile_generation(spec_of(name, dtype), representations=FORMS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("wide", "bfloat16", tmp_path)


def save(name: str, dtype: str, tmp_path: Path) -> Path:
    model: Any = build_model(spec_of(name, dtype), seed=3, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def predict(profile: GenerationProfile, weights: WeightsPlan) -> StagePeak:
    found = estimate_generation_load(profile, plan=GenerationPlan(weights=weights), machine=MACHINE)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_load_takes_what_is_predicted_to_the_byte(name: str, dtype: str, tmp_path: Path) -> None:
    spec, profile, folder = spec_of(name, dtype), profiled(name, dtype), save(name, dtype, tmp_path)
    held = [*FORMS, *(form.replace("bf16", "fp16") for form in FORMS if form.startswith("bf16"))]
    for (number, _, form), place in product((each.partition("/") for each in held), ("device", "host", "disk")):
        weights = WeightsPlan(dtype=number, frozen=form or "same", place=place)
        predicted = predict(profile, weights)
        plan = GenerationPlan(weights=weights)
        with open_generator(spec, plan=plan, weights_folder=folder, scratch=tmp_path) as generator:
            assert generator.meter is not None
            peak, disk_bytes = generator.meter.peak(), generator.tiers.disk_peak_bytes
        expected = (predicted.device_peak_bytes, predicted.host_peak_bytes, predicted.disk_peak_bytes)
        assert (peak.device_bytes, peak.host_bytes, disk_bytes) == expected, weights


@pytest.mark.parametrize("weights", [PACKED, WeightsPlan(frozen="int4"), WeightsPlan(place="host")])
def test_it_loads_under_caps_of_just_so_much_and_not_a_byte_less(folder: Path, weights: WeightsPlan) -> None:
    spec, predicted = spec_of("wide", "bfloat16"), predict(profiled("wide"), weights)
    caps = {"cap_bytes": predicted.device_peak_bytes, "host_cap_bytes": predicted.host_peak_bytes}
    opened: dict[str, Any] = {"plan": GenerationPlan(weights=weights), "weights_folder": folder}
    with open_generator(spec, **opened, **caps):
        pass
    assert caps["host_cap_bytes"] > 0
    for cap, error in (("cap_bytes", OutOfDeviceMemory), ("host_cap_bytes", OutOfHostMemory)):
        with (
            pytest.raises(error, match="in loading") as caught,
            open_generator(spec, **opened, **{**caps, cap: caps[cap] - 1}),
        ):
            pass
        assert caught.value.fields["stage"] == "load"


def test_a_served_model_is_loaded_under_the_same_cap(folder: Path) -> None:
    spec, predicted = spec_of("wide", "bfloat16"), predict(profiled("wide"), PACKED)
    served: dict[str, Any] = {
        "weights": PACKED, "num_rows": 1, "max_tokens": 8, "kv_limit_bytes": 4096, "device_name": "cpu",
    }  # fmt: skip
    with open_server(spec, **served, weights_folder=folder, budget_bytes=2 * predicted.device_peak_bytes) as (server, _):
        assert server.is_idle
    with (
        pytest.raises(OutOfDeviceMemory) as caught,
        open_server(spec, **served, weights_folder=folder, budget_bytes=predicted.device_peak_bytes - 1),
    ):
        pass
    assert caught.value.fields["stage"] == "load"


def test_a_measurement_of_files_says_what_loading_took(folder: Path) -> None:
    predicted = predict(profiled("wide"), PACKED)
    measured = measure_generation(
        spec_of("wide", "bfloat16"), plan=GenerationPlan(weights=PACKED), workload=WORKLOAD, weights_folder=folder
    )
    found = (measured.load_device_peak_bytes, measured.load_host_peak_bytes)
    assert found == (predicted.device_peak_bytes, predicted.host_peak_bytes)
    assert measured.device_peak_bytes == price(PACKED).device_peak_bytes


def price(weights: WeightsPlan, profile: GenerationProfile | None = None) -> GenerationPrediction:
    plan = GenerationPlan(weights=weights)
    return estimate_generation(profile or profiled("wide"), plan=plan, workload=WORKLOAD, machine=MACHINE)


def test_a_verdict_is_of_the_load_where_that_is_higher_than_a_pass() -> None:
    prediction = price(PACKED)
    assert prediction.load == predict(profiled("wide"), PACKED)
    load_bytes = prediction.load.device_peak_bytes
    assert prediction.device_peak_bytes < load_bytes == prediction.highest_peak_bytes < prediction.device_peak_high_bytes
    verdicts = [prediction.verdict(budget) for budget in (load_bytes - 1, load_bytes, prediction.device_peak_high_bytes)]
    assert verdicts == ["does_not_fit", "tight", "fits"]
    assert GenerationPrediction.from_json(json.loads(json.dumps(prediction.to_json()))) == prediction


def test_a_profile_from_before_tensors_were_kept_predicts_no_load() -> None:
    document = profiled("wide").to_json()
    del document["base"], document["weights_dtype"]
    old = GenerationProfile.from_json(document)
    assert price(PACKED, old).load is None
    assert replace(price(PACKED), load=None, device_peak_high_bytes=0) == replace(price(PACKED, old), device_peak_high_bytes=0)


def test_tensors_that_do_not_sum_up_to_the_weights_predict_no_load() -> None:
    profile = profiled("wide")
    assert profile.base is not None
    short = replace(profile, base=replace(profile.base, by_block=(profile.base.by_block[0][1:],)))
    assert estimate_generation_load(short, plan=GenerationPlan(), machine=MACHINE) is None


def test_a_cut_model_has_no_load_and_copies_have_one_home() -> None:
    profile, machine = profiled("wide"), MACHINE
    cut = GenerationPlan(layout=GenerationLayout(stage_blocks=(1,) * profile.num_blocks))
    assert estimate_generation_load(profile, plan=cut, machine=machine) is None
    alone = GenerationPlan(weights=WeightsPlan(dtype="bf16", place="host"))
    copies = replace(alone, layout=GenerationLayout(num_replicas=2))
    loads = [estimate_generation_load(profile, plan=plan, machine=machine) for plan in (alone, copies)]
    assert loads[0] is not None
    assert loads[1] is not None
    home_bytes = sum(profile.weight_bytes("bf16").by_block[kind] for kind in profile.block_kinds)
    assert loads[0].host_peak_bytes - loads[1].host_peak_bytes <= home_bytes // 2
    assert loads[1].host_peak_bytes > home_bytes // 2


def test_on_a_card_a_tensor_is_there_as_the_file_has_it_while_it_is_converted() -> None:
    profile, card = profiled("llama"), table_machine("H100 SXM")
    same, converted = (
        estimate_generation_load(profile, plan=GenerationPlan(weights=WeightsPlan(dtype=dtype)), machine=card)
        for dtype in ("bf16", "fp16")
    )
    assert same is not None
    assert converted is not None
    assert profile.base is not None
    last_bytes = 2 * profile.base.after[-1].num_elements
    assert converted.device_peak_bytes == same.device_peak_bytes + last_bytes
    assert same.host_peak_bytes == converted.host_peak_bytes > 0


# Searches.


def search(**goal: Any) -> GenerationSearchResult:
    given = GenerationGoal(**{"device_budget_bytes": 2**30, **goal})
    return search_generation_plans(profiled("wide"), workload=WORKLOAD, goal=given, machine=MACHINE)


def test_a_plan_that_the_device_could_not_load_is_left_out(folder: Path) -> None:
    pins = GenerationPins(weights=WeightsPins(dtype="bf16", frozen="int8", place="device"))
    load_bytes = price(PACKED).highest_peak_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        search(device_budget_bytes=load_bytes - 1, allow_lossy=True, pins=pins)
    smallest_bytes = caught.value.fields["smallest_feasible_bytes"]
    assert smallest_bytes >= load_bytes
    chosen = search(device_budget_bytes=smallest_bytes, allow_lossy=True, pins=pins).chosen
    assert chosen.verdict == "fits"
    with open_generator(
        spec_of("wide", "bfloat16"), plan=chosen.plan, weights_folder=folder, cap_bytes=smallest_bytes
    ) as generator:
        assert generator.plan == chosen.plan


def test_a_plan_that_the_host_has_no_room_to_load_is_left_out() -> None:
    """Files in bf16 are read to their places as bf16; as fp32 each is on the host first."""
    pins = GenerationPins(weights=WeightsPins(dtype="fp32", frozen="same"))
    needed_bytes = predict(profiled("wide"), WeightsPlan()).host_peak_bytes
    assert search(host_budget_bytes=needed_bytes, pins=pins).chosen.verdict == "fits"
    with pytest.raises(NoFeasiblePlan, match="loading the model takes .* of host memory"):
        search(host_budget_bytes=needed_bytes - 1, pins=pins)
    chosen = search(host_budget_bytes=0, allow_lossy=True).chosen
    assert (chosen.plan.weights.representation, chosen.plan.weights.place) == ("bf16", "device")
