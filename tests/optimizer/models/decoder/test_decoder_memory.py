"""Every option of the decoder is priced to the byte: the predicted peak is what the runtime's meter counts."""

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidModel, InvalidWorkload
from optimizer.estimate.training import estimate_training
from optimizer.models.build import build_model
from optimizer.models.decoder.config import block_kinds, with_block_kinds
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import measure_step
from optimizer.workload import TrainingWorkload
from tests.optimizer.models.decoder.test_decoder import BASE, EVERY_KIND, OPTIONS
from tests.optimizer.profiles import trace

MACHINE = make_cpu_machine()
LONG = {"max_position_embeddings": 128}
"""Settings with room for lengths at which sizes differ."""
WIDE_BLOCKS: dict[str, Any] = {"layer_types": EVERY_KIND, "attention_block": 16}
"""More tokens than an int64 has bytes: one number for each block is then no whole number of bytes for each token."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def spec_of(name: str) -> ModelSpec:
    changes = WIDE_BLOCKS if name == "wide blocks" else OPTIONS[name]
    return read_model_spec({**BASE, **changes, **LONG})


def profile_of(name: str, *, dtype: str, micro_batch_size: int) -> Profile:
    lengths = (48, 96) if name == "wide blocks" else (40, 72)
    extent = Extent(representations=(dtype,), shapes=tuple((min(micro_batch_size, 2), length) for length in lengths))
    return trace(spec_of(name), extent=extent)


def compare(
    name: str,
    *choices: str,
    dtype: str = "fp32",
    micro_batch_size: int = 2,
    accumulation_steps: int = 1,
    sequence_length: int = 40,
    max_grad_norm: float = 1.0,
    **rows: Any,
) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        activations=ActivationsPlan(per_block=choices * (4 // len(choices))),
        **{"weights": WeightsPlan(dtype=dtype), **rows},
    )
    workload = TrainingWorkload(
        sequence_length=sequence_length,
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=max_grad_norm,
    )
    profile = profile_of(name, dtype=dtype, micro_batch_size=micro_batch_size)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=MACHINE)
    measured = measure_step(spec_of(name), plan=plan, workload=workload)
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.copied_bytes == measured.copied_bytes


@pytest.mark.breadth
@pytest.mark.parametrize("name", OPTIONS)
def test_the_peak_of_every_option_is_what_the_meter_counts(name: str) -> None:
    compare(name, "keep")
    compare(name, "recompute", dtype="bf16", micro_batch_size=1, accumulation_steps=2)
    compare(name, "offload", accumulation_steps=2, sequence_length=72)


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["mixture", "shared by two", "shared unevenly", "both", "every kind, apart"])
def test_the_peak_of_blocks_that_differ_in_choice_is_what_the_meter_counts(name: str) -> None:
    compare(name, "offload", "keep", "recompute", "selective")
    compare(name, "selective", dtype="bf16", accumulation_steps=3)


@pytest.mark.parametrize(
    "rows",
    [
        {"gradients": GradientsPlan(choice="consume"), "max_grad_norm": None},
        {"gradients": GradientsPlan(choice="host")},
        {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")},
        {
            "gradients": GradientsPlan(choice="host"),
            "optimizer_state": OptimizerStatePlan(place="host"),
            "weights": WeightsPlan(place="host"),
        },
        {"logits_and_loss": LogitsAndLossPlan(num_chunks=4)},
    ],
    ids=["consumed", "gradients on the host", "state on the host", "streamed", "chunks"],
)
@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_shared_parameters_are_priced_wherever_gradients_state_and_weights_are(
    choice: str, rows: dict[str, Any]
) -> None:
    compare("shared unevenly", choice, **rows)


@pytest.mark.breadth
@pytest.mark.parametrize("name", OPTIONS)
def test_a_profile_counts_each_parameter_once(name: str) -> None:
    profile = trace(spec_of(name), extent=Extent(choices=("keep",), shapes=((2, 40),)))
    assert list(profile.regimes) == ["fp32", "bf16", "fp32+bf16"]
    assert profile.num_parameters == spec_of(name).num_parameters


def test_the_peak_of_wide_blocks_is_what_the_meter_counts() -> None:
    compare("wide blocks", "keep", sequence_length=48)
    compare("wide blocks", "recompute", dtype="bf16", micro_batch_size=1, sequence_length=96)


def test_shared_tensors_stand_outside_the_blocks() -> None:
    tensors = profile_of("shared unevenly", dtype="fp32", micro_batch_size=2).tensors
    plain: Any = build_model(spec_of("plain"), device="meta")
    num_per_block = len(list(plain.model.layers[0].parameters()))
    assert [len(tensors.by_block[kind]) for kind in tensors.block_kinds] == [0, 0, 0, num_per_block]
    assert len(tensors.before) == 1 + num_per_block


def test_a_length_that_is_no_multiple_of_the_block_is_refused_where_attention_runs_in_blocks() -> None:
    compare("plain", "keep", sequence_length=37)
    with pytest.raises(InvalidWorkload, match="sequence_length is 37; .* runs in blocks of 8 tokens: use a multiple"):
        compare("local", "keep", sequence_length=37)


def test_a_length_shorter_than_the_global_blocks_is_refused() -> None:
    spec = read_model_spec(
        {**BASE, **LONG, "layer_types": ["block_sparse"] * 4, "sparse_global_blocks": 3, "num_hidden_layers": 4}
    )
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",) * 4),
    )
    workload = TrainingWorkload(sequence_length=16, global_batch_size=1)
    with pytest.raises(InvalidWorkload, match="sequence_length is 16; this model has positions for 24 to 128 tokens"):
        estimate_training(trace(spec), plan=plan, workload=workload, machine=MACHINE)


def test_too_few_blocks_in_the_longest_sequence_are_refused_by_name() -> None:
    spec = read_model_spec({**BASE, "layer_types": ["local"] * 4, "attention_block": 32})
    with pytest.raises(
        InvalidModel, match="only 2 multiples of 32, its attention's block, lie from 8 to 64; 4 are needed"
    ):
        trace(spec)


def test_a_short_model_of_the_same_kinds_of_blocks_has_them() -> None:
    config = read_model_spec({**BASE, "layer_types": EVERY_KIND, "share_every": 3}).config
    kinds = ["full/first", "block_sparse/last", "linear/alone"]
    short = read_model_spec(with_block_kinds(config, kinds))
    assert block_kinds(config) == ["full/first", "local/inner", "block_sparse/last", "linear/alone"]
    assert (block_kinds(short.config), short.config["share_groups"]) == (kinds, [2, 1])


DOCUMENTED: dict[str, Any] = {
    "model_type": "headroom_decoder",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "local_window": 256,
}
"""The config that the documentation shows, whose attention is of one kind here."""


def predict_peak(kind: str, *, num_layers: int, choice: BlockChoice, dtype: str) -> int:
    spec = read_model_spec({**DOCUMENTED, "num_hidden_layers": num_layers, "layer_types": [kind] * num_layers})
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=(choice,) * num_layers),
        weights=WeightsPlan(dtype=dtype),
        logits_and_loss=LogitsAndLossPlan(num_chunks=16),
    )
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=1)
    extent = Extent(representations=(dtype,), choices=(choice,), shapes=((1, 256), (1, 512)))
    profile = trace(spec, extent=extent)
    return estimate_training(profile, plan=plan, workload=workload, machine=MACHINE).device_peak_bytes


@pytest.mark.breadth
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_layers", "choice"), [(1, "keep"), (4, "keep"), (4, "recompute"), (4, "selective")])
def test_every_kind_holds_less_than_full_attention_at_4096_tokens(num_layers: int, choice: str, dtype: str) -> None:
    settings: dict[str, Any] = {"num_layers": num_layers, "choice": choice, "dtype": dtype}
    full = predict_peak("full", **settings)
    assert all(predict_peak(kind, **settings) < full for kind in ("local", "block_sparse", "linear"))
