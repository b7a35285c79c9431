"""Decisions of the plan that a person holds: one field for each, and how they become ``goal.pins`` and text again."""

import typing
from collections.abc import Mapping
from typing import Any, Final

from django import forms

from optimizer.categories import CATEGORY_LABELS
from optimizer.errors import InvalidInput
from optimizer.plan.pins import Pins, knob_kinds, list_knobs_to_pin, read_pins
from webapp.pages.work_form import pin_field

_LABELS: Final[dict[str, tuple[str, str]]] = {
    "batch.micro_batch_size": ("Micro-batch", "sequences at once"),
    "batch.accumulation_steps": ("Accumulation steps", "micro-batches of a step"),
    "weights.dtype": ("Weights in", ""),
    "weights.autocast": ("Products in", "autocast, beside fp32 weights"),
    "weights.place": ("Weights live on", ""),
    "weights.prefetch": ("Fetched ahead", "blocks, of weights that are away"),
    "weights.frozen": ("Frozen weights in", "under adapters"),
    "gradients.choice": ("Gradients", ""),
    "optimizer_state.bits": ("State in", "bits"),
    "optimizer_state.place": ("State lives on", ""),
    "optimizer_state.fraction": ("Share of it that is away", "from 0 to 1"),
    "activations.per_block": ("Each block", "recompute for all, or such as recompute*8, keep*4"),
    "activations.compress": ("Offloaded ones in", ""),
    "logits_and_loss.num_chunks": ("Loss in chunks", "how many"),
    "allocator.expandable_segments": ("Segments that grow", "of torch's allocator on a card"),
}
"""What a field is called, and its help."""
_WORDS: Final[dict[str, dict[object, str]]] = {
    "gradients.choice": {"keep": "kept until the update", "consume": "used up as they appear", "host": "on the host"},
    "activations.compress": {"none": "as they are"},
    "weights.autocast": {"off": "the weights' own dtype"},
    "weights.frozen": {"same": "as they are"},
    "allocator.expandable_segments": {True: "yes", False: "no"},
}
FREE: Final = "free"
_HEADINGS: Final[dict[str, str]] = {**dict(CATEGORY_LABELS.items()), "batch": "batch", "allocator": "allocator"}


def pin_fields(*, may_be_free: bool = True) -> dict[str, forms.Field]:
    """One for each knob of the plan's table, by the name of its field; what is free is left to the search."""
    return {pin_field(knob): _field(knob, kind, may_be_free=may_be_free) for knob, kind in knob_kinds().items()}


def _field(knob: str, kind: Any, *, may_be_free: bool) -> forms.Field:
    label, help_text = _LABELS[knob]
    values = (True, False) if kind is bool else typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if not values:
        return forms.CharField(label=label, help_text=help_text, max_length=4000, required=False)
    words = _WORDS.get(knob, {})
    free = [("", FREE)] if may_be_free else []
    choices = [*free, *((_text(value), words.get(value, _text(value))) for value in values)]
    return forms.ChoiceField(label=label, help_text=help_text, choices=choices, required=False)


def pin_groups(form: forms.Form) -> list[tuple[str, list[Any]]]:
    """The fields under the categories of the plan."""
    groups: dict[str, list[Any]] = {}
    for knob in list_knobs_to_pin():
        category = knob.partition(".")[0]
        groups.setdefault(_HEADINGS[category].capitalize(), []).append(form[pin_field(knob)])
    return list(groups.items())


def clean_pins(form: forms.Form) -> None:
    """Put beside each field what is wrong with it alone."""
    for knob in list_knobs_to_pin():
        name = pin_field(knob)
        if written := str(form.cleaned_data.get(name) or "").strip():
            try:
                read_pins([f"{knob}={written}"])
            except InvalidInput as error:
                form.add_error(name, error.message)


def typed_pins(data: Mapping[str, Any]) -> dict[str, Any]:
    """``goal.pins`` of what was typed; empty where nothing is held."""
    written = {knob: str(data.get(pin_field(knob)) or "").strip() for knob in list_knobs_to_pin()}
    return read_pins([f"{knob}={text}" for knob, text in written.items() if text]).to_json()


def written_pins(pins: Mapping[str, Any]) -> dict[str, str]:
    """The fields' text for ``goal.pins``."""
    held = {f"{category}.{knob}": value for category, knobs in pins.items() for knob, value in knobs.items()}
    return {pin_field(knob): _text(value) for knob, value in held.items() if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(_runs([str(each) for each in value]))
    return str(value)


def _runs(choices: list[str]) -> list[str]:
    """``["keep", "keep", "recompute"]`` as ``["keep*2", "recompute"]``, as ``read_pins`` reads it; one alone as itself."""
    runs: list[tuple[str, int]] = []
    for choice in choices:
        if runs and runs[-1][0] == choice:
            runs[-1] = (choice, runs[-1][1] + 1)
        else:
            runs.append((choice, 1))
    return [choice if length == 1 else f"{choice}*{length}" for choice, length in runs]




class EditForm(forms.Form):
    """One plan, decision by decision; what differs from it afterwards is the edit."""

    def __init__(self, data: Mapping[str, Any] | None, *, plan: Mapping[str, Any], prefix: str) -> None:
        self._before = written_pins({name: plan[name] for name in {knob.partition(".")[0] for knob in list_knobs_to_pin()}})
        super().__init__({f"{prefix}-{name}": text for name, text in self._before.items()} | dict(data or {}), prefix=prefix)
        self.fields.update(pin_fields(may_be_free=False))

    def clean(self) -> None:
        clean_pins(self)

    def groups(self) -> list[tuple[str, list[Any]]]:
        return pin_groups(self)

    def change(self) -> Pins | None:
        """None where nothing was changed. Only after ``is_valid()``."""
        texts = {
            knob: str(self.cleaned_data.get(pin_field(knob)) or "").strip()
            for knob in list_knobs_to_pin()
            if pin_field(knob) in self.cleaned_data
        }
        edited = [f"{knob}={text}" for knob, text in texts.items() if text and text != self._before.get(pin_field(knob))]
        return read_pins(edited) if edited else None
