"""Names that people give to what they keep."""

from optimizer.base.errors import InvalidInput


def check_name(name: str, *, max_characters: int) -> str:
    """The name with its spaces made single. Raises InvalidInput for one that is empty, too long or not printable."""
    name = " ".join(name.split())
    if not 1 <= len(name) <= max_characters or not name.isprintable():
        raise InvalidInput(
            f"name is {name[:80]!r}; allowed: 1 to {max_characters} printable characters",
            field="name",
            value=name[:80],
            allowed=f"1 to {max_characters} printable characters",
        )
    return name
