"""Low-rank adapters (LoRA, Hu et al. 2021) beside a model's frozen matrices, with peft's modules and under peft's names.

The model stays what it was: its class, its blocks, its backbone and head. Only its matrices inside the blocks are wrapped, and
only the adapters are trained. Mixtral's experts are adapted as peft does (``ParamWrapper``: one pair for each expert, the
factors added to the stacked weights); its router is not, since peft knows no adapter for it. Where some blocks have a dense
network or shared experts beside stacked ones (DeepSeek-V3), those keep none: peft takes their names for the experts'.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from optimizer.base.errors import InvalidWorkload, MissingExtra
from optimizer.base.optional import without_advice
from optimizer.models.anatomy import find_blocks
from optimizer.models.targets import dropout_on_experts
from optimizer.workload import Adapter

ADAPTER_NAME = "default"
"""peft's; left out of the names in saved files."""
_NAMES_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""peft takes these, beside experts, for what the experts' weights were called before they were stacked."""
_SEED_OFFSET = 0x10A4
"""So that adapters are not drawn from the numbers that the model's own weights were drawn from."""
_MAX_SEED = 2**63


class Site(NamedTuple):
    """One matrix that has an adapter."""

    name: str
    """Name of the parameter in the model without adapters: ``model.layers.0.self_attn.q_proj.weight``."""
    layer: Any
    """peft's module."""


def attach_adapters(model: nn.Module, adapter: Adapter, *, seed: int) -> None:
    """Add adapters in place and freeze everything else; the first product of each pair is random, the second zero.

    The adapters have the dtype and the device of what they stand beside, and depend on ``seed`` only; the caller's random
    state is left as it was.

    Raises InvalidWorkload that names a target which is not there, or a module that cannot have an adapter; MissingExtra.
    """
    inject, config_class = _peft()
    modules, parameters = _choose(model, adapter)
    modules = _without_refused(model, modules, adapter=adapter)
    config = config_class(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_list_targets(model, modules) or None,
        target_parameters=sorted({".".join(name.split(".")[-2:]) for name in parameters}) or None,
        fan_in_fan_out=any(_is_transposed(module) for _, module in modules),
        task_type="CAUSAL_LM",
    )
    is_meta = next(model.parameters()).is_meta
    with _seeded(seed), torch.device("meta" if is_meta else "cpu"):
        inject(config, model, adapter_name=ADAPTER_NAME)
    sites = list_sites(model)
    if is_meta:
        _cast_to_bases(model, sites)
    found = {site.name for site in sites}
    wanted = {f"{name}.weight" for name, _ in modules} | set(parameters)
    if found != wanted:
        raise RuntimeError(f"adapters were asked for at {sorted(wanted)} and came to be at {sorted(found)}")


def has_adapters(model: nn.Module) -> bool:
    return getattr(model, "peft_config", None) is not None


def list_sites(model: nn.Module) -> list[Site]:
    """Every matrix that has an adapter, in the model's order; empty without adapters."""
    if not has_adapters(model):
        return []
    sites = []
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and ADAPTER_NAME in module.lora_A:
            parameter = getattr(module, "parameter_name", "weight")
            sites.append(Site(f"{base_name(name)}.{parameter}", module))
    return sites


def holds_experts(module: nn.Module) -> bool:
    """A layer of stacked experts that transformers runs as one grouped product, each expert's matrix ``[out, in]``.

    Other parameters of three dimensions are a convolution's, heads of attention (XLNet), or experts with matrices that lie the
    other way (gpt-oss), whose adapters peft multiplies in the wrong order.
    """
    return getattr(module, "is_transposed", None) is False


def base_name(name: str) -> str:
    """The name a module or parameter has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def add_adapter(weight: torch.Tensor, site: Site, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``weight`` with what the adapter adds, in fp32, as peft merges; a new tensor.

    factors: the adapter's two matrices, in any dtype.
    """
    layer = site.layer
    low, high = (factor.to(torch.float32) for factor in factors)
    scaling = layer.scaling[ADAPTER_NAME]
    if weight.dim() == 3:
        low, high = expert_factors(low, high, num_experts=weight.shape[0])
        return torch.baddbmm(weight.to(torch.float32), high, low, alpha=scaling)
    delta = high @ low
    # The weight is added to the product, so that no fp32 copy of it is needed; a sum has no order.
    merged: torch.Tensor = (delta.T if layer.fan_in_fan_out else delta).mul_(scaling).add_(weight)
    return merged


def expert_factors(
    low: torch.Tensor, high: torch.Tensor, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``lora_A`` and ``lora_B`` of stacked experts as ``[experts, rank, in]`` and ``[experts, out, rank]``."""
    low = low.reshape(num_experts, -1, low.shape[-1])
    return low, high.reshape(high.shape[0], -1, num_experts).permute(2, 0, 1)


def adapter_file_name(parameter_name: str) -> str:
    """The name that peft gives an adapter's tensor in ``adapter_model.safetensors``."""
    parts = [part for part in parameter_name.split(".") if part != ADAPTER_NAME]
    return "base_model.model." + ".".join(parts)


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """The content of ``adapter_config.json``, as peft reads it; the same model gives the same document."""
    config: dict[str, Any] = model.peft_config[ADAPTER_NAME].to_dict()  # type: ignore[union-attr,index]
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {key: getattr(value, "value", value) for key, value in plain.items()} | {"inference_mode": True}


# Helpers.


def _peft() -> tuple[Any, Any]:
    try:
        with without_advice():
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", needed_for="training adapters") from error
    return inject_adapter_in_model, LoraConfig


def _choose(model: nn.Module, adapter: Adapter) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """The modules to adapt, by full name, and the parameters of stacked experts, likewise."""
    _refuse_shared(find_blocks(model))
    modules, experts, others = _list_candidates(model)
    names = {_short(name) for name, _ in modules} | {_short(name) for name in experts}
    for target in adapter.targets:
        if target not in names:
            raise _no_such_target(target, names, others)
    misread = {_short(name) for name, _ in modules} & _NAMES_OF_EXPERTS if experts else set()
    chosen = set(adapter.targets or names)
    parameters = [name for name in experts if _short(name) in chosen]
    mixed = sorted(misread & set(adapter.targets))
    if mixed:
        raise InvalidWorkload(
            f"workload.adapter.targets holds {', '.join(mixed)}, matrices of some blocks where others have experts, for which "
            "peft takes those names",
            field="workload.adapter.targets",
            value=", ".join(mixed),
            allowed=sorted(names - _NAMES_OF_EXPERTS),
            hint="Name the targets, without these.",
        )
    if parameters and adapter.dropout:
        raise dropout_on_experts(adapter, parameters[0])
    return [(name, module) for name, module in modules if _short(name) in chosen - misread], parameters


def _without_refused(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], *, adapter: Adapter
) -> list[tuple[str, nn.Module]]:
    """The modules that peft wraps in this model type: of Mamba's layers some are read past their forward, where no adapter adds.

    Raises InvalidWorkload where a refused one is named as a target.
    """
    refused = {name: why for name in {_short(name) for name, _ in modules} if (why := _ask_peft(model, name))}
    named = sorted(refused.keys() & set(adapter.targets))
    if named:
        raise InvalidWorkload(
            f"workload.adapter.targets names {named[0]!r}, which peft refuses: {refused[named[0]]}",
            field="workload.adapter.targets",
            value=named[0],
            allowed=sorted({_short(name) for name, _ in modules} - refused.keys()),
        )
    return [(name, module) for name, module in modules if _short(name) not in refused]


def _ask_peft(model: nn.Module, name: str) -> str | None:
    """Why peft refuses modules of this name in models of this type; None where it takes them."""
    inject, config_class = _peft()
    stand_in = nn.Module()
    stand_in.config = model.config
    with _seeded(0), torch.device("meta"):
        stand_in.add_module(name, nn.Linear(1, 1, bias=False))
        try:
            inject(config_class(r=1, target_modules=[name]), stand_in)
        except ValueError as error:
            return str(error)
    return None


def _list_targets(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Last names, as people write them; whole ones where a last name would also find a module outside the blocks (the dense
    layer of BERT's head).
    """
    chosen = {name for name, _ in modules}
    short = {_short(name) for name in chosen}
    found = {name for name, module in model.named_modules() if _short(name) in short}
    return sorted(short if found == chosen else chosen)


def _cast_to_bases(model: nn.Module, sites: Sequence[Site]) -> None:
    """Initialize as peft does by itself, but not on ``meta``."""
    dtypes = {base_name(name): parameter.dtype for name, parameter in model.named_parameters()}
    for site in sites:
        for pair in (site.layer.lora_A, site.layer.lora_B):
            pair[ADAPTER_NAME].to(dtypes[site.name])


def _refuse_shared(blocks: Sequence[nn.Module]) -> None:
    """One adapter per place beside one weight for several could not be added to that weight in the end."""
    seen: set[int] = set()
    for block in blocks:
        own = {id(parameter): name for name, parameter in block.named_parameters()}
        shared = next((name for key, name in own.items() if key in seen), None)
        if shared is not None:
            raise InvalidWorkload(
                f"workload.adapter is set; blocks of this model share parameters ({shared}), which can have no adapters",
                field="workload.adapter",
                value="set",
                allowed=None,
                hint="Train every weight, or take a model whose blocks have weights of their own.",
            )
        seen |= own.keys()


def _list_candidates(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[str], dict[str, nn.Module]]:
    """Inside the blocks: what peft wraps as a module, parameters of stacked experts, and the modules that are neither."""
    in_blocks = {id(module) for block in find_blocks(model) for module in block.modules()}
    modules: list[tuple[str, nn.Module]] = []
    experts: list[str] = []
    others: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) not in in_blocks:
            continue
        if _is_matrix(module):
            modules.append((name, module))
            continue
        stacked = [key for key, value in module.named_parameters(recurse=False) if value.dim() == 3 and holds_experts(module)]
        experts += [f"{name}.{key}" for key in stacked]
        if not stacked:
            others.setdefault(_short(name), module)
    return modules, experts, others


def _no_such_target(target: str, names: set[str], others: dict[str, nn.Module]) -> InvalidWorkload:
    module = others.get(target)
    what = f"a {type(module).__name__}, which can have no adapter" if module is not None else "not in the model's blocks"
    return InvalidWorkload(
        f"workload.adapter.targets names {target!r:.80}, {what}; allowed: {', '.join(sorted(names))}",
        field="workload.adapter.targets",
        value=str(target)[:80],
        allowed=sorted(names),
    )


def _is_matrix(module: nn.Module) -> bool:
    """A linear layer, or one of a derived class that returns a product too (Falcon's); Phi-MoE's routers return a choice."""
    if not isinstance(module, nn.Linear):
        return _is_transposed(module)
    return type(module).forward is nn.Linear.forward or _returns_a_product(module)


def _returns_a_product(module: nn.Linear) -> bool:
    parameters = {name: torch.empty_like(value, device="meta") for name, value in module.named_parameters()}
    row = torch.empty(1, module.in_features, dtype=module.weight.dtype, device="meta")
    result = functional_call(module, parameters, (row,))
    return isinstance(result, torch.Tensor) and result.shape == (1, module.out_features)


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's ``Conv1D``: a linear layer whose weight is ``[in, out]``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed + _SEED_OFFSET) % _MAX_SEED)
        yield
