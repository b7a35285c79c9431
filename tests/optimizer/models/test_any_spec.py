"""Any language model that transformers builds from a config is read: declared keys, plain values; it says that nobody checked."""

from typing import Any

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidModel, UnsupportedModelType
from optimizer.estimate.training import estimate_training
from optimizer.models.any_spec import read_any_spec
from optimizer.models.build import build_config
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.workload import TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

OLMO: dict[str, Any] = {
    "model_type": "olmo",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
EXTENT = Extent(representations=("fp32",), choices=("keep", "recompute"))


def test_a_listed_type_is_read_by_the_list() -> None:
    assert read_any_spec(SMALL_CONFIGS["llama"]) == read_model_spec(SMALL_CONFIGS["llama"])


def test_another_type_is_read_as_its_class_declares() -> None:
    spec = read_any_spec({**OLMO, "auto_map": {"x": "evil--y.Z"}, "made_up": 7, "_attn_implementation": "evil"})
    assert (spec.kind, spec.num_blocks, spec.hidden_size, spec.max_sequence_length) == ("decoder", 5, 32, 64)
    assert not spec.is_listed
    assert spec.num_parameters > 2 * 128 * 32
    assert set(spec.config) == set(OLMO) | {"architectures"}
    assert read_any_spec(spec.to_config()) == spec


def test_a_value_is_read_under_the_name_that_transformers_saves_it_by() -> None:
    """Mellum's class declares ``num_experts`` and keeps it as ``num_local_experts``."""
    mellum = {
        **OLMO,
        "model_type": "mellum",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 5,
    }
    saved = read_any_spec(mellum)
    declared = read_any_spec({**mellum, "num_experts": mellum.pop("num_local_experts")})
    assert saved.num_parameters == declared.num_parameters
    assert build_config(saved).num_experts == 3


def test_a_number_that_the_class_does_not_declare_is_taken_where_the_models_source_reads_it() -> None:
    attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500_000, "made_up": 7}
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1}
    dbrx = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 128, "max_seq_len": 64}
    spec = read_any_spec({"model_type": "dbrx", **dbrx, "attn_config": attention, "ffn_config": experts})
    assert spec.config["attn_config"] == {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500_000}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
        ({"hidden_act": "../../etc/passwd"}, "hidden_act"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"rope_parameters": {"rope_type": ["a"] * 2_000}}, "rope_parameters"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_any_spec({**OLMO, **change})
    assert caught.value.fields["field"] == field


def test_heads_that_do_not_divide_end_in_the_error_tree() -> None:
    with pytest.raises(InvalidModel, match="the model cannot be traced|transformers cannot build"):
        profile_model(read_any_spec({**OLMO, "num_key_value_heads": 3}), extent=EXTENT)


def test_a_trace_that_fails_inside_a_block_leaves_no_hooks_on_what_autograd_saves() -> None:
    with pytest.raises(InvalidModel):
        profile_model(read_any_spec({**OLMO, "num_key_value_heads": 3}), extent=EXTENT)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_what_transformers_has_no_language_model_for_is_unsupported() -> None:
    with pytest.raises(UnsupportedModelType):
        read_any_spec({"model_type": "vit"})


def test_the_prediction_equals_the_meter_and_says_that_no_test_holds_the_type() -> None:
    spec = read_any_spec(OLMO)
    profile = profile_model(spec, extent=EXTENT)
    assert len(profile.tensors.by_block) == 3  # first, inner, last
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep", "recompute", "keep", "recompute", "recompute")),
    )
    workload = TrainingWorkload(sequence_length=24, global_batch_size=2)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=make_cpu_machine())
    assert predicted.device_peak_bytes == measure_step(spec, plan=plan, workload=workload).device_peak_bytes
    assert not predicted.is_model_held_to_measurement


def test_blocks_that_run_more_than_once_cannot_be_traced() -> None:
    config = {**OLMO, "model_type": "albert", "embedding_size": 16, "num_hidden_layers": 2}
    with pytest.raises(InvalidModel, match="its 1 blocks do not run once each and in order, but as 1, 1"):
        profile_model(read_any_spec(config), extent=EXTENT)
