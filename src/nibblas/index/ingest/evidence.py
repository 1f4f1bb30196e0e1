"""nibblas's own kernels, and Measurements of them.

A kernel is one implementation, of the files whose text it is. A Measurement belongs to the revision that it was made
of: one whose digest is of no revision in the index is skipped, never counted for other code.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from nibblas.index import languages
from nibblas.index.ingest.reading import Attached, Options, Read, Skipped, described
from nibblas.index.model import (
    CompatFact,
    Environment,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    Source,
    Tensor,
    Workload,
    kebab,
)
from nibblas.index.store import Store
from nibblas.words import counted

if TYPE_CHECKING:
    from nibblas.evidence import Measurement
    from nibblas.kernel import Kernel

SIZES = ("L", "G", "M", "N", "K")
LAYOUTS = ("a_layouts", "b_layouts")
BACKENDS = {"cpu": "c", "cuda": "cuda", "triton": "triton", "torch": "torch", "composite": "torch"}


def _operation(name: str, family: str, formula: str, *tensors: tuple[str, str]) -> Operation:
    """tensors: names and shapes, the result last."""
    described = tuple(
        Tensor(tensor, "output" if tensor == tensors[-1][0] else "input", shape=tuple(shape.split()))
        for tensor, shape in tensors
    )
    axes = {axis for _, shape in tensors for axis in shape.split()}
    return Operation(
        kebab(name),
        name,
        family,
        tuple(axis for axis in SIZES if axis in axes),
        described,
        formula,
        f"nibblas.reference.{name}",
    )


OPERATIONS = {
    operation.name: operation
    for operation in (
        _operation("linear", "gemm", "c = a @ b.T (+ bias)", ("a", "L M K"), ("b", "L N K"), ("c", "L M N")),
        _operation(
            "grouped_linear",
            "grouped_gemm",
            "c[rows of g] = a[rows of g] @ b[g].T (+ bias[g])",
            ("a", "M K"),
            ("b", "G N K"),
            ("c", "M N"),
        ),
        _operation(
            "gated_linear",
            "gated_gemm",
            "c = activation(a @ b1.T) * (a @ b2.T)",
            ("a", "M K"),
            ("b1", "N K"),
            ("b2", "N K"),
            ("c", "M N"),
        ),
    )
}
OPERATIONS["quantize"] = Operation(
    "quantize",
    "quantize",
    "quantize",
    ("M", "K"),
    (Tensor("a", "input", shape=("M", "K")), Tensor("b", "output", shape=("M", "K"))),
    "blocks of e2m1 codes with a scale each, by a named rule",
    "nibblas.quantize",
)


def takes(path: Path) -> bool:
    """A JSONL file."""
    return path.suffix == ".jsonl"


def count(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    """The Measurements of a file, with the kernels that they are of."""
    from nibblas.evidence import Measurement

    measurements = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if line.strip():
            try:
                measurements.append(Measurement.from_json(line))
            except ValueError as error:
                yield Skipped(f"{path}:{number}", str(error))
    yield from _with_runs(measurements, store, every=False)


def read_own(store: Store) -> Iterator[Read]:
    """nibblas's kernels, each with the Measurements that this machine has of it."""
    from nibblas import evidence

    yield from _with_runs(evidence.store().all(), store, every=True)


def _with_runs(measurements: Iterable["Measurement"], store: Store, every: bool) -> Iterator[Read]:
    """Kernels with their Measurements; `every` kernel, or only those that have some."""
    from nibblas.kernels import kernels

    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for measurement in measurements:
        runs[measurement.kernel, measurement.digest].append(run_of(measurement))
    for kernel in kernels():
        of = runs.pop((kernel.name, kernel.digest), [])
        if of or every:
            yield _item(kernel, of)
    for (name, digest), of in runs.items():
        found = store.connection.execute(
            "SELECT digest FROM implementation WHERE slug = ? AND record = ?",
            (kebab("nibblas", name), _record(name, digest)),
        ).fetchone()
        if found:
            yield Attached(found[0], tuple(of))
        else:
            yield Skipped(
                f"{counted(len(of), 'measurement')} of {name}",
                f"of code with the digest {digest[:12]}, not in the index",
                len(of),
            )


def _item(kernel: "Kernel", runs: list[Run]) -> Item:
    from nibblas.kernel import PACKAGE

    contents = {source: (PACKAGE / source).read_bytes() for source in kernel.sources}
    launch = getattr(kernel.launch, "func", kernel.launch)
    written_in = {languages.of_path(path) for path in kernel.sources}
    licence = _licence()
    implementation = Implementation(
        kernel.slug,
        kernel.name,
        Source("nibblas", "nibblas", revision=_version(), terms=licence),
        files=described(contents),
        operation=OPERATIONS[kernel.op],
        authors=("nibblas",),
        # Of the device code, not of its launcher; a header of CUDA reads as C by its suffix.
        language=next((one for one in ("cuda", "c") if one in written_in), "python"),
        framework=BACKENDS.get(kernel.name.split("_")[0]),
        entry_point=f"{launch.__module__}.{launch.__qualname__}",
        signature=f'nibblas.{kernel.op}(..., kernel="{kernel.name}")',
        tensors=_tensors(kernel),
        origin="unknown",
        licence=licence,
        package="nibblas",
        import_path=f"nibblas.{kernel.op}",
        record=_record(kernel.name, kernel.digest),
    )
    archs = tuple(CompatFact("declared", arch=arch) for arch in kernel.archs)
    return Item(implementation, contents, runs=tuple(runs), facts=archs)


def _tensors(kernel: "Kernel") -> tuple[Tensor, ...]:
    """The operands of an op, each with every dtype or format and layout that the kernel takes."""
    operation = OPERATIONS[kernel.op]

    def layouts(accepted) -> str | None:
        return None if accepted is None else " or ".join("/".join((scale.name, data.name)) for scale, data in accepted)

    a = " or ".join(dict.fromkeys(a for a, _ in kernel.operands))
    b = " or ".join(dict.fromkeys(b for _, b in kernel.operands))
    known = {
        "a": (a, layouts(kernel.a_layouts)),
        "b": (b, layouts(kernel.b_layouts)),
        "b1": (b, layouts(kernel.b_layouts)),
        "b2": (b, layouts(kernel.b_layouts)),
        "c": (" or ".join(kernel.outs), None),
    }
    return tuple(
        Tensor(tensor.name, tensor.role, known[tensor.name][0], tensor.shape, known[tensor.name][1])
        for tensor in operation.tensors
    )


def run_of(measurement: "Measurement") -> Run:
    """A Measurement as a run: what is measured, compiled or checked in it, and nothing more."""
    from nibblas.statistics import median_interval

    m, p = measurement, measurement.problem
    of = OPERATIONS[p.op]
    axes = {axis: getattr(p, axis) for axis in SIZES if axis in of.axes}
    given = {name: value for name, value in p.as_dict().items() if name not in ("op", "arch", *SIZES)}
    # In which layout its operands are is the kernel's own choice, so that kernels of different layouts are compared.
    layouts = {name: list(given.pop(name)) for name in LAYOUTS if name in given}
    plain = ("LINEAR", "LINEAR")
    name = str(replace(p, a_layouts=plain, b_layouts=plain)).removesuffix(f" on {p.arch}")
    parameters = {"a": p.a, "b": p.b, "out": p.out, **given}
    figures = []
    if m.samples:
        median = median_interval(m.samples)
        figures = [Figure("latency", "median", median.value, median.low, median.high, len(m.samples))]
    return Run(
        of,
        Workload(of, name, axes, parameters),
        Protocol("nibblas bench", "nibblas", details={"method": m.method} if m.method else {}),
        # What was only compiled was so for an architecture, on no device.
        Environment(m.device if m.samples else None, p.arch, m.threads, m.versions, m.facts),
        "passed" if m.samples else "compiled",
        False,
        observed_at=m.when,
        figures=tuple(figures),
        samples=tuple(float(sample) for sample in m.samples),
        floor=m.floor,
        error=m.error,
        hardened=m.hardened,
        beside=m.beside,
        config={**m.config, **layouts},
        kernel_digest=m.digest,
        command=m.command,
    )


def _record(kernel: str, digest: str) -> str:
    return f"kernel {kernel}, digest {digest}"


def _licence() -> str | None:
    """The SPDX expression that the installed package declares."""
    try:
        return metadata("nibblas")["License-Expression"]
    except (PackageNotFoundError, KeyError):
        return None


def _version() -> str | None:
    try:
        return metadata("nibblas")["Version"]
    except PackageNotFoundError:
        return None
