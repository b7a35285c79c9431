"""Turns a search's answer into the page Plans: every plan as a point, some of them side by side, and each one's step or pass.

Pure functions from the library's values to rows; reads no database and writes no HTML.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.base.units import format_bytes, format_duration
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction, StagePeak
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import generation_knobs, written_knobs
from webapp.pages.presentation import CategoryRow, batch_words, plan_rows, step_words
from webapp.pages.shown.limits import Limits
from webapp.pages.words.baselines import BASELINE_WORDS
from webapp.pages.words.plan_names import plan_name

if TYPE_CHECKING:  # numpy and scipy are loaded with the first price
    from optimizer.search.generation.problem import PricedGenerationPlan
    from optimizer.search.problem import PricedPlan

CHOSEN = "chosen"
YOURS = "yours"
AnyPriced: TypeAlias = "PricedPlan | PricedGenerationPlan"
MAX_COMPARED = 6
EMPTY: Final[Mapping[str, str]] = {}
LETTERS = "ABCDEF"
Sort = Literal["chosen", "baseline", "frontier", "yours"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan of the chart and of the table behind it."""

    key: str
    """Its name in the address: ``chosen``, a baseline's label, the fingerprint of a plan of the frontier, ``yours``."""
    label: str
    sort: Sort
    priced: AnyPriced
    is_compared: bool = False
    letter: str = ""
    twins: tuple[str, ...] = ()
    """Labels of standard setups that are the same plan."""
    finding: str = ""
    """Compares it with the chosen plan, or says why it does not fit, where that was put in words."""

    @property
    def name(self) -> str:
        """The plan in a few words."""
        return plan_name(self.priced.plan.to_json())

    @property
    def note(self) -> str:
        """Anything that people call it besides: recommended, one's own, a standard setup."""
        if self.sort == "frontier":
            return ""
        words = BASELINE_WORDS.get(self.key, self.label)
        if not self.twins or self.sort == "baseline":
            return words
        others = len(self.twins) - 1
        more = f" and {others} other standard setup{'' if others == 1 else 's'}" if others else ""
        return f"{words}, the same as {BASELINE_WORDS.get(self.twins[0], self.twins[0])}{more}"

    @property
    def words(self) -> str:
        """The note, else the plan in a few words."""
        return self.note or self.name

    @property
    def peak_bytes(self) -> int:
        """Upper end, which the budget is held to."""
        return self.priced.prediction.device_peak_high_bytes

    @property
    def time_ms(self) -> float:
        """Milliseconds of a step; of a generation those of all its prompts."""
        found = self.priced.prediction
        return found.step_ms if isinstance(found, Prediction) else found.total_s * 1000


def list_points(
    chosen: "AnyPriced | None",
    *,
    baselines: Mapping[str, AnyPriced],
    frontier: Iterable[AnyPriced],
    yours: "AnyPriced | None",
    findings: Mapping[str, str] = EMPTY,
) -> tuple[Point, ...]:
    """Each plan once: the chosen one, one's own, then from small to fast. Baselines that are the same plan share a point.

    findings: by a baseline's label, how it compares with the chosen plan or why it does not fit.
    """
    found: dict[object, Point] = {}
    if yours is not None:
        found[yours.plan] = Point(key=YOURS, label="your edit", sort="yours", priced=yours)
    if chosen is not None:
        found[chosen.plan] = Point(key=CHOSEN, label="recommended", sort="chosen", priced=chosen)
    for label, priced in baselines.items():
        known = found.get(priced.plan)
        words = label.replace("_", " ")
        if known is None:
            found[priced.plan] = Point(key=label, label=words, sort="baseline", priced=priced, finding=findings.get(label, ""))
        else:
            found[priced.plan] = replace(known, twins=(*known.twins, label))
    for priced in frontier:
        found.setdefault(
            priced.plan, Point(key=priced.plan.fingerprint, label=priced.label, sort="frontier", priced=priced)
        )
    first = {"chosen": 0, "yours": 1}
    return tuple(sorted(found.values(), key=lambda point: (first.get(point.sort, 2), point.peak_bytes, point.label)))


MAX_MAIN = 8
TWIN_SHARE: Final = 0.02
"""Plans whose peaks and times differ by less are shown as one."""


def split_points(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """At most eight distinct plans, and the rest: the chosen one and one's own, then those that fit from fast to slow.

    A plan within a fiftieth of one before it, in bytes and in time, goes to the rest; so does what does not fit, where eight fit.
    """
    main: list[Point] = []
    for point in sorted(points, key=_worth_reading):
        is_own = point.sort in ("chosen", "yours")
        if is_own or (len(main) < MAX_MAIN and not any(_are_twins(point, other) for other in main)):
            main.append(point)
    kept = {point.key for point in main}
    return main, [point for point in points if point.key not in kept]


def _worth_reading(point: Point) -> tuple[int, int, float]:
    return {"chosen": 0, "yours": 1}.get(point.sort, 2), point.priced.verdict == "does_not_fit", point.time_ms


def _are_twins(point: Point, other: Point) -> bool:
    near = abs(point.peak_bytes - other.peak_bytes) <= TWIN_SHARE * other.peak_bytes
    return near and abs(point.time_ms - other.time_ms) <= TWIN_SHARE * other.time_ms


def difference_lines(chosen: AnyPriced, other: AnyPriced) -> list[str]:
    """At most five lines on what changes from the chosen plan to the other: bytes, time, the category that moves most."""
    here, there = chosen.prediction, other.prediction
    bytes_change = there.device_peak_high_bytes - here.device_peak_high_bytes
    share = there.total_s / here.total_s - 1 if here.total_s else 0.0
    changes = {
        name: there.device_bytes_by_category.get(name, 0) - here.device_bytes_by_category.get(name, 0) for name in CATEGORIES
    }
    most = max(changes, key=lambda name: abs(changes[name]))
    speed = "As fast" if abs(share) < 0.005 else f"{abs(100 * share):.0f} % {'slower' if share > 0 else 'faster'}"
    more = "more" if bytes_change > 0 else "less"
    memory = f"{format_bytes(abs(bytes_change))} {more} at the peak" if bytes_change else "The same peak"
    lines = [f"{plan_name(other.plan.to_json())}.", f"{memory}.", f"{speed}: {times_in_words(here.total_s, there.total_s)}."]
    if changes[most]:
        verb = "grow" if changes[most] > 0 else "shrink"
        lines.append(f"{CATEGORY_LABELS[most].capitalize()} {verb} by {format_bytes(abs(changes[most]))}.")
    if other.plan.is_lossless != chosen.plan.is_lossless:
        lines.append("Its numbers are exact." if other.plan.is_lossless else "Its numbers are rounded.")
    return lines


def times_in_words(here_s: float, there_s: float) -> str:
    """Both durations; with their seconds where whole minutes would be the same, or would belie the share beside them."""
    here, there = format_duration(here_s), format_duration(there_s)
    is_coarse = max(here_s, there_s) < 1200 or (here == there and here_s < 3600)
    if is_coarse and min(here_s, there_s) >= 60:
        here, there = (f"{int(seconds // 60)} min {int(seconds % 60)} s" for seconds in (here_s, there_s))
    return f"{there} instead of {here}" if here != there else f"{here} as well"


def choose_points(points: Sequence[Point], wanted: Iterable[str]) -> tuple[Point, ...]:
    """The same with those that are compared marked and lettered: the chosen, one's own, and what was asked for."""
    always = [point.key for point in points if point.sort in ("chosen", "yours")]
    keys = list(dict.fromkeys([*always, *wanted]))
    known = [key for key in keys if any(point.key == key for point in points)][:MAX_COMPARED]
    letters = dict(zip(known, LETTERS, strict=False))
    return tuple(
        replace(point, is_compared=True, letter=letters[point.key]) if point.key in letters else point for point in points
    )


def compared_points(points: Sequence[Point]) -> list[Point]:
    """By their letters."""
    return sorted((point for point in points if point.is_compared), key=lambda point: point.letter)


@dataclass(frozen=True, kw_only=True)
class Value:
    """One cell of the comparison; of sizes the bytes as well."""

    text: str
    num_bytes: int | None = None
    differs: bool = False
    """From the first column."""


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One aspect of the plans."""

    name: str
    values: tuple[Value, ...]

    @property
    def differs(self) -> bool:
        return any(value.differs for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A category with its aspects, or the plan as a whole."""

    label: str
    lines: tuple[ComparedRow, ...]


def side_by_side(points: Sequence[Point]) -> tuple[Group, ...]:
    """The plans as a whole, then category by category."""
    tables = [{row.category: row for row in _rows(point.priced)} for point in points]
    groups = [Group(label="the plan", lines=tuple(_whole_lines([point.priced for point in points])))]
    for category in CATEGORIES:
        rows = [table.get(category) for table in tables]
        if any(rows):
            groups.append(Group(label=CATEGORY_LABELS[category], lines=tuple(_category_lines(rows))))
    return tuple(groups)


def _rows(priced: AnyPriced) -> list[CategoryRow]:
    sizes = {"device_bytes_by_category": priced.prediction.device_bytes_by_category}
    return plan_rows(priced.plan.to_json(), prediction=sizes, measured=None)


def _category_lines(rows: Sequence[CategoryRow | None]) -> Iterable[ComparedRow]:
    for name, aspect in (("place", "place"), ("bits", "representation"), ("lifetime", "lifetime")):
        texts = ["" if row is None else str(getattr(row, aspect)) for row in rows]
        if any(texts):
            yield _line(name, [Value(text=text or "none") for text in texts])
    sizes = [0 if row is None else row.predicted_bytes or 0 for row in rows]
    yield _line("bytes at the peak", [Value(text=format_bytes(size), num_bytes=size) for size in sizes])


def _whole_lines(plans: Sequence[AnyPriced]) -> Iterable[ComparedRow]:
    found = [priced.prediction for priced in plans]
    yield _line("verdict", [Value(text=priced.verdict.replace("_", " ")) for priced in plans])
    yield _line("peak, at most", [_size(here.device_peak_high_bytes) for here in found])
    yield _line("host memory", [_size(here.host_peak_bytes) for here in found])
    steps = [here for here in found if isinstance(here, Prediction)]
    passes = [here for here in found if isinstance(here, GenerationPrediction)]
    if any(here.load is not None for here in passes):
        yield _line("loading, at most", [Value(text=_loading_words(here.load)) for here in passes])
    if passes:
        yield _line("first token", [Value(text=step_words(here.prefill_ms)) for here in passes])
        yield _line("each later token", [Value(text=step_words(here.decode_ms)) for here in passes])
    else:
        yield _line("a step", [Value(text=step_words(here.step_ms)) for here in steps])
    yield _line("tokens/s", [Value(text=f"{here.tokens_per_s:,.0f}") for here in found])
    yield _line("all prompts" if passes else "all steps", [Value(text=format_duration(here.total_s)) for here in found])
    yield _line("sequences at once", [Value(text=batch_words(priced.plan.to_json())) for priced in plans])
    yield from _other_decisions([priced.plan for priced in plans if isinstance(priced.plan, GenerationPlan)])
    yield _line("numbers", [Value(text="as in fp32" if priced.plan.is_lossless else "changed") for priced in plans])


def _loading_words(load: StagePeak | None) -> str:
    """Most bytes on the device, and on the host, while the model is read."""
    if load is None:
        return "unknown"
    return f"{format_bytes(load.device_peak_bytes)}, {format_bytes(load.host_peak_bytes)} on the host"


_SHOWN_ELSEWHERE: Final = frozenset(
    {"batch_size", "num_micro_batches", "weights.dtype", "weights.frozen", "weights.place", "kv_cache.dtype", "kv_cache.place"}
)
"""Knobs of a generation that other lines show."""


def _other_decisions(plans: Sequence[GenerationPlan]) -> Iterable[ComparedRow]:
    """Rows for the decisions of generations that have no line of their own, where not all plans are alike."""
    written = [written_knobs(plan) for plan in plans]
    for knob in generation_knobs() if plans else ():
        texts = [of_plan[knob] for of_plan in written]
        if knob not in _SHOWN_ELSEWHERE and len(set(texts)) > 1:
            yield _line(knob.replace(".", " ").replace("_", " "), [Value(text=text) for text in texts])


def _line(name: str, values: Sequence[Value]) -> ComparedRow:
    first = values[0]
    return ComparedRow(
        name=name,
        values=tuple(
            replace(value, differs=(value.text, value.num_bytes) != (first.text, first.num_bytes)) for value in values
        ),
    )


def _size(num_bytes: int) -> Value:
    return Value(text=format_bytes(num_bytes), num_bytes=num_bytes)


def chart_facts(points: Sequence[Point], *, budget_bytes: int, limits: Limits) -> dict[str, Any]:
    """Data of the charts: every point, and the step, or the pass, of each plan that is compared.

    Training is drawn by the time of a step, generating by its tokens per second.
    """
    is_training = isinstance(points[0].priced.prediction, Prediction)
    return {
        "budget_bytes": budget_bytes,
        "fits_bytes": limits.fits_bytes,
        "tight_bytes": limits.tight_bytes,
        "by": "time" if is_training else "speed",
        "time_of": "a step" if is_training else "all prompts",
        "categories": [{"key": category, "label": CATEGORY_LABELS[category]} for category in CATEGORIES],
        "points": [
            {
                "key": point.key,
                "label": f"{point.name} ({point.note})" if point.note else point.name,
                "sort": point.sort,
                "letter": point.letter,
                "time_ms": point.time_ms,
                "tokens_per_s": point.priced.prediction.tokens_per_s,
                "peak_bytes": point.peak_bytes,
                "verdict": point.priced.verdict,
            }
            for point in points
        ],
        "steps": [
            {
                "letter": point.letter,
                "label": point.words,
                "peak_bytes": point.priced.prediction.device_peak_bytes,
                "timeline": [
                    {"offset_ms": moment.offset_ms, "phase": moment.phase, "bytes": moment.bytes_by_category}
                    for moment in point.priced.prediction.timeline
                ],
            }
            for point in compared_points(points)
            if point.priced.prediction.timeline
        ],
    }


def categories_of(points: Iterable[Point]) -> list[tuple[str, str]]:
    """Those that any of the plans has at its peak, with their names, from bottom to top of a chart."""
    held = {name for point in points for name, size in point.priced.prediction.device_bytes_by_category.items() if size}
    return [(category, CATEGORY_LABELS[category]) for category in CATEGORIES if category in held]


@dataclass(frozen=True, kw_only=True)
class TimelineTable:
    """The table behind a step's chart."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Offset in milliseconds, phase, bytes of each column, their sum."""


def timeline_table(priced: AnyPriced) -> TimelineTable:
    timeline = priced.prediction.timeline
    shown = [category for category in CATEGORIES if any(moment.bytes_by_category.get(category) for moment in timeline)]
    return TimelineTable(
        columns=tuple(CATEGORY_LABELS[category] for category in shown),
        rows=tuple(
            (
                f"{moment.offset_ms:,.2f}",
                moment.phase,
                tuple(moment.bytes_by_category.get(category, 0) for category in shown),
                sum(moment.bytes_by_category.values()),
            )
            for moment in timeline
        ),
    )


def find_point(points: Sequence[Point], key: str) -> Point | None:
    return next((point for point in points if point.key == key), None)


def edited_words(differences: Iterable[Any]) -> list[str]:
    """``optimizer state bits: 32 → 8``."""
    return [f"{each.path.replace('.', ' ').replace('_', ' ')}: {each.a} → {each.b}" for each in differences]


