"""The solver: for every setting, what its blocks do so that the step is fastest within the budgets.

Method. A base is a micro-batch and a representation; ``levers.py`` says what can be added to it outside the blocks. In each
such setting identical blocks differ only by position, so a plan is counts and an arrangement (``lines.py``). A share of the
state that leaves the device is chosen so that it is the least with which some plan fits. Last, the best plan is changed here
and there while that makes it faster (``polish.py``).

Pruning. A base, or a setting, is dropped when keeping everything in it would be no faster than a plan already found: no
choice of a block is faster than keeping, and no lever faster than none, but for what is measured at the first base. A home
of gradients, state and weights is dropped when its lightest plans are far over the budget, and with it the weaker homes
and, where gradients accumulate, the larger micro-batches.

Assumes: along a line bytes do not fall and time does not rise. Where an estimator breaks this slightly, the plan found
still fits (its own price says so) but may miss the optimum by a block. Blocks of different kinds are treated as alike until
the best setting is known (``search_by_kind``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from optimizer.plan.plan import Plan
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.exhaustive import price_all
from optimizer.search.solver.grid import has_free_fraction, with_chunks, with_prefetch
from optimizer.search.solver.guided import bound_guided, solve_guided
from optimizer.search.solver.levers import homes_of, is_weaker, largest_fraction, smallest_fraction, variants_of
from optimizer.search.solver.lines import (
    INFINITE_MS,
    MAX_BLOCKS_FOR_ALL_LINES,
    lightest_bytes,
    plain_lines,
    pure_blocks,
    pure_offload_lines,
    search_line,
    search_mixtures,
    with_compression,
)
from optimizer.search.solver.polish import polish
from optimizer.search.solver.pricebook import PriceBook

HOPELESS_RATIO = 1.25
"""A setting whose lightest pure plan is this far over the budget is not searched for a mixture that fits."""
MAX_MIXED_SETTINGS = 6
"""Settings, best first, in which every mixture of offloaded, rebuilt and kept blocks is looked at."""
_NEVER = 2**62


def solve(book: PriceBook, *, likely: Sequence[Plan] = (), polishes: bool = True) -> None:
    """Price what is worth pricing; the answer is ``book.best``. Of small problems everything is.

    likely: plans near which the best may be, of use for deep models. polishes: False leaves a deep model's best plan as it was
    found, without changing it here and there.
    """
    if price_all(book):
        return
    relax = None if book.problem.pinned_blocks is not None else book.problem.relax
    if relax is not None and book.problem.num_blocks > MAX_BLOCKS_FOR_ALL_LINES:
        is_worth = solve_guided(book, relax, likely=likely)
        if polishes:
            polish(book, is_worth=is_worth)
        return
    _Solver(book).solve()
    if relax is not None:
        bound_guided(book, relax)


@dataclass
class _Solver:
    """The state of one run of the solver, beside the prices."""

    book: PriceBook
    found_ms: dict[OuterPlan, float] = field(default_factory=dict)
    """By setting, the fastest of its plans that was found to fit."""
    hopeless: dict[OuterPlan, int] = field(default_factory=dict)
    """By home, from which micro-batch on nothing can fit where gradients accumulate."""

    def solve(self) -> None:
        bases = sorted(self.book.problem.settings(), key=self.book.keep_all_ms)
        gain = self._largest_gain(bases[0])
        for base in bases:
            if self._is_worth(gain * self.book.keep_all_ms(base)):
                self._search_base(base)
        self._search_offload()
        polish(self.book)

    def _is_worth(self, bound_ms: float) -> bool:
        return bound_ms < self.book.best_step_ms and not self.book.is_full

    def _largest_gain(self, base: OuterPlan) -> float:
        """The time of the lever that makes keeping everything fastest, as a share of none's: 1 where all levers cost time."""
        plain_ms = self.book.keep_all_ms(base)
        times = [self.book.keep_all_ms(variant) for variant in variants_of(self.book, base)]
        return min([plain_ms, *times]) / plain_ms if plain_ms > 0 else 1.0

    def _search_base(self, base: OuterPlan) -> None:
        dead: list[OuterPlan] = []
        hopeful: list[OuterPlan] = []
        for home in reversed(homes_of(self.book, base)):
            roomy = largest_fraction(self.book, home)
            if roomy is None or any(is_weaker(home, other) for other in dead):
                continue
            variants = self._hopeful_variants(roomy)
            hopeful.extend(variants)
            if not variants:
                dead.append(home)
        for setting in sorted(hopeful, key=self._order):
            if self._is_worth(self._bound_ms(setting)):
                self._search_setting(setting)

    def _order(self, setting: OuterPlan) -> tuple[float, float, str]:
        return self.found_ms.get(setting, INFINITE_MS), self._bound_ms(setting), repr(setting)

    def _bound_ms(self, setting: OuterPlan) -> float:
        """Try leaving all of the state on the device, where a share of it may stay."""
        if has_free_fraction(self.book.problem, setting):
            resident = replace(setting, state_place="device", state_fraction=1.0)
            if self.book.problem.permits_setting(resident):
                return min(self.book.keep_all_ms(resident), self.book.keep_all_ms(setting))
        return self.book.keep_all_ms(setting)

    def _hopeful_variants(self, home: OuterPlan) -> list[OuterPlan]:
        """Counts of chunks and of prefetched blocks in which something may fit. The largest count, and no prefetch, are looked
        at only where the others do not surely fit."""
        if self._is_known_hopeless(home):
            return []
        *usual, last = with_chunks(self.book.problem, home)
        found = [setting for chunked in usual or [last] for setting in self._hopeful_prefetch(chunked)]
        limit_bytes = self.book.problem.goal.device_budget_bytes
        if usual and all(lightest_bytes(self.book, setting) > limit_bytes for setting in found):
            found.extend(self._hopeful_prefetch(last))
        if not found and home.accumulation_steps > 1:
            key = _without_batch(home)
            self.hopeless[key] = min(self.hopeless.get(key, _NEVER), home.micro_batch_size)
        return found

    def _is_known_hopeless(self, home: OuterPlan) -> bool:
        """A larger micro-batch never needs less; but the whole batch at once may, whose gradients grow while activations go."""
        return home.accumulation_steps > 1 and home.micro_batch_size >= self.hopeless.get(_without_batch(home), _NEVER)

    def _hopeful_prefetch(self, setting: OuterPlan) -> list[OuterPlan]:
        limit_bytes = self.book.problem.goal.device_budget_bytes
        found = []
        for fetching in with_prefetch(self.book.problem, setting):
            lightest = lightest_bytes(self.book, fetching)
            if lightest <= limit_bytes * HOPELESS_RATIO:
                found.append(fetching)
            if lightest <= limit_bytes and fetching.prefetch <= 1:
                break
        return found

    def _search_setting(self, setting: OuterPlan) -> None:
        self._search_plain(setting)
        if has_free_fraction(self.book.problem, setting):
            for fitted in self._fitted_fractions(setting):
                if fitted not in self.found_ms:
                    self._search_plain(fitted)

    def _search_plain(self, setting: OuterPlan) -> None:
        pinned = self.book.problem.pinned_blocks
        if pinned is not None:
            found = [self.book.price(packed, pinned) for packed in with_compression(self.book, setting)]
            fitting = [prediction.step_ms for prediction in found if self.book.problem.fits(prediction)]
            self.found_ms[setting] = min(fitting, default=INFINITE_MS)
            return
        times = [search_line(self.book, setting, line) for line in plain_lines(self.book)]
        self.found_ms[setting] = min(times, default=INFINITE_MS)

    def _fitted_fractions(self, setting: OuterPlan) -> Iterator[OuterPlan]:
        """The share of the state and the blocks trade bytes for time at rates that hardly change, so in the best plan one of
        the two is at an end of its range: as little state as fits beside blocks that all do the same."""
        for per_block in pure_blocks(self.book):
            fitted = smallest_fraction(self.book, setting, per_block)
            if fitted is not None:
                yield fitted

    def _search_offload(self) -> None:
        """Lines with offloaded blocks: in every setting those that only keep beside them, in the best all mixtures."""
        if not self.book.problem.offloading or self.book.problem.pinned_blocks:
            return
        for setting in sorted(self.found_ms, key=self._order):
            if self._is_worth(self._bound_ms(setting)):
                self._search_pure_offload(setting)
        for setting in sorted(self.found_ms, key=self._order)[:MAX_MIXED_SETTINGS]:
            if self._is_worth(self._bound_ms(setting)):
                search_mixtures(self.book, setting)

    def _search_pure_offload(self, setting: OuterPlan) -> None:
        for compressed in with_compression(self.book, setting):
            times = [search_line(self.book, compressed, line) for line in pure_offload_lines(self.book, compressed)]
            self.found_ms[compressed] = min([self.found_ms.get(compressed, INFINITE_MS), *times])


def _without_batch(home: OuterPlan) -> OuterPlan:
    return replace(home, micro_batch_size=1, accumulation_steps=1)
