"""Behaviour that only a card can show. Each test names its twin on the CPU device.

No Django, no bundled tokenizer's files: these run on a machine with torch, transformers, numpy and pytest alone.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.base.units import MIB
from optimizer.formats.transfer_sizes import ARENA_SLAB_BYTES, STAGING_BYTES
from optimizer.goal import Goal
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.runtime.meter.device import prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.runtime.tiers.shared_memory import SharedMemory
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiny import CONFIGS, make_plan, make_spec, make_workload, write_token_file, write_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("prepared_card")]

CUDA = torch.device("cuda:0")
MIXED = ("offload", "keep", "recompute")
WIDE = read_model_spec({**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1536})
"""Wide enough that tensors, not blocks of the allocator, make up the bytes."""
WIDE_WORK = make_workload(sequence_length=256, global_batch_size=8)


def run_steps(
    name: str, choices: tuple[str, ...], *, dtype: str = "fp32", num_steps: int = 2, compress: str = "none"
) -> tuple[Any, ...]:
    """Losses, the last gradients and the weights after some steps from the same start."""
    plan, workload = make_plan(*choices, dtype=dtype, accumulation_steps=2), make_workload(global_batch_size=4)
    plan = dataclasses.replace(plan, activations=dataclasses.replace(plan.activations, compress=compress))
    model = build_model(make_spec(name), dtype=torch_dtype(plan.weights), device=CUDA, seed=3)
    trainer = Trainer(model, plan=plan, workload=workload, device=CUDA, meter=Meter(device=CUDA))
    torch.manual_seed(5)
    losses: list[Any] = []
    gradients: dict[Any, Any] = {}
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=parameter_name: gradients.__setitem__(name, parameter.grad.clone())
        )
    for _ in range(num_steps):
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        losses.append(trainer.step(batches, learning_rate=1e-3).loss)
    trainer.close()
    return losses, gradients, {key: parameter.detach() for key, parameter in model.named_parameters()}, trainer


# Twin: test_activations.test_recompute_and_offload_give_the_bits_of_keep
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_recompute_and_offload_give_the_bits_of_keep_on_a_card(name: str, dtype: str) -> None:
    losses, gradients, weights, _ = run_steps(name, ("keep",), dtype=dtype)
    for choices in (("keep",), ("recompute",), ("offload",), MIXED):
        other_losses, other_gradients, other_weights, _ = run_steps(name, choices, dtype=dtype)
        assert other_losses == losses, choices
        for key in weights:
            assert torch.equal(other_gradients[key], gradients[key]), (choices, key)
            assert torch.equal(other_weights[key], weights[key]), (choices, key)


# Twin: test_activations.test_offloading_to_the_disk_and_to_a_remote_store_gives_the_bits_of_keep
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_offloading_to_the_disk_gives_the_bits_of_keep_on_a_card(name: str) -> None:
    losses, gradients, weights, _ = run_steps(name, ("keep",))
    for choices in (("offload_disk",), ("offload_disk", "recompute", "offload")):
        other_losses, other_gradients, other_weights, trainer = run_steps(name, choices)
        assert other_losses == losses, choices
        for key in weights:
            assert torch.equal(other_gradients[key], gradients[key]), (choices, key)
            assert torch.equal(other_weights[key], weights[key]), (choices, key)
        assert trainer.tiers.copied_bytes["disk_to_host"] == trainer.tiers.copied_bytes["host_to_disk"] > 0


# Twin: test_activations.test_compressed_trips_leave_the_loss_and_keep_gradients_within_their_bound
@pytest.mark.parametrize("choice", ["offload", "offload_disk"])
@pytest.mark.parametrize(("compress", "bound"), [("bf16", 0.01), ("int8", 0.1)])
def test_compressed_trips_keep_gradients_within_their_bound_on_a_card(choice: str, compress: str, bound: float) -> None:
    losses, gradients, _, _ = run_steps("llama", ("keep",), num_steps=1)
    other_losses, other_gradients, _, _ = run_steps("llama", (choice,), num_steps=1, compress=compress)
    assert other_losses == losses
    error, norm = (
        torch.stack([tensor.norm() for tensor in tensors]).norm()
        for tensors in ([other_gradients[key] - gradients[key] for key in gradients], gradients.values())
    )
    assert 0 < error < bound * norm


# Twin: test_shared_memory.test_a_part_of_it_counts_as_weights_on_the_host_while_the_tiers_live
def test_memory_that_processes_share_is_pinned_as_a_whole_and_let_go() -> None:
    tiers, memory = Tiers(device=CUDA, meter=Meter(device=CUDA)), SharedMemory.make(MIB + 1024)
    tiers.adopt(memory, counted_bytes=MIB // 2)
    memory.close_file()
    homes = [memory.piece(start, 1000) for start in (0, 512 * 7, MIB)]
    for value, home in enumerate(homes):
        assert home.is_pinned()
        target = torch.empty(1000, dtype=torch.uint8, device=CUDA)
        home.fill_(value)
        copy = tiers.copy_to_device(home, target)
        tiers.finish_copies()
        home.fill_(9)
        copy.wait()
        assert target.unique().tolist() == [value]
    assert tiers.meter.bytes_by_category(tier="host")["weights"] == MIB // 2
    tiers.close()
    assert not any(home.is_pinned() for home in homes)


# Twin: test_tiers.test_ranges_are_copied_between_device_and_host_without_autograd_seeing_it
def test_buffers_that_stay_are_pinned_to_the_byte_and_copied_beside_compute(tmp_path: Path) -> None:
    tiers = Tiers(device=CUDA, meter=Meter(device=CUDA), scratch=tmp_path)
    home = tiers.host_buffer((1000, 1000), dtype=torch.float32, category="weights")
    other = tiers.host_buffer(10, dtype=torch.bfloat16, category="gradients")
    assert home.is_pinned()
    assert other.is_pinned()
    assert tiers.meter.host_bytes == 4_000_256 + 512
    busy = torch.randn(4096, 4096, device=CUDA)
    for value in range(20):
        busy = busy @ busy.T / 4096
        source = torch.full((1000, 1000), float(value), device=CUDA)
        copy = tiers.copy_to_host(source, home)
        del source
        torch.full((1000, 1000), -1.0, device=CUDA)
        copy.finish()
        assert bool((home == value).all())
        target = torch.empty(1000, 1000, device=CUDA)
        tiers.copy_to_device(home, target).wait()
        assert bool((target == value).all())
    tiers.close()


# Twin: test_tiers.test_device_tensors_are_saved_to_the_disk_and_loaded_through_staging
def test_device_tensors_are_saved_to_the_disk_and_loaded_while_the_card_is_kept_busy(tmp_path: Path) -> None:
    tiers = Tiers(device=CUDA, meter=Meter(device=CUDA), scratch=tmp_path)
    source = torch.randn(10_000_001, device=CUDA)
    buffer = tiers.stored_buffer(4 * source.nbytes, place="disk")
    busy = torch.randn(4096, 4096, device=CUDA)
    with tiers.meter:
        for index in range(4):
            busy = busy @ busy.T / 4096
            tiers.save(source + index, buffer, offset_bytes=index * source.nbytes)
        for index in (2, 0, 3):
            target = torch.empty_like(source)
            copy = tiers.load(buffer, target, offset_bytes=index * source.nbytes)
            busy = busy @ busy.T / 4096
            copy.wait()
            assert torch.equal(target, source + index)
    assert tiers.meter.host_bytes == STAGING_BYTES
    tiers.close()


# Twin: test_activations.test_offload_moves_each_storage_out_and_back_once
def test_offload_moves_each_storage_out_and_back_once_on_a_card() -> None:
    _, _, _, trainer = run_steps("llama", ("offload",), num_steps=3)
    assert trainer.tiers.copied_bytes["device_to_host"] > 0
    assert trainer.tiers.copied_bytes["host_to_device"] == trainer.tiers.copied_bytes["device_to_host"]


# Twin: test_tiers.test_an_arena_takes_nothing_more_for_sizes_it_had_before
def test_pinned_memory_is_counted_as_it_is_taken_and_taken_once() -> None:
    _, _, _, once = run_steps("llama", ("offload",), num_steps=1)
    _, _, _, often = run_steps("llama", ("offload",), num_steps=4)
    assert once.tiers._arena.taken_bytes == often.tiers._arena.taken_bytes
    assert often.meter.peak().host_bytes == often.tiers._arena.taken_bytes
    assert often.meter.peak().host_bytes % ARENA_SLAB_BYTES == 0
    assert often.tiers._arena._slabs[-1].is_pinned()


# Twin: test_tiers.test_bytes_come_back_as_they_left
def test_bytes_come_back_as_they_left_while_the_card_is_kept_busy() -> None:
    tiers = Tiers(device=CUDA, meter=None)
    busy = torch.randn(4096, 4096, device=CUDA)
    generator = torch.Generator(CUDA).manual_seed(1)
    for _ in range(8):
        sizes = (ARENA_SLAB_BYTES - 512, 3 * ARENA_SLAB_BYTES + 40, 12, 5_000_001)
        sources = [torch.randint(256, (size,), dtype=torch.uint8, device=CUDA, generator=generator) for size in sizes]
        expected = [source.clone() for source in sources]
        tiers.begin_group()
        copies = [tiers.offload(source.untyped_storage(), category="activations") for source in sources]
        del sources
        tiers.settle()
        # The sources are written over at once; the copies must not see it.
        noise = [torch.full((size,), 7, dtype=torch.uint8, device=CUDA) for size in sizes]
        busy = busy @ busy.T / 4096
        fetched = [tiers.fetch(copy, category="activations") for copy in reversed(copies)]
        del copies
        for device_copy, tensor in zip(reversed(fetched), expected, strict=True):
            assert torch.equal(device_copy.wait(), tensor)
        del noise, fetched


# Twin: test_meter.test_the_meter_agrees_with_torch_profiler_at_the_peak_of_a_step
@pytest.mark.parametrize("choices", [("keep",), ("recompute",), ("offload",), MIXED])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_meter_agrees_with_torch_counters_at_the_peak_of_a_step(choices: tuple[str, ...], dtype: str) -> None:
    plan = make_plan(*choices, dtype=dtype, micro_batch_size=8)
    model = build_model(WIDE, dtype=torch_dtype(plan.weights), device=CUDA)
    meter = Meter(device=CUDA)
    trainer = Trainer(model, plan=plan, workload=WIDE_WORK, device=CUDA, meter=meter)
    for _ in range(2):
        trainer.step(make_synthetic_batches(model, plan=plan, workload=WIDE_WORK), learning_rate=1e-3)
    counted_bytes = torch.cuda.max_memory_allocated(CUDA) - meter.workspace_bytes
    # The rest is scratch inside ops, and up to 1 MiB for each block that the allocator did not split.
    assert meter._peak_bytes == pytest.approx(counted_bytes, rel=0.1)
    assert meter.peak().device_bytes == max(counted_bytes, meter._peak_bytes)
    assert sum(meter.peak().device_bytes_by_category.values()) == meter.peak().device_bytes
    trainer.close()


# Twin: test_train.test_over_the_budget_the_job_stops_with_the_sizes_by_category
def test_over_the_cap_the_sizes_by_category_are_named() -> None:
    plan = make_plan(micro_batch_size=8)
    plain = measure_step(WIDE, plan=plan, workload=WIDE_WORK, device=CUDA)
    cap_bytes = int(plain.device_peak_bytes * 0.8)
    with pytest.raises(OutOfDeviceMemory, match="device memory ran out in ") as caught:
        measure_step(WIDE, plan=plan, workload=WIDE_WORK, device=CUDA, cap_bytes=cap_bytes)
    assert caught.value.fields["budget_bytes"] == cap_bytes
    assert caught.value.fields["bytes_by_category"]["weights"] > 0
    assert caught.value.fields["bytes_by_category"]["activations"] > 0


# Twin: test_train.test_exactly_the_measured_peak_is_budget_enough
def test_the_measured_peak_is_budget_enough() -> None:
    plan = make_plan("recompute", micro_batch_size=8)
    plain = measure_step(WIDE, plan=plan, workload=WIDE_WORK, device=CUDA)
    # The allocator cuts its blocks by what was freed before.
    cap_bytes = int(plain.device_peak_bytes * 1.05)
    capped = measure_step(WIDE, plan=plan, workload=WIDE_WORK, device=CUDA, cap_bytes=cap_bytes)
    assert capped.device_peak_bytes <= cap_bytes


# Twin: test_meter.test_going_over_the_cap_names_the_sizes_and_the_moment
def test_torchs_refusal_reads_like_the_meters() -> None:
    meter = Meter(device=CUDA, cap_bytes=64 * MIB)
    meter.mark("forward")
    # One op far beyond the allocator's own limit, which stands above the cap.
    with meter, meter.region("activations"), pytest.raises(OutOfDeviceMemory, match="in forward") as caught:
        torch.empty(1024 * MIB, dtype=torch.uint8, device=CUDA)
    assert caught.value.fields["requested_bytes"] == 1024 * MIB
    assert caught.value.fields["budget_bytes"] == 64 * MIB


# No twin: the CPU has no allocator to limit.
def test_the_limit_on_the_allocator_is_lifted_at_the_end_of_a_run() -> None:
    with prepared_device(CUDA):
        Meter(device=CUDA, cap_bytes=64 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1024 * MIB, dtype=torch.uint8, device=CUDA)
    assert torch.empty(1024 * MIB, dtype=torch.uint8, device=CUDA).nbytes == 1024 * MIB


# Twin: test_activations.test_an_offloaded_block_leaves_nothing_of_its_own_on_the_device
def test_offloading_lowers_the_peak_by_torch_counters() -> None:
    peaks = {
        choice: measure_step(
            WIDE, plan=make_plan(choice, micro_batch_size=8), workload=WIDE_WORK, device=CUDA
        ).device_bytes_by_category["activations"]
        for choice in ("keep", "offload", "recompute")
    }
    assert peaks["offload"] < peaks["keep"]
    assert peaks["recompute"] < peaks["keep"]


# Twin: test_train.test_a_job_stopped_and_resumed_ends_with_the_same_bits
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_job_stopped_and_resumed_ends_with_the_same_bits_on_a_card(tmp_path: Path, name: str, dtype: str) -> None:
    run = TrainingRun(
        spec=make_spec(name),
        plan=make_plan(*MIXED, dtype=dtype),
        workload=make_workload(sample_tokens=8, eval_batches=2, eval_every_steps=3),
        goal=Goal(device_budget_bytes=512 * MIB),
        device="cuda:0",
        attempt=1,
        fence=7,
        job_folder=tmp_path / "whole",
        weights_folder=None,
        token_file=write_token_file(tmp_path / "tokens"),
        tokenizer_file=write_tokenizer(tmp_path / "tokenizer.json"),
        timeline_every_s=0.0,
    )
    expected = train(run, report=lambda message: None, should_stop=lambda: False)
    halves = dataclasses.replace(run, job_folder=tmp_path / "halves")
    messages: list[Any] = []
    drained = train(
        halves,
        report=messages.append,
        should_stop=lambda: any(m.get("kind") == "step" and m["step"] >= 4 for m in messages),
    )
    assert (drained.outcome, drained.step) == ("drained", 4)
    torch.manual_seed(999)
    resumed = dataclasses.replace(halves, resume_from="newest", attempt=2, fence=8)
    result = train(resumed, report=lambda message: None, should_stop=lambda: False)
    assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert result.summary["validation_loss"] == expected.summary["validation_loss"]


# Twin: test_probe.test_every_rate_is_measured_and_possible
def test_the_card_is_probed_and_what_belongs_to_no_plan_is_taken_off() -> None:
    machine = probe_machine(device="cuda:0", max_s=2.0)
    assert machine.device.kind == "cuda"
    assert all(rate > 1e9 for rate in machine.rates.matmul_flops_per_s.values())
    assert machine.rates.device_to_host_bytes_per_s > 1e8
    facts = machine.facts
    assert machine.device.memory_bytes <= int(facts["total_bytes"]) - int(facts["context_bytes"])
    assert int(facts["workspace_bytes"]) < 512 * MIB
