"""Recipes: one word for a usual way to train. Each fills in what a job spec leaves out; what the spec says itself stands.

Values are those that fine-tuners start from (learning rates of peft's and TRL's examples); the planner decides how the memory is
saved, within the losses of quality that the recipe allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.errors import InvalidInput, InvalidWorkload
from optimizer.base.shown import shown_value

_ADAPTER: Final = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "targets": []}

_PAIRED: Final = {"packing": "off", "loss_on": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defaults of a workload and a goal."""

    name: str
    title: str
    sentence: str
    """A sentence for people who choose between them."""
    workload: Mapping[str, Any]
    goal: Mapping[str, Any]
    needs_weights: bool = True


RECIPES: Final = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="lora",
            title="LoRA",
            sentence="Trains small adapters beside the model's weights, which stay as they are, in 16 or fewer bits if need be.",
            workload={"mode": "finetune", "adapter": _ADAPTER, "learning_rate": 2e-4},
            goal={"allow_lossy": True, "most_loss": "any"},
        ),
        Recipe(
            name="qlora",
            title="QLoRA",
            sentence="LoRA over weights that are packed into 4 bits (nf4): the least memory for a fine-tune.",
            workload={"mode": "finetune", "adapter": _ADAPTER, "learning_rate": 2e-4},
            goal={"allow_lossy": True, "most_loss": "any", "pins": {"weights": {"frozen": "nf4"}}},
        ),
        Recipe(
            name="preference",
            title="Preference (DPO)",
            sentence="Learns from pairs of a better and a worse answer (DPO), with adapters: the reference costs no memory.",
            workload={"mode": "finetune", "adapter": _ADAPTER, "learning_rate": 5e-6, "objective": "dpo", **_PAIRED},
            goal={"allow_lossy": True, "most_loss": "any"},
        ),
        Recipe(
            name="full",
            title="Full, 16 bits",
            sentence="Trains every weight; products are computed in bf16, and optimizer state may be kept in 8 bits.",
            workload={"mode": "finetune", "learning_rate": 2e-5},
            goal={"allow_lossy": True, "most_loss": "rounding"},
        ),
        Recipe(
            name="exact",
            title="Exact fp32",
            sentence="Trains every weight and ends with the numbers of plain fp32 training, whatever plan is taken.",
            workload={"learning_rate": 3e-4},
            goal={"allow_lossy": False},
            needs_weights=False,
        ),
    )
}


Defaults = dict[str, Any]
"""Values of a workload or a goal that a spec may leave out."""


def suggest(
    name: Any, *, model_name: str, has_weights: bool, samples: Mapping[str, str]
) -> tuple[Defaults, Defaults]:
    """Defaults of the workload and of the goal: a recipe's, and a mode that uses the model's weights if it has some.

    samples: packing and loss that suit the dataset.

    Raises InvalidInput for a recipe that is not known, InvalidWorkload for one that needs weights where there are none.
    """
    recipe = _find(name)
    workload: Defaults = {"mode": "finetune" if has_weights else "pretrain", **samples}
    if recipe is None:
        return workload, {}
    if recipe.needs_weights and not has_weights:
        raise InvalidWorkload(
            f"recipe is {recipe.name!r}, which fine-tunes; {model_name} has no weights, allowed: exact",
            field="recipe",
            value=recipe.name,
            allowed=[other.name for other in RECIPES.values() if not other.needs_weights],
            hint="Upload the model with its weights to fine-tune it.",
        )
    return {**workload, **recipe.workload}, dict(recipe.goal)


def _find(name: Any) -> Recipe | None:
    if name is None or name == "":
        return None
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    if recipe is None:
        known = list(RECIPES)
        message = f"recipe is {name!r:.80}; allowed: {', '.join(known)}"
        raise InvalidInput(message, field="recipe", value=shown_value(name), allowed=known)
    return recipe
