"""``training_problem``: the problem of a training plan with the estimator bound as its price. Torch-free."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from optimizer.estimate.bounds.lower_bounds import Form, Relaxation
from optimizer.estimate.bounds.relaxation import least_compute_ms, least_exchange_ms, list_kinds, relax
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.job.shortfalls import Shortfall, raise_prediction, shortfall_on
from optimizer.estimate.job.stages import list_stages, most_file_bytes
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.ranks import RankPart, find_part, find_stage_parts, list_machines
from optimizer.estimate.step.setting import lay_out
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.calibration import calibrated_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import count_sharing
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.arrangements import keep_everything
from optimizer.search.budgeted import Elsewhere, budgets_elsewhere, list_representations, list_unavailable
from optimizer.search.check.ledger import audit_plan
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.rank_pricer import RankPricer
from optimizer.workload import TrainingWorkload


def training_problem(
    profile: Profile,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
    layout: DeviceLayout = ONE_DEVICE,
) -> SearchProblem:
    """The problem with the estimator bound as its price; for callers that want the baselines alone.

    layout: the devices of every plan; ranks that differ are asked for as equal ones (``questions/uneven/``), but where the
    model is cut. Raises InvalidPlan for more than the machine has, InvalidWorkload where the batch cannot be dealt out to them.
    """

    def price(plan: Plan) -> Prediction:
        return estimate_training(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)

    def detail(plan: Plan, prediction: Prediction) -> Prediction:
        return add_memory(prediction, profile, plan=plan, workload=workload, machine=machine)

    layout = layout if layout.is_cut else layout.without_ranks
    profile = profile.of_layout(layout)
    calibrated = calibrated_machine(machine, calibration)
    parts = find_stage_parts(workload, calibrated, layout) if layout.is_cut else (find_part(workload, calibrated, layout),)
    # The one whose host has the least room.
    part = min(parts, key=lambda each: each.machine.host_memory_bytes)
    machines = list_machines(machine, layout) if layout.ranks else (machine,)

    def audit(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
        return audit_plan(profile, plan=plan, prediction=prediction, workload=workload, machine=calibrated)

    return SearchProblem(
        num_blocks=profile.num_blocks,
        workload=part.workload,
        layout=layout,
        goal=goal,
        **budgets_of_rank(goal, part.machine, num_ranks=layout.num_devices),
        price=price,
        detail=detail,
        num_sharing=count_sharing(machine, num_ranks=layout.num_devices),
        audit=audit,
        file_bytes=partial(most_file_bytes, profile, workload=workload, machine=machine),
        relax=None if layout.is_cut else _Relax(profile=profile, part=part),
        rank_prices=_make_rank_pricer(profile, parts, machines) if layout.is_cut else None,
        unavailable=frozenset().union(*map(list_unavailable, machines)),
        representations=frozenset.intersection(*(list_representations(profile.regimes, each) for each in machines)),
        has_sparse_gradients=profile.has_sparse_gradients,
        has_plain_head=profile.has_plain_head,
        clamps_fp16=profile.clamps_fp16,
    )


def budgets_of_rank(goal: Goal, machine: Machine, *, num_ranks: int) -> Elsewhere:
    """A rank's budgets of host, disk and remote store; a goal's are of all ranks together. machine: the rank's part."""
    budgets = (goal.host_budget_bytes, goal.disk_budget_bytes)
    host_bytes, disk_bytes = (None if size is None else size // num_ranks for size in budgets)
    return budgets_elsewhere(machine, host_bytes=host_bytes, disk_bytes=disk_bytes)


def _make_rank_pricer(profile: Profile, parts: tuple[RankPart, ...], machines: Sequence[Machine]) -> RankPricer:
    """machines: one for all, or as if all stages were on the device of each."""
    memory_bytes = tuple(each.device.memory_bytes for each in machines) if len(machines) > 1 else ()
    return RankPricer(profile=profile, parts=parts, memory_bytes=memory_bytes)


def with_shortfalls(
    problem: SearchProblem, profile: Profile, shortfalls: Sequence[Shortfall], *, machine: Machine
) -> SearchProblem:
    """The problem, of this profile and machine, with room for what attempts have shown to be predicted too low: each price of
    the device is raised by it, and elsewhere as much is left free.
    """
    if not shortfalls:
        return problem

    def price(plan: Plan) -> Prediction:
        found = problem.price(plan)
        workload = problem.whole_workload
        laid = lay_out(profile, plan=plan, workload=workload, machine=machine)
        stages = list_stages(found, profile, laid, plan=plan, workload=workload, machine=machine)
        return raise_prediction(found, stages, shortfalls)

    return replace(
        problem,
        price=price,
        host_budget_bytes=max(0, problem.host_budget_bytes - shortfall_on("host", shortfalls)),
        disk_budget_bytes=max(0, problem.disk_budget_bytes - shortfall_on("disk", shortfalls)),
    )


@dataclass(frozen=True, kw_only=True)
class _Relax:
    """The estimator's lower bounds, as the solver asks for them."""

    profile: Profile
    part: RankPart

    _known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Other budgets ask for the same."""

    def base_ms(self, base: OuterPlan) -> float:
        key = ("base", base)
        if key not in self._known:
            waits_ms, lane_ms = self.exchange_ms(base)
            self._known[key] = max(self.compute_ms(base) + waits_ms, lane_ms)
        found: float = self._known[key]
        return found

    def compute_ms(self, base: OuterPlan) -> float:
        plan, part = self._plan(base), self.part
        return least_compute_ms(self.profile, plan=plan, workload=part.workload, machine=part.machine)

    def exchange_ms(self, base: OuterPlan) -> tuple[float, float]:
        # Gradients are as many whatever the batch, unless they hold the rows of its tokens alone; sums of hidden states are not.
        is_by_size = self.profile.has_sparse_gradients or self.profile.sums is not None
        size = base.micro_batch_size if is_by_size else 1
        key = ("exchange", replace(base, micro_batch_size=size, accumulation_steps=1, bits=32))
        if key not in self._known:
            plan, part = self._plan(base), self.part
            self._known[key] = least_exchange_ms(
                self.profile, plan=plan, workload=part.workload, machine=part.machine, network=part.network
            )
        found: tuple[float, float] = self._known[key]
        return found

    def setting(
        self, setting: OuterPlan, *, forms: tuple[Form, ...], chunk_counts: tuple[int, ...], state_is_free: bool
    ) -> Relaxation:
        key = (setting, forms, chunk_counts, state_is_free)
        if key not in self._known:
            self._known[key] = relax(
                self.profile,
                plan=self._plan(setting),
                workload=self.part.workload,
                machine=self.part.machine,
                network=self.part.network,
                forms=forms,
                chunk_counts=chunk_counts,
                state_is_free=state_is_free,
            )
        found: Relaxation = self._known[key]
        return found

    def kinds(self, base: OuterPlan, *, choices: tuple[BlockChoice, ...]) -> tuple[int, ...]:
        return list_kinds(
            self.profile, plan=self._plan(base), workload=self.part.workload, machine=self.part.machine, choices=choices
        )

    def _plan(self, setting: OuterPlan) -> Plan:
        return setting.plan(keep_everything(self.profile.num_blocks))
