"""Where text stands in a file: lines and columns, and text whose characters know where they came from.

Lines end with a line feed and count from 1, as an editor and `SourceFile.lines` count them. Columns count characters
from 1. Offsets count characters of the file from 0.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property


class Lines:
    """The lines of a text."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def _starts(self) -> list[int]:
        starts, at = [0], self.text.find("\n")
        while at >= 0:
            starts.append(at + 1)
            at = self.text.find("\n", at + 1)
        return starts

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of a character."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line, without its end."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


class Mapped:
    """Text put together from pieces of a file, each character of which knows its offset there.

    `runs` are (start in the text, offset in the file, length in the file): a run goes on to the start of the next, and
    where it is longer than its piece of the file (a name replaced by its value) its rest stands at the piece's end.
    """

    __slots__ = ("_is_file", "_offsets", "_runs", "text")

    def __init__(self, text: str, runs: Iterable[tuple[int, int, int]]):
        self.text = text
        self._runs = list(runs)
        self._is_file = self._runs == [(0, 0, len(text))]
        self._offsets = [start for start, _, _ in self._runs]

    @classmethod
    def whole(cls, text: str) -> "Mapped":
        """A file's own text."""
        return cls(text, [(0, 0, len(text))])

    @classmethod
    def join(cls, pieces: "Iterable[Mapped]") -> "Mapped":
        """The pieces one after the other."""
        texts, runs, length = [], [], 0
        for piece in pieces:
            texts.append(piece.text)
            runs += [(length + start, offset, size) for start, offset, size in piece._runs]
            length += len(piece.text)
        return cls("".join(texts), runs)

    @property
    def pieces(self) -> int:
        """How many pieces of the file it is made of."""
        return len(self._runs)

    def offset(self, index: int) -> int:
        """The offset in the file of the character at an index; the end's is one past the last character's."""
        if self._is_file:
            return index
        if not self._runs:
            return 0
        if index and index >= len(self.text):
            return self.offset(len(self.text) - 1) + 1
        start, offset, size = self._runs[max(bisect_right(self._offsets, index) - 1, 0)]
        return offset + min(index - start, max(size - 1, 0))

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The offsets in the file of text[start:end]."""
        if self._is_file:
            return start, end
        first = self.offset(start)
        return first, self.offset(end - 1) + 1 if end > start else first

    def cut(self, start: int, end: int) -> "Mapped":
        """The part text[start:end]."""
        return Mapped(self.text[start:end], self._cut_runs(start, end))

    def _cut_runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        first = max(bisect_right(self._offsets, start) - 1, 0)
        for at in range(first, len(self._runs)):
            run_start, offset, size = self._runs[at]
            if run_start >= end:
                return
            skipped = max(start - run_start, 0)
            yield max(run_start - start, 0), offset + min(skipped, max(size - 1, 0)), max(size - skipped, 1)

    def replaced(self, text: str) -> "Mapped":
        """Other text that stands for this one: all of it maps into this one's place."""
        first, last = self.span(0, len(self.text))
        return Mapped(text, [(0, first, last - first)] if text else [])

    def unescaped(self, escapes: "Iterable[tuple[int, int, str]]") -> "Mapped":
        """With each text[start:end] replaced: `escapes` are (start, end, what stands for it), in order."""
        texts: list[str] = []
        runs: list[tuple[int, int, int]] = []
        done = length = 0

        def keep(start: int, end: int) -> None:
            nonlocal length
            if start < end:
                texts.append(self.text[start:end])
                runs.extend((length + at, offset, size) for at, offset, size in self._cut_runs(start, end))
                length += end - start

        for start, end, text in escapes:
            keep(done, start)
            if text:
                texts.append(text)
                first, last = self.span(start, end)
                runs.append((length, first, last - first))
                length += len(text)
            done = end
        keep(done, len(self.text))
        return Mapped("".join(texts), runs)
