"""The price of offloading, from the trace of one place and no compression, equals the runtime's counters."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.activations import (
    TracedCopy,
    Trip,
    count_copied_bytes,
    estimate_packing_bytes,
    estimate_staging_bytes,
    estimate_trip_ms,
    read_copy,
    redirect_changes,
    trip_of,
)
from optimizer.estimate.categories.stores import ASSUMED_BYTES_PER_S
from optimizer.formats.transfer_sizes import STAGING_BYTES, packed_bytes, scratch_bytes
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import traced_choice
from optimizer.profile.profile import Profile
from optimizer.profile.sizes import evaluate
from optimizer.workload import TrainingWorkload
from tests.valkey import Valkey

SHAPE = (2, 40)
CHOICES = ("offload", "offload_disk", "offload_remote")
COMPRESSIONS = ("none", "bf16", "int8")
PEAKS = {"host": "host_peak_bytes", "disk": "disk_peak_bytes", "remote": "remote_peak_bytes"}


class TracedPart:
    """One part of the profile at one shape, as numbers."""

    def __init__(self, profile: Profile, index: int) -> None:
        part = profile.parts[index]
        ops = [profile.ops[number] for number in part.ops]
        copies = [read_copy(op.kind, op.name, evaluate(op.written_bytes, SHAPE)) for op in ops]
        self.copies = [copy for copy in copies if copy is not None]
        changes = [profile.changes[number] for number in part.changes]
        self.changes = [(c.tier, CATEGORIES.index(c.category), evaluate(c.num_bytes, SHAPE)) for c in changes]


def traced_blocks(
    profile: Profile, per_block: tuple[str, ...], dtype: str = "fp32"
) -> Iterator[tuple[str, TracedPart, TracedPart]]:
    """List the choice, forward and backward of each block that offloads."""
    regime = profile.regime(dtype, SHAPE)
    for choice, kind in zip(per_block, regime.block_templates, strict=True):
        traced = traced_choice(choice)
        template = regime.templates[traced][kind]
        if traced == "offload":
            yield choice, TracedPart(profile, template.forward), TracedPart(profile, template.backward_first)


def make_plan(per_block: tuple[str, ...], compress: str, dtype: str = "fp32") -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=SHAPE[0], accumulation_steps=1),
        weights=WeightsPlan(dtype=dtype),
        activations=ActivationsPlan(per_block=per_block, compress=compress),
    )


def measure(spec: ModelSpec, plan: Plan) -> Any:
    from optimizer.runtime.job.measure import measure_step

    workload = TrainingWorkload(sequence_length=SHAPE[1], global_batch_size=plan.batch.global_batch_size)
    return measure_step(spec, plan=plan, workload=workload)


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize(
    "per_block",
    [("offload",) * 4, ("offload_disk",) * 4, ("offload_disk", "keep", "offload_remote", "offload")],
    ids=["host", "disk", "mixed"],
)
def test_copies_by_link_and_bytes_in_each_place_are_what_the_runtime_counts(
    spec: ModelSpec, profile: Profile, remote: Valkey, per_block: tuple[str, ...], compress: str, dtype: str
) -> None:
    plan = make_plan(per_block, compress, dtype)
    measured = measure(spec, plan)
    peaks = dict.fromkeys(PEAKS, 0)
    copied: dict[Any, Any] = {}
    peaks["host"] = staging_bytes(plan)
    for choice, forward, backward in traced_blocks(profile, per_block, dtype):
        trip = trip_of(choice, plan.activations.compress)
        for part in (forward, backward):
            for link, num_bytes in count_copied_bytes(part.copies, trip=trip).items():
                copied[link] = copied.get(link, 0) + num_bytes
        for tier, _, num_bytes in redirect_changes(forward.changes, forward.copies, trip=trip):
            if tier in peaks:
                peaks[tier] += num_bytes
    assert copied == measured.copied_bytes
    assert peaks == {tier: getattr(measured, name) for tier, name in PEAKS.items()}


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("choice", CHOICES)
def test_the_device_holds_what_the_trace_says_and_the_packers_buffers(
    spec: ModelSpec, profile: Profile, remote: Valkey, choice: str, compress: str
) -> None:
    traced = measure(spec, make_plan(("offload",) * 4, "none"))
    plan = make_plan((choice,) * 4, compress)
    measured = measure(spec, plan)
    packing_bytes = estimate_packing_bytes(plan.activations, device_kind="cpu")
    assert packing_bytes == (scratch_bytes(compress, device_kind="cpu") if compress != "none" else 0)
    assert measured.device_peak_bytes == traced.device_peak_bytes + packing_bytes
    added = dict.fromkeys(traced.device_bytes_by_category, 0) | {"temporaries": packing_bytes}
    expected = {name: size + added[name] for name, size in traced.device_bytes_by_category.items()}
    assert measured.device_bytes_by_category == expected


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("choice", CHOICES)
def test_bytes_that_arrive_in_forward_leave_in_backward(profile: Profile, choice: str, compress: str) -> None:
    plan = make_plan((choice,) * 4, compress)
    for _, forward, backward in traced_blocks(profile, (choice,) * 4):
        trip = trip_of(choice, plan.activations.compress)
        came, went = (
            sum(
                num_bytes
                for tier, _, num_bytes in redirect_changes(part.changes, part.copies, trip=trip, made=forward.copies)
                if tier == trip.place
            )
            for part in (forward, backward)
        )
        assert came == -went > 0


def test_changes_keep_their_number_and_order(profile: Profile) -> None:
    trip = Trip(place="disk", compress="int8")
    for _, forward, _ in traced_blocks(profile, ("offload",) * 4):
        redirected = redirect_changes(forward.changes, forward.copies, trip=trip)
        assert len(redirected) == len(forward.changes)
        on_device = [change for change in forward.changes if change[0] == "device"]
        assert [change for change in redirected if change[0] == "device"] == on_device


def test_two_storages_of_one_size_are_packed_by_their_own_dtypes() -> None:
    copies = [
        TracedCopy(is_out=True, dtype="int64", num_bytes=4096),
        TracedCopy(is_out=True, dtype="float32", num_bytes=4096),
    ]
    trip = Trip(place="host", compress="bf16")
    came = redirect_changes([("host", 3, 4096), ("host", 3, 4096)], copies, trip=trip)
    assert came == [("host", 3, 4096), ("host", 3, 2048)]
    back = [dataclasses.replace(copy, is_out=False) for copy in reversed(copies)]
    went = redirect_changes([("host", 3, -4096), ("host", 3, -4096)], back, trip=trip, made=copies)
    assert sum(change[2] for change in went) == -4096 - 2048


def test_tensors_freed_in_a_part_that_did_not_fetch_them_are_known_from_the_forward() -> None:
    made = [TracedCopy(is_out=True, dtype="float32", num_bytes=4096)]
    trip = Trip(place="disk", compress="bf16")
    assert redirect_changes([("host", 3, -4096)], [], trip=trip, made=made) == [("disk", 3, -2048)]


def test_blocks_that_stay_have_no_trip() -> None:
    plan = ActivationsPlan(per_block=("keep", "recompute", "selective"), compress="int8")
    assert all(trip_of(choice, plan.compress) is None for choice in plan.per_block)
    assert estimate_packing_bytes(plan, device_kind="cuda") == 0
    assert staging_bytes(make_plan(plan.per_block, "int8")) == 0


def staging_bytes(plan: Plan) -> int:
    return estimate_staging_bytes(plan.activations, plan.weights)


def test_staging_is_on_the_host_where_a_store_is_used() -> None:
    assert staging_bytes(make_plan(("offload", "keep"), "none")) == 0
    assert staging_bytes(make_plan(("offload_remote", "keep"), "none")) == STAGING_BYTES
    streamed = dataclasses.replace(make_plan(("keep", "keep"), "none"), weights=WeightsPlan(place="disk"))
    assert staging_bytes(streamed) == STAGING_BYTES


def copies_of(num_bytes: int) -> list[TracedCopy]:
    return [TracedCopy(is_out=is_out, dtype="float32", num_bytes=num_bytes) for is_out in (True, False)]


def test_time_is_bytes_over_each_links_rate(machine: Machine) -> None:
    rates = dataclasses.replace(machine.rates, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=2e9, op_overhead_s=0.0)
    copies = copies_of(10**9)
    time = estimate_trip_ms(copies, trip=Trip(place="disk", compress="none"), rates=rates, device_kind="cpu")
    assert (time.copy_out_ms, time.copy_in_ms) == pytest.approx((200, 200))
    assert time.disk_ms == pytest.approx(1000 + 500)
    assert (time.network_ms, time.compute_ms) == (0, 0)


def test_compression_trades_time_on_the_links_for_time_on_the_device(machine: Machine) -> None:
    rates = dataclasses.replace(machine.rates, remote_write_bytes_per_s=1e8, remote_read_bytes_per_s=1e8)
    plain, bf16, int8 = (
        estimate_trip_ms(copies_of(10**8), trip=Trip(place="remote", compress=compress), rates=rates, device_kind="cpu")
        for compress in COMPRESSIONS
    )
    assert plain.network_ms == pytest.approx(2000)
    assert bf16.network_ms == pytest.approx(1000)
    packed = packed_bytes(10**8, dtype="float32", compress="int8")
    assert int8.network_ms == pytest.approx(2 * packed / 1e8 * 1000)
    assert plain.compute_ms == 0 < bf16.compute_ms < int8.compute_ms
    assert int8.copy_out_ms < bf16.copy_out_ms < plain.copy_out_ms


def test_a_disk_that_was_not_measured_is_taken_to_be_slow(machine: Machine) -> None:
    time = estimate_trip_ms(
        copies_of(10**8), trip=Trip(place="disk", compress="none"), rates=machine.rates, device_kind="cpu"
    )
    assert time.disk_ms == pytest.approx(2 * 10**8 / ASSUMED_BYTES_PER_S["disk"] * 1000)
