"""Model types beyond the list, each with a trait that a profile once missed: predicted to the byte, or refused in words."""

from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from benchmarks.zoo.tiny import make_tiny_config
from optimizer.base.errors import InvalidModel
from optimizer.estimate.training import estimate_training
from optimizer.models.anatomy import find_blocks
from optimizer.models.any_spec import read_any_spec
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.workload import TrainingWorkload

LENGTH = 8
"""The shortest: the scans run token by token."""
BATCH_SIZE = 2
TRAITS = {
    "bloom": "position biases that blocks share",
    "codegen": "buffers in every block",
    "cpmant": "sizes that are no polynomial over all lengths",
    "gemma4_text": "embeddings that grow with the depth",
    "mamba": "a scan whose ops depend on the length",
    "megatron-bert": "a check of its masks' values",
    "mllama": "blocks that text does not run through",
    "mpt": "a part of the config without a type",
    "olmo_hybrid": "linear attention in chunks",
    "rwkv": "weights that are scaled when training or evaluation begins",
}


def read_tiny(model_type: str, class_name: str | None = None) -> ModelSpec:
    named = {} if class_name is None else {"architectures": [class_name]}
    return read_any_spec({**make_tiny_config(model_type), **named})


def make_extent(*choices: BlockChoice) -> Extent:
    return Extent(representations=("fp32",), choices=choices, shapes=((BATCH_SIZE, LENGTH),))


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", TRAITS)
def test_the_prediction_equals_the_meter(model_type: str) -> None:
    spec = read_tiny(model_type)
    plan = Plan(
        batch=BatchPlan(micro_batch_size=BATCH_SIZE, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep", *("recompute",) * (spec.num_blocks - 1))),
    )
    workload = TrainingWorkload(sequence_length=LENGTH, global_batch_size=BATCH_SIZE)
    profile = profile_model(spec, extent=make_extent("keep", "recompute"))
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=make_cpu_machine())
    assert predicted.device_peak_bytes == measure_step(spec, plan=plan, workload=workload).device_peak_bytes


def test_a_model_that_also_sees_images_trains_its_text_part_and_keeps_no_cache() -> None:
    spec = read_tiny("gemma3", "Gemma3ForConditionalGeneration")
    model: Any = build_model(spec, device="meta")
    assert len(find_blocks(model)) == spec.num_blocks == model.config.text_config.num_hidden_layers
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all("language_model" in name or "lm_head" in name for name in trained)
    assert any("vision_tower" in name for name in frozen)
    assert not model.config.use_cache
    assert not model.config.text_config.use_cache


def test_lists_of_single_layers_are_no_blocks() -> None:
    """Gemma 3n has lists of projections beside its blocks."""
    spec = read_tiny("gemma3n_text")
    blocks = find_blocks(build_model(spec, device="meta"))
    assert {type(block).__name__ for block in blocks} == {"Gemma3nTextDecoderLayer"}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("jetmoe", r"it decides by the values of its activations \(tolist\)"),
        ("longcat_flash", r"the size of what aten\.nonzero\.default returns depends on the values of its activations"),
        ("hrm_text", "its 8 blocks do not run once each and in order"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_its_op(model_type: str, why: str) -> None:
    with pytest.raises(InvalidModel, match=why):
        profile_model(read_tiny(model_type), extent=make_extent("keep"))
