"""A model read from files, tensor by tensor to its place, is the model that was built whole and then filled."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.models.build import build_model, build_unfilled, load_weights
from optimizer.models.spec import read_model_spec
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared, prepare_model
from optimizer.runtime.layers.quantized_linear import hash_frozen
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import PUBLISHED_TYPES, SMALL_CONFIGS
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

CPU = torch.device("cpu")
FORMS = ("same", "nf4", "int8", "int4")


def save(model: nn.Module, folder: Path) -> Path:
    published: Any = model
    published.save_pretrained(folder)
    return folder


def assert_same(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype, name
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert torch.equal(parameter, theirs[name]), name
    for (name, buffer), (other_name, other_buffer) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert name == other_name
        assert torch.equal(buffer, other_buffer), name


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", sorted(PUBLISHED_TYPES))
def test_read_to_its_place_a_model_is_the_one_that_was_filled_whole(model_type: str, tmp_path: Path) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    folder = save(build_model(spec, seed=5, dtype=torch.bfloat16), tmp_path)
    forms = FORMS if model_type in ("llama", "gpt2", "mixtral") else ("nf4",)
    cases = [(WeightsPlan(), None), *((WeightsPlan(dtype="bf16", frozen=form), Adapter(rank=4)) for form in forms)]
    for weights, adapter in cases:
        workload = TrainingWorkload(adapter=adapter, seed=3)
        whole = build_model(spec, dtype=torch_dtype(weights), seed=3)
        load_weights(whole, folder)
        prepare_model(whole, weights=weights, workload=workload)
        streamed = build_prepared(spec, weights=weights, workload=workload, device=CPU, weights_folder=folder)
        assert_same(whole, streamed)
        assert hash_frozen(whole) == hash_frozen(streamed)


@pytest.mark.parametrize("model_type", sorted(SMALL_CONFIGS))
def test_a_model_built_without_data_has_its_buffers(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    built, unfilled = build_model(spec), build_unfilled(spec)
    assert all(parameter.is_meta for parameter in unfilled.parameters())
    ours, theirs = dict(unfilled.named_buffers()), dict(built.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())
    assert not unfilled.training ^ built.training


def test_building_without_data_leaves_torch_as_it_was() -> None:
    state = torch.get_rng_state()
    build_unfilled(make_spec())
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.Linear(2, 2).weight.is_meta


STREAMED = [
    (WeightsPlan(dtype="bf16", frozen=form, place=place), Adapter(rank=4))
    for form, place in itertools.product(("same", "nf4"), ("host", "disk"))
]


@pytest.mark.parametrize(("weights", "adapter"), [*STREAMED, *((WeightsPlan(place=place), None) for place in ("host", "disk"))])
def test_weights_that_stream_are_read_into_their_homes(weights: WeightsPlan, adapter: Adapter | None, tmp_path: Path) -> None:
    spec = make_spec()
    folder = save(build_model(spec, seed=5), tmp_path / "model")
    plan, workload = _plan(weights), make_workload(adapter=adapter)
    losses = []
    for source in (None, folder):
        model = build_prepared(spec, weights=weights, workload=workload, device=CPU, weights_folder=source)
        if source is None:  # the old way: filled whole, then prepared
            model = build_model(spec, dtype=torch_dtype(weights), seed=workload.seed)
            load_weights(model, folder)
            prepare_model(model, weights=weights, workload=workload)
        trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=None, scratch=tmp_path / "scratch")
        batches = make_synthetic_batches(trainer.model, plan=plan, workload=workload)
        losses.append([trainer.step(batches, learning_rate=0.01).loss for _ in range(2)])
        trainer.close()
    assert losses[0] == losses[1]


def _plan(weights: WeightsPlan) -> Plan:
    state = OptimizerStatePlan(place="disk" if weights.place == "disk" else "host")
    changes = {"weights": weights, "gradients": GradientsPlan(choice="host"), "optimizer_state": state}
    return dataclasses.replace(make_plan("keep", "recompute", "keep"), **changes)


def test_beside_what_stays_one_tensor_of_the_file_is_in_host_memory(tmp_path: Path) -> None:
    spec = make_spec()
    folder = save(build_model(spec, seed=5), tmp_path)
    largest_bytes = max(parameter.nbytes for parameter in build_model(spec).parameters())
    meter = Meter(device=CPU)
    model = build_prepared(
        spec,
        weights=WeightsPlan(dtype="bf16"),
        workload=make_workload(),
        device=CPU,
        weights_folder=folder,
        meter=meter,
    )
    assert meter.peak().host_bytes == largest_bytes
    assert meter.host_bytes == 0
    assert meter.device_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_what_is_wrong_with_a_file_is_said_before_anything_is_read(tmp_path: Path) -> None:
    folder = save(build_model(make_spec(), seed=5), tmp_path)
    spec = read_model_spec({**make_spec().to_config(), "vocab_size": 600})
    meter = Meter(device=CPU)
    with pytest.raises(InvalidModel, match="the config asks for \\[600, "):
        build_prepared(
            spec, weights=WeightsPlan(), workload=make_workload(), device=CPU, weights_folder=folder, meter=meter
        )
    assert meter.peak().host_bytes == meter.peak().device_bytes == 0
