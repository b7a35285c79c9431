"""Volumes and times of what ranks exchange, by formula."""

import pytest

from optimizer.estimate.categories.network import Backend, Collective, Network, estimate_sent_bytes, overlaps
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import PeerLink
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.layout import DataParallel, DeviceLayout
from optimizer.plan.plan import Plan

LINK = PeerLink(kind="pcie", bytes_per_s=1e9, latency_s=1e-5, source="measured")
SIZE = 12_000_000


def network(num_ranks: int, backend: Backend = "nccl") -> Network:
    return Network(num_ranks=num_ranks, backend=backend, link=LINK)


@pytest.mark.parametrize(
    ("backend", "collective", "num_ranks", "seconds", "sent"),
    [
        ("nccl", "all_reduce", 2, 0.012 + 2e-5, SIZE),
        ("nccl", "all_reduce", 4, 0.018 + 6e-5, 1.5 * SIZE),
        ("nccl", "reduce", 4, 0.012 + 3e-5, 0.75 * SIZE),
        ("nccl", "broadcast", 4, 0.012 + 3e-5, 0.75 * SIZE),
        ("gloo", "all_reduce", 4, 0.018 + 6e-5, 1.5 * SIZE),
        ("gloo", "reduce", 2, 0.012 + 2e-5, 0.75 * SIZE),
        ("gloo", "broadcast", 4, 0.024 + 2e-5, 0.75 * SIZE),
    ],
)
def test_exchanges_take_what_their_rings_and_trees_take(
    backend: Backend, collective: Collective, num_ranks: int, seconds: float, sent: float
) -> None:
    found = network(num_ranks, backend)
    assert found.seconds(collective, SIZE) == pytest.approx(seconds)
    assert found.sent_bytes(collective, SIZE) == pytest.approx(sent)


def plan(data: DataParallel, *, steps: int = 1, gradients: str = "keep") -> Plan:
    return Plan(
        layout=DeviceLayout(num_devices=4, data=data),
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=steps),
        gradients=GradientsPlan(choice=gradients),
        activations=ActivationsPlan(per_block=("keep",)),
    )


def test_zero_sends_as_much_as_plain_data_parallel_training_and_zero_2_once_for_each_micro_batch() -> None:
    tensors, nccl = (1000, 3000), network(4)
    norms = 2 * 3 / 4 * 8 * 4 * 2
    once = 2 * 3 / 4 * 4 * 4000
    sent = {(data, steps): estimate_sent_bytes(nccl, tensors, plan(data, steps=steps)) for data, steps in
            ((d, s) for d in ("replicated", "zero1", "zero2") for s in (1, 3))}
    assert sent["replicated", 1] == sent["replicated", 3] == sent["zero1", 1] == sent["zero1", 3] == once + norms
    assert sent["zero2", 3] == once + norms + 2 * (once / 2)
    assert estimate_sent_bytes(nccl, tensors, plan("replicated", steps=3, gradients="host")) == 3 * once + norms


def test_only_gradients_that_every_rank_of_cards_keeps_travel_beside_backward() -> None:
    assert overlaps(plan("replicated"), device_kind="cuda")
    assert not overlaps(plan("replicated"), device_kind="cpu")
    assert not overlaps(plan("replicated", gradients="host"), device_kind="cuda")
    assert not overlaps(plan("zero1"), device_kind="cuda")


def test_one_device_has_no_network_and_cards_use_nccl() -> None:
    pair = table_machine("RTX 3090", num_devices=2)
    assert Network.of(pair, DeviceLayout()) is None
    found = Network.of(pair, DeviceLayout(num_devices=2))
    assert found is not None
    assert (found.backend, found.link) == ("nccl", pair.peers)
