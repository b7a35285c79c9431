"""Settings of a config that its spec leaves out are listed, unless they change nothing."""

from typing import Any

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.models.spec import read_model_spec
from optimizer.models.unread import describe_unread
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LLAMA = SMALL_CONFIGS["llama"]


def unread(**more: Any) -> tuple[str, ...]:
    config = {**LLAMA, **more}
    return describe_unread(config, read_model_spec(config))


@pytest.mark.parametrize("name", sorted(SMALL_CONFIGS))
def test_a_config_that_is_read_whole_has_nothing_to_say(name: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[name])
    assert describe_unread(spec.to_config(), spec) == ()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "the config's weights are packed by gptq; this estimate holds weights as the plan says",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            "the config brings code of its own, which is not run; this is an estimate of transformers' LlamaForCausalLM",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "the config names LlamaForTokenClassification; this is an estimate of LlamaForCausalLM, with its projection and loss",
        ),
        ({"pretraining_tp": 2}, "of the config not read: pretraining_tp 2"),
        ({"_attn_implementation": "mine"}, "of the config not read: _attn_implementation mine"),
        ({"chunk_size_feed_forward": 3, "layerdrop": 0.1}, "of the config not read: chunk_size_feed_forward 3, layerdrop 0.1"),
    ],
)
def test_what_would_make_it_another_model_is_said(more: dict[str, Any], sentence: str) -> None:
    assert unread(**more) == (sentence,)


@pytest.mark.parametrize(
    "more",
    [
        {"architectures": ["LlamaModel"]},
        {"architectures": "LlamaForCausalLM"},
        {"transformers_version": "5.1.0", "use_cache": True, "output_attentions": False, "id2label": {"0": "no"}},
        {"pretraining_tp": 1, "_attn_implementation": "sdpa", "chunk_size_feed_forward": None, "quantization_config": None},
    ],
)
def test_settings_that_change_nothing_are_not_listed(more: dict[str, Any]) -> None:
    assert unread(**more) == ()


@pytest.mark.parametrize(
    ("value", "told"),
    [("96", "the text '96'"), ("1e3", "the text '1e3'"), ("", "the text ''"), ("true", "the text 'true'"), ("wide", "wide")],
)
def test_a_text_where_a_number_belongs_is_named_as_a_text(value: str, told: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_spec({**LLAMA, "hidden_size": value})
    assert caught.value.message == f"hidden_size is {told}; allowed: an integer from 1 to 65,536"
