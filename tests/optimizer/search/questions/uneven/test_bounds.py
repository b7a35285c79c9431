"""No plan of unequal devices takes less than what it is passed over by."""

import itertools

import pytest

from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.search.questions.uneven.bounds import whole_sequences_ms
from tests.optimizer.search.questions.uneven.test_answer import FORBID, ask, three_cards

SHARING = frozenset(FORBID) - {"shard_state", "shard_gradients"}
GIGABIT, SLOW_LINK = {"bytes_per_s": 125e6, "latency_s": 1e-3}, {"bytes_per_s": 1e6, "latency_s": 1e-3}


@pytest.mark.breadth
@pytest.mark.parametrize("link", [{}, GIGABIT, SLOW_LINK], ids=["in-the-box", "gigabit", "slow"])
@pytest.mark.parametrize("data", ["replicated", "zero1", "zero2"])
def test_no_shares_are_faster_than_their_bound(llama_profile: Profile, link: dict[str, float], data: str) -> None:
    pins = read_pins(["layout.num_devices=3", f"layout.data={data}"])
    found = ask(llama_profile, three_cards(**link), forbid=SHARING, pins=pins)
    searched = [option for option in found.layouts if option.best is not None]
    assert searched
    for option in searched:
        assert option.best.prediction.step_ms >= option.least_step_ms > 0, option.sentence


def test_what_is_passed_over_would_not_have_been_chosen(llama_profile: Profile) -> None:
    """Asked for alone, each layout takes what was said of it at least."""
    found = ask(llama_profile, three_cards(**GIGABIT), forbid=SHARING)
    chosen_ms = found.result.chosen.prediction.step_ms
    passed = {option.layout.data: option for option in found.layouts if "not searched" in option.sentence}
    assert passed
    for data, option in passed.items():
        asked = ask(
            llama_profile,
            three_cards(**GIGABIT),
            forbid=SHARING,
            pins=read_pins([f"layout.num_devices={option.layout.num_devices}", f"layout.data={data}"]),
        )
        assert asked.result.chosen.prediction.step_ms >= chosen_ms


@pytest.mark.parametrize("total", [4, 7, 12])
@pytest.mark.parametrize("sequence_ms", [(1.0, 1.0), (2.0, 5.0), (0.7, 3.1)])
def test_whole_sequences_are_done_no_sooner_than_by_any_shares(total: int, sequence_ms: tuple[float, float]) -> None:
    counts = [2, 1]
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    splits = (split for split in itertools.product(range(1, total), repeat=len(kinds)) if sum(split) == total)
    least_ms = min(max(sequence_ms[kind] * share for kind, share in zip(kinds, split, strict=True)) for split in splits)
    assert whole_sequences_ms(total, counts, sequence_ms) == pytest.approx(least_ms)
