"""Words for numbers."""


def counted(n: int, one: str, several: str | None = None) -> str:
    """A number with what it counts.

    >>> counted(1, "row"), counted(1000, "matrix", "matrices")
    ('1 row', '1,000 matrices')
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"
