"""The tables of README and docs/kernels.md that are made from the code and the shipped evidence.

Which kernels answer what on which device and what is known of each, and the measured figures. `python -m
nibblas.bench.tables` writes them between their marks.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial

from nibblas import evidence
from nibblas.evidence import Measurement
from nibblas.formats import FORMATS
from nibblas.generated import Part
from nibblas.kernel import Kernel
from nibblas.kernels import kernels
from nibblas.problem import Problem
from nibblas.words import counted, time_text

# The architectures we speak of, as Problem.arch names them.
DEVICES = {
    "CPU": ("cpu",),
    "Ampere, Ada": ("sm_80", "sm_86", "sm_89"),
    "Hopper": ("sm_90",),
    "Blackwell": ("sm_100", "sm_103"),
    "consumer Blackwell": ("sm_120",),
    "CDNA3, CDNA4": ("gfx942", "gfx950"),
}
OLD = "†"
NOTE = f"{OLD} of an earlier version of the kernel's source."
FORMAT_SUFFIX = re.compile(f"_(?:{'|'.join(FORMATS)})$")
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
    return fp4 is None or any((a in FORMATS) == fp4 for a, _ in kernel.operands)


def is_old(m: Measurement) -> bool:
    """Whether it is of an earlier version of its kernel's source."""
    return (m.kernel, m.digest) not in ((kernel.name, kernel.digest) for kernel in kernels())


def with_note(text: str) -> str:
    """Tables, and what their mark means where they have one."""
    return f"{text}\n\n{NOTE}" if OLD in text else text


def known(kernel: Kernel, archs: tuple[str, ...], fp4: bool | None) -> str:
    """The timing level of the kernel in this use, from shipped evidence; marked where an earlier version reached it."""
    records = [
        m
        for m in evidence.store().shipped_only()
        if m.kernel == kernel.name and m.problem.arch in archs and (fp4 is None or (m.problem.a in FORMATS) == fp4)
    ]
    level = evidence.timing_level(records)
    return level + OLD * (level != evidence.timing_level(m for m in records if not is_old(m)))


def support_table() -> str:
    """The table in Markdown: the kernels made for a use, else the ones that run anywhere."""
    lines = [f"| device | {' | '.join(USES)} |", "|---" * (len(USES) + 1) + "|"]
    for device, archs in DEVICES.items():
        cells = []
        for op, fp4 in USES.values():
            found = [k for k in kernels() if answers(k, archs, op, fp4)]
            own = [k for k in found if k.archs] or found
            levels: dict[str, dict[str, None]] = {}  # one line for a kernel that each format has of its own
            for kernel in own:
                levels.setdefault(FORMAT_SUFFIX.sub("", kernel.name), {})[known(kernel, archs, fp4)] = None
            cells.append("<br>".join(f"{name} ({', '.join(some)})" for name, some in levels.items()))
        lines.append(f"| {device} | {' | '.join(cells)} |")
    return with_note("\n".join(lines))


def products(activations: str = "bf16", dependent: bool = False, beside: str | None = None) -> list[Measurement]:
    """Of the shipped evidence, the fastest kernel of each plain product, device and number of threads.

    activations : a dtype's name, or "fp4" for those of the weights' format.
    dependent : those whose launches overlapped, instead of those whose launches did not.
    beside : of those that were measured in the same run as this library.
    """

    def wanted(m: Measurement) -> bool:
        p = m.problem
        plain = (p.op, p.out, p.L, p.bias, p.batch_invariant) == ("linear", "bf16", 1, False, False)
        is_wanted = p.a == (p.b if activations == "fp4" else activations) and m.is_dependent == dependent
        return plain and is_wanted and (beside is None or beside in m.beside)

    return _fastest(wanted)


def of_op(op: str) -> list[Measurement]:
    """Of the shipped evidence, the fastest kernel of each problem of another op, bf16 in and out."""
    return _fastest(lambda m: (m.problem.op, m.problem.a, m.problem.out) == (op, "bf16", "bf16"))


def _fastest(wanted: Callable[[Measurement], bool]) -> list[Measurement]:
    """Of the shipped evidence that is wanted, the fastest of our kernels for each device, threads and problem.

    What an earlier version of a kernel took counts only where its source as it is was not measured.
    """
    names = {kernel.name for kernel in kernels()}
    timed = [m for m in evidence.store().shipped_only() if m.samples and m.kernel in names and wanted(m)]
    renewed = {(_case(m), m.kernel) for m in timed if not is_old(m)}
    best: dict[tuple, Measurement] = {}
    for m in timed:
        case = _case(m)
        if is_old(m) and (case, m.kernel) in renewed:
            continue
        if case not in best or m.median < best[case].median:
            best[case] = m
    return [m for _, m in sorted(best.items())]


def _case(m: Measurement) -> tuple:
    p = m.problem
    return m.device, m.threads, p.b, p.N, p.K, p.G, p.M, p.rule


def ratios(m: Measurement) -> dict[str, float]:
    """How many times as long each other library took in the same run: torch's own product, and peers."""
    ours = {kernel.name for kernel in kernels()}
    others = {name: seconds for name, seconds in m.beside.items() if name.split()[0] not in ours}
    return {name: seconds / m.median for name, seconds in others.items() if name != "torch fp32"}


def peers(device: str) -> list[str]:
    """What else was timed in the shipped evidence of a device, torch's own product first."""
    names = (name for m in evidence.store().shipped_only() if m.device == device for name in ratios(m))
    return sorted(set(names), key=lambda name: (name != "torch bf16", name))


def _by_rows(title: str, found: Iterable[Measurement], cell: Callable[[Measurement], str]) -> list[str]:
    """A table with a line for each format, shape, groups and number of threads, and a column for each M."""
    by_M = sorted(found, key=lambda m: m.problem.M)
    columns = list(dict.fromkeys(f"M = {m.problem.M}" for m in by_M))
    ordered = sorted(by_M, key=lambda m: (m.threads, m.problem.b, m.problem.N, m.problem.K, m.problem.G))
    return _pivot(title, columns, ((_shape(m.problem) + _threads(m), f"M = {m.problem.M}", cell(m)) for m in ordered))


def _shape(p: Problem) -> str:
    groups = f"{p.G} of " if p.op == "grouped_linear" else ""
    return f"{groups}{p.b.upper()} {p.N}x{p.K}"


def _threads(m: Measurement) -> str:
    return f", {counted(m.threads, 'thread')}" if m.problem.arch == "cpu" else ""


def _pivot(title: str, columns: list[str], cells: Iterable[tuple[str, str, str]]) -> list[str]:
    """A table of cells (line, column, text), lines in the order in which they come first."""
    lines: dict[str, dict[str, str]] = {}
    for name, column, text in cells:
        lines.setdefault(name, {})[column] = text
    head = [f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = [f"| {name} | " + " | ".join(texts.get(c, "") for c in columns) + " |" for name, texts in lines.items()]
    return head + rows


def speed_table() -> str:
    """Times faster than torch's bf16 product, for each device."""
    found = products()
    lines: list[str] = []
    for device in dict.fromkeys(m.device for m in found):
        lines += ["", *_by_rows(device, (m for m in found if m.device == device), partial(_times, peer="torch bf16"))]
    return with_note("\n".join(lines[1:]))


def _times(m: Measurement, peer: str) -> str:
    return f"{ratios(m)[peer]:.2f}x{OLD * is_old(m)}" if peer in ratios(m) else ""


def figures_table() -> str:
    """For each device: the median, the share of the floor, and how many times as long every other library took."""
    found = products()
    lines: list[str] = []
    for device in dict.fromkeys(m.device for m in found):
        of_device = [m for m in found if m.device == device]
        lines += ["", f"### {device}", "", *_by_rows("time, share of the floor", of_device, _time_and_share)]
        for peer in peers(device):
            timed = [m for m in products(beside=peer) if m.device == device]
            if timed:
                lines += ["", *_by_rows(f"over {peer}", timed, partial(_times, peer=peer))]
        for title, others in (
            ("with dependent launch", products(dependent=True)),
            ("FP4 activations", products("fp4")),
        ):
            timed = [m for m in others if m.device == device]
            if timed:
                lines += ["", *_by_rows(f"{title}: time, share of the floor", timed, _time_and_share)]
        for op, title in (("grouped_linear", "grouped"), ("gated_linear", "gated")):
            timed = [m for m in of_op(op) if m.device == device]
            if timed:
                lines += ["", *_by_rows(f"{title}: time, share of the floor", timed, _time_and_share)]
                lines += ["", *_by_rows(f"{title}: over torch bf16", timed, partial(_times, peer="torch bf16"))]
        lines += _quantizers(device)
    return with_note("\n".join(lines[1:]))


def _quantizers(device: str) -> list[str]:
    """A table of the fastest quantizer by each rule."""
    timed = [m for m in _fastest(lambda m: m.problem.op == "quantize") if m.device == device]
    if not timed:
        return []
    cells = [
        (
            f"{m.problem.a} {m.problem.M}x{m.problem.K}{_threads(m)}",
            f"{m.problem.b.upper()} {m.problem.rule}",
            _time_and_share(m),
        )
        for m in timed
    ]
    return ["", *_pivot("quantize: time, share of the floor", sorted({column for _, column, _ in cells}), cells)]


def _time_and_share(m: Measurement) -> str:
    share = f" {m.floor / m.median:.0%}" if m.floor else ""
    return f"{time_text(m.median)}{share}{OLD * is_old(m)}"


TABLES = {
    Part("README.md", "support", "nibblas.bench.tables"): support_table,
    Part("README.md", "speed", "nibblas.bench.tables"): speed_table,
    Part("docs/kernels.md", "figures", "nibblas.bench.tables"): figures_table,
}


if __name__ == "__main__":
    for part, table in TABLES.items():
        part.write(table())
