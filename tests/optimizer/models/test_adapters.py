"""Adapters stand where they were asked for, leave the model what it was, and merge as peft merges."""

import sys
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from optimizer.base.errors import InvalidWorkload, MissingExtra
from optimizer.models.adapters import add_adapter, attach_adapters, base_name, has_adapters, list_sites
from optimizer.models.anatomy import find_anatomy, find_blocks
from optimizer.models.any_spec import read_any_spec
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.models.targets import ADAPTER_TARGETS, check_targets
from optimizer.workload import Adapter
from tests.optimizer.models.adapter_values import give_values
from tests.optimizer.models.small_configs import SMALL_CONFIGS


def make_model(model_type: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1) -> Any:
    return build_model(read_model_spec(SMALL_CONFIGS[model_type]), dtype=dtype, device=device, seed=seed)


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    anatomy = find_anatomy(model)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        return anatomy.compute_logits(anatomy.run(ids, labels=ids, masks={}, at_hidden=lambda hidden: None))


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", sorted(ADAPTER_TARGETS))
def test_every_type_takes_adapters_at_every_matrix_and_only_they_train(model_type: str) -> None:
    plain, model = make_model(model_type), make_model(model_type)
    attach_adapters(model, Adapter(rank=4), seed=1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert {site.name.split(".")[-2 if site.name.endswith("weight") else -1] for site in list_sites(model)} == set(
        ADAPTER_TARGETS[model_type]
    )
    assert len(find_blocks(model)) == len(find_blocks(plain))
    in_blocks = {id(parameter) for block in find_blocks(model) for parameter in block.parameters()}
    assert all(id(parameter) in in_blocks for parameter in model.parameters() if parameter.requires_grad)
    assert torch.equal(logits_of(model), logits_of(plain))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_adapters_have_the_dtype_and_device_of_their_model(device: str) -> None:
    model = make_model("llama", dtype=torch.bfloat16, device=device)
    attach_adapters(model, Adapter(rank=4), seed=1)
    assert {(parameter.dtype, parameter.device.type) for parameter in model.parameters()} == {(torch.bfloat16, device)}


def test_adapters_depend_on_the_seed_alone_and_leave_the_random_state() -> None:
    def draw(seed: int) -> list[torch.nn.Parameter]:
        model = make_model("llama")
        attach_adapters(model, Adapter(rank=4), seed=seed)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(3), strict=True))
    assert not torch.equal(first[0], draw(4)[0])


def test_named_targets_alone_are_adapted() -> None:
    model = make_model("llama")
    attach_adapters(model, Adapter(rank=4, targets=("q_proj", "v_proj")), seed=1)
    assert [site.name for site in list_sites(model)][:2] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ]
    assert len(list_sites(model)) == 6


def test_a_target_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidWorkload, match="names 'w_proj', not in the model's blocks; allowed: down_proj, gate_proj"):
        attach_adapters(make_model("llama"), Adapter(targets=("w_proj",)), seed=1)


def test_a_module_that_can_have_no_adapter_is_named_with_its_class() -> None:
    with pytest.raises(InvalidWorkload, match="names 'gate', a MixtralTopKRouter, which can have no adapter"):
        attach_adapters(make_model("mixtral"), Adapter(targets=("gate",)), seed=1)
    with pytest.raises(InvalidWorkload, match="names 'input_layernorm', a LlamaRMSNorm, which can have no adapter"):
        attach_adapters(make_model("llama"), Adapter(targets=("input_layernorm",)), seed=1)


def test_experts_can_have_no_dropout() -> None:
    with pytest.raises(InvalidWorkload, match=r"dropout is 0\.1; adapters of experts \(model\.layers\.0\.mlp\.experts\."):
        attach_adapters(make_model("mixtral"), Adapter(dropout=0.1), seed=1)
    attach_adapters(make_model("mixtral"), Adapter(dropout=0.1, targets=("q_proj",)), seed=1)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="training adapters needs the package 'peft'"):
        attach_adapters(make_model("llama"), Adapter(), seed=1)


def test_the_dense_mlp_of_a_model_that_also_has_experts_takes_no_adapters() -> None:
    spec = read_model_spec({**SMALL_CONFIGS["qwen3_moe"], "mlp_only_layers": [0]})
    with pytest.raises(InvalidWorkload, match=r"holds down_proj, matrices of some blocks"):
        attach_adapters(build_model(spec), Adapter(targets=("q_proj", "down_proj")), seed=1)
    model = build_model(spec)
    attach_adapters(model, Adapter(), seed=1)
    names = {site.name for site in list_sites(model)}
    assert not any(name.startswith("model.layers.0.mlp") for name in names)
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= names


def test_targets_are_checked_by_type_without_a_model() -> None:
    check_targets(Adapter(targets=("qkv_proj",)), "phi3")
    check_targets(Adapter(targets=("anything",)), "a type of tomorrow")
    with pytest.raises(InvalidWorkload, match="names 'q_proj'; the matrices in the blocks of phi3 that can have"):
        check_targets(Adapter(targets=("q_proj",)), "phi3")
    with pytest.raises(InvalidWorkload, match=r"adapters of experts \(gate_up_proj, down_proj\) can have none"):
        check_targets(Adapter(dropout=0.1), "mixtral")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "mixtral"])
def test_an_adapter_is_added_as_peft_adds_it(model_type: str) -> None:
    model = make_model(model_type)
    attach_adapters(model, Adapter(rank=4, alpha=12.0), seed=1)
    give_values(model)
    assert has_adapters(model)
    bases = {base_name(name): parameter for name, parameter in model.named_parameters() if "lora_" not in name}
    merged = {
        site.name: add_adapter(
            bases[site.name].detach(), site, [pair["default"].weight.detach() for pair in (site.layer.lora_A, site.layer.lora_B)]
        )
        for site in list_sites(model)
    }
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for name, weight in merged.items():
        # peft adds experts' adapters in two operations when it merges, and in one, as here, when it computes.
        atol = 1e-7 if weight.dim() == 3 else 0
        torch.testing.assert_close(weight, bases[name].detach(), rtol=0, atol=atol)


def test_blocks_that_share_parameters_can_have_no_adapters() -> None:
    model = make_model("llama")
    blocks: Any = find_blocks(model)
    first, second, _ = blocks
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(InvalidWorkload, match=r"blocks of this model share parameters \(mlp\.up_proj\.weight\)"):
        attach_adapters(model, Adapter(), seed=1)


def test_what_peft_refuses_is_left_out_unless_it_is_named() -> None:
    """In Mamba's layers ``out_proj`` is read past its forward; a refusal names it."""
    mamba = {"model_type": "mamba", "vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    spec = read_any_spec({**mamba, "time_step_rank": 2})
    model = build_model(spec, device="meta")
    attach_adapters(model, Adapter(rank=2), seed=1)
    assert {site.name.split(".")[-2] for site in list_sites(model)} == {"in_proj", "x_proj", "dt_proj"}
    with pytest.raises(InvalidWorkload, match="'out_proj', which peft refuses"):
        attach_adapters(build_model(spec, device="meta"), Adapter(rank=2, targets=("out_proj",)), seed=1)
