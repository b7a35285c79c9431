"""Every tensor has one owner, and owners have nearly as much as each other."""

from hypothesis import given
from hypothesis import strategies as st

from optimizer.formats.ownership import assign_owners, fullest_rank


@given(st.lists(st.integers(1, 10**9), max_size=60), st.integers(1, 8))
def test_no_rank_owns_more_than_its_part_and_one_tensor(sizes: list[int], num_ranks: int) -> None:
    owners = assign_owners(sizes, num_ranks=num_ranks)
    owned = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(owned) == sum(sizes)
    assert max(owned) <= sum(sizes) / num_ranks + max(sizes, default=0)
    assert max(owned) == owned[fullest_rank(sizes, owners, num_ranks=num_ranks)]


def test_equal_tensors_are_dealt_out_in_turn() -> None:
    assert assign_owners([5, 5, 5, 5], num_ranks=2) == [0, 1, 0, 1]
    assert assign_owners([1, 8, 1, 8], num_ranks=3) == [2, 0, 2, 1]
