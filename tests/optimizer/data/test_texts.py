"""Lengths of texts, gathered text by text."""

from optimizer.data.texts import MAX_RECORD_CHARACTERS, MAX_RECORDS, Texts


def test_lengths_double_from_one_count_to_the_next() -> None:
    texts = Texts()
    for length in (1, 2, 3, 4, 7, 8):
        texts.add("x" * length)
    assert texts.lengths() == ((2, 1), (4, 2), (8, 2), (16, 1))


def test_a_text_in_pieces_is_one_text() -> None:
    texts = Texts()
    texts.add("ab", continues=True)
    texts.add("cdef")
    texts.add("z")
    assert texts.lengths() == ((2, 1), (8, 1))
    assert texts.records == ["abcdef", "z"]


def test_the_first_records_are_kept_by_their_beginnings() -> None:
    texts = Texts()
    for number in range(MAX_RECORDS + 3):
        texts.add(f"{number}" + "x" * 100, continues=True)
        texts.add("more" * 1000)
    assert [record[0] for record in texts.records] == [str(number) for number in range(MAX_RECORDS)]
    assert all(record[101:103] == "mo" and len(record) == MAX_RECORD_CHARACTERS for record in texts.records)
