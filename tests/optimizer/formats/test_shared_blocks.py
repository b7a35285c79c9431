"""Which part of a block is whose: agrees with transformers' own plans, and with the shapes of the narrower model."""

from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.formats.shared_blocks import INTO, OUT_OF, SHARED_TYPES, Widths, find_obstacle, find_slice, is_partial
from optimizer.models.build import build_config, build_model
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.small_configs import SMALL_CONFIGS

FUSED = {"qkv_proj": "colwise_gather_output", "gate_up_proj": "colwise_gather_output"}
"""Several matrices in one: transformers cuts them anywhere and gathers what they make; here each is cut by its own heads."""
CONFIGS = {**SMALL_CONFIGS, "cohere": {**SMALL_CONFIGS["cohere"], "use_qk_norm": False}}


@pytest.mark.parametrize("model_type", sorted(SHARED_TYPES - {DECODER_TYPE}))
def test_layers_are_cut_as_transformers_plans_it(model_type: str) -> None:
    plan = build_config(read_model_spec(CONFIGS[model_type])).base_model_tp_plan
    found = {name.rpartition(".")[2]: way for name, way in plan.items() if name.startswith("layers.")}
    cut = {name for name, way in found.items() if way != "replicated_with_grad_allreduce"}
    assert cut <= INTO | OUT_OF
    for name in cut:
        into = FUSED.get(name, "colwise")
        assert found[name] == into if name in INTO else found[name].startswith("rowwise"), name
    assert all(is_partial(f"layers.0.self_attn.{name}.weight") for name in found.keys() - cut)


@pytest.mark.parametrize("model_type", sorted(SHARED_TYPES))
def test_a_ranks_model_has_the_slices_and_no_other_shapes(model_type: str) -> None:
    spec = read_model_spec(CONFIGS[model_type])
    widths = Widths.of(spec.config)
    assert Widths.of(spec.of_rank(2).config, num_ranks=2) == widths
    whole, part = (dict(build_model(each, device="meta").named_parameters()) for each in (spec, spec.of_rank(2)))
    assert list(part) == list(whole)
    num_slices = 0
    for name, parameter in whole.items():
        shape, slice_ = list(parameter.shape), find_slice(name, widths)
        if slice_ is not None:
            assert sum(slice_.parts) == shape[slice_.dim], name
            shape[slice_.dim] //= 2
            num_slices += 1
        assert list(part[name].shape) == shape, name
    assert num_slices >= 4 * spec.num_blocks


@pytest.mark.parametrize(
    ("config", "num_ranks", "words"),
    [
        (SMALL_CONFIGS["gpt2"], 2, "blocks of gpt2 cannot be shared by devices; those of cohere, gemma"),
        (SMALL_CONFIGS["mixtral"], 2, "blocks of mixtral cannot be shared by devices"),
        (SMALL_CONFIGS["llama"], 3, "the model has 4 heads (num_attention_heads), which 3 devices cannot share equally"),
        (SMALL_CONFIGS["llama"], 4, "the model has 2 heads of keys (num_key_value_heads), which 4 devices cannot share equally"),
        (
            {**SMALL_CONFIGS["llama"], "intermediate_size": 49},
            2,
            "the model has 49 neurons of each MLP (intermediate_size), which 2 devices cannot share equally",
        ),
        (SMALL_CONFIGS["cohere"], 2, "the model's queries and keys have norms that depend on all heads (use_qk_norm)"),
        (
            {**SMALL_CONFIGS["llama"], "attention_dropout": 0.1},
            2,
            "the model has dropout (attention_dropout is 0.1), for which devices would need the same random numbers",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_words(config: dict[str, Any], num_ranks: int, words: str) -> None:
    spec = read_model_spec(config)
    assert find_obstacle(spec.config, num_ranks).startswith(words)
    with pytest.raises(InvalidPlan) as caught:
        spec.of_rank(num_ranks)
    assert str(caught.value).startswith(f"plan.layout.tensor is {num_ranks}; {words}")
