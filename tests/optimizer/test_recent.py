"""The newest few are kept."""

from optimizer.recent import Recent


def test_what_was_asked_for_longest_ago_makes_room():
    recent = Recent(2)
    for key in ("a", "b", "a", "c"):
        recent.obtain(key, lambda key=key: key.upper())
    assert [recent.get(key) for key in ("a", "b", "c")] == ["A", None, "C"]


def test_what_is_known_is_not_made_again():
    recent, made = Recent(1), []
    for _ in range(2):
        recent.obtain("a", lambda: made.append(1) or 1)
    assert made == [1]
