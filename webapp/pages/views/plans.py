"""The page Plans: every plan that a search found, some side by side, any of them edited, and the same work on other cards.

All of the question is in the address, in the words of the new-job form, so that it can be sent to somebody else:
``on`` is a machine's id or a card (``gpu:T4``), ``with`` names plans to show beside the chosen one, ``try-...`` edits that one;
``from`` a job leads to the address of what it asked for. With ``waits`` the answer only says whether what the page waits for
is there by now, with ``whole`` it is given however long it takes (``shown/plan_work.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.text import capfirst
from django.views.decorators.http import require_GET

from optimizer.api.compiled_needs import compiled_representations
from optimizer.api.shared_needs import shared_number
from optimizer.base.errors import HeadroomError, InvalidInput, NoFeasiblePlan
from optimizer.hardware.devices import find_device, known_devices
from webapp.accounts.turns import take_turn
from webapp.catalog.models import Profile
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.models import Kind
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.specs.generation import GenerateSpec, read_job_spec
from webapp.jobs.specs.training import read_goal, read_workload
from webapp.pages.forms.kinds import GENERATION, TRAINING, FormKind, first_model, usable_budget
from webapp.pages.forms.pins import EditForm
from webapp.pages.forms.work import WorkForm, exact_bytes, form_query, initial_from_query, list_problems, typed_of
from webapp.pages.pictures.plans import frontier_picture
from webapp.pages.presentation import largest_part
from webapp.pages.shown import plans
from webapp.pages.shown.limits import limits_of
from webapp.pages.shown.plan_work import Edited, GenerationWork, Neighbour, PlanAnswer, TrainingWork, Work
from webapp.pages.shown.price_view import describe_compiled_trace, ways_out
from webapp.planning.cards import rank_some_cards
from webapp.planning.search.asked import AskedOfModel, question_at, read_place, read_question
from webapp.planning.search.generation import asked_by_generation
from webapp.planning.search.profiles import ProfileNeed

CARD = "gpu:"
EDIT = "try"
ASKED = ("model", "prompts", "sequence_length", "global_batch_size", "max_new_tokens", "device_budget")
"""Fields that stand at the top of the page; all others keep what the address says."""
COMPILED = "compiled"
"""Value of ``waits`` on a page that has an answer, and may have a better one once compiled blocks are traced."""
DEFAULT_CARD = "RTX 4090"
"""Card taken where no machine has registered."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A machine or a card that the work may be put on."""

    key: str
    name: str


@require_GET
@login_required
def plans_page(request: HttpRequest) -> HttpResponse:
    if job_id := request.GET.get("from"):
        return redirect(f"{reverse('plans')}?{_address_of_job(request, job_id)}")
    kind = _kind_of(request)
    form, places, on = _read(request, kind)
    context: dict[str, Any] = {
        "form": form,
        "kind": kind.kind,
        "places": places,
        "on": on,
        "form_url": reverse(kind.address),
        "query": form_query(form),
        "kept": [pair for pair in _pairs(request, without=()) if pair[0] not in ("on", *ASKED)],
        "asked": [form[name] for name in ASKED if name in form.fields],
        "is_about_rows": bool(request.GET.get("packing")),
    }
    if not form.is_valid():
        return render(request, "plans/page.html", {**context, "problems": list_problems(form)}, status=422)
    try:
        work = _work(request, kind, form, on)
        if waits := request.GET.get("waits"):
            still = work is None or (waits == COMPILED and work.find(whole=False).awaits_compiled)
            return HttpResponse(status=204) if still else HttpResponse(headers={"HX-Refresh": "true"})
        if work is None:
            return render(request, "plans/page.html", context | _waiting(request, kind, form))
        return render(request, "plans/page.html", context | _described(request, work))
    except NoFeasiblePlan as error:
        cards_url = f"{reverse('plans_cards')}?{_with(request)}"
        return render(request, "plans/page.html", context | _nothing_fits(error, on=on) | {"cards_url": cards_url})
    except HeadroomError as error:
        if "waits" in request.GET:  # an answer as well, which the page then shows
            return HttpResponse(headers={"HX-Refresh": "true"})
        problems = list_problems(form) if form.put_error(error) else (_said(form, error),)
        return render(request, "plans/page.html", {**context, "problems": problems}, status=422)


def _said(form: WorkForm, error: HeadroomError) -> str:
    return f"{capfirst(form.in_words(error.message))}. {form.in_words(error.hint)}".strip()


@require_GET
@login_required
def plans_cards(request: HttpRequest) -> HttpResponse:
    """A part of the page: cards ranked, as many as are known so far; it asks for the rest by itself."""
    work = _work_or_404(request)
    order: Literal["speed", "money"] = "money" if request.GET.get("order") == "money" else "speed"
    found = rank_some_cards(work.card_question, order=order)
    since = request.GET.get("since") or timezone.localtime().strftime("%H:%M:%S")
    context = {
        "found": found,
        "order": order,
        "addresses": {name: f"?{_with(request, order=name)}" for name in ("speed", "money")},
        "since": since,
        "again": f"{reverse('plans_cards')}?{_with(request, since=since)}",
        **_frame(request),
    }
    return render(request, "plans/cards.html", context)


@require_GET
@login_required
def plans_knobs(request: HttpRequest) -> HttpResponse:
    """A part of the page: what each single change of the chosen plan would come to, the largest saving first."""
    work = _work_or_404(request)
    found = _found_or_404(lambda: work.find(whole=True))
    if found.chosen is None:
        raise Http404("nothing fits, so there is no plan to change")
    plan = found.chosen.plan

    def change_each() -> list[Neighbour]:
        with take_turn():
            return list(work.neighbours(plan))

    address = reverse("plans")
    rows = [
        {
            "knob": knob,
            "try": f"{address}?{_with(request, drop=(f'{EDIT}-',), **_prefixed(knob.tried))}",
            "hold": knob.held and f"{address}?{_with(request, drop=(f'{EDIT}-',), **knob.held)}",
        }
        for knob in _found_or_404(change_each)
    ]
    context = {"rows": rows, "kind": _kind_of(request).kind, **_frame(request)}
    return render(request, "plans/knobs.html", context)


@require_GET
@login_required
def plans_step(request: HttpRequest) -> HttpResponse:
    """The table behind a plan's chart of its step: ``plan`` is its key."""
    work = _work_or_404(request)
    found = _found_or_404(lambda: work.find(whole=True))
    point = plans.find_point(_look(request, work, found, whole=True).points, request.GET.get("plan", ""))
    if point is None:
        raise Http404("no such plan")
    context = {"point": point, "table": plans.timeline_table(point.priced), **_frame(request)}
    return render(request, "plans/step.html", context)


def _frame(request: HttpRequest) -> dict[str, str]:
    return {"page_base": "fragment.html" if request.headers.get("HX-Request") else "base.html"}


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


def _work_or_404(request: HttpRequest) -> Work:
    kind = _kind_of(request)
    form, _, on = _read(request, kind)
    return _found_or_404(lambda: _work(request, kind, form, on) if form.is_valid() else None)


def _kind_of(request: HttpRequest) -> FormKind:
    return GENERATION if request.GET.get("kind") == Kind.GENERATE else TRAINING


def _address_of_job(request: HttpRequest, job_id: str) -> str:
    """All that a job asked for, and the machine that it was priced on."""
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id, kind__in=(Kind.TRAIN, Kind.GENERATE))
    kind = GENERATION if job.kind == Kind.GENERATE else TRAINING
    query = form_query(kind.make_form(request, None, kind.initial_from_spec(job.spec)))
    of_kind = {"kind": job.kind} if job.kind == Kind.GENERATE else {}
    on = {"on": job.machine_id} if job.machine_id else {}
    return "&".join(filter(None, [query, urlencode(of_kind | on)]))


def _read(request: HttpRequest, kind: FormKind) -> tuple[WorkForm, list[_Place], str]:
    """The form that the address fills, where the work may go, and where it goes."""
    machines = machines_visible_to(request.user).order_by("name")
    places = [_Place(key=machine.pk, name=f"{machine.name} ({machine.document['device']['name']})") for machine in machines]
    default = places[0].key if places else f"{CARD}{DEFAULT_CARD}"
    places += [_Place(key=f"{CARD}{name}", name=name) for name in known_devices()]
    on = request.GET.get("on") or default
    first = {"model": first_model(kind.models(request), request.user), "device_budget": _usable_budget(request, on)}
    initial = first | initial_from_query(request.GET)
    initial["device_budget"] = initial["device_budget"] or first["device_budget"]
    form = kind.make_form(request, typed_of(kind.make_form(request, None, initial)), {})
    if "dataset" in form.fields:
        form.fields["dataset"].required = False  # no plan depends on it
    return form, places, on


def _usable_budget(request: HttpRequest, on: str) -> str:
    """Memory that one job can have there; the newest machine's for a place that is not known, which is refused later."""
    if on.startswith(CARD) and on.removeprefix(CARD) in known_devices():
        return exact_bytes(find_device(on.removeprefix(CARD)).usable_bytes)
    return usable_budget(request.user)


def _work(request: HttpRequest, kind: FormKind, form: WorkForm, on: str) -> Work | None:
    """None while the model is being profiled. Raises HeadroomError."""
    if kind.kind == Kind.GENERATE:
        return _generation(request, form, on)
    question = read_question(request.user, _question(form, on))
    return None if question is None else TrainingWork(question=question)


def _generation(request: HttpRequest, form: WorkForm, on: str) -> GenerationWork | None:
    spec = read_job_spec(request.user, form.spec())
    if not isinstance(spec, GenerateSpec):
        raise InvalidInput("this address is that of a generate job", field="kind", value=spec.kind)
    question = question_at(asked_by_generation(spec), read_place(request.user, **_place(on), goal=spec.goal))
    return None if question is None else GenerationWork(question=question)


def _question(form: WorkForm, on: str) -> AskedOfModel:
    spec = form.spec()
    return AskedOfModel(model=spec["model"], workload=spec["workload"], goal=spec["goal"], **_place(on))


def _place(on: str) -> dict[str, str | None]:
    if on.startswith(CARD):
        return {"machine": None, "gpu": on.removeprefix(CARD)}
    return {"machine": on, "gpu": None}


def _waiting(request: HttpRequest, kind: FormKind, form: WorkForm) -> dict[str, Any]:
    """Since when the profile that the question needs has been waited for, and what takes longest of it."""
    spec = form.spec()
    model = kind.models(request).get(pk=spec["model"])
    if kind.kind == Kind.GENERATE:
        need = ProfileNeed(model=model, generates=True)
    else:
        goal = None if spec["goal"] is None else read_goal(spec["goal"])
        workload = read_workload(spec["workload"])
        compiled = () if goal is None else compiled_representations(workload, goal.pins, goal.may_use)
        sharing = 1 if goal is None else shared_number(goal.pins)
        need = ProfileNeed.of_training(model, workload, compiled=compiled, sharing=sharing)
    since = Profile.objects.filter(fingerprint=need.fingerprint).values_list("created_at", flat=True).first()
    return {"waiting_since": since, "waiting_for": describe_compiled_trace(need.compiled)}


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The plans of an answer as the address wants them."""

    points: tuple[plans.Point, ...]
    edit: EditForm | None
    """None where there is no plan to edit."""
    edited: list[str]
    """In words."""
    is_whole: bool


def _look(request: HttpRequest, work: Work, found: PlanAnswer, *, whole: bool) -> _Look:
    typed = {name: request.GET[name] for name in request.GET if name.startswith(f"{EDIT}-")}
    plan = found.chosen.plan if found.chosen is not None else work.read_edit(typed, prefix=EDIT)
    edit, edited = None, None
    if plan is not None:
        edit = EditForm(typed, plan=plan, decisions=work.decisions, prefix=EDIT)
        edited = _edited(work, plan, edit, whole=whole, is_chosen=found.chosen is not None)
    points = plans.list_points(
        found.chosen,
        baselines=found.baselines,
        frontier=found.frontier,
        yours=edited.priced if edited else None,
        findings=found.findings,
    )
    wanted = request.GET.getlist("with") or [point.key for point in points if point.sort == "baseline"][:1]
    return _Look(
        points=plans.choose_points(points, wanted),
        edit=edit,
        edited=plans.edited_words(edited.differences) if edited else [],
        is_whole=found.is_whole and (edited is None or edited.is_whole),
    )


def _edited(work: Work, plan: Any, edit: EditForm, *, whole: bool, is_chosen: bool) -> Edited | None:
    """is_chosen: whether the plan is what the edit begins with; else it is the edit itself."""
    if not edit.is_valid():
        return None
    change = edit.change()
    if change is None and is_chosen:
        return None
    try:
        return work.edit(plan, change or {}, whole=whole)
    except HeadroomError as error:
        edit.add_error(None, f"{error.message}. {error.hint}".strip())
        return None


def _described(request: HttpRequest, work: Work) -> dict[str, Any]:
    whole = "whole" in request.GET
    found = work.find(whole=whole)
    look = _look(request, work, found, whole=whole)
    points, compared = look.points, plans.compared_points(look.points)
    described = {
        "found": found,
        "look": look,
        "edit": look.edit,
        "edited": look.edited,
        "points": points,
        "compared": compared,
        "kept_beside": {
            "with": _pairs(request, without=("with",)),
            "try": _pairs(request, without=(f"{EDIT}-",)),
        },
        "rest_url": f"{reverse('plans')}?{_with(request, whole='yes')}",
        "since": timezone.now(),
        "knobs_url": f"{reverse('plans_knobs')}?{_with(request)}",
        "cards_url": f"{reverse('plans_cards')}?{_with(request)}",
    }
    if points:
        nearest = found.chosen or points[0].priced
        limits = limits_of(nearest.prediction, budget_bytes=found.budget_bytes)
        main, rest = plans.split_points(points)
        facts = plans.chart_facts(points, budget_bytes=found.budget_bytes, limits=limits)
        described |= {
            "main": main,
            "rest": rest,
            "limits": limits,
            "lines": [
                (point, plans.difference_lines(nearest, point.priced)) for point in compared if point.priced is not nearest
            ][:1],
            "categories": plans.categories_of(compared),
            "groups": plans.side_by_side(compared),
            "facts": facts,
            "picture": frontier_picture(facts),
            "steps": [
                (point, f"{reverse('plans_step')}?{_with(request, plan=point.key)}")
                for point in compared
                if point.priced.prediction.timeline
            ],
        }
    if found.chosen is not None:
        described["largest"] = largest_part(found.chosen.prediction.device_bytes_by_category)
    if found.nothing_fits is not None:
        described |= _nothing_fits(found.nothing_fits, on=request.GET.get("on", ""))
    return described


def _prefixed(fields: dict[str, str]) -> dict[str, str]:
    return {f"{EDIT}-{name}": text for name, text in fields.items()}


def _nothing_fits(error: NoFeasiblePlan, *, on: str) -> dict[str, Any]:
    suggestions = ways_out(error, on_card=on.startswith(CARD))
    return {"nothing_fits": error.message, "hint": error.hint, "pricing": {"suggestions": suggestions}}


def _pairs(request: HttpRequest, *, without: tuple[str, ...]) -> list[tuple[str, str]]:
    """The address's parameters but those that begin with any of these; how long an answer may take is no part of an address."""
    left_out = (*without, "whole")
    return [(name, text) for name in request.GET if not name.startswith(left_out) for text in request.GET.getlist(name)]


def _with(request: HttpRequest, *, drop: tuple[str, ...] = (), **changes: str) -> str:
    """This address with some parameters set anew."""
    kept = [(name, text) for name, text in _pairs(request, without=drop) if name not in changes]
    return urlencode([*kept, *changes.items()])
