"""An empty index to write to, and something to store in it."""

from collections.abc import Iterator

import pytest
from made_up import make_item

from nibblas.index.model import Item
from nibblas.index.store import Store


@pytest.fixture
def item() -> Item:
    return make_item()


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    with Store.open(tmp_path / "index.sqlite") as opened:
        yield opened
