import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from optimizer.base.errors import OutOfDeviceMemory, OutOfHostMemory
from optimizer.estimate.job.causes import bytes_wanted, missing_bytes
from optimizer.models.build import build_model
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from tests.optimizer.runtime.counted_card import counted_card
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

CPU = torch.device("cpu")


def make_meter(**options: Any) -> Meter:
    return Meter(device=CPU, **options)


def test_a_new_tensor_counts_its_storage_once_until_it_goes() -> None:
    meter = make_meter()
    with meter:
        tensor = torch.empty(1000)
        view = tensor[10:20].reshape(2, 5)
        assert meter.device_bytes == 4000
        tensor.add_(1)
        assert meter.device_bytes == 4000
        del tensor
        assert meter.device_bytes == 4000
        del view
    assert meter.device_bytes == 0


def test_tensors_freed_after_the_meter_was_left_are_still_taken_off() -> None:
    meter = make_meter()
    with meter:
        tensor = torch.empty(1000)
    assert meter.device_bytes == 4000
    del tensor
    assert meter.device_bytes == 0


def test_several_results_of_one_op_count_each_storage_once() -> None:
    meter = make_meter()
    with meter:
        values, indices = torch.topk(torch.arange(100.0), 10)
        assert meter.device_bytes == values.nbytes + indices.nbytes
        halves = values.chunk(2)
        assert meter.device_bytes == values.nbytes + indices.nbytes
        del halves


def test_each_region_gives_its_category_and_restores_the_one_before() -> None:
    meter = make_meter()
    with meter:
        with meter.region("activations"):
            inside = torch.empty(8)
            with meter.region("logits_and_loss"):
                deeper = torch.empty(16)
        outside = torch.empty(4)
    counted = meter.bytes_by_category()
    assert counted["activations"] == inside.nbytes
    assert counted["logits_and_loss"] == deeper.nbytes
    assert counted["temporaries"] == outside.nbytes


def test_the_host_tier_is_counted_apart() -> None:
    meter = make_meter()
    with meter, meter.region("activations", tier="host"):
        moved = torch.empty(8)
    assert (meter.device_bytes, meter.host_bytes) == (0, moved.nbytes)
    assert meter.bytes_by_category(tier="host")["activations"] == moved.nbytes
    assert meter.peak().host_bytes == moved.nbytes


def test_gradients_move_to_their_category_when_they_have_accumulated() -> None:
    meter = make_meter()
    layer = torch.nn.Linear(16, 16, bias=False)
    meter.assign_module(layer)
    meter.watch_gradients(layer.parameters())
    with meter:
        layer(torch.ones(4, 16)).sum().backward()
        layer(torch.ones(4, 16)).sum().backward()
    counted = meter.bytes_by_category()
    assert counted["weights"] == layer.weight.nbytes
    assert counted["gradients"] == layer.weight.nbytes
    layer.weight.grad = None
    assert meter.bytes_by_category()["gradients"] == 0


def test_the_peak_holds_its_categories_and_starts_anew_after_a_reset() -> None:
    meter = make_meter()
    with meter:
        kept = torch.empty(10)
        with meter.region("activations"):
            torch.empty(1000)
        assert meter.peak().device_bytes == 4040
        assert meter.peak().device_bytes_by_category["activations"] == 4000
        meter.reset_peak()
        assert meter.peak().device_bytes == kept.nbytes


def test_going_over_the_cap_names_the_sizes_and_the_moment() -> None:
    meter = make_meter(cap_bytes=10_000)
    weights = torch.empty(1000)
    meter.assign(weights, "weights")
    meter.mark("forward")
    with meter, meter.region("activations"):
        first = torch.empty(1000)
        with pytest.raises(OutOfDeviceMemory, match=r"device memory ran out in forward: 3\.91 KiB more") as caught:
            torch.empty(1000)
    assert caught.value.fields["requested_bytes"] == 4000
    assert caught.value.fields["in_use_bytes"] == 8000
    assert caught.value.fields["budget_bytes"] == 10_000
    assert caught.value.fields["bytes_by_category"]["weights"] == weights.nbytes
    assert caught.value.fields["bytes_by_category"]["activations"] == first.nbytes


def test_after_going_over_the_cap_the_counts_are_right_again() -> None:
    meter = make_meter(cap_bytes=10_000)
    with meter:
        kept = torch.empty(2000)
        for _ in range(3):
            with pytest.raises(OutOfDeviceMemory):
                torch.empty(2000)
            gc.collect()
            assert meter.device_bytes == kept.nbytes
        assert torch.empty(400).nbytes == 1600


def test_exactly_the_cap_is_allowed() -> None:
    meter = make_meter(cap_bytes=4000)
    with meter:
        assert torch.empty(1000).nbytes == 4000


def test_weights_alone_over_the_cap_are_refused() -> None:
    with pytest.raises(OutOfDeviceMemory, match="in loading"):
        make_meter(cap_bytes=100).assign(torch.empty(1000), "weights")


def test_going_over_the_host_cap_is_another_error() -> None:
    meter = make_meter(host_cap_bytes=100)
    with (
        meter,
        meter.region("activations", tier="host"),
        pytest.raises(OutOfHostMemory, match="host memory ran out"),
    ):
        torch.empty(1000)


def test_what_only_the_cards_counters_saw_is_counted_once() -> None:
    with counted_card() as memory:
        meter = make_meter(cap_bytes=10_240)
        with meter, meter.region("activations"):
            kept = torch.empty(1024)
        memory.spike(10_240)
        meter.check_peak()
        memory.spike(11_264)
        with pytest.raises(OutOfDeviceMemory, match="inside an op in loading") as caught:
            meter.check_peak()
    fields = caught.value.fields
    assert missing_bytes(fields) == 1024
    assert bytes_wanted(fields) == {
        **dict.fromkeys(meter.bytes_by_category(), 0),
        "activations": kept.nbytes,
        "temporaries": 11_264 - kept.nbytes,
    }


def test_a_step_ends_by_what_only_the_cards_counters_saw_in_it() -> None:
    plan, workload = make_plan(), make_workload()
    with counted_card() as memory:
        meter = make_meter(cap_bytes=2**30)
        model = build_model(make_spec())
        trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        trainer.step(batches, learning_rate=1e-3)
        model.get_submodule("model").register_forward_hook(lambda *_: memory.spike(2**30 + 512))
        for is_counted in (True, False):
            with pytest.raises(OutOfDeviceMemory, match=r"inside an op in .*: 512 B more"):
                trainer.step(batches, learning_rate=1e-3, is_counted=is_counted)
        trainer.close()


def test_running_out_in_backward_names_the_block() -> None:
    model = build_model(make_spec())
    plan, workload = make_plan("recompute"), make_workload()
    peak = measure_step(model, plan=plan, workload=workload)
    # The first block's backward comes last, when all other gradients are there.
    assert peak.peak_moment == "backward of block 1 of 3"
    with pytest.raises(OutOfDeviceMemory, match="in backward of block 1 of 3"):
        measure_step(build_model(make_spec()), plan=plan, workload=workload, cap_bytes=peak.device_peak_bytes - 1)


@pytest.mark.parametrize("choice", ["keep", "recompute", "selective", "offload"])
def test_a_step_that_ran_out_leaves_a_trainer_that_can_be_dropped_to_nothing(choice: str) -> None:
    meter = make_meter()
    model = build_model(make_spec())
    plan, workload = make_plan(choice), make_workload()
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    trainer.step(batches, learning_rate=1e-3)
    steady_bytes = meter.device_bytes
    meter._limit_bytes = steady_bytes + 100_000
    with pytest.raises(OutOfDeviceMemory):
        trainer.step(batches, learning_rate=1e-3)
    trainer.optimizer.zero_grad()
    gc.collect()
    assert meter.device_bytes == steady_bytes
    trainer.close()
    del model, trainer, batches
    gc.collect()
    assert meter.device_bytes == 0


def test_the_timeline_is_short_ordered_and_holds_the_peak() -> None:
    measured = measure_step(make_spec(), plan=make_plan("keep", "recompute", "offload"), workload=make_workload())
    offsets = [offset_ms for offset_ms, _ in measured.timeline]
    assert offsets == sorted(offsets)
    assert len(offsets) <= 200
    assert max(sum(sizes.values()) for _, sizes in measured.timeline) == measured.device_peak_bytes
    # The inputs are still held by the caller.
    assert measured.timeline[-1][1].keys() == {"weights", "optimizer_state", "temporaries"}


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize(
    ("choices", "dtype", "bits"),
    [
        (("keep",), "fp32", 32),
        (("recompute",), "fp32", 32),
        (("keep", "recompute", "offload"), "fp32", 8),
        (("keep",), "bf16", 8),
    ],
)
def test_the_meter_agrees_with_torch_profiler_at_the_peak_of_a_step(
    name: str, choices: tuple[str, ...], dtype: str, bits: int
) -> None:
    plan, workload = make_plan(*choices, dtype=dtype, bits=bits), make_workload(sequence_length=64)
    meter = make_meter()
    model = build_model(make_spec(name), dtype=torch_dtype(plan.weights))
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
    trainer.step(make_synthetic_batches(model, plan=plan, workload=workload), learning_rate=1e-3)
    base_bytes = meter.device_bytes
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    for tensor in (tensor for batch in batches for tensor in batch):
        meter.assign(tensor, "temporaries")
    inputs_bytes = meter.device_bytes - base_bytes
    meter.start_timeline()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.step(batches, learning_rate=1e-3)
    # Both tiers are CPU memory, so the profiler sees their sum; the inputs were there before it began.
    counted_bytes = highest_sum(delta for _, _, delta in meter.take_events()) + inputs_bytes
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    profiled_bytes = highest_sum(event.nbytes() for event in events) + inputs_bytes
    assert counted_bytes + base_bytes == pytest.approx(profiled_bytes + base_bytes, rel=0.01)


def highest_sum(deltas: Iterator[Any]) -> int:
    highest = current = 0
    for delta in deltas:
        current += delta
        highest = max(highest, current)
    return highest


def test_a_storage_that_was_resized_is_counted_anew() -> None:
    meter = Meter(device=CPU, cap_bytes=10_000)
    with meter:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        meter.resized(tensor, "weights")
        assert meter.device_bytes == 0
        tensor.untyped_storage().resize_(8000)
        meter.resized(tensor, "weights")
    assert meter.bytes_by_category()["weights"] == meter.device_bytes == 8000
    assert meter.peak().device_bytes == 8000
    del tensor
    assert meter.device_bytes == 0


def test_a_storage_that_grows_over_the_cap_is_refused() -> None:
    meter = Meter(device=CPU, cap_bytes=5000)
    with meter:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(8000)
        with pytest.raises(OutOfDeviceMemory, match="device memory ran out"):
            meter.resized(tensor, "weights")
