"""What people type for a generate job, and how it becomes a job spec; as ``forms.py`` has it for training."""

from collections.abc import Iterable
from typing import Any, Final, cast

from django import forms

from optimizer.errors import HeadroomError
from optimizer.techniques import TECHNIQUE_LABELS
from optimizer.workload import GenerationWorkload, Technique
from webapp.catalog.models import Dataset, Model
from webapp.pages.forms import FORM_ID, BytesField, exact_bytes, field_of

SAMPLING_FIELDS: Final = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
FORBIDDEN: Final[tuple[Technique, ...]] = (
    "stream_weights",
    "disk",
    "bf16",
    "fp16",
    "quantize_frozen",
    "offload_kv",
    "quantize_kv",
)
"""Techniques that a generation may use."""
_DEFAULTS: Final = GenerationWorkload()


class GenerateForm(forms.Form):
    """One spec of a generate job. ``model`` and ``prompts`` offer only what the user may see and what can be used."""

    name = forms.CharField(max_length=200, initial="my-prompts")
    model = forms.ChoiceField()
    prompts = forms.ChoiceField()
    max_new_tokens = forms.IntegerField(
        label="New tokens", help_text="at most, after each prompt", initial=_DEFAULTS.max_new_tokens
    )
    temperature = forms.FloatField(help_text="0: the likeliest token each time", initial=_DEFAULTS.temperature)
    top_k = forms.IntegerField(label="Top k", help_text="0: no limit", initial=_DEFAULTS.top_k)
    top_p = forms.FloatField(label="Top p", initial=_DEFAULTS.top_p)
    seed = forms.IntegerField(initial=_DEFAULTS.seed)
    stop = forms.CharField(
        label="Stop at",
        help_text="texts that end an answer, one a line, at most four",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 2}),
    )
    objective = forms.ChoiceField(
        label="Best is",
        choices=[
            ("throughput", "all prompts in the least time"),
            ("first_token", "the first token after the least time"),
            ("largest_batch", "most prompts at once"),
        ],
        initial="throughput",
    )
    device_budget = BytesField(label="Device memory budget", help_text="such as 360 MiB or 12 GiB", initial="2 GiB")
    host_budget = BytesField(label="Host memory budget", help_text="empty: what the machine has free", required=False)
    disk_budget = BytesField(label="Disk budget", help_text="empty: what the machine has free", required=False)
    allow_lossy = forms.BooleanField(
        label="Allow choices that change the numbers (16-bit weights, packed weights)", required=False
    )
    forbid = forms.MultipleChoiceField(
        label="Never use",
        choices=[(name, TECHNIQUE_LABELS[name]) for name in FORBIDDEN],
        required=False,
        widget=forms.CheckboxSelectMultiple,
    )

    def __init__(self, *args: Any, models: Iterable[Model], prompts: Iterable[Dataset], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        offered = (
            ("model", [(row.pk, row.name) for row in models], "no model with weights yet: upload one"),
            ("prompts", [(row.pk, row.name) for row in prompts], "no prompts yet: upload some"),
        )
        for name, choices, nothing in offered:
            cast(forms.ChoiceField, self.fields[name]).choices = choices or [("", nothing)]
        for field in self.fields.values():
            field.widget.attrs["form"] = FORM_ID
        for name in ("temperature", "top_p"):
            self.fields[name].widget = forms.TextInput(attrs={"form": FORM_ID, "inputmode": "decimal"})

    def spec(self) -> dict[str, Any]:
        """The job spec as the API takes it. Only after ``is_valid()``."""
        data = self.cleaned_data
        goal: dict[str, Any] = {
            "device_budget_bytes": data["device_budget"],
            "allow_lossy": data["allow_lossy"],
            "objective": data["objective"],
        }
        for tier in ("host", "disk"):
            if data[f"{tier}_budget"] is not None:
                goal[f"{tier}_budget_bytes"] = data[f"{tier}_budget"]
        if data["forbid"]:
            goal["forbid"] = data["forbid"]
        return {
            "kind": "generate",
            "name": data["name"],
            "model": data["model"],
            "prompts": data["prompts"],
            "workload": {
                **{name: data[name] for name in SAMPLING_FIELDS},
                "stop": [line for line in data["stop"].splitlines() if line],
            },
            "goal": goal,
            "plan": "chosen",
        }

    def put_error(self, error: HeadroomError) -> bool:
        """Put an error of the library beside the field it names. False when it names none of this form's."""
        name = field_of(str(error.fields.get("field", "")))
        if name not in self.fields:
            return False
        self.add_error(name, error.message)
        return True


def initial_from_generate_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """What the form shows for a spec: a clone of a job."""
    goal, workload = spec.get("goal", {}), spec.get("workload", {})
    initial = {name: spec.get(name) for name in ("name", "model", "prompts")}
    initial |= {name: workload[name] for name in SAMPLING_FIELDS if name in workload}
    initial["stop"] = "\n".join(workload.get("stop", ()))
    for tier in ("device", "host", "disk"):
        if (budget_bytes := goal.get(f"{tier}_budget_bytes")) is not None:
            initial[f"{tier}_budget"] = exact_bytes(budget_bytes)
    return initial | {
        "objective": goal.get("objective", "throughput"),
        "allow_lossy": goal.get("allow_lossy", False),
        "forbid": list(goal.get("forbid", ())),
    }


class PromptsUploadForm(forms.Form):
    """Prompts as their file; the checks are ``create_dataset``'s."""

    name = forms.CharField(max_length=200)
    file = forms.FileField(label="File", help_text=".jsonl: each line a prompt or messages, or as OpenAI's Batch API has it")
    fallback_field = "file"
