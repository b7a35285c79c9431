"""Searches for a training job's plan, remembered: what is asked again within minutes, or under another budget, need not wait.

Kept in this process. What is kept is what a new search would find, because a search is a function of its question. Where a run is
long enough to repay compiling its blocks, a second search prices them by a profile of their own (``compiled.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from optimizer.api.compiled_needs import compiled_representations
from optimizer.api.shared_needs import shared_number
from optimizer.api.try_compiled import try_compiled
from optimizer.base.errors import HeadroomError, InvalidInput, NoFeasiblePlan
from optimizer.base.recent import remembered
from optimizer.estimate.job.shortfalls import Shortfall, known_shortfalls
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.hardware.rental import read_prices
from optimizer.plan.devices.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.explain.training import explain_plan
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.search.answer.baselines import Baseline, list_baselines, price_baselines
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.alternatives import add_ways_out
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.layouts import answer_layouts
from optimizer.search.questions.objectives import answer_goal
from optimizer.search.questions.price_cache import PriceMemory, detailed_part, name_work, priced_part
from optimizer.search.questions.uneven.answer import answer_uneven, explain_ranks
from optimizer.search.questions.uneven.spared import with_less_elsewhere
from optimizer.search.training import training_problem, with_shortfalls
from optimizer.workload import TrainingWorkload
from webapp.accounts.turns import take_turn
from webapp.catalog.models import Model, Profile
from webapp.jobs.specs.training import JobSpec
from webapp.planning.search.compiled import BeingTraced, Traced, check_known_to_compile, compiled_profile
from webapp.planning.search.profiles import ProfileNeed, known_profile_of, read_profile
from webapp.planning.search.question import FoundPlan, FoundPlans, NothingFits, Place, Question

MAX_ANSWERS = 6
MAX_MEMORIES = 2
"""Pairs of a model and a machine whose prices are kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingQuestion(Question[ModelProfile, TrainingWorkload, Goal]):
    """The question which plan trains the model."""

    shortfalls: tuple[Shortfall, ...] = field(default=(), compare=False)
    """Shown by attempts at this work on this machine; of the place's calibration."""
    known_profile: Callable[[TrainingWorkload], ModelProfile | None] = field(default=lambda _: None, compare=False)
    """The model's profile with other adapters, where it was made already; for what would fit where nothing does."""
    trace_compiled: Callable[[Sequence[str]], Traced] | None = field(default=None, compare=False)
    """The model's profile with blocks compiled in these forms of the weights (``compiled_profile``); None: none is offered."""

    @property
    def key(self) -> tuple[object, ...]:
        """Neither the name of a schedule nor how many steps there are is among it."""
        return self.profile_sha256, self.place.sha256, detailed_part(self.workload), self.goal

    @property
    def is_answered(self) -> bool:
        return _search.at_hand(self) is not None

    def find_plans(self) -> FoundPlans:
        try:
            found = find_offered(self)
        except NoFeasiblePlan as error:
            by_hand = [] if self.place.machine.others else _explained(self, price_baselines(problem_of(self)))
            return FoundPlans(chosen=None, by_hand=by_hand, nothing_fits=error)
        result = found.answer.result
        chosen = FoundPlan(
            priced=result.chosen,
            explanation=[*result.explanation, *(option.sentence for option in found.answer.layouts)],
            profile_sha256=found.priced_by.profile_sha256,
        )
        return FoundPlans(
            chosen=chosen, by_hand=_explained(self, _without_twins(found.plain)), awaits_compiled=found.awaits_compiled
        )

    def find_by_hand(self, *, taken: Plan | None) -> PricedPlan | None:
        if self.place.machine.others:
            return None  # whose devices it would take is what the search is for
        problem = problem_of(self, taken)
        plans = [(label, _plan_of(baseline, problem)) for label, baseline in list_baselines(problem).items()]
        if taken is not None and _suits(problem, taken):
            plans.append(("chosen before", taken))
        priced = [
            problem.priced(label, plan, problem.price(plan), in_detail=False) for label, plan in plans if problem.permits(plan)
        ]
        fitting = [found for found in priced if found.verdict == "fits"]
        return min(fitting, key=lambda found: found.prediction.step_ms, default=None)

    def that_prices(self, *plans: Plan) -> "TrainingQuestion":
        """The question with a profile of what these plans run; itself unless one of them has compiled blocks that no goal pins.

        Raises BeingTraced where no such profile is there yet, and ProfileFailed.
        """
        forms = {form: None for plan in plans for form in compiled_representations(self.workload, Pins(), _anything, ran=plan)}
        if not forms or self.goal.pins.kernels.blocks == "compiled" or self.trace_compiled is None:
            return self
        return self._traced(tuple(forms))

    def with_compiled(self, goal: Goal) -> "TrainingQuestion":
        """The question whether blocks should run compiled. goal: pins that they do.

        Raises NotKnownToCompile, BeingTraced and ProfileFailed.
        """
        check_known_to_compile(self.place.machine)
        return replace(self._traced(compiled_representations(self.workload, goal.pins, goal.may_use)), goal=goal)

    def _traced(self, forms: Sequence[str]) -> "TrainingQuestion":
        if self.trace_compiled is None:
            raise BeingTraced("compiled blocks are not traced for this question")
        traced = self.trace_compiled(forms)
        return replace(
            self,
            profile=traced.profile,
            profile_sha256=traced.sha256,
            shortfalls=known_shortfalls(self.place.calibration, name_work(traced.fingerprint, self.workload)),
        )


@dataclass(frozen=True, kw_only=True)
class AskedTraining:
    """Training, as it was read."""

    model: Model
    workload: TrainingWorkload
    goal: Goal

    @property
    def need(self) -> ProfileNeed:
        compiled = compiled_representations(self.workload, self.goal.pins, self.goal.may_use)
        sharing = shared_number(self.goal.pins)
        return ProfileNeed.of_training(self.model, self.workload, compiled=compiled, sharing=sharing)

    def complete(self, profile: Profile, places: Sequence[Place]) -> list[TrainingQuestion]:
        return [
            TrainingQuestion(
                model_name=self.model.name,
                profile=read_profile(profile.pk, profile.document_sha256),
                profile_sha256=profile.document_sha256,
                workload=self.workload,
                goal=replace(self.goal, num_devices=min(self.goal.num_devices, place.machine.total_devices)),
                place=place,
                shortfalls=known_shortfalls(place.calibration, name_work(profile.pk, self.workload)),
                known_profile=partial(known_profile_of, self.model),
                trace_compiled=partial(compiled_profile, self.model, self.workload),
            )
            for place in places
        ]


def asked_by_training(spec: JobSpec) -> AskedTraining:
    return AskedTraining(model=spec.model, workload=spec.workload, goal=spec.goal)


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A question's best answer, and how it came about."""

    answer: ObjectiveAnswer
    plain: ObjectiveAnswer
    """The best without compiled blocks, unless the goal pins them."""
    priced_by: TrainingQuestion
    """The question whose profile the answer was priced with."""
    awaits_compiled: bool = False
    """Compiled blocks may be better; a worker traces them now."""


def find_answer(question: TrainingQuestion) -> ObjectiveAnswer:
    """The best plan. Raises NoFeasiblePlan with what would fit."""
    return find_offered(question).answer


def find_offered(question: TrainingQuestion) -> Offered:
    """The best plan, with compiled blocks where the run is long enough to repay them and they were traced already.

    Where they were not, a worker is asked to, and the best plan without is the answer. Raises NoFeasiblePlan with what would fit.
    """
    plain, priced_by, awaits = _answer(question), [question], []

    def answer_compiled(goal: Goal) -> ObjectiveAnswer:
        try:
            priced_by.append(question.with_compiled(goal))
        except BeingTraced:
            awaits.append(True)
            raise
        return _answer(priced_by[-1])

    found = plain
    if question.trace_compiled is not None:
        found = try_compiled(
            plain, answer_compiled, profile=question.profile, goal=question.goal, machine=question.place.machine
        )
    is_compiled = found.result.chosen.plan.kernels.blocks == "compiled"
    return Offered(
        answer=found, plain=plain, priced_by=priced_by[-1] if is_compiled else question, awaits_compiled=bool(awaits)
    )


def _answer(question: TrainingQuestion) -> ObjectiveAnswer:
    found = _search.at_hand(question)
    if found is None:
        with take_turn():
            found = _search(question)
    if isinstance(found, NothingFits):
        raise found.error()
    return found.for_run(question.workload)


def problem_of(question: TrainingQuestion, *plans: Plan | None) -> SearchProblem:
    """For prices of single plans of one layout, the first's; from memory where a search has asked for them.

    plans: what is to be priced, where it may have compiled blocks. Raises BeingTraced where those have no profile yet, and
    InvalidInput where the machine has devices of several kinds: such a plan is found by a search of its own.
    """
    if (machine := question.place.machine).others:
        names = ", ".join(kind.device.name for kind in machine.kinds)
        raise InvalidInput(
            f"single decisions cannot be tried on {machine.name}, which has devices of several kinds ({names})",
            field="machine",
            value=machine.name,
            allowed="a machine whose devices are all alike",
            hint="Hold decisions with goal.pins and plan again.",
        )
    known = [plan for plan in plans if plan is not None]
    question = question.that_prices(*known)
    layout = known[0].layout if known else ONE_DEVICE
    return _pose(question, question.profile, question.workload, layout=layout)


@remembered(most=MAX_ANSWERS, key=lambda question: question.key)
def _search(question: TrainingQuestion) -> ObjectiveAnswer | NothingFits:
    pose = partial(_pose, question)

    def obtain(workload: TrainingWorkload, goal: Goal) -> ModelProfile | None:
        traced = (workload.adapter, workload.is_packed, workload.objective)
        asked = question.workload
        is_same = traced == (asked.adapter, asked.is_packed, asked.objective)
        return question.profile if is_same else question.known_profile(workload)

    try:
        if question.place.machine.others:
            return answer_uneven(
                question.profile,
                question.workload,
                with_less_elsewhere(question.goal, question.place.machine, [(question.goal.num_devices, question.shortfalls)]),
                machine=question.place.machine,
                make_problem=training_problem,
                calibration=question.place.calibration,
                shortfalls=question.shortfalls,
            )
        if question.goal.num_devices > 1:
            return answer_layouts(
                lambda layout: partial(pose, layout=layout),
                question.profile,
                question.workload,
                question.goal,
                answer_one=answer_goal,
                num_within=question.place.machine.num_within,
            )
        return answer_goal(pose, question.profile, question.workload)
    except NoFeasiblePlan as error:
        if question.place.machine.others:
            return NothingFits.of(error)
        add_ways_out(
            error,
            pose,
            obtain=obtain,
            workload=question.workload,
            goal=question.goal,
            machine=question.place.machine,
            prices=read_prices(),
        )
        return NothingFits.of(error)


def _pose(
    question: TrainingQuestion,
    profile: ModelProfile,
    workload: TrainingWorkload,
    goal: Goal | None = None,
    machine: MachineSpec | None = None,
    layout: DeviceLayout = ONE_DEVICE,
) -> SearchProblem:
    """The question's problem, or one beside it; with prices from memory where model and machine are the question's own."""
    place = question.place
    problem = training_problem(
        profile,
        workload=workload,
        goal=goal or question.goal,
        machine=machine or place.machine,
        calibration=place.calibration,
        layout=layout,
    )
    problem = replace(problem, names_ways=False)
    is_here = profile is question.profile and machine in (None, place.machine)
    if not is_here:
        return problem
    shortfalls = question.shortfalls if priced_part(workload) == priced_part(question.workload) else ()
    return with_shortfalls(_memory(question).bind(problem), profile, shortfalls, machine=place.machine)


@remembered(most=MAX_MEMORIES, key=lambda question: (question.profile_sha256, question.place.sha256))
def _memory(question: TrainingQuestion) -> PriceMemory:
    return PriceMemory()


def _without_twins(answer: ObjectiveAnswer) -> dict[str, PricedPlan]:
    """The baselines, without setups of several devices that are the same plan as one before."""
    setups, seen, found = {setup.label for setup in answer.setups}, set[Plan](), dict[str, PricedPlan]()
    for label, priced in answer.result.baselines.items():
        if label not in setups or priced.plan not in seen:
            found[label] = priced
        seen.add(priced.plan)
    return found


def _explained(question: TrainingQuestion, baselines: Mapping[str, PricedPlan]) -> list[FoundPlan]:
    plain = baselines["keep_all"].prediction if "keep_all" in baselines else None

    def explain(label: str, priced: PricedPlan) -> list[str]:
        if priced.plan.layout.ranks:
            return [*explain_ranks(priced.plan, priced.prediction)]
        return explain_plan(priced.plan, prediction=priced.prediction, baseline=None if label == "keep_all" else plain)

    return [
        FoundPlan(priced=priced, explanation=explain(label, priced), profile_sha256=question.profile_sha256)
        for label, priced in baselines.items()
    ]


def _plan_of(baseline: Baseline, problem: SearchProblem) -> Plan:
    setting, per_block = baseline(problem)
    return setting.plan(per_block)


def _anything(_: Technique) -> bool:
    return True


def _suits(problem: SearchProblem, plan: Plan) -> bool:
    try:
        problem.check(plan)
    except HeadroomError:
        return False
    return True
