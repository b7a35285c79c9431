"""The page Plans: every plan that a search found, some side by side, any of them edited, and the same work on other cards.

All of the question is in the address, in the words of the new-job form, so that it can be sent to somebody else:
``on`` is a machine's id or a card (``gpu:T4``), ``with`` names plans to show beside the chosen one, ``try-...`` edits that one;
``from`` a job leads to the address of what it asked for. With ``waits`` the answer only says whether there is one by now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from optimizer.errors import HeadroomError, InvalidInput, NoFeasiblePlan
from optimizer.hardware.devices import known_devices
from optimizer.plan.pins import pins_of_change
from optimizer.plan.plan import Plan
from optimizer.profile.inference import traced_fingerprint
from webapp.catalog.models import Profile
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.generation_spec import GenerateSpec, inference_workload, read_job_spec
from webapp.jobs.models import Kind
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.spec import read_workload
from webapp.pages import plans
from webapp.pages.forms import ANY_LOSS
from webapp.pages.pin_fields import EditForm, written_pins
from webapp.pages.presentation import largest_part
from webapp.pages.pricing import ways_out
from webapp.pages.views import generate, new_job
from webapp.pages.views.work import FormPage, first_model, incomplete
from webapp.pages.work_form import WorkForm, form_query, initial_from_query, typed_of
from webapp.planning.cards import rank_some_cards
from webapp.planning.estimates import AskedOfModel, read_machine
from webapp.planning.generation_searches import GenerationQuestion, find_generation
from webapp.planning.profiles import read_inference_profile, ready_profile
from webapp.planning.questions import Asked, read_question
from webapp.planning.searches import problem_of

CARD = "gpu:"
EDIT = "try"
DEFAULT_CARD = "RTX 4090"
"""Where no machine has registered."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A machine or a card that the work may be put on."""

    key: str
    name: str


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A search's answer, of either kind of work."""

    model: str
    device: str
    budget_bytes: int
    work: str
    """In words: how much of it there is."""
    limit: str
    """What binds, where the most that fits was asked for."""
    chosen: plans.AnyPriced
    baselines: Mapping[str, plans.AnyPriced]
    frontier: Sequence[plans.AnyPriced]
    explanation: tuple[str, ...]
    bound: str
    """How near the chosen plan is to the best, in words; empty where that is not known."""
    asked: Asked | None
    """Of training, whose plans can be edited and which can be put on other cards."""


@require_GET
@login_required
def plans_page(request: HttpRequest) -> HttpResponse:
    if job_id := request.GET.get("from"):
        return redirect(f"{reverse('plans')}?{_address_of_job(request, job_id)}")
    page = _work_of(request)
    form, places, on = _read(request, page)
    context: dict[str, Any] = {
        "form": form,
        "kind": page.kind,
        "places": places,
        "on": on,
        "form_url": reverse(page.address),
        "query": form_query(form),
        "kept": [pair for pair in _pairs(request, without=()) if pair[0] != "on"],
    }
    if not form.is_valid():
        return render(request, "plans/page.html", {**context, "problems": incomplete(form).problems}, status=422)
    if "waits" in request.GET:
        return HttpResponse(headers={"HX-Refresh": "true"}) if _is_answered(request, page, form, on) else HttpResponse(status=204)
    try:
        found = _find(request, page, form, on)
        if found is None:
            return render(request, "plans/page.html", {**context, "waiting_since": _asked_at(request, page, form)})
        return render(request, "plans/page.html", context | _described(request, found))
    except NoFeasiblePlan as error:
        return render(request, "plans/page.html", context | _nothing_fits(error))
    except HeadroomError as error:
        problems = [f"{error.message}. {error.hint}".strip()]
        return render(request, "plans/page.html", {**context, "problems": problems}, status=422)


@require_GET
@login_required
def plans_cards(request: HttpRequest) -> HttpResponse:
    """A part of the page: cards ranked, as many as are known so far; it asks for the rest by itself."""
    form, _, on = _read(request, new_job.PAGE)
    asked = _found_or_404(lambda: read_question(request.user, _question(form, on)) if form.is_valid() else None)
    order: Literal["speed", "money"] = "money" if request.GET.get("order") == "money" else "speed"
    found = rank_some_cards(asked.question, order=order)
    since = request.GET.get("since") or timezone.localtime().strftime("%H:%M:%S")
    context = {
        "found": found,
        "order": order,
        "addresses": {name: f"?{_with(request, order=name)}" for name in ("speed", "money")},
        "since": since,
        "again": f"{reverse('plans_cards')}?{_with(request, since=since)}",
        "page_base": "fragment.html" if request.headers.get("HX-Request") else "base.html",
    }
    return render(request, "plans/cards.html", context)


@require_GET
@login_required
def plans_step(request: HttpRequest) -> HttpResponse:
    """The table behind a plan's chart of its step: ``plan`` is its key."""
    page = _work_of(request)
    form, _, on = _read(request, page)
    found = _found_or_404(lambda: _find(request, page, form, on) if form.is_valid() else None)
    point = plans.find_point(_points(request, found)[0], request.GET.get("plan", ""))
    if point is None:
        raise Http404("no such plan")
    context = {
        "point": point,
        "table": plans.timeline_table(point.priced),
        "page_base": "fragment.html" if request.headers.get("HX-Request") else "base.html",
    }
    return render(request, "plans/step.html", context)


T = TypeVar("T")


def _found_or_404(find: Callable[[], T | None]) -> T:
    """For the parts of the page, which are only asked for once the page itself has answered."""
    try:
        found = find()
    except HeadroomError as error:
        raise Http404(error.message) from error
    if found is None:
        raise Http404("there are no plans at this address yet")
    return found


def _work_of(request: HttpRequest) -> FormPage:
    return generate.PAGE if request.GET.get("kind") == Kind.GENERATE else new_job.PAGE


def _address_of_job(request: HttpRequest, job_id: str) -> str:
    """All that a job asked for, and the machine that it was priced on."""
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id, kind__in=(Kind.TRAIN, Kind.GENERATE))
    page = generate.PAGE if job.kind == Kind.GENERATE else new_job.PAGE
    query = form_query(page.make_form(request, None, page.initial_from_spec(job.spec)))
    kind = {"kind": job.kind} if job.kind == Kind.GENERATE else {}
    on = {"on": job.machine_id} if job.machine_id else {}
    return "&".join(filter(None, [query, urlencode(kind | on)]))


def _read(request: HttpRequest, page: FormPage) -> tuple[WorkForm, list[_Place], str]:
    """The form that the address fills, where the work may go, and where it goes."""
    initial = {"model": first_model(page.models(request), request.user)} | initial_from_query(request.GET)
    form = page.make_form(request, typed_of(page.make_form(request, None, initial)), {})
    if "dataset" in form.fields:
        form.fields["dataset"].required = False  # no plan depends on it
    machines = machines_visible_to(request.user).order_by("name")
    places = [_Place(key=machine.pk, name=machine.name) for machine in machines]
    default = places[0].key if places else f"{CARD}{DEFAULT_CARD}"
    places += [_Place(key=f"{CARD}{name}", name=name) for name in known_devices()]
    return form, places, request.GET.get("on") or default


def _find(request: HttpRequest, page: FormPage, form: WorkForm, on: str) -> _Found | None:
    """The answer. None while the model is being profiled. Raises HeadroomError, NoFeasiblePlan among it."""
    if page.kind == Kind.GENERATE:
        return _find_generation(request, form, on)
    asked = read_question(request.user, _question(form, on))
    if asked is None:
        return None
    answer = asked.answer()
    found = answer.result
    bound = f" by more than {100 * found.gap:.2g} %" if found.gap is not None and not found.is_optimal else ""
    return _Found(
        model=asked.model.name,
        device=asked.question.machine.device.name,
        budget_bytes=asked.question.goal.device_budget_bytes,
        work=f"sequences of {answer.workload.sequence_length:,} tokens, batch of {answer.workload.global_batch_size:,}",
        limit="" if answer.limit is None else answer.limit.reason,
        chosen=found.chosen,
        baselines=found.baselines,
        frontier=found.frontier,
        explanation=found.explanation,
        bound="" if found.gap is None else f"No allowed plan that fits is faster{bound}",
        asked=asked,
    )


def _is_answered(request: HttpRequest, page: FormPage, form: WorkForm, on: str) -> bool:
    """An error is an answer as well, which the page then shows."""
    try:
        return _find(request, page, form, on) is not None
    except HeadroomError:
        return True


def _find_generation(request: HttpRequest, form: WorkForm, on: str) -> _Found | None:
    spec = read_job_spec(request.user, form.spec())
    if not isinstance(spec, GenerateSpec):
        raise InvalidInput("this address is that of a generate job", field="kind", value=spec.kind)
    machine, calibration = read_machine(request.user, **_place(on))
    profile = ready_profile(spec.model, generates=True)
    if profile is None:
        return None
    question = GenerationQuestion(
        profile=read_inference_profile(profile.pk, profile.document_sha256),
        profile_sha256=profile.document_sha256,
        workload=inference_workload(spec),
        goal=spec.goal,
        machine=machine,
        calibration=calibration,
    )
    answer = find_generation(question)
    if answer.chosen is None:
        raise answer.nothing_fits.error() if answer.nothing_fits else Http404("nothing was found")
    workload = question.workload
    return _Found(
        model=spec.model.name,
        device=machine.device.name,
        budget_bytes=spec.goal.device_budget_bytes,
        work=f"{workload.num_sequences:,} prompts, up to {workload.num_new_tokens:,} new tokens each",
        limit="",
        chosen=answer.chosen,
        baselines=answer.baselines,
        frontier=answer.frontier,
        explanation=answer.explanation,
        bound="",
        asked=None,
    )


def _question(form: WorkForm, on: str) -> AskedOfModel:
    spec = form.spec()
    return AskedOfModel(model=spec["model"], workload=spec["workload"], goal=spec["goal"], **_place(on))


def _place(on: str) -> dict[str, str | None]:
    if on.startswith(CARD):
        return {"machine": None, "gpu": on.removeprefix(CARD)}
    return {"machine": on, "gpu": None}


def _asked_at(request: HttpRequest, page: FormPage, form: WorkForm) -> datetime | None:
    """Since when the profile that the question needs has been waited for."""
    spec = form.spec()
    fingerprint = page.models(request).get(pk=spec["model"]).fingerprint
    generates = page.kind == Kind.GENERATE
    adapter = None if generates else read_workload(spec["workload"]).adapter
    wanted = traced_fingerprint(fingerprint, adapter=adapter, generates=generates)
    return Profile.objects.filter(fingerprint=wanted).values_list("created_at", flat=True).first()


def _points(request: HttpRequest, found: _Found) -> tuple[tuple[plans.Point, ...], EditForm | None, list[str]]:
    """Every plan; the form that edits the chosen one, and in words what was edited."""
    edit, yours = None, None
    words: list[str] = []
    if found.asked is not None and isinstance(found.chosen.plan, Plan):
        edit, yours, words = _edited(request, found.asked, found.chosen.plan)
    points = plans.list_points(found.chosen, baselines=found.baselines, frontier=found.frontier, yours=yours)
    wanted = request.GET.getlist("with") or list(found.baselines)[:1]
    return plans.choose_points(points, wanted), edit, words


def _edited(request: HttpRequest, asked: Asked, plan: Plan) -> "tuple[EditForm, plans.AnyPriced | None, list[str]]":
    from optimizer.search.compare import reprice

    typed = {name: request.GET[name] for name in request.GET if name.startswith(f"{EDIT}-")}
    edit = EditForm(typed, plan=plan.to_json(), prefix=EDIT)
    if edit.is_valid() and (change := edit.change()) is not None:
        try:
            edited = reprice(problem_of(asked.question), plan, change=change)
        except HeadroomError as error:
            edit.add_error(None, f"{error.message}. {error.hint}".strip())
        else:
            return edit, edited.priced, plans.edited_words(edited.differences)
    return edit, None, []


def _described(request: HttpRequest, found: _Found) -> dict[str, Any]:
    points, edit, edited = _points(request, found)
    compared = plans.compared_points(points)
    described = {
        "found": found,
        "largest": largest_part(found.chosen.prediction.device_bytes_by_category),
        "points": points,
        "compared": compared,
        "groups": plans.side_by_side(compared),
        "facts": plans.chart_facts(points, budget_bytes=found.budget_bytes),
        "steps": [(point, f"{reverse('plans_step')}?{_with(request, plan=point.key)}") for point in compared],
        "kept_beside": {
            "with": _pairs(request, without=("with",)),
            "try": _pairs(request, without=(f"{EDIT}-",)),
        },
    }
    if found.asked is None or not isinstance(found.chosen.plan, Plan):
        return described
    return described | {
        "edit": edit,
        "edited": edited,
        "knobs": _knobs(request, found.asked, found.chosen.plan),
        "cards_url": f"{reverse('plans_cards')}?{request.GET.urlencode()}",
    }


def _knobs(request: HttpRequest, asked: Asked, plan: Plan) -> list[dict[str, Any]]:
    """What each single change of the chosen plan would come to, the largest saving first."""
    from optimizer.search.knobs import list_knobs

    rows = []
    for knob in list_knobs(problem_of(asked.question), plan):
        fields = written_pins(pins_of_change(plan, knob.plan))
        allowed = {} if knob.is_lossless else ANY_LOSS
        rows.append(
            {
                "knob": knob,
                "try": _with(request, drop=(f"{EDIT}-",), **{f"{EDIT}-{name}": text for name, text in fields.items()}),
                "hold": _with(request, drop=(f"{EDIT}-",), **fields, **allowed),
            }
        )
    return rows


def _nothing_fits(error: NoFeasiblePlan) -> dict[str, Any]:
    return {"nothing_fits": error.message, "pricing": {"suggestions": ways_out(error)}}


def _pairs(request: HttpRequest, *, without: tuple[str, ...]) -> list[tuple[str, str]]:
    """The address's parameters but those that begin with any of these."""
    return [(name, text) for name in request.GET if not name.startswith(without) for text in request.GET.getlist(name)]


def _with(request: HttpRequest, *, drop: tuple[str, ...] = (), **changes: str) -> str:
    """This address with some parameters set anew."""
    kept = [(name, text) for name, text in _pairs(request, without=drop) if name not in changes]
    return urlencode([*kept, *changes.items()])
