"""Losses and gradients of preference training against formulas written out on a plain model; its bytes as predicted."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.data.batches import IGNORED_LABEL
from optimizer.estimate.training import estimate_training
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.runtime.job.prepare import prepare_model
from optimizer.runtime.step.preference import as_reference
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LENGTH = 24
PAIRS = 2
TYPES = ("llama", "gemma2")
BETA = 0.3


def _spec(name: str) -> ModelSpec:
    return read_model_spec(SMALL_CONFIGS[name])


def _workload(objective: Any, *, accumulation_steps: int = 1, adapter: Adapter | None = None) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=LENGTH,
        global_batch_size=PAIRS * accumulation_steps,
        packing="off",
        loss_on="assistant",
        objective=objective,
        beta=BETA,
        adapter=adapter or (Adapter(rank=4) if objective == "dpo" else None),
        num_steps=3,
    )


def _plan(spec: ModelSpec, choice: Any = "keep", *, accumulation_steps: int = 1, **changes: Any) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=PAIRS, accumulation_steps=accumulation_steps),
        activations=ActivationsPlan(per_block=(choice,) * spec.num_blocks),
        **changes,
    )


def _model(spec: ModelSpec, workload: TrainingWorkload, weights: WeightsPlan | None = None) -> nn.Module:
    """With adapters that have been trained: their second products are not zero."""
    model = build_model(spec, seed=1)
    prepare_model(model, weights=weights or WeightsPlan(), workload=workload)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=draw)
    return model


def _rows(num_pairs: int = PAIRS) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of answers of several lengths to prompts of several lengths, padded at the end."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (2 * num_pairs, LENGTH), generator=draw)
    labels = torch.full_like(ids, IGNORED_LABEL)
    for row in range(2 * num_pairs):
        pair, start = row % num_pairs, 4 + row % num_pairs
        ids[row, :start] = ids[pair, :start]
        end = start + 5 + 3 * row % 13
        labels[row, start:end] = torch.randint(1, 60, (end - start,), generator=draw)
    return ids, labels


def _scores(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(model(input_ids=ids, use_cache=False).logits, dim=-1)
    counts = labels != IGNORED_LABEL
    return (logp.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0] * counts).sum(1)


def _expected(objective: str, model: nn.Module, base: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores, half = _scores(model, ids, labels), len(ids) // 2
    if objective == "dpo":
        with torch.no_grad():
            reference = _scores(base, ids, labels)
        ratios = scores - reference
        return -F.logsigmoid(BETA * (ratios[:half] - ratios[half:])).mean()
    means = scores / (labels != IGNORED_LABEL).sum(1)
    odds = torch.log(means.exp() / (1 - means.exp()))
    return (-means[:half] - BETA * F.logsigmoid(odds[:half] - odds[half:])).mean()


@pytest.mark.parametrize("choice", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
@pytest.mark.parametrize("name", [*TYPES, "mixtral"])
def test_loss_and_gradients_are_those_of_the_formula(name: str, objective: str, choice: str) -> None:
    spec, workload = _spec(name), _workload(objective)
    model, (ids, labels) = _model(spec, workload), _rows()
    plain = copy.deepcopy(model).eval()
    expected = _expected(objective, plain, build_model(spec, seed=1).eval(), ids, labels)
    expected.backward()
    trainer = Trainer(model, plan=_plan(spec, choice), workload=workload, device=torch.device("cpu"), meter=None)
    loss = trainer.accumulate([(ids, labels)])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), key


@pytest.mark.parametrize("frozen", ["same", "int8", "nf4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_reference_is_the_model_without_its_adapters_to_the_bit(name: str, frozen: Any) -> None:
    spec, workload = _spec(name), _workload("dpo")
    weights = WeightsPlan(frozen=frozen)
    model, untrained = _model(spec, workload, weights).eval(), build_model(spec, seed=1).eval()
    prepare_model(untrained, weights=weights, workload=workload)  # its second products are zero
    ids, labels = _rows()
    with torch.no_grad():
        trained, wanted = _scores(model, ids, labels), _scores(untrained, ids, labels)
        with as_reference(model):
            assert torch.equal(_scores(model, ids, labels), wanted)
        assert torch.equal(_scores(model, ids, labels), trained)
    assert not torch.allclose(trained, wanted)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_the_loss_does_not_depend_on_how_the_pairs_are_split(objective: str) -> None:
    spec = _spec("llama")
    workload = _workload(objective, accumulation_steps=2)
    ids, labels = _rows(4)
    together = [0, 1, 4, 5], [2, 3, 6, 7]
    losses = []
    for micro_batches in ([(ids, labels)], [(ids[rows], labels[rows]) for rows in together]):
        trainer = Trainer(
            _model(spec, workload),
            plan=_plan(spec, accumulation_steps=2),
            workload=workload,
            device=torch.device("cpu"),
            meter=None,
        )
        losses.append(trainer.accumulate(micro_batches).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_adapters_are_on_again_after_the_reference_and_want_gradients() -> None:
    spec, workload = _spec("llama"), _workload("dpo")
    model = _model(spec, workload)
    trainer = Trainer(model, plan=_plan(spec), workload=workload, device=torch.device("cpu"), meter=None)
    first = trainer.step([_rows()], learning_rate=1e-2)
    assert model.training
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert trainer.step([_rows()], learning_rate=1e-2).loss < first.loss
    assert first.rewards is not None


@pytest.mark.breadth
@pytest.mark.parametrize("choice", ["keep", "recompute", "selective", "offload"])
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
@pytest.mark.parametrize("name", TYPES)
def test_the_predicted_peak_is_the_measured_one(name: str, objective: str, choice: Any) -> None:
    spec = _spec(name)
    workload = _workload(objective, accumulation_steps=2)
    plan = _plan(spec, choice, accumulation_steps=2)
    _check_peak(spec, plan, workload)


@pytest.mark.breadth
@pytest.mark.parametrize("frozen", ["same", "int8", "nf4"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_peak_of_dpo_is_as_predicted_over_packed_and_streamed_weights(frozen: Any, place: Any) -> None:
    spec, workload = _spec("llama"), _workload("dpo", accumulation_steps=2)
    weights = WeightsPlan(dtype="bf16", frozen=frozen, place=place)
    _check_peak(spec, _plan(spec, "recompute", accumulation_steps=2, weights=weights), workload)


def _check_peak(spec: ModelSpec, plan: Plan, workload: TrainingWorkload) -> None:
    shape = (plan.batch.micro_batch_size, LENGTH)
    extent = Extent(representations=(plan.weights.representation,), choices=(plan.activations.per_block[0],), shapes=(shape,))
    profile = profile_model(spec, adapter=workload.adapter, objective=workload.objective, extent=extent)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=make_cpu_machine())
    measured = measure_step(spec, plan=plan, workload=workload, device="cpu")
    assert measured.device_bytes_by_category == predicted.device_bytes_by_category
    assert measured.device_peak_bytes == predicted.device_peak_bytes
    assert measured.host_peak_bytes == predicted.host_peak_bytes
    assert measured.copied_bytes == predicted.copied_bytes


def test_a_reference_is_priced_as_one_more_forward() -> None:
    spec = _spec("llama")
    extent = Extent(representations=("fp32",), choices=(), shapes=((PAIRS, LENGTH),))
    adapter = Adapter(rank=4)
    step_ms = {}
    for objective in ("dpo", "orpo"):
        workload = _workload(objective, adapter=adapter)
        profile = profile_model(spec, adapter=adapter, objective=workload.objective, extent=extent)
        step_ms[objective] = estimate_training(
            profile, plan=_plan(spec), workload=workload, machine=make_cpu_machine()
        ).step_ms
    assert 1.15 < step_ms["dpo"] / step_ms["orpo"] < 1.5


def test_profiles_of_objectives_have_names_of_their_own() -> None:
    names = {profile_fingerprint("f" * 64, None, objective=objective) for objective in ("next_token", "dpo", "orpo")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "best_fit"}, "a row each"),
        ({"loss_on": "all", "packing": "off"}, "answers alone"),
        ({"adapter": None}, "no second copy"),
        ({"beta": 0}, "beta"),
    ],
)
def test_what_pairs_cannot_be_combined_with_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkload, match=message):
        replace(_workload("dpo"), **changes)


def test_a_loss_of_whole_answers_is_not_cut_into_chunks() -> None:
    spec, workload = _spec("llama"), _workload("orpo")
    plan = _plan(spec, logits_and_loss=LogitsAndLossPlan(num_chunks=2))
    with pytest.raises(InvalidPlan, match="compares whole answers: use 1"):
        Trainer(build_model(spec), plan=plan, workload=workload, device=torch.device("cpu"), meter=None)
