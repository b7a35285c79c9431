"""Devices by name, and the machine that is made of a row of the table."""

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB
from optimizer.hardware.cuda_facts import CONTEXT_SIZES, NUM_HANDLES, WORKSPACE_BYTES
from optimizer.hardware.devices import find_device, known_devices, products_efficiency, table_machine
from optimizer.hardware.machine import Machine


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_card_is_found_in_any_spelling(name: str) -> None:
    assert find_device(name).name == "RTX 4090"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop 8GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
    ],
)
def test_the_names_that_nvidia_smi_prints_are_known(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "found"),
    [("T4", "T4"), ("Tesla T4", "T4"), ("H200", "H200 SXM"), ("RTX 3060", "RTX 3060 12GB"), ("RTX 4060", "RTX 4060")],
)
def test_the_size_may_be_left_out_where_one_card_has_the_name(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("A100", "A100 40GB or A100 80GB"),
        ("RTX 4060 Ti", "RTX 4060 Ti 8GB or RTX 4060 Ti 16GB"),
        ("H100", "H100 PCIe or H100 SXM or H100 NVL"),
    ],
)
def test_an_ambiguous_name_asks_which(name: str, meaning: str) -> None:
    with pytest.raises(InvalidInput, match=rf"GPU '{name}' could be {meaning};"):
        find_device(name)


@pytest.mark.parametrize("name", ["Voodoo 2", "", "NVIDIA"])
def test_an_unknown_name_lists_the_table(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not in the table") as caught:
        find_device(name)
    assert caught.value.fields["allowed"] == list(known_devices())


def test_a_table_machine_applies_the_tables_efficiencies() -> None:
    machine = table_machine("RTX 4090", host_memory_bytes=64 * GIB)
    spec = find_device("RTX 4090")
    assert machine.rates.source == "table"
    assert machine.rates.matmul_flops_per_s["bf16"] == spec.bf16_flops_per_s * spec.efficiency["tensor_products"].value
    assert machine.rates.matmul_flops_per_s["fp32"] == spec.fp32_flops_per_s * spec.efficiency["fp32_products"].value
    assert machine.rates.attention_flops_per_s["fp16"] == spec.flops_per_s["fp16"] * spec.efficiency["attention"].value
    assert machine.rates.memory_bytes_per_s == spec.memory_bytes_per_s * spec.efficiency["memory"].value
    assert machine.rates.host_to_device_bytes_per_s == spec.link_bytes_per_s * spec.efficiency["link"].value
    assert machine.host_memory_bytes == 64 * GIB


def test_a_job_may_have_what_cuda_calls_the_cards_total_less_context_and_workspaces() -> None:
    spec = find_device("RTX 4090")
    assert spec.cuda_memory_bytes is not None
    taken_bytes = CONTEXT_SIZES[spec.compute_capability].num_bytes.value + NUM_HANDLES * WORKSPACE_BYTES
    assert table_machine("RTX 4090").device.memory_bytes == spec.cuda_memory_bytes - taken_bytes
    assert spec.cuda_memory_bytes < spec.memory_bytes


def test_bf16_on_a_card_without_units_for_it_is_as_slow_as_fp32_and_fp16_is_not() -> None:
    rates = table_machine("T4").rates.matmul_flops_per_s
    assert rates["bf16"] == rates["fp32"]
    assert rates["fp16"] > 3 * rates["fp32"]
    assert products_efficiency(find_device("T4"), "bf16") == find_device("T4").efficiency["fp32_products"].value


@pytest.mark.parametrize("name", list(known_devices()))
def test_every_card_makes_a_machine_that_crosses_json(name: str) -> None:
    machine = table_machine(name)
    assert Machine.from_json(machine.to_json()) == machine
    assert min(machine.rates.matmul_flops_per_s.values()) > 1e12
    assert machine.device.memory_bytes > 5 * GIB
