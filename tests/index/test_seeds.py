"""Technique findings in four texts against a table made by reading them.

seeds.csv says of each text where a person who reads it sees which technique, and whether it is used there or only
mentioned: file, line, technique and kind. The table was written before the rules were run on these texts, and corrected
afterwards where reading again showed a mistake. The texts are not ours and not here: NIBBLAS_SEEDS names a folder with
them, each by its number (`000_*.txt`). Lines are those of the file that the index's importers take out of a text.
"""

import csv
import os
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_cuda")

from nibblas.index import rule
from nibblas.index.ingest.kernelbot import TEXT
from nibblas.index.ingest.page import _page
from nibblas.index.ingest.page import takes as is_page
from nibblas.index.techniques import KINDS, find

TABLE = Path(__file__).with_name("seeds.csv")
FOLDER = os.environ.get("NIBBLAS_SEEDS")
FILES = ("000", "001", "002", "004")
LEAST = 0.95

Row = tuple[str, int, str, str]


def table() -> list[Row]:
    with TABLE.open(newline="") as rows:
        return [(row["file"], int(row["line"]), row["technique"], row["kind"]) for row in csv.DictReader(rows)]


def found() -> set[Row]:
    rows = set()
    for file in FILES:
        (path,) = Path(FOLDER or "").glob(f"{file}_*.txt")
        text = path.read_text()
        source = _page(text).source if is_page(path) else TEXT.sub("", text, count=1)
        rows |= {(file, one.line, one.technique, one.kind) for one in find("submission.py", source)}
    return rows


def test_table_names_each_place_once():
    rows = table()
    places = [row[:3] for row in rows]
    assert len(set(places)) == len(places)
    assert {row[0] for row in rows} == set(FILES)
    assert {row[2] for row in rows} <= set(rule.techniques())
    assert {row[3] for row in rows} <= set(KINDS)


@pytest.mark.skipif(not FOLDER, reason="NIBBLAS_SEEDS must name a folder with the texts 000_*, 001_*, 002_* and 004_*")
@pytest.mark.parametrize("used", [True, False], ids=["uses", "mentions"])
def test_findings_agree_with_reading(used):
    read = {row for row in table() if (row[3] == "use") == used}
    findings = {row for row in found() if (row[3] == "use") == used}
    both = len(read & findings)
    apart = "\n".join(f"{'read' if row in read else 'found'} only: {row}" for row in sorted(read ^ findings))
    assert both >= LEAST * len(findings), f"precision {both / len(findings):.3f}\n{apart}"
    assert both >= LEAST * len(read), f"recall {both / len(read):.3f}\n{apart}"
