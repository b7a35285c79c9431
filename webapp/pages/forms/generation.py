"""The form of a generate job, and how it becomes a job spec."""

from collections.abc import Iterable
from typing import Any, Final

from django import forms

from optimizer.plan.techniques import techniques_for
from optimizer.workload import GenerationRequest
from webapp.catalog.models import Dataset, Model
from webapp.pages.forms.pins import GENERATION, PinnedForm, written_pins
from webapp.pages.forms.work import initial_goal

SAMPLING_FIELDS: Final = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
FORBIDDEN: Final = techniques_for("generation")
"""Techniques that a generation may use."""
OBJECTIVES: Final = (
    ("throughput", "all prompts in the least time"),
    ("first_token", "the first token after the least time"),
    ("largest_batch", "most prompts at once"),
)
_DEFAULTS: Final = GenerationRequest()


class GenerateForm(PinnedForm):
    """One spec of a generate job. ``model`` and ``prompts`` offer only what the user may see and what can be used."""

    decisions = GENERATION
    techniques = FORBIDDEN
    decimals = ("temperature", "top_p")

    objective = forms.ChoiceField(label="Optimise for", choices=OBJECTIVES, initial="throughput", required=False)
    allow_lossy = forms.BooleanField(
        label="Allow choices that change the numbers (16-bit weights, packed weights)", required=False
    )
    prompts = forms.ChoiceField()
    max_new_tokens = forms.IntegerField(
        label="New tokens", help_text="at most, after each prompt", initial=_DEFAULTS.max_new_tokens
    )
    temperature = forms.FloatField(help_text="0: the likeliest token each time", initial=_DEFAULTS.temperature)
    top_k = forms.IntegerField(label="Top k", help_text="0: no limit", initial=_DEFAULTS.top_k)
    top_p = forms.FloatField(label="Top p", initial=_DEFAULTS.top_p)
    num_devices = forms.IntegerField(
        label="Devices, at most",
        help_text="of one machine; each has the device budget, and a copy of the model or some of its blocks",
        initial=1,
        required=False,
    )
    seed = forms.IntegerField(initial=_DEFAULTS.seed)
    stop = forms.CharField(
        label="Stop at",
        help_text="texts that end an answer, one a line, at most four",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 2}),
    )

    def __init__(
        self, *args: Any, models: Iterable[Model], prompts: Iterable[Dataset], most_devices: int = 1, **kwargs: Any
    ) -> None:
        """most_devices: those of the machine that has most; the form asks for several only where there are."""
        super().__init__(*args, **kwargs)
        if most_devices < 2:
            del self.fields["num_devices"]
        self.offer_rows("model", models, nothing="no model with weights yet: upload one")
        self.offer_rows("prompts", prompts, nothing="no prompts yet: upload some")

    def spec(self) -> dict[str, Any]:
        """The job spec as the API takes it. Only after ``is_valid()``."""
        data = self.cleaned_data
        return {
            "kind": "generate",
            "name": self.job_name("model", "prompts"),
            "model": data["model"],
            "prompts": data["prompts"],
            "workload": {
                **{name: data[name] for name in SAMPLING_FIELDS},
                "stop": [line for line in data["stop"].splitlines() if line],
            },
            "goal": self.goal(),
            "plan": "chosen",
            **self.mirrors_part(),
        }


def initial_from_generate_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The form's values for a spec: a clone of a job."""
    goal, workload = spec.get("goal", {}), spec.get("workload", {})
    initial = {name: spec.get(name) for name in ("name", "model", "prompts")}
    initial |= {name: workload[name] for name in SAMPLING_FIELDS if name in workload}
    initial["mirrors"] = list(spec.get("mirrors", ()))
    initial["stop"] = "\n".join(workload.get("stop", ()))
    return {**initial, **initial_goal(goal), **written_pins(goal.get("pins") or {})}


class PromptsUploadForm(forms.Form):
    """Prompts as their file; the checks are ``create_dataset``'s."""

    name = forms.CharField(max_length=200)
    file = forms.FileField(label="File", help_text=".jsonl: each line a prompt or messages, or as OpenAI's Batch API has it")
    fallback_field = "file"
