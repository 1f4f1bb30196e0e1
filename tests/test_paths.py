"""Files that are written whole or not at all."""

import os

import pytest

from nibblas.paths import write_atomically


def test_a_file_that_can_not_be_written_is_named_and_nothing_is_left(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="is a folder, need a file's name") as caught:
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a device, pipe or socket, need a regular file"),
        (lambda path: path.symlink_to("absent"), "is a link; name the file that it leads to, or remove it"),
        (lambda path: path.symlink_to("other"), "is a link"),
    ],
)
def test_only_a_regular_file_is_replaced(tmp_path, make, message):
    (tmp_path / "other").write_text("other")
    path = tmp_path / "path"
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match=message) as caught:
        write_atomically(path, "text")
    assert caught.value.filename == str(path)
    assert os.path.samestat(path.lstat(), before)
    assert {found.name for found in tmp_path.iterdir()} == {"other", "path"}
    assert (tmp_path / "other").read_text() == "other"
