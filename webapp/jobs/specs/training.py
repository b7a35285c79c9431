"""Reads a job spec as people send it (API, form, YAML) into the one normalized form that is priced and frozen with the job."""

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from django.conf import settings
from django.db.models import QuerySet

from optimizer.api.compiled_needs import check_compiled_pin, compiled_representations
from optimizer.api.shared_needs import check_shared_pin, shared_number
from optimizer.base.errors import InvalidInput, InvalidModel, InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_value
from optimizer.base.units import parse_bytes
from optimizer.data.bundled import BUNDLED_ENTRIES
from optimizer.goal import GenerationGoal, Goal
from optimizer.models.files.gguf_export.kinds import check_gguf
from optimizer.models.files.gguf_export.vocabulary import read_vocabulary
from optimizer.models.files.sidecars import TOKENIZER_FILE
from optimizer.models.packing import PACKING_TYPES, check_packs
from optimizer.models.spec import read_model_spec
from optimizer.models.targets import check_targets
from optimizer.plan.plan import Plan
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import Adapter, Export, GenerationWorkload, TrainingWorkload
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import datasets_visible_to, find_dataset, find_model, models_visible_to, most_devices
from webapp.jobs.models import Checkpoint
from webapp.jobs.specs.branching import branch_document, check_branch, read_resume_from, with_pins
from webapp.jobs.specs.epochs import split_epochs, steps_of
from webapp.jobs.specs.joining import JOINING_FIELDS, Joining, read_joining
from webapp.jobs.specs.mirrors import mirrors_document, read_mirrors
from webapp.jobs.specs.recipes import suggest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SPEC_FIELDS = (
    *("name", "model", "dataset", "recipe", "workload", "goal", "plan", "kind"),
    *("resume_from", "mirrors", "machines", "link", "link_measured_at"),
)
_MAX_NAME_CHARACTERS = 200
_KIND_WORDS = {"messages": "conversations", "prompt_completion": "prompts with completions"}
_SIZES = ("device_budget_bytes", "host_budget_bytes", "disk_budget_bytes")

R = TypeVar("R", Model, Dataset)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A valid spec with what it names."""

    name: str
    model: Model
    dataset: Dataset
    workload: TrainingWorkload
    goal: Goal
    plan_label: str
    """``chosen``, or the baseline that is asked for."""
    kind: Literal["train"] = "train"
    resume_from: Checkpoint | None = None
    """Another run's checkpoint that this one goes on from."""
    mirrors: tuple[str, ...] = ()
    """Services that its measurements are copied to."""
    joining: Joining | None = None
    """The machines that share it, where several are named."""

    @property
    def profile_fingerprint(self) -> str:
        """Fingerprint of the profile that prices it: the model's, or that of the model with the workload's adapters,
        with compiled blocks or with a part of shared ones."""
        return self.fingerprint_behind(None)

    def fingerprint_behind(self, plan: Plan | None) -> str:
        """The same of the profile that prices this plan, whose blocks may be compiled, or shared, though no pin says so."""
        return profile_fingerprint(
            self.model.fingerprint,
            self.workload.adapter,
            is_packed=self.workload.is_packed,
            objective=self.workload.objective,
            compiled=compiled_representations(self.workload, self.goal.pins, self.goal.may_use, ran=plan),
            sharing=shared_number(self.goal.pins, ran=plan),
        )

    def to_json(self) -> dict[str, Any]:
        """Normalized: ids for names, bytes for sizes, every default written out."""
        return {
            "name": self.name,
            "model": self.model.pk,
            "dataset": self.dataset.pk,
            "workload": to_json(self.workload),
            "goal": to_json(self.goal),
            "plan": self.plan_label,
            **branch_document(self.resume_from),
            **mirrors_document(self.mirrors),
            **(self.joining.to_json() if self.joining else {}),
        }

    def priced_part(self) -> dict[str, Any]:
        """The part of a spec that a price depends on: all but the job's name and the offer that is taken."""
        document = self.to_json()
        return {key: document.get(key) for key in ("model", "dataset", "workload", "goal", "machines", "link")}


def read_spec(user: Any, document: Any) -> JobSpec:
    """Raises InvalidInput with the dotted name of the first field that is wrong, its value and what is allowed."""
    if not isinstance(document, dict):
        raise InvalidInput("spec must be an object", field="spec", value=type(document).__name__, allowed=list(SPEC_FIELDS))
    refuse_unknown(document, SPEC_FIELDS)
    model, dataset = _find_parts(user, document)
    samples = _suited_to(dataset, model, document)
    for_workload, for_goal = suggest(
        document.get("recipe"), model_name=model.name, has_weights=model.has_weights, samples=samples
    )
    fields, epochs = split_epochs(_over(for_workload, document.get("workload", {})))
    workload = read_workload(fields)
    _check_kind(dataset, workload)
    check_has_words(model)
    _check_long_enough(dataset, workload)
    if epochs is not None:
        workload = replace(workload, num_steps=steps_of(epochs, dataset, model, workload))
    goal = read_goal(_over(for_goal, document.get("goal")))
    check_against_model(workload, model)
    check_compiled_pin(goal.pins)
    check_shared_pin(model.config, goal.pins, num_devices=goal.num_devices)
    joining = read_joining(user, {name: document[name] for name in JOINING_FIELDS if name in document})
    if joining is not None:
        goal = _over_all(goal, document["goal"], num_devices=joining.num_devices)
        check_devices(workload, goal, most=joining.num_devices)
    else:
        check_devices(workload, goal, most=most_devices(user) if goal.num_devices > 1 else 0)
    resume_from = read_resume_from(user, document.get("resume_from"))
    if resume_from is not None:
        check_branch(resume_from, workload, model)
        goal = with_pins(goal, resume_from)
    return JobSpec(
        name=read_name(document.get("name"), fallback=f"{model.name} on {dataset.name}"),
        model=model,
        dataset=dataset,
        workload=workload,
        goal=goal,
        plan_label=_read_plan(document.get("plan", "chosen")),
        resume_from=resume_from,
        mirrors=read_mirrors(document.get("mirrors")),
        joining=joining,
    )


def _over_all(goal: Goal, given: dict[str, Any], *, num_devices: int) -> Goal:
    """The goal for so many devices of several machines, unless it says how many. given: the goal as it was sent."""
    return replace(goal, num_devices=goal.num_devices if "num_devices" in given else num_devices)


def _find_parts(user: Any, document: dict[str, Any]) -> tuple[Model, Dataset]:
    """By their ids, which programs name and a prepared query finds, else as anything is found."""
    given_model, given_dataset = document.get("model"), document.get("dataset")
    model = find_model(user, given_model) if isinstance(given_model, str) else None
    if model is None:
        model = find_visible(models_visible_to(user), given_model, field="model")
    dataset = find_dataset(user, given_dataset) if isinstance(given_dataset, str) else None
    if dataset is None or dataset.format == "prompts":
        dataset = find_visible(datasets_visible_to(user).exclude(format="prompts"), given_dataset, field="dataset")
    return model, dataset


def check_devices(workload: TrainingWorkload, goal: Goal, *, most: int) -> None:
    """Raise InvalidWorkload for more devices than any machine has, or a batch that no number of them can share.

    Devices that share each block all work on the whole of it.
    most: devices of the machine that has most; 0 while none is known, and nothing is refused for it.
    """
    number = goal.num_devices
    check_enough_devices(number, most=most)
    may_change = goal.objective == "largest_batch" or shared_number(goal.pins) > 1
    if number > 1 and not may_change and all(workload.global_batch_size % count for count in range(2, number + 1)):
        workload.of_rank(number)


def check_enough_devices(number: int, *, most: int) -> None:
    """Raise InvalidWorkload for more devices than any machine has. most: as ``check_devices`` has it."""
    if number > 1 and most and number > most:
        have = "one device" if most == 1 else f"at most {most} devices"
        raise InvalidWorkload(
            f"goal.num_devices is {number}; the machines here have {have}",
            field="goal.num_devices",
            value=number,
            allowed={"minimum": 1, "maximum": most},
            hint="Ask for fewer, or start a worker on a machine with more.",
        )


def _over(defaults: dict[str, Any], given: Any) -> Any:
    """The defaults under what was given; what is no object is left for the reader to refuse."""
    return {**defaults, **given} if isinstance(given, dict) else given


def _check_kind(dataset: Dataset, workload: TrainingWorkload) -> None:
    """Raise InvalidInput where pairs of answers meet an objective that reads single ones, or the reverse."""
    has_pairs = dataset.facts.get("kind") == "preference"
    if has_pairs and not workload.has_pairs:
        raise InvalidInput(
            f"dataset {dataset.name!r} holds pairs of a better and a worse answer; workload.objective is 'next_token', which "
            "trains on single answers",
            field="dataset",
            value=dataset.name,
            allowed="conversations, prompts with completions, or texts",
            hint="Take recipe preference, or set workload.objective to dpo or orpo.",
        )
    if workload.has_pairs and not has_pairs:
        kind = _KIND_WORDS.get(dataset.facts.get("kind", "text"), "texts")
        raise InvalidInput(
            f"dataset {dataset.name!r} holds {kind}; workload.objective is "
            f"{workload.objective!r}, which learns from pairs of a better and a worse answer",
            field="dataset",
            value=dataset.name,
            allowed="rows with chosen and rejected",
            hint="Upload pairs, or set workload.objective to next_token.",
        )


def check_has_words(model: Model) -> None:
    """Raise InvalidInput for a model without a tokenizer whose vocabulary is too small for the bundled one."""
    entries = read_model_spec(model.config).vocab_size
    if not model.has_tokenizer and entries < BUNDLED_ENTRIES:
        raise InvalidInput(
            f"model {model.name!r} has no tokenizer of its own, and its vocabulary of {entries:,} is too small for "
            f"the bundled one, which has {BUNDLED_ENTRIES:,} entries",
            field="model",
            value=model.name,
            allowed=f"a tokenizer.json, or a vocab_size of at least {BUNDLED_ENTRIES:,}",
            hint="Upload the model again together with its tokenizer.json.",
        )


def _check_long_enough(dataset: Dataset, workload: TrainingWorkload) -> None:
    """Raise InvalidInput for data that cannot give one row to train on and one to validate with."""
    if dataset.num_documents is None:
        return
    if workload.packing == "wrapped":
        # a token is a byte at the least, and each document ends with one of its own
        most, needed = dataset.num_bytes + dataset.num_documents, 2 * workload.sequence_length + 1
        found, unit = f"at most {most:,} tokens", "tokens"
    else:
        most, needed = dataset.num_documents, 2
        found, unit = f"{most} sample{'' if most == 1 else 's'}", "samples"
    if most < needed:
        raise InvalidInput(
            f"dataset {dataset.name!r} holds {found}; at least {needed:,} {unit} are needed, for one row to train on and one to "
            "validate with",
            field="dataset",
            value=dataset.name,
            allowed=f"at least {needed:,} {unit}",
            hint="Use more data" + (" or a shorter sequence length." if unit == "tokens" else "."),
        )


def _suited_to(dataset: Dataset, model: Model, document: dict[str, Any]) -> dict[str, str]:
    """Packing and loss of a spec that names neither: conversations and completions stay whole, and their answers are learnt."""
    given = document.get("workload")
    asks_for_pairs = isinstance(given, dict) and given.get("objective", "next_token") != "next_token"
    if asks_for_pairs or dataset.facts.get("kind") == "preference":
        return {"packing": "off", "loss_on": "assistant"}
    if dataset.facts.get("kind", "text") == "text" or (isinstance(given, dict) and {"packing", "loss_on"} & set(given)):
        return {}
    return {"packing": "best_fit" if model.model_type in PACKING_TYPES else "off", "loss_on": "assistant"}


def refuse_unknown(document: dict[str, Any], known: Sequence[str]) -> None:
    """Raise InvalidInput for the first field that is none of these."""
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise InvalidInput(
            f"{unknown[0]:.80} is not a known field; known: {', '.join(known)}", field=str(unknown[0])[:80], allowed=list(known)
        )


def find_visible(rows: "QuerySet[R]", wanted: Any, *, field: str) -> R:
    """By id, else by name; of several of one name the newest, one's own before what ships with the program."""
    if not isinstance(wanted, str) or not wanted:
        raise InvalidInput(
            f"{field} is {wanted!r:.80}; allowed: the id or name of a {field}",
            field=field,
            value=shown_value(wanted),
            allowed=f"the id or name of a {field}",
        )
    found = rows.filter(pk=wanted).first()
    if found is None:
        named = list(rows.filter(name=wanted).order_by("-pk"))
        found = next((row for row in named if row.owner_id is not None), named[0] if named else None)
    if found is None:
        names = sorted(set(rows.values_list("name", flat=True)[:20]))
        raise InvalidInput(
            f"{field} {wanted[:80]!r} is not there; yours: {', '.join(names) or 'none yet'}",
            field=field,
            value=wanted[:80],
            allowed=names,
        )
    return found


def read_adapter(document: Any) -> Adapter | None:
    """The adapters in a profile job's spec; jobs of earlier versions name none."""
    return None if document is None else from_json(Adapter, document, path="adapter", error=InvalidWorkload)


def read_workload(document: Any) -> TrainingWorkload:
    if isinstance(document, dict):
        document = _with_numbers(document, TrainingWorkload)
        if isinstance(document.get("adapter"), dict):
            document["adapter"] = _with_numbers(document["adapter"], Adapter)
        if isinstance(document.get("export"), dict):
            document["export"] = with_sizes(document["export"], Export)
    return from_json(TrainingWorkload, document, path="workload", error=InvalidWorkload)


def _with_numbers(document: dict[str, Any], kind: "type[DataclassInstance]") -> dict[str, Any]:
    """YAML reads 3e-4 as text."""
    floats = {f.name for f in dataclasses.fields(kind) if f.type in (float, float | None)}
    return {key: _as_number(value) if key in floats else value for key, value in document.items()}


def with_sizes(document: dict[str, Any], kind: "type[DataclassInstance]") -> dict[str, Any]:
    sizes = {f.name for f in dataclasses.fields(kind) if f.name.endswith("_bytes")}
    return {
        key: _as_bytes(value, field=f"workload.export.{key}") if key in sizes else value
        for key, value in document.items()
    }


def _as_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def read_generation_workload(document: Any) -> GenerationWorkload:
    return from_json(GenerationWorkload, document, path="workload", error=InvalidWorkload)


def read_generation_goal(document: Any) -> GenerationGoal:
    return from_json(GenerationGoal, _with_budgets(document), path="goal", error=InvalidWorkload)


def _with_budgets(document: Any) -> Any:
    """Sizes as bytes."""
    if not isinstance(document, dict):
        return document
    return {
        key: _as_bytes(value, field=f"goal.{key}") if key in _SIZES and value is not None else value
        for key, value in document.items()
    }


def read_goal(document: Any) -> Goal:
    if document is None:
        raise InvalidWorkload(
            "goal is missing; allowed: an object with device_budget_bytes", field="goal", allowed="{device_budget_bytes: 6 GiB}"
        )
    return from_json(Goal, _with_budgets(document), path="goal", error=InvalidWorkload)


def _as_bytes(value: Any, *, field: str) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"size {reprlib.repr(value)} is not understood; write a number of bytes, or a text such as 6 GiB")
        return parse_bytes(value)
    except ValueError as error:
        allowed = "bytes, or a text such as 6 GiB"
        raise InvalidWorkload(f"{field}: {error}", field=field, value=shown_value(value), allowed=allowed) from error


def check_generates(model: Model) -> None:
    spec = read_model_spec(model.config)
    if spec.kind != "decoder":
        raise InvalidModel(
            f"{model.name} is of type {spec.model_type}, an {spec.kind.replace('_', '-')}; generation needs a decoder",
            field="model",
            value=model.model_type,
            allowed="a decoder",
        )


def check_against_model(workload: TrainingWorkload, model: Model) -> None:
    spec = read_model_spec(model.config)
    if spec.kind != "decoder":
        # A dataset becomes next tokens; hiding some, or pairing sources with targets, is another preparation.
        raise InvalidModel(
            f"{model.name} is of type {spec.model_type}, an {spec.kind.replace('_', '-')}; jobs train decoders, on next tokens",
            field="model",
            value=model.model_type,
            allowed="a decoder",
            hint="The library can estimate and step it: optimizer.estimate.training, optimizer.runtime.step.step.Trainer.",
        )
    longest = spec.max_sequence_length
    if workload.sequence_length > longest:
        raise InvalidWorkload(
            f"workload.sequence_length is {workload.sequence_length:,}; {model.name} has positions for {longest:,} tokens",
            field="workload.sequence_length",
            value=workload.sequence_length,
            allowed={"minimum": 8, "maximum": longest},
        )
    if workload.adapter is not None:
        check_targets(workload.adapter, model.model_type)
    if workload.export.gguf != "none":
        check_gguf(spec)
        _check_gguf_tokenizer(model)
    if workload.is_packed:
        check_packs(model.model_type)
    if workload.mode == "finetune" and not model.has_weights:
        raise InvalidWorkload(
            f"workload.mode is 'finetune'; {model.name} has no weights, allowed: pretrain",
            field="workload.mode",
            value="finetune",
            allowed=["pretrain"],
            hint="Upload the model with its weights to fine-tune it.",
        )


def _check_gguf_tokenizer(model: Model) -> None:
    """Refuse now a tokenizer that GGUF has no words for, and not after the training. Raises InvalidWorkload."""
    file = Path(settings.HEADROOM_HOME) / model.folder / TOKENIZER_FILE
    if model.has_tokenizer and file.is_file():
        read_vocabulary(file, vocab_size=read_model_spec(model.config).vocab_size, special_ids={}, chat=None)


def read_name(name: Any, *, fallback: str) -> str:
    if name is None or name == "":
        return fallback[:_MAX_NAME_CHARACTERS]
    if not isinstance(name, str) or not name.strip() or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidInput(
            f"name is {name!r:.80}; allowed: 1 to {_MAX_NAME_CHARACTERS} printable characters",
            field="name",
            value=str(name)[:80],
            allowed=f"1 to {_MAX_NAME_CHARACTERS} printable characters",
        )
    return name.strip()


def read_label(label: Any, allowed: Sequence[str]) -> str:
    """One of a plan's labels. Raises InvalidInput."""
    if label not in allowed:
        value = str(label)[:80]
        raise InvalidInput(
            f"plan is {value!r}; allowed: {', '.join(allowed)}", field="plan", value=value, allowed=list(allowed)
        )
    return str(label)


def _read_plan(label: Any) -> str:
    return read_label(label, ("chosen", *BASELINES))
