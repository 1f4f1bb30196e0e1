"""How long a list may be."""

from nibblas.index.documents import QueryError

MOST_LIMIT = 200


def check_limit(limit: int) -> None:
    """Raise QueryError unless a page may have so many lines."""
    if not 1 <= limit <= MOST_LIMIT:
        raise QueryError(f"limit: {limit}, need 1 to {MOST_LIMIT}")
