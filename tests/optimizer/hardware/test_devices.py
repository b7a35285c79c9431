"""The table of cards: dense, sourced, found by any spelling."""

import pytest

from optimizer.errors import InvalidInput
from optimizer.hardware.devices import (
    CONTEXT_BYTES,
    DEVICES,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    find_device,
    table_machine,
)
from optimizer.hardware.machine import Machine
from optimizer.units import GIB

MARKETING_BF16_TFLOPS = {
    "A10": 250,
    "L4": 242,
    "L40S": 733,
    "A100 40GB": 624,
    "A100 80GB": 624,
    "H100 PCIe": 1513,
    "H100 SXM": 1979,
    "H200 SXM": 1979,
    "RTX 3080 10GB": 119,
    "RTX 3090": 142,
    "RTX A6000": 309.7,
    "RTX 4080": 194.9,
    "RTX 4090": 330.3,
    "RTX 5090": 419,
}
"""Printed with 2:4 sparsity, at twice the dense rate."""


@pytest.mark.parametrize("name", sorted(MARKETING_BF16_TFLOPS))
def test_rates_are_dense_not_the_sparse_ones_of_the_brochure(name):
    assert DEVICES[name].bf16_flops_per_s == pytest.approx(MARKETING_BF16_TFLOPS[name] * 1e12 / 2, rel=0.02)


def test_the_l4_has_its_own_memory_and_not_an_h100s():
    assert DEVICES["L4"].memory_bytes_per_s == 300e9


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
def test_every_card_is_plausible_and_says_where_its_numbers_are_from(spec):
    assert "NVIDIA" in spec.source
    assert 8 * GIB < spec.memory_bytes < 200 * GIB
    assert 5e12 < spec.fp32_flops_per_s < 150e12
    assert spec.fp32_flops_per_s <= spec.bf16_flops_per_s < 1000e12
    assert 200e9 < spec.memory_bytes_per_s < 5000e9
    assert spec.has_bf16_units or spec.bf16_flops_per_s == spec.fp32_flops_per_s


def test_the_table_holds_the_cards_people_have():
    wanted = ["T4", "L4", "A10", "RTX 3060 12GB", "RTX 3090", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4080", "RTX 4090"]
    wanted += ["RTX 5090", "A100 40GB", "A100 80GB", "H100 SXM", "H200 SXM"]
    assert set(wanted) <= set(DEVICES)


def test_a_narrow_link_is_half_a_wide_one():
    assert DEVICES["RTX 4060 Ti 16GB"].link_bytes_per_s * 2 == DEVICES["RTX 4090"].link_bytes_per_s
    assert DEVICES["RTX 4090"].link_bytes_per_s == pytest.approx(31.5e9, rel=0.01)


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_card_is_found_in_any_spelling(name):
    assert find_device(name).name == "RTX 4090"


@pytest.mark.parametrize("name", ["T4", "Tesla T4", "H200", "RTX 3060"])
def test_a_beginning_that_means_one_card_is_enough(name):
    assert find_device(name).name.startswith(name.removeprefix("Tesla "))


def test_an_ambiguous_name_asks_which():
    with pytest.raises(InvalidInput, match=r"GPU 'A100' could be A100 40GB or A100 80GB"):
        find_device("A100")


@pytest.mark.parametrize("name", ["Voodoo 2", "", "NVIDIA"])
def test_an_unknown_name_lists_the_table(name):
    with pytest.raises(InvalidInput) as caught:
        find_device(name)
    assert caught.value.fields["allowed"] == list(DEVICES)


def test_a_table_machine_applies_the_named_efficiencies():
    machine = table_machine("RTX 4090", host_memory_bytes=64 * GIB)
    spec = DEVICES["RTX 4090"]
    assert machine.rates.source == "table"
    assert machine.rates.matmul_flops_per_s["bf16"] == spec.bf16_flops_per_s * MATMUL_EFFICIENCY["bf16"]
    assert machine.rates.memory_bytes_per_s == spec.memory_bytes_per_s * MEMORY_EFFICIENCY
    assert machine.rates.host_to_device_bytes_per_s == spec.link_bytes_per_s * LINK_EFFICIENCY
    assert machine.device.memory_bytes == spec.memory_bytes - CONTEXT_BYTES
    assert machine.host_memory_bytes == 64 * GIB


def test_a_table_machine_crosses_json():
    machine = table_machine("T4")
    assert Machine.from_json(machine.to_json()) == machine
