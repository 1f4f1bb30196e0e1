"""The support table of the README: which kernels answer what on which device, and what is known of each.

`python -m nibblas.bench.support` writes it there.
"""

import re
from pathlib import Path

from nibblas import evidence
from nibblas.kernel import Kernel
from nibblas.kernels import kernels

MARKS = ("<!-- support: `python -m nibblas.bench.support` writes this -->", "<!-- /support -->")
# The architectures we speak of, as Problem.arch names them.
DEVICES = {
    "CPU": ("cpu",),
    "Ampere, Ada": ("sm_80", "sm_86", "sm_89"),
    "Hopper": ("sm_90",),
    "Blackwell": ("sm_100", "sm_103"),
    "consumer Blackwell": ("sm_120",),
    "CDNA3, CDNA4": ("gfx942", "gfx950"),
}
# A use of the library: the operation, and whether its first operand is FP4.
USES = {
    "W4A16": ("linear", False),
    "W4A4": ("linear", True),
    "grouped": ("grouped_linear", None),
    "gated": ("gated_linear", None),
    "quantize": ("quantize", None),
}


def answers(kernel: Kernel, archs: tuple[str, ...], op: str, fp4: bool | None) -> bool:
    """Whether a kernel is made for this use on any of these architectures."""
    if kernel.op != op or (kernel.archs and not set(kernel.archs) & set(archs)):
        return False
    return fp4 is None or any((a == b) == fp4 for a, b in kernel.operands)


def known(kernel: Kernel, archs: tuple[str, ...], fp4: bool | None) -> str:
    """The timing level of the kernel in this use, from shipped evidence of any version of its source."""
    records = [m for m in evidence.store().shipped_only() if m.kernel == kernel.name and m.problem.arch in archs]
    return evidence.timing_level(m for m in records if fp4 is None or (m.problem.a == m.problem.b) == fp4)


def support_table() -> str:
    """The table in Markdown: the kernels made for a use, else the ones that run anywhere."""
    lines = [f"| device | {' | '.join(USES)} |", "|---" * (len(USES) + 1) + "|"]
    for device, archs in DEVICES.items():
        cells = []
        for op, fp4 in USES.values():
            found = [k for k in kernels() if answers(k, archs, op, fp4)]
            own = [k for k in found if k.archs] or found
            cells.append("<br>".join(f"{k.name} ({known(k, archs, fp4)})" for k in own))
        lines.append(f"| {device} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(readme: Path) -> None:
    """Bring the table in a README up to date, between its marks."""
    start, end = MARKS
    text, found = re.subn(
        f"{re.escape(start)}.*?{re.escape(end)}",
        lambda _: f"{start}\n{support_table()}\n{end}",
        readme.read_text(),
        flags=re.DOTALL,
    )
    if found != 1:
        raise ValueError(f"{readme}: {found} places lie between {start} and {end}, need one")
    readme.write_text(text)


if __name__ == "__main__":
    write(Path(__file__).parents[3] / "README.md")
