"""Wherever weights, gradients and optimizer state live between uses, the numbers are those of keeping all on the device."""

import functools
import itertools
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from optimizer.base.categories import CATEGORIES
from optimizer.base.errors import DiskFull, LossNotFinite, OutOfDeviceMemory, OutOfHostMemory
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import host_update
from optimizer.runtime.step.step import Trainer
from tests.optimizer.runtime.states import CPU, Ran, assert_same_bits, make_trainer, run_steps
from tests.optimizer.runtime.tiny import CONFIGS, VOCAB_SIZE, make_plan, make_workload

PLACES: dict[str, Any] = {
    "gradients on the host": {"gradients": "host"},
    "half the state on the host": {"gradients": "host", "state_place": "host", "fraction": 0.5},
    "half the state on the disk": {"gradients": "host", "state_place": "disk", "fraction": 0.5},
    "state on the host": {"gradients": "host", "state_place": "host"},
    "state on the disk": {"gradients": "host", "state_place": "disk"},
    "all on the host": {"gradients": "host", "state_place": "host", "weights_place": "host"},
    "all on the disk": {"gradients": "host", "state_place": "disk", "weights_place": "disk", "prefetch": 0},
    "weights on the disk": {"gradients": "host", "state_place": "host", "weights_place": "disk", "prefetch": 2},
    "moments on the disk": {"gradients": "host", "state_place": "disk", "weights_place": "host"},
}


WEIGHTS_BYTES = 4 * sum(p.numel() for p in build_model(read_model_spec(CONFIGS["llama"]), device="meta").parameters())


@functools.cache
def run_plain(name: str, dtype: str, accumulation_steps: int, max_grad_norm: float) -> Ran:
    plan = make_plan(dtype=dtype, accumulation_steps=accumulation_steps)
    trainer = make_trainer(name, plan=plan, max_grad_norm=max_grad_norm)
    try:
        return run_steps(trainer)
    finally:
        trainer.close()


def run_placed(
    tmp_path: Path,
    name: str = "llama",
    *choices: Any,
    thread: bool | None = None,
    max_grad_norm: float = 1.0,
    **places: Any,
) -> Ran:
    trainer = make_trainer(
        name,
        plan=make_plan(*choices, **places),
        scratch=tmp_path,
        updates_on_thread=thread,
        max_grad_norm=max_grad_norm,
    )
    try:
        return run_steps(trainer)
    finally:
        trainer.close()


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("thread", "max_grad_norm"),
    [(False, 0.1), (True, 0.1), (True, None)],
    ids=["at once", "beside the next forward", "beside backward"],
)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_every_place_gives_the_bits_of_the_device(
    tmp_path: Path, places: dict[str, Any], max_grad_norm: float | None, thread: bool
) -> None:
    ran = run_placed(tmp_path, max_grad_norm=max_grad_norm, thread=thread, accumulation_steps=2, **places)
    assert_same_bits(ran, run_plain("llama", "fp32", 2, max_grad_norm))


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_weights_below_fp32_follow_the_same_masters_everywhere(
    tmp_path: Path, places: dict[str, Any], dtype: str
) -> None:
    ran = run_placed(tmp_path, dtype=dtype, **places)
    assert_same_bits(ran, run_plain("llama", dtype, 1, 1.0))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("choices", [("recompute",), ("offload",), ("offload_disk", "selective", "keep")])
@pytest.mark.parametrize("places", [PLACES["all on the host"], PLACES["all on the disk"]], ids=["host", "disk"])
def test_places_go_together_with_what_becomes_of_activations(
    tmp_path: Path, name: str, choices: tuple[str, ...], places: dict[str, Any]
) -> None:
    ran = run_placed(tmp_path, name, *choices, accumulation_steps=2, **places)
    assert_same_bits(ran, run_plain(name, "fp32", 2, 1.0))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_consumed_gradients_give_the_bits_of_kept_ones(tmp_path: Path, name: str, dtype: str) -> None:
    ran = run_placed(tmp_path, name, "recompute", "keep", "offload", dtype=dtype, gradients="consume", max_grad_norm=None)
    assert_same_bits(ran, run_plain(name, dtype, 1, None))


def test_consumed_gradients_never_stand_together() -> None:
    highest_bytes = {}
    for choice in ("keep", "consume"):
        trainer = make_trainer(plan=make_plan(gradients=choice), max_grad_norm=None)
        run_steps(trainer, num_steps=1)
        trainer.meter.start_timeline()
        run_steps(trainer, num_steps=1)
        slot = CATEGORIES.index("gradients")
        changes = [change for _, category, change in trainer.meter.take_events() if category == slot]
        highest_bytes[choice] = max(itertools.accumulate(changes))
        trainer.close()
    largest_bytes = VOCAB_SIZE * 64 * 4
    assert highest_bytes == {"keep": WEIGHTS_BYTES, "consume": largest_bytes}


def test_a_tensor_is_updated_in_pieces_with_the_bits_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = PLACES["state on the disk"]
    whole = run_placed(tmp_path, **places)
    monkeypatch.setattr("optimizer.runtime.tiers.homes.PIECE_ELEMENTS", 1 << 10)
    monkeypatch.setattr(host_update, "PIECE_ELEMENTS", 1 << 10)
    cut = run_placed(tmp_path, **places)
    assert_same_bits(cut, whole)
    assert cut.peak.host_bytes < whole.peak.host_bytes


def test_a_steady_step_allocates_nothing_on_the_host_for_its_update(tmp_path: Path) -> None:
    for places in PLACES.values():
        trainer = make_trainer(plan=make_plan(accumulation_steps=2, **places), scratch=tmp_path)
        run_steps(trainer, num_steps=2)
        before_bytes = trainer.meter.host_bytes
        ran = run_steps(trainer, num_steps=1)
        # The norm and the factor of clipping: a few single numbers.
        assert ran.peak.host_bytes - before_bytes <= 32, places
        trainer.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gradients on the host", {"device_to_host": 2, "host_to_device": 1}),
        ("state on the host", {"device_to_host": 2, "host_to_device": 1}),
        ("state on the disk", {"device_to_host": 2, "host_to_device": 1, "disk_to_host": 3, "host_to_disk": 3}),
    ],
)
def test_each_copy_of_a_step_is_counted_once_on_its_link(tmp_path: Path, name: str, expected: dict[str, int]) -> None:
    ran = run_placed(tmp_path, accumulation_steps=2, **PLACES[name])
    assert ran.copied_bytes == {link: times * WEIGHTS_BYTES for link, times in expected.items()}


def test_streamed_blocks_are_fetched_once_forward_and_once_backward_of_each_micro_batch(tmp_path: Path) -> None:
    ran = run_placed(tmp_path, accumulation_steps=2, **PLACES["all on the disk"])
    block_bytes = sum(tensor.nbytes for key, tensor in ran.weights.items() if ".layers." in key)
    rest_bytes = WEIGHTS_BYTES - block_bytes
    assert ran.copied_bytes == {
        "device_to_host": 2 * WEIGHTS_BYTES,
        # The rest of the weights is updated on the host and stays on the device.
        "host_to_device": 4 * block_bytes + rest_bytes,
        "disk_to_host": 4 * block_bytes + 3 * WEIGHTS_BYTES,
        "host_to_disk": 3 * WEIGHTS_BYTES,
    }
    assert ran.disk_bytes == 3 * WEIGHTS_BYTES


# Larger than the device.


DEEP = read_model_spec(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 16,
        "vocab_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
)


def deep_plan(place: str, choice: str = "recompute") -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=2),
        weights=WeightsPlan(place=place),
        gradients=GradientsPlan(choice="host" if place != "device" else "keep"),
        optimizer_state=OptimizerStatePlan(place=place),
        activations=ActivationsPlan(per_block=(choice,) * DEEP.num_blocks),
    )


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_model_of_more_than_four_times_the_device_trains_to_the_same_bits(tmp_path: Path, place: str) -> None:
    workload = make_workload(sequence_length=16)
    num_elements = sum(p.numel() for p in build_model(DEEP, device="meta").parameters())
    states_bytes = (4 + 4 + 8) * num_elements
    cap_bytes = states_bytes // 4
    plain = measure_step(DEEP, plan=deep_plan("device"), workload=workload, num_steps=3, with_weights_hash=True)
    assert plain.device_peak_bytes > states_bytes
    placed = measure_step(
        DEEP,
        plan=deep_plan(place),
        workload=workload,
        num_steps=3,
        cap_bytes=cap_bytes,
        scratch=tmp_path,
        with_weights_hash=True,
    )
    assert placed.device_peak_bytes <= cap_bytes
    assert placed.weights_sha256 == plain.weights_sha256
    assert (placed.disk_peak_bytes > 8 * num_elements) == (place == "disk")


def test_without_room_for_the_blocks_that_must_be_there_the_device_is_full(tmp_path: Path) -> None:
    block_bytes = 4 * sum(p.numel() for name, p in build_model(DEEP).named_parameters() if ".layers.0." in name)
    with pytest.raises(OutOfDeviceMemory, match="block"):
        measure_step(
            DEEP, plan=deep_plan("host"), workload=make_workload(sequence_length=16), cap_bytes=2 * block_bytes
        )


def test_a_full_host_is_refused_before_the_first_step() -> None:
    meter = Meter(device=CPU, host_cap_bytes=WEIGHTS_BYTES)
    with pytest.raises(OutOfHostMemory):
        make_trainer(plan=make_plan(**PLACES["all on the host"]), meter=meter)


def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> Never:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(DiskFull, match="more were needed"):
        make_trainer(plan=make_plan(**PLACES["state on the disk"]), scratch=tmp_path)


# Numbers that are not finite.


@pytest.mark.parametrize("name", ["state on the host", "all on the disk"])
@pytest.mark.parametrize("thread", [False, True])
def test_gradients_that_stand_together_are_checked_before_any_weight_is_touched(
    tmp_path: Path, name: str, thread: bool
) -> None:
    trainer = make_trainer(plan=make_plan(**PLACES[name]), scratch=tmp_path, updates_on_thread=thread)
    run_steps(trainer, num_steps=1)
    before = {key: trainer.read_weight(key).clone() for key in trainer.named_weights()}
    spoil(trainer, "model.layers.1.mlp.down_proj.weight")
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    with pytest.raises(LossNotFinite, match="the gradient norm became nan"):
        trainer.step(batches, learning_rate=1e-3)
    for key, weight in before.items():
        assert torch.equal(trainer.read_weight(key), weight), key
    trainer.close()


def test_a_loss_that_is_not_finite_is_found_before_gradients_are_consumed() -> None:
    trainer = make_trainer(plan=make_plan(gradients="consume"), max_grad_norm=None)
    with torch.no_grad():
        trainer.model.get_parameter("model.norm.weight").fill_(float("inf"))
    before = {key: trainer.read_weight(key).clone() for key in trainer.named_weights()}
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    with pytest.raises(LossNotFinite, match="the loss became nan"):
        trainer.step(batches, learning_rate=1e-3)
    for key, weight in before.items():
        assert torch.equal(trainer.read_weight(key), weight), key
    trainer.close()


def test_a_consumed_gradient_that_is_not_finite_is_named_and_its_tensor_left_as_it_was() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    trainer = make_trainer(plan=make_plan(gradients="consume"), max_grad_norm=None)
    before = trainer.read_weight(name).clone()
    spoil(trainer, name)
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    with pytest.raises(LossNotFinite, match=f"the gradient of {name} became infinite or not a number") as caught:
        trainer.step(batches, learning_rate=1e-3)
    assert caught.value.fields["tensor"] == name
    assert torch.equal(trainer.read_weight(name), before)
    trainer.close()


def test_an_update_during_backward_names_the_tensor_whose_gradient_is_not_finite() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    places = PLACES["state on the host"]
    trainer = make_trainer(plan=make_plan(**places), updates_on_thread=True, max_grad_norm=None)
    before = trainer.read_weight(name).clone()
    spoil(trainer, name)
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    with pytest.raises(LossNotFinite, match=f"the gradient of {name} became"):
        trainer.step(batches, learning_rate=1e-3)
    assert torch.equal(trainer.model.get_parameter(name), before)
    # Nobody waits for ever for the update that will not come.
    assert trainer.optimizer.is_updated(name)
    with pytest.raises(LossNotFinite, match=f"the gradient of {name} became"):
        trainer.join()
    trainer.close(keep_weights=False)


def spoil(trainer: Trainer, name: str) -> None:
    """The parameter's gradient becomes NaN, and no other."""
    trainer.model.get_parameter(name).register_hook(lambda gradient: gradient * float("nan"))


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_a_step_counted_after_uncounted_ones_has_the_peak_of_the_one_before(
    tmp_path: Path, places: dict[str, Any]
) -> None:
    trainer = make_trainer("llama", plan=make_plan("offload", **places), scratch=tmp_path)
    peaks = []
    try:
        for index in range(6):
            batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
            trainer.step(batches, learning_rate=1e-3, is_counted=index in (0, 1, 5))
            peaks.append(trainer.meter.peak())
    finally:
        trainer.close()
    assert peaks[1] == peaks[2] == peaks[4] == peaks[5]


def test_uncounted_steps_change_no_bit(tmp_path: Path) -> None:
    weights = []
    for is_counted in (True, False):
        trainer = make_trainer("llama", plan=make_plan(gradients="host", state_place="host"), scratch=tmp_path)
        try:
            for index in range(4):
                batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
                trainer.step(batches, learning_rate=1e-3, is_counted=is_counted or index == 0)
            weights.append({name: trainer.read_weight(name).clone() for name in trainer.named_weights()})
        finally:
            trainer.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
