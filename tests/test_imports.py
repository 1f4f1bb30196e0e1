"""The direction of imports, and how little `import nibblas` brings in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "nibblas"

# A module may import modules of a lower level and of its own package folder.
LEVELS = [
    {"paths", "formats", "generated", "memory", "statistics", "targets", "words"},
    {"layouts", "terminal"},
    {"tensor"},
    {"quantize", "reference", "problem"},
    {"roofline"},
    {"kernel"},
    {"kernels"},
    {"evidence"},
    {"dispatch"},
    {"operators"},
    {"ops"},
    {"nn", "storage", "parallel"},
    {"checkpoint"},
    {"bench", "arena", "index"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Names of the top parts of nibblas that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            names = [f"nibblas.{alias.name}" for alias in node.names] if base == "nibblas" else [base]
        found |= {name.split(".")[1] for name in names if name.startswith("nibblas.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    part = part_of(path)
    assert part in LEVEL, f"{part} has no level in this test; give it one"
    upward = {name for name in imported(path) - {part} if LEVEL.get(name, -1) >= LEVEL[part]}
    assert not upward, f"{path.name} imports {upward}, which stand no lower than {part}"


def test_import_is_light():
    heavy = "triton fastapi typer rich transformers tokenizers cuda jinja2 pygments"
    code = (
        "import sys, torch; before = set(sys.modules); import nibblas; "
        f"print(sorted((set(sys.modules) - before) & set({heavy.split()!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
