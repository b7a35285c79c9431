"""The form of a training job, and how it becomes a job spec; and the forms of uploads and tokens.

Ranges live in ``optimizer/workload.py``; here is only the reading of text.
"""

from collections.abc import Iterable
from typing import Any

from django import forms

from optimizer.base.serialize import to_json
from optimizer.optimizers import OPTIMIZERS
from optimizer.plan.techniques import techniques_for
from optimizer.workload import Adapter, TrainingWorkload
from webapp.catalog.hub.download import is_open
from webapp.catalog.linked import model_roots
from webapp.catalog.models import Dataset, Model
from webapp.catalog.server_data import dataset_roots
from webapp.pages.forms.pins import TRAINING, TRAINING_ON_SEVERAL, PinnedForm, written_pins
from webapp.pages.forms.work import initial_goal

ADVANCED_FIELDS = (
    "optimizer",
    "momentum",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "eval_every_steps",
    "eval_batches",
    "checkpoint_every_steps",
    "sample_tokens",
)
WORKLOAD_FIELDS = (
    "sequence_length",
    "global_batch_size",
    "num_steps",
    "learning_rate",
    "schedule",
    "warmup_steps",
    *ADVANCED_FIELDS,
)
_DEFAULTS = TrainingWorkload()
_ADAPTER_DEFAULTS = Adapter()


OBJECTIVES = (
    ("fastest_step", "speed"),
    ("cheapest_run", "cost of the run"),
    ("largest_batch", "the largest batch that fits"),
    ("longest_sequence", "the longest sequence that fits"),
)
MOST_LOSS = (
    ("", "exact fp32"),
    ("rounding", "mixed: bf16 and 8-bit Adam"),
    ("any", "anything: also packed weights and compression"),
)
ON_OUT_OF_MEMORY = (
    ("", "go on under another plan, if Headroom chose the plan"),
    ("replan", "go on under another plan"),
    ("stop", "stop, and say what held the memory"),
)
PACKING = (
    ("", "as suits the dataset"),
    ("best_fit", "whole samples, several in a row, each by itself"),
    ("off", "one sample in a row, padded"),
    ("wrapped", "one stream of text, cut into rows"),
)
TRAIN_ON = (
    ("", "texts and answers: the next token"),
    ("dpo", "pairs of answers, by DPO (with adapters)"),
    ("orpo", "pairs of answers, by ORPO"),
)
LOSS_ON = (("", "as suits the dataset"), ("assistant", "answers alone"), ("all", "every token"))
ANY_LOSS = {"most_loss": "any"}
"""The form's field that allows it all."""


class JobForm(PinnedForm):
    """One spec of a training job. ``model`` and ``dataset`` offer only what the user may see."""

    decisions = TRAINING
    techniques = techniques_for("training")
    decimals = ("learning_rate", "momentum", "weight_decay", "max_grad_norm", "alpha", "dropout", "beta")

    objective = forms.ChoiceField(label="Optimise for", choices=OBJECTIVES, initial="fastest_step", required=False)
    most_loss = forms.ChoiceField(label="Precision", choices=MOST_LOSS, required=False)
    on_out_of_memory = forms.ChoiceField(label="When memory runs out", choices=ON_OUT_OF_MEMORY, required=False)
    dataset = forms.ChoiceField()
    mode = forms.ChoiceField(
        label="Kind of training",
        choices=[
            ("", "fine-tune the model's weights, if it has some"),
            ("finetune", "fine-tune the model's weights"),
            ("pretrain", "pre-train from scratch: weights are not used"),
        ],
        required=False,
    )
    sequence_length = forms.IntegerField(label="Sequence length", help_text="tokens", initial=256)
    global_batch_size = forms.IntegerField(
        label="Batch size", help_text="sequences per step", initial=_DEFAULTS.global_batch_size
    )
    packing = forms.ChoiceField(label="Rows", choices=PACKING, required=False)
    loss_on = forms.ChoiceField(label="Learn", choices=LOSS_ON, required=False)
    train_on = forms.ChoiceField(label="Learn from", choices=TRAIN_ON, required=False)
    beta = forms.FloatField(
        label="Beta", help_text="weight of the preference", initial=_DEFAULTS.beta, required=False
    )
    num_steps = forms.IntegerField(label="Steps", initial=200)
    num_epochs = forms.FloatField(label="Epochs", help_text="passes over the data, in place of steps", required=False)
    learning_rate = forms.FloatField(label="Learning rate", initial=_DEFAULTS.learning_rate)
    schedule = forms.ChoiceField(
        choices=[(name, name) for name in ("cosine", "linear", "constant")], initial=_DEFAULTS.schedule
    )
    warmup_steps = forms.IntegerField(label="Warm-up steps", initial=_DEFAULTS.warmup_steps)
    optimizer = forms.ChoiceField(
        choices=[(name, declared.label) for name, declared in OPTIMIZERS.items()], initial=_DEFAULTS.optimizer
    )
    momentum = forms.FloatField(label="Momentum", help_text="of SGD; 0 keeps no state", initial=_DEFAULTS.momentum)
    weight_decay = forms.FloatField(label="Weight decay", initial=_DEFAULTS.weight_decay)
    max_grad_norm = forms.FloatField(
        label="Clip gradients to", help_text="empty: no clipping", initial=_DEFAULTS.max_grad_norm, required=False
    )
    num_devices = forms.IntegerField(
        label="Devices, at most",
        help_text="of one machine; each has the device budget and takes a part of the batch",
        initial=1,
        required=False,
    )
    machines = forms.CharField(
        label="Machines that share it",
        help_text="names, by commas: all of their devices work on the job; empty: any one machine",
        max_length=1000,
        required=False,
    )
    link = forms.CharField(
        label="Network between them",
        help_text="its rate and delay, such as 1Gbit,1ms; empty: as their workers measured it",
        max_length=80,
        required=False,
    )
    seed = forms.IntegerField(initial=_DEFAULTS.seed)
    eval_every_steps = forms.IntegerField(label="Validate every", help_text="steps", initial=_DEFAULTS.eval_every_steps)
    eval_batches = forms.IntegerField(label="Validation batches", initial=_DEFAULTS.eval_batches)
    checkpoint_every_steps = forms.IntegerField(
        label="Checkpoint every", help_text="steps", initial=_DEFAULTS.checkpoint_every_steps
    )
    sample_tokens = forms.IntegerField(
        label="Text sample", help_text="tokens at the end", initial=_DEFAULTS.sample_tokens
    )
    use_adapters = forms.BooleanField(
        label="Train low-rank adapters (LoRA) and leave the model's own weights as they are", required=False
    )
    rank = forms.IntegerField(label="Rank", initial=_ADAPTER_DEFAULTS.rank, required=False)
    alpha = forms.FloatField(
        label="Alpha", help_text="their product counts alpha / rank", initial=_ADAPTER_DEFAULTS.alpha, required=False
    )
    dropout = forms.FloatField(
        label="Dropout", help_text="on their input", initial=_ADAPTER_DEFAULTS.dropout, required=False
    )
    targets = forms.CharField(
        label="Matrices",
        help_text="names such as q_proj, v_proj; empty: every matrix in the blocks",
        max_length=1000,
        required=False,
    )
    export_adapter = forms.ChoiceField(
        label="Save",
        choices=[
            ("both", "the adapters, and the model with them added"),
            ("alone", "the adapters alone"),
            ("merged", "the model with the adapters added"),
        ],
        initial=_DEFAULTS.export.adapter,
        required=False,
    )
    export_dtype = forms.ChoiceField(
        label="Save weights as",
        choices=[("same", "as they are trained"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")],
        initial=_DEFAULTS.export.dtype,
        required=False,
    )

    export_gguf = forms.ChoiceField(
        label="GGUF file",
        choices=[("none", "none"), ("q8_0", "Q8_0, for llama.cpp"), ("f16", "F16, for llama.cpp")],
        initial=_DEFAULTS.export.gguf,
        required=False,
    )
    resume_from = forms.RegexField(
        r"^[A-Za-z0-9_]{1,60}:[0-9]{1,10}$",
        label="Go on from the checkpoint",
        help_text="job:step; empty: from the beginning",
        required=False,
    )

    def __init__(
        self,
        *args: Any,
        models: Iterable[Model],
        datasets: Iterable[Dataset],
        most_devices: int = 1,
        num_machines: int = 1,
        **kwargs: Any,
    ) -> None:
        """most_devices: those of the machine that has most; the form asks for several only where there are. num_machines: those
        registered; it asks which of them share the job only where there are several.
        """
        super().__init__(*args, decisions=TRAINING_ON_SEVERAL if most_devices > 1 else TRAINING, **kwargs)
        if most_devices < 2:
            del self.fields["num_devices"]
        if num_machines < 2:
            del self.fields["machines"], self.fields["link"]
        self.offer_rows("model", models, nothing="no model yet: upload one")
        self.offer_rows("dataset", datasets, nothing="no dataset yet: upload one")

    def spec(self) -> dict[str, Any]:
        """The job spec as the API takes it. Only after ``is_valid()``."""
        data = self.cleaned_data
        return {
            "name": self.job_name("model", "dataset"),
            "model": data["model"],
            "dataset": data["dataset"],
            "workload": {
                **{name: data[name] for name in WORKLOAD_FIELDS if name != "num_steps"},
                **self._duration(),
                **{name: data[name] for name in ("packing", "loss_on", "mode") if data[name]},
                **self._objective(),
                "adapter": self._adapter() if data["use_adapters"] else None,
                "export": self._export(),
            },
            "goal": self.goal(),
            "plan": "chosen",
            **self._resume_from(),
            **self._joining(),
            **self.mirrors_part(),
        }

    def _duration(self) -> dict[str, Any]:
        """Epochs where they are given, else steps."""
        epochs = self.cleaned_data["num_epochs"]
        return {"num_steps": self.cleaned_data["num_steps"]} if epochs is None else {"num_epochs": epochs}

    def _objective(self) -> dict[str, Any]:
        data = self.cleaned_data
        beta = {} if data["beta"] is None else {"beta": data["beta"]}
        return {"objective": data["train_on"], **beta} if data["train_on"] else {}

    def _resume_from(self) -> dict[str, Any]:
        job_id, _, step = self.cleaned_data["resume_from"].partition(":")
        return {"resume_from": {"job": job_id, "step": int(step)}} if job_id else {}

    def _joining(self) -> dict[str, Any]:
        """A link without machines is refused with the spec."""
        names = [name.strip() for name in self.cleaned_data.get("machines", "").split(",") if name.strip()]
        link = self.cleaned_data.get("link", "")
        return {**({"machines": names} if names else {}), **({"link": link} if link else {})}

    def _adapter(self) -> dict[str, Any]:
        """A number that was left empty is the default."""
        data = self.cleaned_data
        given = {name: data[name] for name in ("rank", "alpha", "dropout") if data[name] is not None}
        targets = [name for name in data["targets"].replace(",", " ").split() if name]
        return {**to_json(_ADAPTER_DEFAULTS), **given, "targets": targets}

    def _export(self) -> dict[str, Any]:
        data = self.cleaned_data
        return {name: data[f"export_{name}"] for name in ("dtype", "adapter", "gguf") if data[f"export_{name}"]}


def initial_from_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The form's values for a spec: a clone of a job."""
    goal, workload = spec.get("goal", {}), spec.get("workload", {})
    shown = {name: value for name, value in workload.items() if name != "objective"}
    train_on = workload.get("objective", "next_token")
    shown["train_on"] = "" if train_on == "next_token" else train_on
    initial = {**shown, **{name: spec.get(name) for name in ("name", "model", "dataset")}}
    initial["mirrors"] = list(spec.get("mirrors", ()))
    if (adapter := workload.get("adapter")) is not None:
        initial |= {**adapter, "use_adapters": True, "targets": ", ".join(adapter.get("targets", ()))}
    initial |= {f"export_{name}": value for name, value in workload.get("export", {}).items()}
    initial |= {"machines": ", ".join(spec.get("machines", ())), "link": spec.get("link", "")}
    if (resumed := spec.get("resume_from")) is not None:
        initial["resume_from"] = f"{resumed['job']}:{resumed['step']}"
    return {**initial, **initial_goal(goal), **written_pins(goal.get("pins") or {})}


class SeveralFilesInput(forms.ClearableFileInput):
    allow_multiple_selected = True


class SeveralFilesField(forms.FileField):
    """Any number of files, cleaned to a list."""

    widget = SeveralFilesInput

    def clean(self, data: Any, initial: Any = None) -> Any:
        given = data if isinstance(data, list | tuple) else [data] if data else []
        return [super(SeveralFilesField, self).clean(file, initial) for file in given]


class ModelUploadForm(forms.Form):
    """A model as its files, or as a folder on the server; the checks are ``create_model``'s and ``link_model``'s."""

    name = forms.CharField(max_length=200)
    path = forms.CharField(
        label="Folder on the server",
        required=False,
        max_length=1000,
        help_text="its weights stay there and are linked, not copied",
    )
    hub = forms.CharField(
        label="Hugging Face hub",
        required=False,
        max_length=300,
        help_text="owner/name, or owner/name@revision; safetensors only, fetched by the service",
    )
    config = forms.FileField(label="config.json", required=False)
    tokenizer = forms.FileField(label="tokenizer.json", required=False, help_text="without it: the bundled tokenizer")
    tokenizer_config = forms.FileField(
        label="tokenizer_config.json", required=False, help_text="for its chat template, which generate jobs use"
    )
    weights = SeveralFilesField(
        label="Weights",
        required=False,
        help_text="*.safetensors, and model.safetensors.index.json when there are several; or one *.gguf",
    )
    others = SeveralFilesField(
        label="Other files",
        required=False,
        help_text="generation_config.json, chat_template.jinja and further templates, special_tokens_map.json",
    )

    fallback_field = "config"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not model_roots():
            del self.fields["path"]
        if not is_open():
            del self.fields["hub"]

    def clean(self) -> dict[str, Any]:
        data: dict[str, Any] = super().clean() or {}
        has_files = any(data.get(name) for name in ("config", "weights", "tokenizer", "tokenizer_config", "others"))
        places = [name for name in ("path", "hub") if data.get(name)]
        if len(places) + has_files > 1:
            self.add_error(places[0], "Give one of the three: a folder on the server, a model of the hub, or files.")
        elif not places and not data.get("config") and not _is_gguf(data.get("weights") or []):
            self.add_error("config", "Choose the file config.json.")
        return data


def _is_gguf(weights: list[Any]) -> bool:
    """A GGUF file holds its own config."""
    return len(weights) == 1 and str(weights[0].name).endswith(".gguf")


class DatasetUploadForm(forms.Form):
    """A dataset as its file; the checks are ``create_dataset``'s."""

    name = forms.CharField(max_length=200)
    path = forms.CharField(
        label="File or folder on the server",
        required=False,
        max_length=1000,
        help_text="is copied; all dataset files of a folder become one",
    )
    file = forms.FileField(
        label="File", required=False, help_text=".txt; or chats, completions or texts in .jsonl, .json, .csv, .parquet"
    )
    columns = forms.CharField(
        required=False,
        max_length=1000,
        help_text="only where they have unusual names: prompt=ask, completion=reply",
    )
    fallback_field = "file"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not dataset_roots():
            del self.fields["path"]

    def clean(self) -> dict[str, Any]:
        data: dict[str, Any] = super().clean() or {}
        if data.get("path") and data.get("file"):
            self.add_error("path", "Give one of the two: a path on the server, or a file.")
        elif not data.get("path") and not data.get("file") and "file" not in self.errors:
            self.add_error("file", "Choose a file.")
        return data
