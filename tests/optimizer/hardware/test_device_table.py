"""The table's rows can be true: dense, of this card, sourced. And a row that cannot is refused."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB, MIB
from optimizer.hardware.device_spec import DeviceSpec, find_faults
from optimizer.hardware.device_table import TABLE, parse_devices, read_devices

DEVICES = read_devices()
PRINTED_WITH_SPARSITY_TFLOPS: dict[str, Any] = {
    "A10": 250,
    "A30": 330,
    "A40": 299.4,
    "L4": 242,
    "L40S": 733,
    "A100 40GB": 624,
    "A100 80GB": 624,
    "H100 PCIe": 1513,
    "H100 SXM": 1979,
    "H100 NVL": 1671,
    "H200 SXM": 1979,
    "B200 SXM": 4500,
    "RTX A4000": 153.4,
    "RTX A5000": 222.2,
    "RTX A6000": 309.7,
    "RTX 3080 10GB": 119,
    "RTX 3090": 142,
    "RTX 4080": 194.9,
    "RTX 4090": 330.3,
    "RTX 5090": 419,
}
"""bf16 as the makers print it with 2:4 sparsity, at twice the dense rate."""


def test_at_least_36_devices_from_6_to_192_gb() -> None:
    sizes = sorted(spec.memory_bytes for spec in DEVICES.values())
    assert len(sizes) >= 36
    assert sizes[0] == 6 * GIB
    assert 175 * GIB < sizes[-1] <= 192 * GIB


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
def test_every_row_can_be_true_and_says_where_it_is_from(spec: DeviceSpec) -> None:
    assert find_faults(spec) == []
    assert "NVIDIA" in spec.source
    assert 2016 <= spec.year <= 2026
    assert 50 <= spec.power_w <= 1000
    major, _, minor = spec.compute_capability.partition(".")
    assert 6 <= int(major) <= 12
    assert minor.isdigit()


@pytest.mark.parametrize("name", sorted(PRINTED_WITH_SPARSITY_TFLOPS))
def test_rates_are_dense_not_the_sparse_ones_of_the_brochure(name: str) -> None:
    assert DEVICES[name].bf16_flops_per_s == pytest.approx(PRINTED_WITH_SPARSITY_TFLOPS[name] * 1e12 / 2, rel=0.02)


@pytest.mark.parametrize("name", sorted(PRINTED_WITH_SPARSITY_TFLOPS))
def test_a_sparse_rate_in_a_row_is_refused(name: str) -> None:
    printed = dict(DEVICES[name].printed_flops_per_s) | {"bf16": PRINTED_WITH_SPARSITY_TFLOPS[name] * 1e12}
    (fault,) = find_faults(replace(DEVICES[name], printed_flops_per_s=printed))
    assert fault.startswith("bf16: ")
    assert "twice the dense rate" in fault


def test_the_l4_of_torchs_own_table_is_refused_for_both_of_its_errors() -> None:
    # torch/_inductor/analysis/device_info.py has the L4 with 242 TFLOP/s of bf16 and 3,350 GB/s, an H100's bandwidth
    printed = dict(DEVICES["L4"].printed_flops_per_s) | {"bf16": 242e12}
    faults = find_faults(replace(DEVICES["L4"], printed_flops_per_s=printed, memory_bytes_per_s=3350e9))
    assert [fault.partition(":")[0] for fault in faults] == ["bf16", "memory bandwidth"]
    assert faults[1] == "memory bandwidth: 3350 GB/s, but 192 bits at 12.5 Gbit/s a pin give 300"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"memory_bytes": 22_000 * MIB}, "memory: no card is sold whose driver shows 22,000 MiB"),
        ({"cuda_memory_bytes": 24 * GIB}, "memory: CUDA's total of 24,576 MiB is not within 7 % below"),
        ({"link_bytes_per_s": 63e9}, "link: 63.0 GB/s, but PCIe 4 x16 has 31.5"),
        ({"pcie_lanes": 4}, "link: PCIe 4 x4 is not one of"),
        ({"pcie_generation": None, "link_bytes_per_s": 0.0}, "link: neither PCIe nor a rate"),
        ({"num_sms": 60}, "fp32: 30.3 TFLOP/s, but 60 multiprocessors at their clock give 31.3"),
        ({"printed_flops_per_s": {"fp32": 30.3e12, "fp4": 1e12}}, "fp4: a rate is given, but the chip has no units"),
        ({"printed_flops_per_s": {}}, "fp32: no printed rate to check the chip with"),
    ],
)
def test_each_kind_of_wrong_figure_is_refused_by_name(changed: dict[str, Any], fault: str) -> None:
    faults = find_faults(replace(DEVICES["L4"], **changed))
    assert any(found.startswith(fault) for found in faults), faults


def test_what_the_maker_does_not_print_follows_from_the_chip() -> None:
    spec = DEVICES["RTX 3060 12GB"]
    assert "bf16" not in spec.printed_flops_per_s
    assert spec.bf16_flops_per_s == 28 * 1777e6 * 512
    assert spec.fp32_flops_per_s == 12.7e12


def test_turing_and_older_have_no_bf16_units() -> None:
    without = {name for name, spec in DEVICES.items() if not spec.has_bf16_units}
    assert without == {name for name, spec in DEVICES.items() if float(spec.compute_capability) < 8}
    assert DEVICES["T4"].bf16_flops_per_s == DEVICES["T4"].fp32_flops_per_s


def test_fp16_products_accumulate_in_fp32_which_is_slower_on_geforce() -> None:
    assert DEVICES["RTX 2080 Ti"].flops_per_s["fp16"] == 53.8e12
    assert DEVICES["TITAN RTX"].flops_per_s["fp16"] == 130.5e12


def test_a_narrow_link_is_half_a_wide_one() -> None:
    assert DEVICES["RTX 4060 Ti 16GB"].link_bytes_per_s * 2 == DEVICES["RTX 4090"].link_bytes_per_s
    assert DEVICES["GH200 96GB"].link_bytes_per_s == 450e9


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
def test_efficiencies_are_shares_with_an_interval_and_a_source(spec: DeviceSpec) -> None:
    assert set(spec.efficiency) == {"tensor_products", "fp32_products", "attention", "memory", "link"}
    for efficiency in spec.efficiency.values():
        assert 0 < efficiency.low < efficiency.value < efficiency.high < 1
        assert efficiency.source
        assert not efficiency.is_assumed or efficiency.high / efficiency.low > 1.25


def _document() -> dict:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def test_a_misspelt_key_is_refused_by_its_path() -> None:
    document = _document()
    document["devices"][3]["memory"]["mebibytes"] = 1
    with pytest.raises(InvalidInput, match=r"devices\.toml\.devices\[3\]\.memory"):
        parse_devices(document)


def test_rates_that_the_file_lacks_are_refused() -> None:
    document = _document()
    document["devices"][0]["rates"] = "voodoo"
    with pytest.raises(InvalidInput, match="P100 16GB has rates 'voodoo'; the file has pascal_data_center"):
        parse_devices(document)


def test_a_name_that_is_there_twice_is_refused() -> None:
    document = _document()
    document["devices"].append(document["devices"][0])
    with pytest.raises(InvalidInput, match="P100 16GB is there twice"):
        parse_devices(document)


def test_a_spelling_means_one_device() -> None:
    spellings = [name for spec in DEVICES.values() for name in (spec.name, *spec.also_called)]
    assert len(spellings) == len({name.lower() for name in spellings})


def test_specs_do_not_change() -> None:
    with pytest.raises(AttributeError):
        DEVICES["T4"].power_w = 1  # type: ignore[misc]
    assert isinstance(DEVICES["T4"], DeviceSpec)
