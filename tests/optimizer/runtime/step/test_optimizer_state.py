import sys
from typing import Any

import pytest
import torch

from optimizer.base.errors import CheckpointInvalid, MissingExtra
from optimizer.plan.optimizer_state import QUANTIZATION_BLOCK_ELEMENTS, OptimizerStatePlan, update_scratch_bytes
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.gradients import Gradients
from optimizer.runtime.step.optimizer_state import Optimizer, learning_rate_at
from optimizer.runtime.updates import adamw_8bit
from tests.optimizer.runtime.tiny import make_workload


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64))
    return model.to(dtype)


def make_optimizer(model: torch.nn.Module, *, bits: int = 32, **changes: Any) -> Optimizer | None:
    return Optimizer(model, plan=OptimizerStatePlan(bits=bits), workload=make_workload(**changes))


def fill_gradients(model: torch.nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_parts_to_the_peak(schedule: str) -> None:
    workload = make_workload(num_steps=20, warmup_steps=4, schedule=schedule, learning_rate=0.5)
    assert [learning_rate_at(step, workload) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]
    assert learning_rate_at(4, workload) == 0.5


@pytest.mark.parametrize(("schedule", "final"), [("constant", 0.5), ("linear", 0.05), ("cosine", 0.05)])
def test_the_last_step_has_a_tenth_of_the_peak_unless_constant(schedule: str, final: float) -> None:
    workload = make_workload(num_steps=20, warmup_steps=4, schedule=schedule, learning_rate=0.5)
    assert learning_rate_at(19, workload) == pytest.approx(final, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_the_rate_only_falls(schedule: str) -> None:
    workload = make_workload(num_steps=50, warmup_steps=5, schedule=schedule)
    rates = [learning_rate_at(step, workload) for step in range(5, 50)]
    assert rates == sorted(rates, reverse=True)


def test_a_job_of_one_step_trains_at_the_peak() -> None:
    assert learning_rate_at(0, make_workload(num_steps=1, learning_rate=0.5)) == 0.5


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_torchs_own(max_norm: float) -> None:
    model, reference = make_model(), make_model()
    fill_gradients(model, seed=1)
    fill_gradients(reference, seed=1)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    norm = Gradients(list(model.parameters())).clip_(max_norm).norm
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    assert torch.equal(norm, expected)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses


def test_without_a_limit_the_norm_is_reported_and_gradients_stay() -> None:
    model = make_model()
    fill_gradients(model, seed=1)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = Gradients(list(model.parameters())).clip_(None).norm
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in before]).norm()), rel=1e-6)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_clipping_allocates_only_single_numbers() -> None:
    model = make_model()
    fill_gradients(model, seed=1)
    meter = Meter(device=torch.device("cpu"))
    with meter:
        Gradients(list(model.parameters())).clip_(0.1)
    assert meter.peak().device_bytes < 200


def test_32_bits_is_adamw_with_decay_on_matrices_only() -> None:
    model, reference = make_model(), make_model()
    workload = make_workload(weight_decay=0.3)
    optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    expected = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        fused=True,
    )
    for seed in range(3):
        fill_gradients(model, seed=seed)
        fill_gradients(reference, seed=seed)
        optimizer.step(0.01 * (seed + 1))
        for group in expected.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        expected.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_32_bits_allocates_nothing_after_its_first_step() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    meter = Meter(device=torch.device("cpu"))
    fill_gradients(model, seed=0)
    optimizer.step(1e-3)
    with meter:
        optimizer.step(1e-3)
    assert meter.peak().device_bytes == 0


def test_8_bits_keeps_one_byte_per_element_and_a_scale_per_block() -> None:
    model = make_model()
    optimizer = make_optimizer(model, bits=8)
    fill_gradients(model, seed=0)
    optimizer.step(1e-3)
    tensors, _ = optimizer.export_state()
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if size >= 4096:
            assert tensors[f"{name}//state1"].nbytes == size
            assert tensors[f"{name}//absmax1"].nbytes == 4 * size // QUANTIZATION_BLOCK_ELEMENTS
        else:
            # bitsandbytes leaves small tensors in 32 bits.
            assert tensors[f"{name}//state1"].nbytes == 4 * size


def test_bf16_weights_follow_fp32_master_weights() -> None:
    model, reference = make_model(torch.bfloat16), make_model(torch.bfloat16).float()
    optimizer, expected = make_optimizer(model), make_optimizer(reference)
    for seed in range(4):
        fill_gradients(model, seed=seed)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = ours.grad.float()
        optimizer.step(1e-5)
        expected.step(1e-5)
    tensors, _ = optimizer.export_state()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(tensors[f"{name}//master"], theirs)
        assert torch.equal(ours, theirs.to(torch.bfloat16))


@pytest.mark.parametrize("bits", [32, 8])
def test_bf16_holds_the_fp32_gradient_of_one_parameter_at_a_time(bits: int) -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, bits=bits)
    for _ in range(2):
        fill_gradients(model, seed=0)
        meter = Meter(device=torch.device("cpu"))
        with meter:
            optimizer.step(1e-3)
    largest = max(parameter.numel() for parameter in model.parameters())
    scratch_bytes = update_scratch_bytes(largest, bits=8) if bits == 8 else 0
    assert meter.peak().device_bytes == largest * 4 + scratch_bytes


def test_8_bits_takes_large_tensors_piece_by_piece_with_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, whole = make_model(), make_model()
    in_pieces, at_once = make_optimizer(pieces, bits=8), make_optimizer(whole, bits=8)
    for seed in range(3):
        for each in (pieces, whole):
            fill_gradients(each, seed=seed)
        at_once.step(1e-2)
        with monkeypatch.context() as small:
            small.setattr(adamw_8bit, "UPDATE_PIECE_ELEMENTS", 1024)
            small.setattr(adamw_8bit, "_BLOCKS_PER_PIECE", 4)
            with Meter(device=torch.device("cpu")) as meter:
                in_pieces.step(1e-2)
    for ours, theirs in zip(pieces.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    state, expected = in_pieces.export_state()[0], at_once.export_state()[0]
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    small_bytes = max(update_scratch_bytes(p.numel(), bits=32) for p in pieces.parameters() if p.numel() < 4096)
    assert meter.peak().device_bytes == max(update_scratch_bytes(1024, bits=8), small_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 8])
def test_exported_state_goes_on_where_it_stopped(dtype: torch.dtype, bits: int) -> None:
    model = make_model(dtype)
    optimizer = make_optimizer(model, bits=bits)
    for seed in range(2):
        fill_gradients(model, seed=seed)
        optimizer.step(1e-2)
    exported: Any = optimizer.export_state()
    tensors, scalars = exported
    copied = {key: tensor.clone() for key, tensor in tensors.items()}
    other = make_model(dtype)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, bits=bits)
    resumed.import_state(copied, scalars)
    for each, stepper in ((model, optimizer), (other, resumed)):
        fill_gradients(each, seed=9)
        stepper.step(1e-2)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="names 'other', which the model does not have"):
        make_optimizer(make_model()).import_state({"other//exp_avg": torch.zeros(1)}, {})


def test_8_bits_without_bitsandbytes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match="optimizer state in 8 bits needs the package 'bitsandbytes'") as caught:
        make_optimizer(make_model(), bits=8)
    assert caught.value.hint == "pip install 'headroom[bitsandbytes]'"
