"""Packed weights give, bit for bit, the results and the gradients of the same weights unpacked, wherever they live."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from optimizer.base.errors import MissingExtra
from optimizer.models.adapters import attach_adapters, base_name
from optimizer.models.anatomy import find_anatomy, find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared, prepare_model
from optimizer.runtime.layers.quantize import pack, unpack
from optimizer.runtime.layers.quantized_linear import PackedLinear, hash_frozen, list_base_tensors
from optimizer.runtime.meter.device import prepared_device
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import Adapter
from tests.left_out import NF4
from tests.optimizer.models.adapter_values import give_values
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import make_workload

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
ADAPTER = Adapter(rank=4)
NUM_BLOCKS = 3
PRECISIONS = {
    "fp32": WeightsPlan(),
    "bf16": WeightsPlan(dtype="bf16"),
    "fp16": WeightsPlan(dtype="fp16"),
    "autocast": WeightsPlan(autocast="bf16"),
}


def make_model(model_type: str, weights: WeightsPlan, *, adapter: Adapter = ADAPTER, device: torch.device = CPU) -> Any:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    model = build_prepared(spec, weights=weights, workload=make_workload(adapter=adapter), device=device)
    give_values(model)
    return model


def unpacked_twin(model: Any, model_type: str, weights: WeightsPlan) -> Any:
    """The same model in peft's own modules, its frozen weights unpacked."""
    device = next(model.parameters()).device
    twin = build_model(read_model_spec(SMALL_CONFIGS[model_type]), dtype=torch_dtype(weights), device=device)
    attach_adapters(twin, Adapter(rank=4), seed=0)
    ours = dict(model.named_parameters())
    theirs = dict(twin.named_parameters())
    bases = {base_name(name): parameter for name, parameter in theirs.items() if "lora_" not in name}
    with torch.no_grad():
        for base in list_base_tensors(model):
            bases[base.name].copy_(base.make([ours[name] for name in base.sources]))
        for name, parameter in ours.items():
            if parameter.requires_grad:
                theirs[name].copy_(parameter)
    return twin


def run(model: Any, weights: WeightsPlan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of the adapters and of the embedding, which show those of every block's input."""
    embedding = model.get_input_embeddings().weight
    embedding.requires_grad_(True)
    anatomy = find_anatomy(model)
    ids = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(3)).to(embedding.device)
    torch.manual_seed(11)
    with torch.autocast(embedding.device.type, dtype=torch.bfloat16, enabled=weights.autocast != "off", cache_enabled=False):
        logits = anatomy.compute_logits(anatomy.backbone(input_ids=ids, use_cache=False).last_hidden_state)
    torch.sin(logits.float()).sum().backward()
    embedding.requires_grad_(False)
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.breadth
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "phi3", "mixtral"])
def test_results_and_all_gradients_are_those_of_the_unpacked_weights(
    model_type: str, form: str, precision: str
) -> None:
    base = PRECISIONS[precision]
    weights = WeightsPlan(dtype=base.dtype, autocast=base.autocast, frozen=form)
    model = make_model(model_type, weights)
    logits, gradients = run(model, weights)
    expected_logits, expected = run(unpacked_twin(model, model_type, weights), weights)
    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", ["int8", "int4", NF4])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_results_and_all_gradients_on_a_card_are_those_of_the_unpacked_weights(
    model_type: str, form: str, precision: str
) -> None:
    base = PRECISIONS[precision]
    weights = WeightsPlan(dtype=base.dtype, autocast=base.autocast, frozen=form)
    with prepared_device(CUDA):
        model = make_model(model_type, weights, device=CUDA)
        logits, gradients = run(model, weights)
        expected_logits, expected = run(unpacked_twin(model, model_type, weights), weights)
        assert torch.equal(logits, expected_logits)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_experts_that_are_run_again_are_those_of_peft(targets: tuple[str, ...]) -> None:
    adapter = Adapter(rank=4, targets=targets)
    model = make_model("mixtral", WeightsPlan(), adapter=adapter)
    twin = build_model(read_model_spec(SMALL_CONFIGS["mixtral"]))
    attach_adapters(twin, adapter, seed=0)
    give_values(twin)
    logits, gradients = run(model, WeightsPlan())
    expected_logits, expected = run(twin, WeightsPlan())
    assert torch.equal(logits, expected_logits)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_every_frozen_matrix_in_the_blocks_is_packed_and_nothing_else(form: str) -> None:
    model = make_model("llama", WeightsPlan(frozen=form), adapter=Adapter(rank=4, targets=("q_proj",)))
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == NUM_BLOCKS * 7
    small = [p for block in find_blocks(model) for p in block.parameters() if not p.requires_grad and p.dim() < 2]
    assert {p.dtype for p in small} <= {torch.float32, torch.uint8}
    assert model.get_input_embeddings().weight.dtype == torch.float32
    assert isinstance(model.get_output_embeddings(), nn.Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_off_by_half_a_step_at_most_and_keeps_rows_of_zeros(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 40).to(dtype)
    weight[2] = 0
    packed, scales, form = pack(weight, "int8")
    unpacked = unpack(packed, scales, form)
    assert (packed.dtype, scales.shape, unpacked.dtype) == (torch.int8, (6, 1), dtype)
    assert torch.equal(unpacked[2], weight[2])
    rounding = 0 if dtype == torch.float32 else 2**-8 * weight.float().abs()
    assert ((unpacked.float() - weight.float()).abs() <= scales.float() * 0.501 + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (7, 100), (4, 6, 10)])
def test_int4_is_off_by_half_a_step_of_its_group_and_packs_what_it_unpacked_to_the_same(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    packed, scales, form = pack(weight, "int4")
    num_groups = -(-weight.numel() // 64)
    assert (packed.dtype, packed.shape) == (torch.uint8, (num_groups * 32,))
    assert (scales.dtype, scales.shape) == (torch.float16, (2, num_groups))
    unpacked = unpack(packed, scales, form)
    assert (unpacked.shape, unpacked.dtype) == (shape, dtype)
    steps = scales[0].float().repeat_interleave(64)[: weight.numel()].view(shape)
    # Least values and steps are rounded to fp16, sums of them to the matrix's dtype.
    largest = weight.float().abs().max()
    rounding = largest * (2**-9 if dtype == torch.float32 else 2**-6)
    assert ((unpacked.float() - weight.float()).abs() <= steps / 2 + rounding).all()
    if dtype == torch.float32:
        again, _, _ = pack(unpacked, "int4")
        assert torch.equal(unpack(again, scales, form), unpacked)


def test_int4_keeps_groups_of_one_value() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.5
    assert torch.equal(unpack(*pack(weight, "int4")), weight)


@pytest.mark.parametrize("shape", [(64, 64), (3, 5), (7, 100), (4, 6, 10)])
def test_nf4_takes_half_a_byte_an_element_and_packs_what_it_unpacked_to_the_same(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    packed, scales, form = pack(weight, "nf4")
    num_blocks = -(-weight.numel() // 64)
    assert (packed.dtype, packed.shape, scales.shape) == (torch.uint8, (num_blocks * 32,), (num_blocks,))
    unpacked = unpack(packed, scales, form)
    assert unpacked.shape == shape
    # The widest gap between two of the sixteen values, as a share of the largest of its block.
    assert ((unpacked - weight).abs() <= 0.152 * weight.abs().max()).all()
    again, same_scales, _ = pack(unpacked, "nf4")
    assert torch.equal(again, packed)
    assert torch.equal(same_scales, scales)


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_the_product_saves_references_to_packed_weights_and_nothing_else(form: str) -> None:
    layer = PackedLinear(nn.Linear(8, 16).requires_grad_(False), form)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(4, 8, requires_grad=True))
    held = {layer.weight_packed.untyped_storage()._cdata, layer.weight_scales.untyped_storage()._cdata}
    assert {tensor.untyped_storage()._cdata for tensor in saved} == held


PLAIN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=1), activations=ActivationsPlan(per_block=("keep",) * NUM_BLOCKS)
)


def train_two_steps(
    model_type: str, plan: Plan, tmp_path: Path, *, device: torch.device = CPU
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    workload = make_workload(
        adapter=Adapter(rank=4), global_batch_size=plan.batch.global_batch_size, max_grad_norm=None
    )
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    model = build_prepared(spec, weights=plan.weights, workload=workload, device=device)
    torch.manual_seed(5)
    trainer = Trainer(model, plan=plan, workload=workload, device=device, meter=None, scratch=tmp_path)
    try:
        results = [
            trainer.step(make_synthetic_batches(model, plan=plan, workload=workload), learning_rate=0.05) for _ in range(2)
        ]
    finally:
        trainer.close()
    trained = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    return [(result.loss, result.grad_norm) for result in results], trained


ELSEWHERE: dict[str, Any] = {
    "recompute": {"activations": ActivationsPlan(per_block=("recompute",) * NUM_BLOCKS)},
    "selective": {"activations": ActivationsPlan(per_block=("selective",) * NUM_BLOCKS)},
    "offload": {"activations": ActivationsPlan(per_block=("offload",) * NUM_BLOCKS)},
    "each": {"activations": ActivationsPlan(per_block=("offload", "recompute", "keep"))},
    "streamed": {"place": "host"},
    "streamed from disk": {"place": "disk", "activations": ActivationsPlan(per_block=("offload", "recompute", "offload"))},
    "all away": {
        "place": "host",
        "activations": ActivationsPlan(per_block=("recompute", "offload", "selective")),
        "gradients": GradientsPlan(choice="host"),
        "optimizer_state": OptimizerStatePlan(place="host"),
    },
    "consumed": {"gradients": GradientsPlan(choice="consume")},
}


@pytest.mark.breadth
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize(("model_type", "form"), [("llama", "nf4"), ("gpt2", "int8"), ("mixtral", "nf4")])
def test_training_ends_with_the_same_bits_wherever_things_live(
    model_type: str, form: str, elsewhere: str, tmp_path: Path
) -> None:
    changes = dict(ELSEWHERE[elsewhere])
    place = changes.pop("place", "device")
    plain = Plan(**{**vars(PLAIN), "weights": WeightsPlan(frozen=form)})
    moved = Plan(**{**vars(PLAIN), "weights": WeightsPlan(frozen=form, place=place), **changes})
    assert_same(train_two_steps(model_type, moved, tmp_path), train_two_steps(model_type, plain, tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("form", ["int8", "int4", NF4])
def test_training_on_a_card_ends_with_the_same_bits_wherever_things_live(
    form: str, elsewhere: str, tmp_path: Path
) -> None:
    changes = dict(ELSEWHERE[elsewhere])
    place = changes.pop("place", "device")
    plain = Plan(**{**vars(PLAIN), "weights": WeightsPlan(frozen=form)})
    moved = Plan(**{**vars(PLAIN), "weights": WeightsPlan(frozen=form, place=place), **changes})
    with prepared_device(CUDA):
        ours = train_two_steps("llama", moved, tmp_path, device=CUDA)
        if "optimizer_state" in changes:
            # The update runs on the host, whose fused kernel rounds as it does.
            assert ours[0][0] == train_two_steps("llama", plain, tmp_path, device=CUDA)[0][0]
        else:
            assert_same(ours, train_two_steps("llama", plain, tmp_path, device=CUDA))


def assert_same(
    ours: tuple[list[tuple[float, float]], dict[str, torch.Tensor]],
    theirs: tuple[list[tuple[float, float]], dict[str, torch.Tensor]],
) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, tensor in ours[1].items():
        assert torch.equal(tensor, theirs[1][name]), name


def test_the_hash_distinguishes_frozen_weights_and_does_not_see_adapters() -> None:
    hashes = {
        hash_frozen(make_model("llama", WeightsPlan(dtype=dtype, frozen=form)))
        for dtype in ("fp32", "bf16")
        for form in ("same", "int8", "int4", "nf4")
    }
    assert len(hashes) == 8
    model = make_model("llama", WeightsPlan())
    before = hash_frozen(model)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1)
    assert hash_frozen(model) == before
    assert hash_frozen(build_model(read_model_spec(SMALL_CONFIGS["llama"]))) == ""


def test_without_adapters_nothing_is_done_to_the_model() -> None:
    model = build_model(read_model_spec(SMALL_CONFIGS["llama"]))
    names = [name for name, _ in model.named_modules()]
    prepare_model(model, weights=WeightsPlan(), workload=make_workload())
    assert [name for name, _ in model.named_modules()] == names


def test_without_bitsandbytes_nf4_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match="frozen weights in nf4 needs the package 'bitsandbytes'"):
        make_model("llama", WeightsPlan(frozen="nf4"))
