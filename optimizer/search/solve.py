"""The solver: for every setting, how many blocks keep, recompute and offload so that the step is fastest within the
budget.

Method. Identical blocks differ only by position, so a plan is counts and an arrangement. With the number of offloaded
blocks fixed, each further block that keeps costs bytes and saves time: the best member of such a line is the last that
fits, found by interpolation and bisection over exact prices (the estimator's own, at every moment of the step). Lines
differ in the number of offloaded blocks; all are tried on shallow models, on deep ones a grid that narrows around the
best. A setting is dropped when keeping everything in it would be no faster than a plan already found, which is exact
because no choice is faster than keeping.

Assumes: along a line bytes do not fall and time does not rise. Where an estimator breaks this slightly, the plan found
still fits (its own price says so) but may miss the optimum by a block. *Not modelled*: blocks of different kinds; they
are treated as alike.
"""

from collections.abc import Iterator

from optimizer.search.arrangements import Arrangement, Line, PerBlock, keep_everything
from optimizer.search.pricebook import PriceBook
from optimizer.search.problem import Setting

MAX_BLOCKS_FOR_ALL_LINES = 12
"""Up to this depth every number of offloaded blocks is tried."""
NUM_GRID_CELLS = 4
"""Beyond it, offloaded counts start this many cells apart."""
HOPELESS_RATIO = 1.25
"""A setting whose lightest pure plan is this far over the budget is not searched for a mixture that fits."""


def solve(book: PriceBook) -> None:
    """Price what is worth pricing; the answer is ``book.best``."""
    settings = sorted(_hopeful_settings(book), key=lambda setting: _keep_all_ms(book, setting))
    for setting in settings:
        for line in _plain_lines(book):
            _search_line(book, setting, line)
    for setting in settings:
        if _keep_all_ms(book, setting) < book.best_step_ms and not book.is_full:
            for arrangement in _arrangements(book):
                _search_lines(book, setting, arrangement)
    _polish(book)


def price_lightest(book: PriceBook, setting: Setting) -> int:
    """Price the plans of a setting that could have its least peak; the least upper end found."""
    highs = [
        book.price(setting, line.per_block(num_keep)).device_peak_high_bytes
        for line in _light_lines(book)
        for num_keep in (0, 1)
        if num_keep <= line.max_keep
    ]
    return min([*highs, book.price(setting, keep_everything(book.problem.num_blocks)).device_peak_high_bytes])


def _hopeful_settings(book: PriceBook) -> Iterator[Setting]:
    """Settings in which some plan may fit.

    Among those that accumulate a larger micro-batch never needs less, so the first hopeless one ends its representation.
    The whole batch at once is looked at on its own: its gradients grow only while activations go.
    """
    hopeless: set[tuple[str, int]] = set()
    limit_bytes = book.problem.goal.device_budget_bytes * HOPELESS_RATIO
    for setting in book.problem.settings():
        representation = (setting.dtype, setting.bits)
        if setting.accumulation_steps > 1 and representation in hopeless:
            continue
        if min(_pure_peaks(book, setting)) > limit_bytes:
            hopeless.add(representation)
        else:
            yield setting


def _pure_peaks(book: PriceBook, setting: Setting) -> list[int]:
    return [
        book.price(setting, (choice,) * book.problem.num_blocks).device_peak_high_bytes
        for choice in book.problem.choices
    ]


def _keep_all_ms(book: PriceBook, setting: Setting) -> float:
    """A lower bound on every plan of the setting."""
    return book.price(setting, keep_everything(book.problem.num_blocks)).step_ms


def _plain_lines(book: PriceBook) -> list[Line]:
    """Recompute against keep, where that is allowed."""
    allowed = book.problem.allows("recompute")
    return [Line(num_blocks=book.problem.num_blocks, arrangement="first", num_offload=0)] if allowed else []


def _arrangements(book: PriceBook) -> tuple[Arrangement, ...]:
    return ("first", "spread") if book.problem.allows("offload") else ()


def _search_lines(book: PriceBook, setting: Setting, arrangement: Arrangement) -> None:
    depth = book.problem.num_blocks
    _search_line(book, setting, Line(num_blocks=depth, arrangement=arrangement, num_offload=None))
    if not book.problem.allows("recompute"):
        return
    if depth <= MAX_BLOCKS_FOR_ALL_LINES:
        for count in range(1, depth + 1):
            _search_line(book, setting, Line(num_blocks=depth, arrangement=arrangement, num_offload=count))
        return
    _narrow(book, setting, arrangement)


def _narrow(book: PriceBook, setting: Setting, arrangement: Arrangement) -> None:
    """Grid over the number of offloaded blocks, then halve the cell around the best until it is one block wide."""
    depth = book.problem.num_blocks

    def best_ms(count: int) -> float:
        return _search_line(book, setting, Line(num_blocks=depth, arrangement=arrangement, num_offload=count))

    cell = -(-depth // NUM_GRID_CELLS)
    times = {count: best_ms(count) for count in offload_grid(depth)}
    while cell > 1:
        cell = -(-cell // 2)
        centre = min(times, key=lambda count: (times[count], count))
        for count in (centre - cell, centre + cell):
            if 0 <= count <= depth and count not in times:
                times[count] = best_ms(count)


def offload_grid(num_blocks: int) -> list[int]:
    """Numbers of offloaded blocks from none to all, a cell apart."""
    cell = -(-num_blocks // NUM_GRID_CELLS)
    return sorted({*range(0, num_blocks, cell), num_blocks})


def _light_lines(book: PriceBook) -> Iterator[Line]:
    depth = book.problem.num_blocks
    yield from _plain_lines(book)
    for arrangement in _arrangements(book):
        yield Line(num_blocks=depth, arrangement=arrangement, num_offload=None)
        if book.problem.allows("recompute"):
            for count in offload_grid(depth)[1:]:
                yield Line(num_blocks=depth, arrangement=arrangement, num_offload=count)


def _search_line(book: PriceBook, setting: Setting, line: Line) -> float:
    """Price the line's last member that fits; its step time, or infinity where none does or none could be best."""
    fastest = book.price(setting, line.per_block(line.max_keep))
    if fastest.step_ms > book.best_step_ms or book.is_full:
        return float("inf")
    num_keep = _last_that_fits(book, setting, line)
    return float("inf") if num_keep is None else _time_if_fits(book, setting, line.per_block(num_keep))


def _time_if_fits(book: PriceBook, setting: Setting, per_block: PerBlock) -> float:
    prediction = book.price(setting, per_block)
    return prediction.step_ms if book.problem.fits(prediction) else float("inf")


def _last_that_fits(book: PriceBook, setting: Setting, line: Line) -> int | None:
    """The most blocks that can keep. Host bytes only fall along a line, so they are looked at once, at the answer."""
    budget_bytes = book.problem.goal.device_budget_bytes

    def high_bytes(num_keep: int) -> int:
        return book.price(setting, line.per_block(num_keep)).device_peak_high_bytes

    high = line.max_keep
    if high_bytes(high) <= budget_bytes:
        return high
    low = next((keep for keep in (0, 1) if keep < high and high_bytes(keep) <= budget_bytes), None)
    if low is None:
        return None
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        if interpolate:
            share = (budget_bytes - high_bytes(low)) / (high_bytes(high) - high_bytes(low))
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        interpolate = not interpolate
        low, high = (middle, high) if high_bytes(middle) <= budget_bytes else (low, middle)
    return low


def _polish(book: PriceBook) -> None:
    """Change single blocks of the best plan while that makes it faster: catches what no line holds, such as one odd block."""
    improved = book.best is not None
    while improved and book.best is not None:
        plan, before = book.best
        setting = Setting(
            micro_batch_size=plan.batch.micro_batch_size,
            accumulation_steps=plan.batch.accumulation_steps,
            dtype=plan.weights.dtype,
            bits=plan.optimizer_state.bits,
        )
        for per_block in _neighbours(book, plan.activations.per_block):
            if book.is_full:
                return
            book.price(setting, per_block)
        improved = book.best_step_ms < before.step_ms


def _neighbours(book: PriceBook, per_block: PerBlock) -> Iterator[PerBlock]:
    """One block changed, first and last of each run only: blocks inside a run are alike."""
    for index, choice in enumerate(per_block):
        inside = 0 < index < len(per_block) - 1 and per_block[index - 1] == choice == per_block[index + 1]
        if inside:
            continue
        for other in book.problem.choices:
            if other != choice:
                yield (*per_block[:index], other, *per_block[index + 1 :])
