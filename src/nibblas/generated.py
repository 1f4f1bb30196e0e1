"""Parts of this repository's documents that a program writes, between marks that name it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """A named part of a document, which a module writes when it is run.

    document : its path below the root of the repository.
    module : its name, for people who want to bring the part up to date.
    """

    document: str
    name: str
    module: str
    root: Path = ROOT

    @property
    def marks(self) -> tuple[str, str]:
        """The lines before and after it."""
        return f"<!-- {self.name}: `python -m {self.module}` writes this -->", f"<!-- /{self.name} -->"

    def read(self) -> str:
        """What stands there; ValueError where the document has not exactly one place for it."""
        return self._find()[1].strip()

    def write(self, text: str) -> None:
        """Put text there; ValueError where the document has not exactly one place for it."""
        before, _, after = self._find()
        start, end = self.marks
        (self.root / self.document).write_text(f"{before}{start}\n{text}\n{end}{after}")

    def _find(self) -> list[str]:
        """The document before the part, the part, and the rest."""
        start, end = map(re.escape, self.marks)
        found = re.split(f"{start}\n?(.*?){end}", (self.root / self.document).read_text(), flags=re.DOTALL)
        if len(found) != 3:
            marks = " and ".join(self.marks)
            raise ValueError(f"{self.document}: {len(found) // 2} places lie between {marks}, need one")
        return found
