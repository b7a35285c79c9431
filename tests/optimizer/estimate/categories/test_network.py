"""Volumes and times of what ranks exchange, by formula."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.estimate.categories.network import (
    Backend,
    Collective,
    Network,
    agreement_ms,
    estimate_sent_bytes,
    overlaps,
)
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import PeerLink
from optimizer.hardware.peers import LOOPBACK
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.gradients import GradientsPlan
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
    once = 2 * 3 / 4 * 4 * 4000

    def sent(data: DataParallel, *, steps: int = 1, gradients: str = "keep") -> float:
        """Bytes of a rank's tensors, without the tables on which ranks agree."""
        given = plan(data, steps=steps, gradients=gradients)
        tables = [8 * 4 * columns for columns in (steps, len(tensors), 1)]
        agreed = sum(nccl.between_hosts.sent_bytes("all_reduce", size, element_bytes=8) for size in tables)
        return sum(estimate_sent_bytes(nccl, tensors, given)) / 4 - agreed

    for data in ("replicated", "zero1", "zero2"):
        assert sent(data) == pytest.approx(once)
    assert sent("replicated", steps=3) == sent("zero1", steps=3) == pytest.approx(once)
    assert sent("zero2", steps=3) == pytest.approx(once + 2 * (once / 2))
    assert sent("replicated", steps=3, gradients="host") == pytest.approx(3 * once)


def test_weights_that_all_ranks_read_at_home_are_not_sent_but_waited_for() -> None:
    given, gloo = plan("zero1"), network(4, "gloo")
    all_sent, first_sent = (
        sum(estimate_sent_bytes(gloo, (1000, 3000), given, are_sent=flags)) for flags in ((True, True), (True, False))
    )
    barrier = 4 * 2 * 3 * 48
    assert all_sent - first_sent == 3 * (4 * 3000 + 3 * 48) - barrier


def test_ranks_on_cards_of_several_machines_agree_over_the_network_and_others_over_the_loopback() -> None:
    far = replace(LINK, kind="network", latency_s=0.02)
    assert network(2).between_hosts.link == LOOPBACK
    assert replace(network(2), link=far).between_hosts.link == far
    assert agreement_ms(replace(network(2), link=far), 10) > 200 > 20 > agreement_ms(network(2), 10)


def test_large_tensors_take_the_rate_that_was_measured_for_their_size() -> None:
    link = replace(LINK, bytes_per_s_by_size=((1e5, 1e8), (1e7, 1e9)))
    assert link.at_size(1e6).bytes_per_s == pytest.approx(5.5e8)
    assert link.at_size(1e3).bytes_per_s == 1e8
    assert link.at_size(1e9).bytes_per_s == 1e9
    slow, fast = (replace(network(2), link=link).seconds("reduce", size) for size in (10**5, 10**7))
    assert slow == pytest.approx(1e-3 + 1e-5)
    assert fast == pytest.approx(1e-2 + 1e-5)


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


def test_a_pair_that_a_bridge_joins_exchanges_over_it_alone_or_as_a_replica() -> None:
    machine = table_machine("RTX 3090", num_devices=4)

    def network(**layout: Any) -> Network:
        found = Network.of(machine, DeviceLayout(**layout))
        assert found is not None
        return found

    assert network(num_devices=2).link == machine.peers_within
    assert network(num_devices=4, data="zero2").link == machine.peers
    pairs = network(num_devices=4, data="zero2", replicas=2)
    assert (pairs.within.link, pairs.across.link) == (machine.peers_within, machine.peers)
    assert (pairs.within.num_ranks, pairs.across.num_ranks) == (2, 2)
    # No bridge joins three.
    six = Network.of(replace(machine, num_devices=6), DeviceLayout(num_devices=6, data="zero2", replicas=2))
    assert six is not None
    assert six.within.link == machine.peers
