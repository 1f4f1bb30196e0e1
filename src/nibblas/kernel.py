"""Kernel: what can answer a Problem, as data first.

`why_not` is derived from the data and serves dispatch, test skips, error messages and the support table, so that a
kernel can't be offered where it wasn't meant to run.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nibblas.layouts import LINEAR, Layout
from nibblas.problem import Problem

PACKAGE = Path(__file__).parent

Layouts = tuple[tuple[Layout, Layout], ...]
PLAIN: Layouts = ((LINEAR, LINEAR),)


@dataclass(frozen=True)
class Kernel:
    """An implementation of one op.

    Parameters
    ----------
    name : unique, `<backend>_<op>[_<arch>]` with what sets it apart.
    op : the Problem.op it answers.
    archs : Problem.arch values it runs on; empty means any.
    operands : accepted (a, b) names, as Problem.a and Problem.b.
    outs : accepted Problem.out names.
    launch : does the work. linear: launch(a, b, bias, out) with a (M, K), b (N, K), out (M, N), or each with a leading
        L if `batched`. grouped_linear: launch(x, w, offsets, bias, out, linear=...). gated_linear: launch(x, w_gate,
        w_up, bias_gate, bias_up, activation, out, linear=...). quantize: launch(x, format, rule, global_scale)
        -> ScaledTensor over x (rows, K). `linear` is the best linear kernel as a
        function, for kernels made of products.
    sources : files under the package whose text is the kernel; their digest dates its evidence.
    cost : Problem, Roofline -> seconds expected, where nothing was measured.
    bind : linear only, optional: bind(a, b, bias, out) -> run(a, out), a cheaper launch for more operands like these: a
        and out contiguous, of as many elements, of these dtypes and this device, b and bias the very same memory. What
        it gives belongs to the thread that asked.
    a_layouts, b_layouts : accepted (layout, data_layout) of an operand, None for any. The first of b's is what a module
        should store its weights in.
    also : a reason not to run that the data can't say, or None.
    batched : launch takes a leading L.
    batch_invariant : a row's result does not depend on M.
    decodes_weights : the whole weight is decoded at every call, so a module had better keep it decoded.
    """

    name: str
    op: str
    archs: tuple[str, ...]
    operands: tuple[tuple[str, str], ...]
    outs: tuple[str, ...]
    launch: Callable
    sources: tuple[str, ...]
    cost: "Callable[[Problem, Roofline], float]"  # type: ignore[name-defined]  # noqa: F821
    a_layouts: Layouts | None = PLAIN
    b_layouts: Layouts | None = PLAIN
    also: Callable[[Problem], str | None] | None = None
    bind: Callable | None = None
    batched: bool = False
    batch_invariant: bool = False
    decodes_weights: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def slug(self) -> str:
        """Its name in the index."""
        return f"nibblas-{self.name.replace('_', '-')}"

    @cached_property
    def digest(self) -> str:
        """sha256 over the source files' bytes, each under its name."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(source.encode() + b"\0" + (PACKAGE / source).read_bytes())
        return digest.hexdigest()

    def why_not(self, problem: Problem) -> str | None:
        """Why this kernel can't answer the problem; None if it can."""
        if problem.op != self.op:
            return f"computes {self.op}, asked for {problem.op}"
        if self.archs and problem.arch not in self.archs:
            some = self.archs if len(self.archs) <= 4 else (*self.archs[:3], f"{len(self.archs) - 3} more")
            return f"runs on {', '.join(some)}, this is {problem.arch}"
        if (problem.a, problem.b) not in self.operands:
            pairs = ", ".join(f"{a} x {b}" for a, b in self.operands)
            return f"takes {pairs}; asked for {problem.a} x {problem.b}"
        if problem.out not in self.outs:
            return f"writes {', '.join(self.outs)}; asked for {problem.out}"
        for name, accepted, given in (
            ("a", self.a_layouts, problem.a_layouts),
            ("b", self.b_layouts, problem.b_layouts),
        ):
            names = None if accepted is None else [(layout.name, data.name) for layout, data in accepted]
            if names is not None and given not in names:
                return f"takes {name} in {', '.join('/'.join(pair) for pair in names)}; got {'/'.join(given)}"
        if problem.batch_invariant and not self.batch_invariant:
            return "a row's result may depend on M, asked for batch_invariant"
        return self.also(problem) if self.also else None


def storage_layouts(kernels: Iterable[Kernel]) -> Layouts:
    """The layouts in which weights are stored for some kernels: row after row, then what each of them likes best."""
    return tuple(dict.fromkeys([*PLAIN, *(kernel.b_layouts[0] for kernel in kernels if kernel.b_layouts)]))
