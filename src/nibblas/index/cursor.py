"""Where a page of results ended, as a text in an address."""

import base64
import json
from typing import Any


def encode(*key: Any) -> str:
    """What the next page comes after."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def decode(cursor: str, parts: int) -> list:
    """The inverse; as many Nones for a text that is no cursor of so many parts."""
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, list) and len(found) == parts else [None] * parts
