"""The solver where settings can be bounded without pricing them: the most promising first, until none can hold a faster plan.

In a node the share of the state that leaves is the one at which the bound is least; only those lines of plans are priced whose
own bound is under the best plan found, and of mixtures those around the counts that are best in the sums a bound is made of.

Bounds promise most where blocks may move to the host, and hold least there, so a search may spend its prices on promises. For
that reason plans whose blocks stay come first, whose bounds are near what they cost: few prices find nearly the best of them, and
much that is only promised is then under no bound any more. After them the best node of each base has its turn before the second
of any. A search that begins near known plans does without the first: to bound all bases takes longer than to price what they
promise, and those plans have what an earlier search found so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from optimizer.estimate.bounds.lower_bounds import Form
from optimizer.plan.plan import Plan
from optimizer.search.problem import OuterPlan, Relax
from optimizer.search.solver.grid import (
    PREFETCHES,
    fraction_steps,
    has_free_fraction,
)
from optimizer.search.solver.levers import largest_fraction, smallest_fraction
from optimizer.search.solver.lines import (
    all_blocks,
    ladders,
    mixtures,
    plain_lines,
    pure_choices,
    pure_offload_lines,
    search_around,
    search_line,
)
from optimizer.search.solver.nodes import Node, Nodes
from optimizer.search.solver.pricebook import PriceBook

MIN_GAIN = 1e-3
"""The gain that a node or a line must promise, as a share."""
MAX_PLAIN_PRICES = 160
"""Prices for plans whose blocks move nothing, beside those that a search has."""
_KEEP: Form = ("keep", "none")


def solve_guided(book: PriceBook, relax: Relax, *, likely: Sequence[Plan] = ()) -> Callable[[OuterPlan], bool]:
    """Price what is worth pricing; the answer is ``book.best``, what it can be behind is ``book.floor_ms``.

    likely: plans that are priced first, and in whose nodes others are looked for first. Returns whether a setting may still hold
    a faster plan, for whoever polishes the best.
    """
    nodes = Nodes(book, relax)
    settings = {plan: OuterPlan.of(plan) for plan in likely if plan.layout == book.problem.layout}
    for plan, setting in settings.items():
        book.price(setting, plan.activations.per_block)
    for node in nodes.holding(settings.values()):
        if _is_worth(book, node.bound_ms):
            _search_node(book, node)
    if not settings:
        _search_plain_nodes(book, nodes)
    for node in turns(book, nodes):
        if _is_worth(book, node.bound_ms):
            _search_node(book, node)
    book.floor_ms = nodes.floor_ms
    return lambda setting: _is_worth(book, nodes.least_ms(setting))


def bound_guided(book: PriceBook, relax: Relax) -> None:
    """Only ``book.floor_ms``, of plans that were found otherwise."""
    nodes = Nodes(book, relax)
    for node in nodes.in_order():
        if node.bound_ms >= book.best_step_ms:
            break
    book.floor_ms = nodes.floor_ms


def _is_worth(book: PriceBook, bound_ms: float) -> bool:
    """Report whether plans of such a bound are worth a price."""
    return bound_ms * (1 + MIN_GAIN) < book.best_step_ms and not book.is_full


def turns(book: PriceBook, nodes: Nodes) -> Iterator[Node]:
    """The most promising node of each base, then all others, as long as they promise more than was found."""
    bases: set[OuterPlan] = set()
    others: list[Node] = []
    for node in nodes.in_order():
        if not _is_worth(book, node.bound_ms):
            break
        if node.setting.base in bases:
            others.append(node)
        else:
            bases.add(node.setting.base)
            yield node
    yield from others


def _search_plain_nodes(book: PriceBook, nodes: Nodes) -> None:
    """Price plans whose blocks keep or rebuild what they need, in the nodes that promise most to such. These prices come beside
    those that a search has.
    """
    plain = [form for form in book.problem.forms if form[0] not in book.problem.offloading]
    if not plain or len(plain) == len(book.problem.forms):
        return
    with book.more_prices(MAX_PLAIN_PRICES):
        for bound_ms, node in nodes.in_order_with(*plain):
            if not _is_worth(book, bound_ms):
                break
            for setting in _settings_of(book, node):
                _search_plain(book, node, setting)


def _search_node(book: PriceBook, node: Node) -> None:
    for setting in _settings_of(book, node):
        _search_setting(book, node, setting)


def _settings_of(book: PriceBook, node: Node) -> Iterator[OuterPlan]:
    setting = node.setting
    if has_free_fraction(book.problem, setting):
        roomy = largest_fraction(book, setting)
        if roomy is not None:
            steps = fraction_steps(book.problem.num_blocks)
            most = round(roomy.state_fraction * steps)
            yield replace(roomy, state_fraction=node.best_share(steps, most) / steps)
    elif not setting.brings_weights or "prefetch" in book.problem.pinned_levers:
        yield setting
    else:
        yield from (replace(setting, prefetch=number) for number in PREFETCHES)


def _search_setting(book: PriceBook, node: Node, setting: OuterPlan) -> None:
    _search_plain(book, node, setting)
    for compress in dict.fromkeys(packing for choice, packing in book.problem.forms if choice in book.problem.offloading):
        _search_offload(book, node, replace(setting, compress=compress))
    if has_free_fraction(book.problem, setting):
        for choice in pure_choices(book):
            if _is_worth(book, node.bound_with((choice, "none"))):
                roomy = largest_fraction(book, replace(setting, state_fraction=1.0))
                if roomy is not None:
                    smallest_fraction(book, roomy, all_blocks(book, choice))


def _search_plain(book: PriceBook, node: Node, setting: OuterPlan) -> None:
    if not ladders(book):
        book.price(setting, all_blocks(book, "keep"))
    for steps, line in zip(ladders(book), plain_lines(book), strict=True):
        if _is_worth(book, node.bound_with(*((choice, "none") for choice in steps))):
            search_line(book, setting, line)


def _search_offload(book: PriceBook, node: Node, setting: OuterPlan) -> None:
    moved: list[Form] = [(choice, setting.compress) for choice in book.problem.offloading]
    if _is_worth(book, node.bound_with(_KEEP, *moved)):
        for line in pure_offload_lines(book, setting):
            search_line(book, setting, line)
    for steps in ladders(book)[:1]:
        kept: list[Form] = [(choice, "none") for choice in steps]
        if not _is_worth(book, node.bound_with(*kept, *moved)):
            continue
        for line in mixtures(book, setting):
            counts = node.best_counts(setting, (kept[0], kept[-1], (line.offload, setting.compress)))
            if counts is not None and counts[1] and counts[0]:
                search_around(book, setting, line, num_offload=counts[1])
