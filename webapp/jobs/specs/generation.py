"""Reads the spec of a generate job into the one normalized form that is priced and frozen with the job, as ``training.py`` does
it of training.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimizer.base.errors import InvalidInput, InvalidModel, InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_value
from optimizer.goal import GenerationGoal
from optimizer.models.spec import read_model_spec
from optimizer.profile.fingerprints import generation_fingerprint
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.workload import GenerationRequest, GenerationWorkload
from webapp.catalog.actions import count_prompt_tokens
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to, most_devices
from webapp.jobs.models import Job
from webapp.jobs.specs.mirrors import mirrors_document, read_mirrors
from webapp.jobs.specs.training import (
    JobSpec,
    check_enough_devices,
    check_generates,
    find_visible,
    read_generation_goal,
    read_label,
    read_name,
    read_spec,
    refuse_unknown,
)

GENERATE_FIELDS = ("name", "model", "prompts", "workload", "goal", "plan", "kind", "mirrors")


@dataclass(frozen=True, kw_only=True)
class GenerateSpec:
    """A valid spec with what it names."""

    name: str
    model: Model
    dataset: Dataset
    """Its prompts."""
    workload: GenerationRequest
    goal: GenerationGoal
    plan_label: str
    """``chosen``, or the baseline that is asked for."""
    kind: Literal["generate"] = "generate"
    mirrors: tuple[str, ...] = ()
    """Services that its measurements are copied to."""

    @property
    def profile_fingerprint(self) -> str:
        return generation_fingerprint(self.model.fingerprint)

    @property
    def num_steps(self) -> int:
        """The number that the job counts to: its lines."""
        return int(self.dataset.num_documents or 0)

    def to_json(self) -> dict[str, Any]:
        """Normalized: ids for names, bytes for sizes, every default written out."""
        return {
            "kind": self.kind,
            "name": self.name,
            "model": self.model.pk,
            "prompts": self.dataset.pk,
            "workload": to_json(self.workload),
            "goal": to_json(self.goal),
            "plan": self.plan_label,
            **mirrors_document(self.mirrors),
        }

    def priced_part(self) -> dict[str, Any]:
        document = self.to_json()
        return {key: document[key] for key in ("kind", "model", "prompts", "workload", "goal")}


def read_job_spec(user: Any, document: Any) -> JobSpec | GenerateSpec:
    """Read a spec of any kind of job; without ``kind`` it trains. Raises InvalidInput."""
    if isinstance(document, dict) and document.get("kind", "train") != "train":
        if document["kind"] != "generate":
            raise InvalidInput(
                f"kind is {document['kind']!r:.80}; allowed: train, generate",
                field="kind",
                value=shown_value(document["kind"]),
                allowed=["train", "generate"],
            )
        return read_generate_spec(user, document)
    return read_spec(user, document)


def read_generate_spec(user: Any, document: dict[str, Any]) -> GenerateSpec:
    """Raises InvalidInput with the dotted name of the first field that is wrong, its value and what is allowed."""
    refuse_unknown(document, GENERATE_FIELDS)
    model = find_visible(models_visible_to(user), document.get("model"), field="model")
    prompts = datasets_visible_to(user).filter(format="prompts")
    dataset = find_visible(prompts, document.get("prompts"), field="prompts")
    workload = read_generation_request(_with_sampling(document.get("workload", {}), model))
    if document.get("goal") is None:
        raise InvalidWorkload(
            "goal is missing; allowed: an object with device_budget_bytes", field="goal", allowed="{device_budget_bytes: 6 GiB}"
        )
    goal = read_generation_goal(document["goal"])
    check_enough_devices(goal.num_devices, most=most_devices(user) if goal.num_devices > 1 else 0)
    check_can_generate(model)
    return GenerateSpec(
        name=read_name(document.get("name"), fallback=f"{dataset.name} by {model.name}"),
        model=model,
        dataset=dataset,
        workload=workload,
        goal=goal,
        plan_label=_read_plan(document.get("plan", "chosen")),
        mirrors=read_mirrors(document.get("mirrors")),
    )


def _with_sampling(workload: Any, model: Model) -> Any:
    """Take the settings of the model's generation_config.json for a spec that has no word on sampling."""
    names = ("temperature", "top_k", "top_p")
    if not isinstance(workload, dict) or any(name in workload for name in names):
        return workload
    return {**workload, **{name: model.generation[name] for name in names if name in model.generation}}


def _read_plan(label: Any) -> str:
    return read_label(label, ("chosen", *GENERATION_BASELINES))


def spec_of_job(job: Job) -> GenerateSpec:
    """Read the spec of a generate job that exists; nothing is checked again."""
    if job.dataset is None:
        raise InvalidInput("the job names no prompts", field="prompts")
    return GenerateSpec(
        name=job.name,
        model=job.model,
        dataset=job.dataset,
        workload=read_generation_request(job.spec["workload"]),
        goal=read_generation_goal(job.spec["goal"]),
        plan_label=job.spec["plan"],
    )


def read_generation_request(document: Any) -> GenerationRequest:
    return from_json(GenerationRequest, document, path="workload", error=InvalidWorkload)


def check_can_generate(model: Model) -> None:
    """Raise InvalidModel for one that is no decoder, or has no weights: random ones write nothing that anyone wants."""
    check_generates(model)
    if not model.has_weights:
        raise InvalidModel(
            f"{model.name} has no weights; a generate job needs a model with them",
            field="model",
            value=model.name,
            allowed="a model with weights",
            hint="Upload the model with its safetensors files; what generating would take is answered by POST /estimates.",
        )


def generation_workload(spec: GenerateSpec) -> GenerationWorkload:
    """The workload that is priced: the lines that the model has room for.

    Raises InvalidInput where it has room for none, InvalidModel where its tokenizer cannot be used.
    """
    longest = read_model_spec(spec.model.config).max_sequence_length
    fitting = [
        (prompt, new, num)
        for prompt, new, num in asked_tokens(count_prompt_tokens(spec.dataset, spec.model), spec.workload)
        if prompt + new <= longest
    ]
    if not fitting:
        raise InvalidInput(
            f"prompts: no line can be generated for: {_first_problem(spec)}; the model has positions for {longest:,} tokens and "
            f"workload.max_new_tokens is {spec.workload.max_new_tokens:,}",
            field="prompts",
            value=spec.dataset.name,
            allowed=f"at least one line of at most {longest:,} tokens, those that are generated among them",
        )
    draws = spec.workload.temperature > 0 or bool(spec.dataset.facts.get("num_drawing"))
    return summed_workload(fitting, max_sequence_length=longest, draws=draws)


def asked_tokens(
    counts: Iterable[Sequence[int | None]], workload: GenerationRequest
) -> Iterable[tuple[int, int, int]]:
    """Prompt tokens, new tokens and lines, where lines that name no number get the job's."""
    for prompt, new, num in counts:
        yield int(prompt or 0), int(new or workload.max_new_tokens), int(num or 0)


def summed_workload(
    tokens: Sequence[tuple[int, int, int]], *, max_sequence_length: int, draws: bool = False
) -> GenerationWorkload:
    """Each prompt with its own length and the new tokens that it asks for."""
    lengths = [max(2, prompt) for prompt, _, num in tokens for _ in range(num)]
    counts = [min(new, max_sequence_length - max(2, prompt)) for prompt, new, num in tokens for _ in range(num)]
    return GenerationWorkload.of_prompts(lengths, num_new_tokens=[max(1, count) for count in counts], draws=draws)


def _first_problem(spec: GenerateSpec) -> str:
    problems = spec.dataset.facts.get("problems") or [{"line": 1, "message": "its prompt and answer have too many tokens"}]
    return f"line {problems[0]['line']}: {problems[0]['message']}"
