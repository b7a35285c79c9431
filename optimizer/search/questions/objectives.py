"""The most that fits: sequences at once, tokens in a sequence, blocks in a model. The answer is a plan and the limit that binds.

Each is found over ``search``: sizes grow until nothing fits, then the gap is halved. That what fits at one size fits at every
smaller one is assumed, as memory does; the plan at the answer is searched for and verified, so it holds in any case.
"""

from collections.abc import Callable
from dataclasses import replace
from math import lcm

from optimizer.base.errors import InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.profile.deeper import depth_period, with_depth
from optimizer.profile.profile import Profile
from optimizer.search.answer.smallest import smallest_found
from optimizer.search.check.pins import check_pins
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.questions.answers import Limit, ObjectiveAnswer, Pose, Unit, answer_with
from optimizer.search.questions.sizes import MAX_SEQUENCE_LENGTH, SEQUENCE_STEP
from optimizer.search.result import SearchResult
from optimizer.search.solver.pricebook import PriceBook
from optimizer.workload import TrainingWorkload

MAX_BATCH = 65_536
MAX_BLOCKS = 1_024


def answer_goal(pose: Pose, profile: Profile, workload: TrainingWorkload) -> ObjectiveAnswer:
    """The best plan for the goal of the problem that ``pose`` makes.

    Raises NoFeasiblePlan where not even the smallest size fits, InvalidWorkload for a pin on what is looked for, InvalidModel
    where a deeper model is asked for and the blocks do not repeat.
    """
    problem = pose(profile, workload)
    objective = problem.goal.objective
    if objective == "largest_batch":
        return _largest_batch(pose, profile, workload, num_devices=problem.layout.num_devices)
    if objective == "longest_sequence":
        return _longest_sequence(pose, profile, workload)
    if objective == "largest_model":
        return _largest_model(pose, profile, workload)
    return answer_with(problem, profile, search(problem))


def _largest_batch(
    pose: Pose, profile: Profile, workload: TrainingWorkload, *, num_devices: int
) -> ObjectiveAnswer:
    """The most sequences that each device runs at once."""

    def at(size: int) -> SearchProblem:
        resized = replace(workload, global_batch_size=size * num_devices)
        return replace(pose(profile, resized), micro_batch_size=size)

    pins = at(1).goal.pins.batch
    if pins.micro_batch_size is not None or pins.accumulation_steps is not None:
        raise InvalidWorkload(
            "goal.pins.batch is given; largest_batch looks for just that",
            field="goal.pins.batch",
            hint="Leave the pin out, or ask for the fastest step.",
        )
    largest, result, over = _find_most(at, 1, MAX_BATCH)
    limit = _limit("sequences", largest, result, over, at(1).goal.device_budget_bytes, "this program looks no further")
    return answer_with(at(largest), profile, result, limit=limit)


def _longest_sequence(pose: Pose, profile: Profile, workload: TrainingWorkload) -> ObjectiveAnswer:
    step = lcm(SEQUENCE_STEP, profile.sequence_multiple)
    highest = min(profile.max_sequence_length, MAX_SEQUENCE_LENGTH)
    if highest < step:
        step = highest

    def at(steps: int) -> SearchProblem:
        return pose(profile, replace(workload, sequence_length=steps * step))

    steps, result, over = _find_most(at, 1, highest // step)
    over = None if over is None else (over[0] * step, over[1])
    end = f"the model has positions for {profile.max_sequence_length:,}"
    limit = _limit("tokens", steps * step, result, over, at(1).goal.device_budget_bytes, end)
    return answer_with(at(steps), profile, result, limit=limit)


def _largest_model(pose: Pose, profile: Profile, workload: TrainingWorkload) -> ObjectiveAnswer:
    """A model of the given width with as many blocks as fit."""
    period = depth_period(profile)
    least = profile.num_blocks - (profile.num_blocks - 2 - period) // period * period

    def blocks(steps: int) -> int:
        return least + (steps - 1) * period

    def at(steps: int) -> SearchProblem:
        return pose(with_depth(profile, blocks(steps)), workload)

    steps, result, over = _find_most(at, 1, 1 + (MAX_BLOCKS - least) // period)
    over = None if over is None else (blocks(over[0]), over[1])
    budget_bytes = at(1).goal.device_budget_bytes
    limit = _limit("blocks", blocks(steps), result, over, budget_bytes, "this program looks no further")
    return answer_with(at(steps), with_depth(profile, blocks(steps)), result, limit=limit)


def _find_most(
    at: Callable[[int], SearchProblem], low: int, high: int
) -> tuple[int, SearchResult, tuple[int, int] | None]:
    """The largest size that fits with what is best there, and the next with the smallest peak found at it.

    Raises NoFeasiblePlan where the lowest does not fit.
    """
    check_pins(at(low))
    over: tuple[int, int] | None = None
    size = low
    while size <= high:
        needs_bytes = _bytes_too_many(at(size))
        if needs_bytes is not None:
            over = (size, needs_bytes)
            break
        low, size = size, high if size < high < 2 * size else 2 * size
    fits, ends = low, high + 1 if over is None else over[0]
    while ends - fits > 1:
        middle = (fits + ends) // 2
        needs_bytes = _bytes_too_many(at(middle))
        if needs_bytes is None:
            fits = middle
        else:
            ends, over = middle, (middle, needs_bytes)
    return _searched(at, fits, over)


def _searched(
    at: Callable[[int], SearchProblem], size: int, over: tuple[int, int] | None
) -> tuple[int, SearchResult, tuple[int, int] | None]:
    """The plan there; of a smaller size where what comes on top of its tensors has no room on the card."""
    found: SearchResult | None = None
    low, stride = size, 1
    while found is None:
        try:
            found = search(at(low))
        except NoFeasiblePlan as error:
            if low == 1:
                raise
            over = (low, int(error.fields["smallest_feasible_bytes"]))
            low, stride = max(1, low - stride), 2 * stride
    while over is not None and over[0] - low > 1 and over[0] <= size:
        middle = (low + over[0]) // 2
        try:
            found, low = search(at(middle)), middle
        except NoFeasiblePlan as error:
            over = (middle, int(error.fields["smallest_feasible_bytes"]))
    return low, found, over


def _bytes_too_many(problem: SearchProblem) -> int | None:
    """None where some plan fits; else the smallest peak that was found."""
    book = PriceBook(problem)
    smallest_bytes = smallest_found(book)
    return None if book.best is not None else smallest_bytes


def _limit(
    unit: Unit, largest: int, result: SearchResult, over: tuple[int, int] | None, budget_bytes: int, end: str
) -> Limit:
    peak_bytes = result.chosen.prediction.device_peak_high_bytes
    at_most = f"at {largest:,} {unit} the peak is up to {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}"
    if over is None:
        return Limit(
            unit=unit,
            largest=largest,
            peak_bytes=peak_bytes,
            budget_bytes=budget_bytes,
            next=None,
            next_peak_bytes=None,
            reason=f"{at_most}; memory does not end it: {end}",
        )
    return Limit(
        unit=unit,
        largest=largest,
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
        next=over[0],
        next_peak_bytes=over[1],
        reason=f"{at_most}; at {over[0]:,} nothing fits{_why(over[1], budget_bytes)}",
    )


def _why(smallest_bytes: int, budget_bytes: int) -> str:
    if smallest_bytes > budget_bytes:
        return f", the smallest peak is {format_bytes(smallest_bytes)}"
    return " beside what the process takes of the card besides tensors"
