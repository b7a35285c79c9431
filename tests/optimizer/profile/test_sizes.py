"""Sizes are found exactly or not at all."""

from hypothesis import given
from hypothesis import strategies as st

from optimizer.profile.sizes import evaluate, fit_terms

SHAPES = ((13, 127), (7, 113), (11, 109), (5, 107))


@given(index=st.integers(0, 5), coefficient=st.integers(1, 10**9))
def test_one_monomial_is_found_from_four_shapes(index: int, coefficient: int) -> None:
    terms = tuple(coefficient if place == index else 0 for place in range(6))
    assert fit_terms({shape: evaluate(terms, shape) for shape in SHAPES}) == terms


def test_a_sum_of_a_constant_and_a_product_is_found() -> None:
    terms = (4096, 0, 0, 520, 0, 0)
    assert fit_terms({shape: evaluate(terms, shape) for shape in SHAPES}) == terms


def test_what_is_no_polynomial_of_few_terms_is_not_guessed() -> None:
    assert fit_terms({shape: 2 ** shape[0] + shape[1] ** 3 for shape in SHAPES}) is None


def test_a_micro_batch_of_one_gives_terms_without_the_batch() -> None:
    values = {(1, length): 8 * length + 512 for length in (127, 113, 109, 107)}
    assert fit_terms(values) == (512, 0, 8, 0, 0, 0)
