"""Configs are read by an allow-list: what is on it is checked, what is not is dropped."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.base.errors import InvalidModel, UnsupportedModelType
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import ModelSpec, read_model_spec
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LLAMA = SMALL_CONFIGS["llama"]


def test_a_spec_says_what_the_planner_needs() -> None:
    spec = read_model_spec({**LLAMA, "tie_word_embeddings": True})
    assert (spec.model_type, spec.num_blocks, spec.vocab_size, spec.hidden_size) == ("llama", 3, 128, 32)
    assert spec.max_sequence_length == 64
    assert spec.tied_embeddings


def test_gpt2_sizes_are_found_under_their_own_names() -> None:
    spec = read_model_spec(SMALL_CONFIGS["gpt2"])
    assert (spec.num_blocks, spec.hidden_size, spec.max_sequence_length, spec.tied_embeddings) == (3, 32, 64, True)


def test_gpt2_accepts_the_general_names_too() -> None:
    general = {
        "model_type": "gpt2",
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    assert read_model_spec(general) == read_model_spec(SMALL_CONFIGS["gpt2"])


@pytest.mark.parametrize("model_type", sorted(SMALL_CONFIGS))
def test_a_written_config_reads_back_to_the_same_spec(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    again = read_model_spec(json.loads(json.dumps(spec.to_config())))
    assert again == spec
    assert again.fingerprint == spec.fingerprint
    assert hash(again) == hash(spec)


def test_every_supported_type_has_a_small_config() -> None:
    assert set(SMALL_CONFIGS) == set(ARCHITECTURES)


def test_the_fingerprint_ignores_order_and_dropped_keys_but_no_number() -> None:
    spec = read_model_spec(LLAMA)
    shuffled = dict(reversed(list(LLAMA.items())))
    assert read_model_spec({**shuffled, "made_up": 1}).fingerprint == spec.fingerprint
    assert read_model_spec({**LLAMA, "rms_norm_eps": 1e-5}).fingerprint != spec.fingerprint
    assert len(spec.fingerprint) == 64


def test_changing_the_written_config_leaves_the_spec_alone() -> None:
    spec = read_model_spec(LLAMA)
    spec.to_config()["rope_parameters"]["rope_theta"] = 7.0
    assert spec.config["rope_parameters"]["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    "hostile",
    [
        {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}},
        {"trust_remote_code": True},
        {"_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"attn_implementation": "evil/kernel"},
        {"_experts_implementation": "evil/kernel"},
        {"custom_pipelines": {"x": {"impl": "evil.Evil"}}},
        {"custom_generate": "evil/repo"},
        {"_name_or_path": "evil/repo"},
        {"name_or_path": "../../etc/passwd"},
        {"quantization_config": {"quant_method": "custom", "modules": "evil"}},
        {"architectures": ["EvilForCausalLM"]},
        {"base_model_tp_plan": {"layers.*": "evil"}},
        {"transformers_version": "0.0.1"},
        {"label2id": {"x": 1}},
        {"output_hidden_states": True},
        {"use_cache": True},
    ],
    ids=lambda hostile: next(iter(hostile)),
)
def test_hostile_and_unknown_keys_leave_no_trace(hostile: dict[str, Any]) -> None:
    assert read_model_spec({**LLAMA, **hostile}) == read_model_spec(LLAMA)


def test_unknown_model_types_are_named_with_those_that_work() -> None:
    with pytest.raises(UnsupportedModelType) as caught:
        read_model_spec({"model_type": "mamba"})
    assert str(caught.value) == (
        "model_type 'mamba' is not supported; supported: bart, bert, cohere, distilbert, electra, falcon, gemma, gemma2, "
        "gemma3_text, gpt2, gpt_bigcode, gpt_neox, granite, headroom_decoder, llama, mistral, mixtral, olmo2, opt, phi, phi3, "
        "qwen2, qwen3, qwen3_moe, roberta, stablelm, starcoder2, t5"
    )
    assert caught.value.fields["value"] == "mamba"


@pytest.mark.parametrize("config", [{}, {"model_type": None}])
def test_a_missing_model_type_is_said(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidModel, match=r"model_type is missing; allowed: bart"):
        read_model_spec(config)


@pytest.mark.parametrize("model_type", [7, ["llama"], {"a": 1}, "x" * 10_000])
def test_a_model_type_that_is_no_name_is_refused_shortly(model_type: Any) -> None:
    with pytest.raises(UnsupportedModelType) as caught:
        read_model_spec({"model_type": model_type})
    assert len(str(caught.value)) < 500


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidModel, match="must hold one JSON object"):
        read_model_spec([1, 2])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "32", "hidden_size is the text '32'; allowed: an integer from 1 to 65,536"),
        ("hidden_size", 32.0, "hidden_size is 32.0; allowed: an integer from 1 to 65,536"),
        ("hidden_size", True, "hidden_size is True; allowed: an integer from 1 to 65,536"),
        ("hidden_size", 0, "hidden_size is 0; allowed: an integer from 1 to 65,536"),
        ("hidden_size", 2**40, "hidden_size is 1099511627776; allowed: an integer from 1 to 65,536"),
        ("vocab_size", -1, "vocab_size is -1; allowed: an integer from 2 to 1,048,576"),
        ("num_hidden_layers", 513, "num_hidden_layers is 513; allowed: an integer from 1 to 512"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan; allowed: a number from 1e-12 to 0.1"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is the text '1e-6'; allowed: a number from 1e-12 to 0.1"),
        ("attention_dropout", 1.5, "attention_dropout is 1.5; allowed: a number from 0.0 to 0.9"),
        ("tie_word_embeddings", 1, "tie_word_embeddings is 1; allowed: true or false"),
        ("dtype", "int8", "dtype is int8; allowed: float32, bfloat16, float16"),
        (
            "eos_token_id",
            [1, "2"],
            "eos_token_id is [1, '2']; allowed: a token id, or a list of 1 to 64, each 0 to 1,048,575",
        ),
        (
            "hidden_act",
            "os.system",
            "allowed: gelu, gelu_fast, gelu_new, gelu_pytorch_tanh, quick_gelu, relu, relu2, silu, swish",
        ),
    ],
)
def test_a_listed_key_with_a_wrong_value_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_spec({**LLAMA, field: value})
    assert message in str(caught.value)
    assert caught.value.fields["field"] == field
    assert caught.value.fields["allowed"]


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_size_that_is_left_out_is_not_guessed(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(InvalidModel, match=f"{field} is missing; allowed: an integer"):
        read_model_spec(config)


@pytest.mark.parametrize(
    ("model_type", "change", "field", "allowed"),
    [
        (
            "llama",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "hidden_size",
            "a multiple of num_attention_heads (5)",
        ),
        ("gpt2", {"n_head": 5}, "n_embd", "a multiple of n_head (5)"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads (4)"),
        (
            "mistral",
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "hidden_size",
            "a multiple of num_attention_heads (3)",
        ),
        ("qwen3", {"head_dim": 7}, "head_dim", "an even number, as rotary embeddings need"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok", "1 to num_local_experts (4)"),
        ("llama", {"pad_token_id": 128}, "pad_token_id", "0 to 127 (vocab_size - 1)"),
        ("llama", {"eos_token_id": [1, 500]}, "eos_token_id", "0 to 127 (vocab_size - 1)"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types", "one entry for each of 3 layers"),
        ("opt", {"layerdrop": 0.1}, "layerdrop", "a number from 0.0 to 0.0"),
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop", "a number from 0.0 to 0.0"),
        ("bart", {"decoder_attention_heads": 5}, "decoder_attention_heads", "a divisor of d_model (32)"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings", "true"),
        ("bert", {"num_attention_heads": 5}, "hidden_size", "a multiple of num_attention_heads (5)"),
        ("falcon", {"alibi": True}, "alibi", "false"),
        ("falcon", {"num_kv_heads": 3}, "num_kv_heads", "a divisor of num_attention_heads (4)"),
        ("phi", {"partial_rotary_factor": 0.4}, "head_dim", "an even number, as rotary embeddings need"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok", "1 to num_experts (4)"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers", "0 to 2 (num_hidden_layers - 1)"),
        (
            "roberta",
            {"max_position_embeddings": 2},
            "max_position_embeddings",
            "more than 2: positions are counted from pad_token_id + 1",
        ),
        ("t5", {"num_layers": 0}, "num_layers", "an integer from 1 to 512"),
    ],
)
def test_impossible_shapes_name_the_field(model_type: str, change: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_spec({**SMALL_CONFIGS[model_type], **change})
    assert caught.value.fields["field"] == field
    assert caught.value.fields["allowed"] == allowed


def test_default_special_tokens_outside_a_small_vocabulary_are_left_out() -> None:
    assert read_model_spec(SMALL_CONFIGS["gpt2"]).config["eos_token_id"] is None
    assert read_model_spec(SMALL_CONFIGS["phi3"]).config["pad_token_id"] is None


def test_null_means_absent() -> None:
    assert read_model_spec({**LLAMA, "head_dim": None, "rope_scaling": None, "dtype": None}) == read_model_spec(LLAMA)


def test_null_switches_off_a_soft_cap_and_a_special_token() -> None:
    spec = read_model_spec({**SMALL_CONFIGS["gemma2"], "final_logit_softcapping": None, "pad_token_id": None})
    assert spec.config["final_logit_softcapping"] is None
    assert spec.config["pad_token_id"] is None
    assert spec.config["attn_logit_softcapping"] == 50.0


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, ["x" * 1_000_000], {"a": {"b": "c"}}],
    ids=["nan", "inf", "huge", "long", "nested"],
)
def test_an_error_can_be_sent_as_strict_json_whatever_was_submitted(value: Any) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_spec({**LLAMA, "rms_norm_eps": value})
    assert len(json.dumps(caught.value.to_json(), allow_nan=False)) < 500


PUBLISHED: dict[str, Any] = {
    "Phi-3-mini-4k-instruct": {
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2",
        "use_cache": True,
        "vocab_size": 32064,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("Phi-3-mini-4k-instruct", 3_821_079_552), ("Llama-3.2-1B", 1_235_814_400)]
)
def test_published_configs_are_read_as_they_are(name: str, num_parameters: int) -> None:
    assert read_model_spec(PUBLISHED[name]).num_parameters == num_parameters


LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}, "torch_dtype": "bfloat16"}
    new = {
        **LLAMA,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE},
        "dtype": "bfloat16",
    }
    spec = read_model_spec(old)
    assert spec == read_model_spec(new)
    assert spec.config["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}
    assert spec.config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_parameters.rope_type"),
        ({"rope_type": ["default"]}, "rope_parameters.rope_type"),
        ({"rope_type": "linear"}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": "2"}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": True}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_parameters.factor"),
        ({"rope_theta": float("inf")}, "rope_parameters.rope_theta"),
        ({"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 4.0}, "rope_parameters.low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": 3.5},
         "rope_parameters.original_max_position_embeddings"),
        ("default", "rope_parameters"),
    ],
)  # fmt: skip
def test_rope_parameters_are_checked_one_by_one(rope: Any, field: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_spec({**LLAMA, "rope_parameters": rope})
    assert caught.value.fields["field"] == field


TEXTS = st.text(st.characters(codec="ascii"), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON_VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, SCALARS, max_size=3)
LISTED_KEYS = {key for architecture in ARCHITECTURES.values() for key in architecture.fields}
KEYS = [
    *sorted(LISTED_KEYS),
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "architectures",
    "auto_map",
]


@settings(deadline=None)
@given(
    model_type=st.sampled_from(sorted(SMALL_CONFIGS)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
)
def test_whatever_is_submitted_gives_a_spec_or_an_error_that_names_a_field(
    model_type: str, changes: dict[str, Any]
) -> None:
    outcome = _spec_or_error({**SMALL_CONFIGS[model_type], **changes})
    if isinstance(outcome, InvalidModel):
        assert outcome.fields["field"]
        assert outcome.fields["allowed"]
    else:
        assert read_model_spec(outcome.to_config()) == outcome
        assert outcome.num_parameters > 0


def _spec_or_error(config: dict[str, Any]) -> ModelSpec | InvalidModel:
    try:
        return read_model_spec(config)
    except InvalidModel as error:
        return error
