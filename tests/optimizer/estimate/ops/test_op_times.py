"""Ops at a machine's rates: by curves where there are some, by flat rates where not, and never less time for more work."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.heap import KEPT_BYTES
from optimizer.estimate.ops.op_times import OpTimes, seconds_by_bytes, seconds_by_flops
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.simulate import estimate_fresh_ms
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.hardware.rates import Rates
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.ops import compute_kind
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

FLAT = make_cpu_machine().rates
CURVED = dataclasses.replace(
    FLAT,
    matmul_curves={"mm fp32": ((4.0, 2e10), (64.0, 8e10))},
    op_curves={"elementwise": ((1e5, 2e10), (1e7, 1e10)), "tanh": ((1e5, 2e9),), "gather": ((1e5, 1e10),)},
    forward_dispatch_s=30e-6,
    backward_dispatch_s=20e-6,
    python_s={"recompute op": 1e-5, "selective op": 2e-5, "offload": 1e-4},
    fresh_bytes_per_s=2e9,
)
NOISY = ((1e4, 1e9), (1e5, 5e10), (1e6, 4e9), (1e7, 9e10), (1e8, 1e10))


def price(choice: str, profile: Profile, rates: Rates, *, kind: str = "cpu", batch: int = 2) -> Prediction:
    machine = make_cpu_machine()
    machine = dataclasses.replace(machine, rates=rates, device=dataclasses.replace(machine.device, kind=kind))
    plan = Plan(
        batch=BatchPlan(micro_batch_size=batch, accumulation_steps=1),
        activations=ActivationsPlan(per_block=(choice,) * profile.num_blocks),
    )
    workload = TrainingWorkload(sequence_length=32, global_batch_size=batch)
    return estimate_training(profile, plan=plan, workload=workload, machine=machine)


def test_without_curves_a_product_is_the_longer_of_computing_and_moving() -> None:
    times = OpTimes(FLAT, "fp32")
    assert times.kernel_s("matmul", "aten.mm.default", flops=5e10, read_bytes=8) == pytest.approx(1.0)
    assert times.kernel_s("matmul", "aten.mm.default", flops=1.0, read_bytes=4e9, written_bytes=4e9) == pytest.approx(1.0)
    assert times.kernel_s("gather", "aten.embedding.default", read_bytes=6e9, written_bytes=2e9) == pytest.approx(1.0)
    assert times.dispatch_s == (FLAT.op_overhead_s, FLAT.op_overhead_s)
    assert not times.counts_views


def test_a_dtype_that_was_not_measured_takes_the_rate_of_fp32() -> None:
    assert OpTimes(FLAT, "fp16").kernel_s("matmul", "aten.mm.default", flops=5e10) == pytest.approx(1.0)


@pytest.mark.parametrize("curve", [NOISY, NOISY[:1], CURVED.op_curves["elementwise"]])
def test_more_bytes_never_take_less_time(curve: tuple[tuple[float, float], ...]) -> None:
    seconds = seconds_by_bytes(np.geomspace(1, 1e10, 2000), curve)
    assert np.all(np.diff(seconds) >= 0)
    assert np.all(seconds > 0)
    assert seconds_by_bytes(np.array([0.0]), curve)[0] == 0.0


def test_a_curve_is_met_at_its_points_and_goes_on_at_its_ends_rates() -> None:
    curve = CURVED.op_curves["elementwise"]
    seconds = seconds_by_bytes(np.array([1e4, 1e5, 1e7, 1e9]), curve)
    assert seconds.tolist() == pytest.approx([1e4 / 2e10, 1e5 / 2e10, 1e7 / 1e10, 1e9 / 1e10])


def test_products_with_few_flops_for_each_byte_are_slower_and_more_flops_never_faster() -> None:
    curve = CURVED.matmul_curves["mm fp32"]
    flops = np.full(4, 1e9)
    seconds = seconds_by_flops(flops, flops / np.array([2.0, 4.0, 64.0, 500.0]), curve)
    assert seconds.tolist() == pytest.approx([1e9 / 1e10, 1e9 / 2e10, 1e9 / 8e10, 1e9 / 8e10])
    growing = np.geomspace(1e3, 1e13, 500)
    assert np.all(np.diff(seconds_by_flops(growing, growing / 16.0, curve)) > 0)


def test_a_product_takes_the_curve_of_its_form_and_its_own_dtype_then_of_all_forms_together() -> None:
    curves = {"mm bf16": ((1.0, 2e10),), "mm nn bf16": ((1.0, 1e9),), "mm fp32": ((1.0, 8e10),), "mm tn fp16": ((1.0, 5e9),)}
    rates = dataclasses.replace(CURVED, matmul_curves=curves)
    sizes = {"flops": np.array([1e9]), "read_bytes": np.array([1e6]), "written_bytes": np.zeros(1)}

    def seconds(dtype: str, form: str, *, computes: str = "bf16") -> float:
        times = OpTimes(rates, computes)
        return float(times.kernels_s("matmul", "aten.mm.default", **sizes, dtype=dtype, form=form)[0])

    assert seconds("bf16", "nn") == pytest.approx(1.0)
    assert seconds("bf16", "nt") == pytest.approx(1 / 20)
    assert seconds("", "") == pytest.approx(1 / 20)
    # Autocast leaves some products in fp32, and a step in fp16 has the profile of bf16.
    assert seconds("fp32", "nn") == pytest.approx(1 / 80)
    assert seconds("bf16", "tn", computes="fp16") == pytest.approx(1 / 5)


def test_an_op_that_moves_bytes_takes_the_curve_of_its_own_dtype() -> None:
    curves = CURVED.op_curves | {"_to_copy int8": ((1e5, 1e9),), "elementwise bf16": ((1e5, 4e9),)}
    times = OpTimes(dataclasses.replace(CURVED, op_curves=curves), "fp32")
    sizes = {"flops": np.zeros(1), "read_bytes": np.array([1e5]), "written_bytes": np.zeros(1)}
    assert times.kernels_s("elementwise", "aten._to_copy.default", **sizes, dtype="int8") == pytest.approx(1e-4)
    assert times.kernels_s("elementwise", "aten.add.Tensor", **sizes, dtype="bf16") == pytest.approx(1e5 / 4e9)
    assert times.kernels_s("elementwise", "aten.add.Tensor", **sizes, dtype="fp32") == pytest.approx(1e5 / 2e10)


def test_attention_that_is_not_causal_has_a_rate_of_its_own_where_it_was_probed() -> None:
    sizes = {"flops": np.array([1e9]), "read_bytes": np.array([1e7]), "written_bytes": np.zeros(1)}
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"

    def seconds(form: str, **curves: Any) -> float:
        rates = dataclasses.replace(CURVED, attention_curves={"forward fp32": ((100.0, 1e10),), **curves})
        return OpTimes(rates, "fp32").kernels_s("attention", name, **sizes, form=form)[0]

    assert seconds("", **{"forward whole fp32": ((100.0, 2e10),)}) == pytest.approx(0.1)
    assert seconds("whole", **{"forward whole fp32": ((100.0, 2e10),)}) == pytest.approx(0.05)
    assert seconds("whole") == pytest.approx(0.1)


def test_an_op_of_a_generation_costs_what_a_generation_was_measured_to() -> None:
    rates = dataclasses.replace(CURVED, pass_dispatch_s=10e-6)
    assert OpTimes(rates, "fp32", generates=True).dispatch_s[0] == 10e-6
    assert OpTimes(rates, "fp32").dispatch_s[0] == OpTimes(CURVED, "fp32", generates=True).dispatch_s[0] == 30e-6


DECODING = dataclasses.replace(
    CURVED,
    matmul_curves=CURVED.matmul_curves
    | {"rows nt fp32": ((1.0, 1e10), (16.0, 4e10)), "rows nt fp32 cold": ((1.0, 5e9), (16.0, 4e10))},
    attention_curves={"forward fp32": ((4.0, 1e10), (64.0, 3e10)), "token fp32": ((10.0, 2e9), (1000.0, 8e9))},
)


def product_s(rates: Rates, *, rows: int, form: str = "nt", **how: Any) -> float:
    """Time of a product with this many FLOPs for each byte."""
    times = OpTimes(rates, "fp32", **how)
    return times.kernel_s("matmul", "aten.addmm.default", flops=rows * 1e6, read_bytes=9e5, written_bytes=1e5, form=form)


def test_a_generations_products_of_few_rows_have_their_own_curve_as_far_as_it_goes() -> None:
    assert product_s(DECODING, rows=16, generates=True) == pytest.approx(16e6 / 4e10)
    assert product_s(DECODING, rows=64, generates=True) == pytest.approx(64e6 / 8e10)
    for other in ({"rows": 16}, {"rows": 16, "form": "nn", "generates": True}):
        assert product_s(DECODING, **other) == product_s(CURVED, rows=16)


def test_products_with_weights_from_memory_have_theirs() -> None:
    cold = DECODING.with_cold_weights
    assert product_s(cold, rows=1, generates=True) == pytest.approx(2 * product_s(DECODING, rows=1, generates=True))
    assert product_s(cold, rows=1) == product_s(DECODING, rows=1)
    assert CURVED.with_cold_weights == CURVED


def attention_s(rates: Rates, *, length: int, queries: int = 1, **how: Any) -> float:
    """Time of attention with one head of 64 channels."""
    read_bytes, written_bytes = 4.0 * 64 * (2 * length + queries), 4.0 * 64 * queries
    flops = 2.0 * 2 * 64 * length * queries
    times = OpTimes(rates, "fp32", **how)
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    return times.kernel_s("attention", name, flops=flops, read_bytes=read_bytes, written_bytes=written_bytes)


def test_attention_of_one_token_goes_by_the_bytes_of_the_cache_at_a_rate_by_its_length() -> None:
    assert attention_s(DECODING, length=4, generates=True) == pytest.approx(256 * 10 / 2e9)
    assert attention_s(DECODING, length=499, generates=True) == pytest.approx(256 * 1000 / 8e9)
    assert attention_s(DECODING, length=4999, generates=True) == pytest.approx(256 * 10_000 / 8e9)


def test_attention_of_a_long_prompt_and_of_training_keep_their_curve() -> None:
    for how in ({"length": 64, "queries": 64, "generates": True}, {"length": 4}):
        assert attention_s(DECODING, **how) == attention_s(
            dataclasses.replace(CURVED, attention_curves=DECODING.attention_curves), **{**how, "generates": False}
        )


def test_an_op_takes_its_own_curve_then_its_kinds_then_the_flat_rate() -> None:
    times = OpTimes(CURVED, "fp32")
    assert times.kernel_s("elementwise", "aten.tanh.default", read_bytes=1e5) == pytest.approx(1e5 / 2e9)
    assert times.kernel_s("elementwise", "aten.tanh_.default", read_bytes=1e5) == pytest.approx(1e5 / 2e9)
    assert times.kernel_s("elementwise", "aten.erf.default", read_bytes=1e5) == pytest.approx(1e5 / 2e10)
    assert times.kernel_s("reduction", "aten.sum.default", read_bytes=8e9) == pytest.approx(1.0)


def test_what_gathers_rows_reads_as_much_as_it_writes_however_large_the_table() -> None:
    times = OpTimes(CURVED, "fp32")
    assert times.kernel_s("gather", "aten.embedding.default", read_bytes=1e9, written_bytes=5e4) == pytest.approx(1e-5)


def test_memory_that_is_taken_and_not_touched_costs_its_dispatch_alone() -> None:
    assert OpTimes(CURVED, "fp32").kernel_s("elementwise", "aten.empty_like.default", written_bytes=1e9) == 0.0


def test_a_kinds_factor_multiplies_its_kernels_and_no_others() -> None:
    times = OpTimes(dataclasses.replace(CURVED, time_factors={"elementwise": 2.0, "dispatch": 3.0}), "fp32")
    plain = OpTimes(CURVED, "fp32")
    for kind, factor in (("elementwise", 2.0), ("gather", 1.0)):
        sizes = {"read_bytes": 1e6, "written_bytes": 1e6}
        assert times.kernel_s(kind, "aten.x.default", **sizes) == factor * plain.kernel_s(kind, "aten.x.default", **sizes)
    assert times.dispatch_s == pytest.approx((90e-6, 60e-6))


@pytest.mark.parametrize(
    ("op_kind", "name", "kind"),
    [
        ("matmul", "aten.mm.default", "matmul"),
        ("attention", "aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("memory", "aten._log_softmax_backward_data.default", "reduction"),
        ("memory", "aten.native_layer_norm.default", "reduction"),
        ("memory", "aten.embedding_dense_backward.default", "gather"),
        ("memory", "aten.nll_loss_forward.default", "gather"),
        ("memory", "aten.silu.default", "elementwise"),
        ("memory", "bitsandbytes.dequantize_4bit.default", "quantization"),
    ],
)
def test_kinds_of_ops(op_kind: str, name: str, kind: str) -> None:
    assert compute_kind(op_kind, name) == kind


def test_where_dispatch_was_measured_views_cost_theirs(profile: Profile) -> None:
    parts = profile.regime("fp32", (2, 32)).parts
    head = profile.parts[parts["head"]]
    assert head.num_views > 0
    free = dataclasses.replace(CURVED, forward_dispatch_s=0.0, backward_dispatch_s=0.0)
    cheap = dataclasses.replace(CURVED, forward_dispatch_s=30e-6, backward_dispatch_s=0.0)
    regime = profile.regime("fp32", (2, 32))
    forward = [parts["prologue"], parts["head"], *(regime.templates["keep"][i].forward for i in regime.block_templates)]
    num_ops = sum(len(profile.parts[index].ops) + profile.parts[index].num_views for index in forward)
    longer_ms = price("keep", profile, cheap).step_ms - price("keep", profile, free).step_ms
    assert longer_ms == pytest.approx(num_ops * 30e-3)


def test_a_techniques_own_python_shows_as_hooks(profile: Profile) -> None:
    regime = profile.regime("fp32", (2, 32))

    def num_ops(choice: str, which: str) -> int:
        indices = [getattr(regime.templates[choice][template], which) for template in regime.block_templates]
        return sum(len(profile.parts[index].ops) + profile.parts[index].num_views for index in indices)

    assert "hooks" not in price("keep", profile, CURVED).busy_by_kind_ms
    for choice, each_ms in (("recompute", 0.01), ("selective", 0.02)):
        num_again = num_ops(choice, "backward_first") - num_ops("keep", "backward_first")
        expected_ms = each_ms * (num_ops(choice, "forward") + num_again)
        assert price(choice, profile, CURVED).busy_by_kind_ms["hooks"] == pytest.approx(expected_ms)
    assert price("offload", profile, CURVED).busy_by_kind_ms["hooks"] > 0


def test_on_a_card_dispatch_counts_only_as_far_as_it_outlasts_the_kernels(profile: Profile) -> None:
    slow = dataclasses.replace(FLAT, memory_bytes_per_s=1e3, forward_dispatch_s=1e-6, backward_dispatch_s=1e-6)
    assert price("keep", profile, slow, kind="cuda").busy_by_kind_ms.get("dispatch", 0.0) == 0.0
    fast = dataclasses.replace(CURVED, forward_dispatch_s=1e-3, backward_dispatch_s=1e-3)
    assert price("keep", profile, fast, kind="cuda").step_ms < price("keep", profile, fast).step_ms


def test_memory_beyond_what_the_process_keeps_is_touched_for_the_first_time_again() -> None:
    assert estimate_fresh_ms(KEPT_BYTES, fresh_bytes_per_s=1e9) == 0.0
    assert estimate_fresh_ms(KEPT_BYTES + 10**9, fresh_bytes_per_s=1e9) == pytest.approx(1000.0)
    assert estimate_fresh_ms(KEPT_BYTES + 2 * 10**9, fresh_bytes_per_s=1e9) == pytest.approx(2000.0)


def test_a_machine_stored_before_there_were_curves_loads() -> None:
    machine = make_cpu_machine()
    document = machine.to_json()
    new = ("matmul_curves", "attention_curves", "op_curves", "forward_dispatch_s", "backward_dispatch_s", "python_s")
    for name in (*new, "fresh_bytes_per_s", "link_bytes_per_s", "time_factors"):
        del document["rates"][name]
    assert Machine.from_json(document) == machine


def test_a_machine_with_curves_crosses_json() -> None:
    machine = dataclasses.replace(make_cpu_machine(), rates=CURVED)
    assert Machine.from_json(machine.to_json()) == machine


def test_large_products_are_a_librarys_where_small_ones_were_measured_apart() -> None:
    curves = {"mm fp32": ((4.0, 4e10),), "small fp32": ((4.0, 2e10),), "bmm fp32": ((4.0, 1e10),)}
    times = OpTimes(dataclasses.replace(FLAT, matmul_curves=curves, library_call_s=1e-5), "fp32")

    def price_product(flops: float, *, intensity: float = 8.0, name: str = "aten.mm.default") -> float:
        return times.kernel_s("matmul", name, flops=flops, read_bytes=flops / intensity)

    assert price_product(4e9) == pytest.approx(0.1 + 1e-5)
    assert price_product(2e6) == pytest.approx(1e-4)
    # A row: so many FLOPs that it would be the library's, were there not so many bytes.
    assert price_product(4e9, intensity=0.5) == pytest.approx(0.2 * 4 / 0.5)
    assert price_product(1e9, name="aten.bmm.default") == pytest.approx(0.1)


def test_few_rows_are_a_librarys_from_the_same_size_on() -> None:
    curves = {
        "mm nt fp32": ((16.0, 8e10),), "small nt fp32": ((16.0, 4e10),),
        "rows nt fp32": ((2.0, 1e10),), "small rows nt fp32": ((2.0, 5e9),),
    }  # fmt: skip
    rates = dataclasses.replace(FLAT, matmul_curves=curves, library_call_s=1e-5)
    times = OpTimes(rates, "fp32", generates=True)

    def price_rows(flops: float, intensity: float) -> float:
        return times.kernel_s("matmul", "aten.mm.default", flops=flops, read_bytes=flops / intensity, form="nt")

    assert price_rows(1e7, 2.0) == pytest.approx(1e-3 + 1e-5)
    assert price_rows(1e6, 2.0) == pytest.approx(2e-4)
    assert price_rows(8e7, 16.0) == pytest.approx(1e-3 + 1e-5)
    assert price_rows(1e6, 16.0) == pytest.approx(1e6 / 4e10)


def test_grouped_products_are_none_of_the_librarys() -> None:
    curves = {"mm fp32": ((4.0, 4e10),), "small fp32": ((4.0, 2e10),), "bmm fp32": ((4.0, 1e10),)}
    times = OpTimes(dataclasses.replace(FLAT, matmul_curves=curves, library_call_s=1e-5), "fp32")
    assert times.kernel_s("matmul", "aten._grouped_mm.default", flops=1e9, read_bytes=1e8) == pytest.approx(0.1)
    del curves["small fp32"]
    times = OpTimes(dataclasses.replace(FLAT, matmul_curves=curves), "fp32")
    assert times.kernel_s("matmul", "aten._grouped_mm.default", flops=1e9, read_bytes=1e8) == pytest.approx(0.025)


def test_python_between_the_kernels_of_a_real_model_takes_longer_than_in_the_probe() -> None:
    on_processor = dataclasses.replace(CURVED, cache_bytes=1 << 25)
    assert OpTimes(on_processor, "fp32").dispatch_s == pytest.approx((60e-6, 40e-6))
    assert OpTimes(CURVED, "fp32").dispatch_s == pytest.approx((30e-6, 20e-6))
