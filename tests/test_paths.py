"""Files that are written whole or not at all."""

import os

import pytest

from nibblas.paths import write_atomically


def test_a_file_that_can_not_be_written_is_named_and_nothing_is_left(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(folder, "text")
    assert caught.value.filename == str(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_old_text_stays_where_writing_is_stopped(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_atomically(path, "old")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [(found, found.read_text()) for found in path.parent.iterdir()] == [(path, "old")]
