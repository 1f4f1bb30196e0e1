"""What `nibblas bench` multiplies: activations, FP4 weights out of the caches, and the float64 answers.

Operands are drawn as codes and scale bytes, so that no quantizer stands between a kernel and its test. There is a class
for each operation that is a product: how it calls a kernel, what torch does in its place, and what is right.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, pad, silu

from nibblas import reference
from nibblas.bench.timing import MAX_COPIES, Rotation
from nibblas.formats import Format
from nibblas.kernel import Kernel
from nibblas.memory import free_memory
from nibblas.operators import best_linear, launch_each
from nibblas.problem import DTYPE_NAMES, DTYPES, Problem, arch_of, operand_name
from nibblas.tensor import ScaledTensor, stack

# Scale bytes as quantized weights have them, for what is timed: a kernel may have a slow path for extremes.
USUAL_SCALES = {"nvfp4": (80, 0x7E), "mxfp4": (115, 123)}
# Scales of one row lie this close, or its larger blocks would hide an error in the smaller ones.
SPREAD = {"nvfp4": 16, "mxfp4": 4}
GRAPH = 512  # launches in a CUDA graph, at most
COPIES_OF_MEMORY = 0.25  # the share of the free memory that copies of one operand may take

Activations = Tensor | ScaledTensor
Layouts = tuple[str, str]


def rotation_of(operand, beyond: int):
    """Copies of an operand, as many as the device's calls take turns on."""
    most = GRAPH if operand.device.type == "cuda" else MAX_COPIES
    room = torch.cuda.mem_get_info(operand.device)[0] if operand.device.type == "cuda" else free_memory()
    return Rotation(operand, beyond, max(1, min(most, int(room * COPIES_OF_MEMORY) // max(operand.nbytes, 1))))


class Operands(ABC):
    """Activations of the most rows that are timed, weights of one format, and the float64 answer for fewer rows.

    a : (most rows, K), or (L, most rows, K) for a batch; a dense dtype, or FP4 of the weights' format.
    b : (N, K), or more of them: what the operation says.
    out : the result's dtype.
    beyond : bytes that the copies of b span, of which a call takes one.
    """

    op: str
    is_rowwise = True  # what becomes of a row does not depend on how many there are

    def __init__(self, a: Activations, b: ScaledTensor, out: torch.dtype, beyond: int):
        self.a, self.b, self.out, self.beyond = a, b, out, beyond
        self._rotations: dict[Layouts, Rotation[ScaledTensor]] = {}
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}

    def problem(self, M: int) -> Problem:
        """The question, for weights in LINEAR layouts."""
        *_, N, K = self.b.shape
        a, out, arch = operand_name(self.a, "bench"), DTYPE_NAMES[self.out], arch_of(self.b.device)
        return Problem(self.op, M, N, K, self.L, self.G, a, self.b.format.name, out, arch=arch)

    @property
    def L(self) -> int:
        """Problem.L."""
        return 1

    @property
    def G(self) -> int:
        """Problem.G."""
        return 1

    def rows(self, M: int) -> Activations:
        """The first M rows of the activations."""
        rows = self.a[..., :M, :] if isinstance(self.a, Tensor) else self.a.slice(-2, 0, M)
        return rows.contiguous()

    def weights(self, layouts: Layouts) -> Rotation[ScaledTensor]:
        """Copies of the weights in these layouts of scale and data."""
        if layouts not in self._rotations:
            self._rotations[layouts] = rotation_of(self.b.with_layout(*layouts), self.beyond)
        return self._rotations[layouts]

    def covers(self, scales: tuple[int, int]) -> bool:
        """Whether b has all pairs of codes and all of these scale bytes."""
        return len(self.b.data.unique()) == 256 and len(self.b.scale.unique()) == scales[1] - scales[0] + 1

    def answer(self, M: int) -> tuple[Tensor, Tensor]:
        """The exact result of M rows in float64, and the size of each of its elements that errors are compared with."""
        rows = self.a.shape[-2] if self.is_rowwise else M
        if rows not in self._answers:
            self._answers[rows] = self._answer(rows)
        exact, size = self._answers[rows]
        return exact[..., :M, :], size[..., :M, :]

    def check(self, kernel: Kernel, problem: Problem) -> tuple[float, str | None]:
        """`compare` for what the kernel makes of these operands."""
        exact, size = self.answer(problem.M)
        out = torch.full(exact.shape, torch.nan, dtype=self.out, device=self.b.device)
        self.call(kernel, problem)(out)
        return compare(out, exact, size, problem.K)

    @abstractmethod
    def _answer(self, M: int) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def call(self, kernel: Kernel, problem: Problem) -> Callable[[Tensor], None]:
        """A function that writes the kernel's result to a tensor, of the next copy of the weights at each call."""

    @abstractmethod
    def of_torch(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """What torch does in a kernel's place for dense rows x: a function of dense weights of b's shape."""


class Linear(Operands):
    """a (M, K) @ b (N, K).T, or as many of them as a and b have a leading L."""

    op = "linear"

    @property
    def L(self) -> int:
        return self.b.shape[0] if self.b.ndim == 3 else 1

    def _answer(self, M: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(M)
        return reference.matmul(rows, self.b), reference.magnitude(rows, self.b)

    def call(self, kernel: Kernel, problem: Problem) -> Callable[[Tensor], None]:
        rows, weights = self.rows(problem.M), self.weights(problem.b_layouts)
        return lambda out: launch_each(kernel, rows, weights(), None, out)

    def of_torch(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return (lambda w: linear(x, w)) if x.ndim == 2 else (lambda w: torch.bmm(x, w.mT))


class GroupedLinear(Operands):
    """Rows of a (M, K), dealt to groups at random, each run against its own b (G, N, K)."""

    op = "grouped_linear"
    is_rowwise = False

    @property
    def G(self) -> int:
        return self.b.shape[0]

    def offsets(self, M: int) -> Tensor:
        """Where the runs of M rows begin and end: (G + 1,) int32."""
        group_of_row = torch.randint(self.G, (M,), generator=torch.Generator().manual_seed(M))
        return pad(group_of_row.bincount(minlength=self.G).cumsum(0), (1, 0)).int()

    def runs(self, M: int) -> list[tuple[int, int, int]]:
        """Each group that has some of M rows, whose weights are read, with where they begin and end."""
        return [(g, *run) for g, run in enumerate(pairwise(self.offsets(M).tolist())) if run[0] < run[1]]

    def share(self, M: int) -> float:
        """Of the groups, the share that have rows."""
        return len(self.runs(M)) / self.G

    def _answer(self, M: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(M)
        sizes = [
            reference.magnitude(rows[s:e] if isinstance(rows, Tensor) else rows.slice(-2, s, e), self.b[g])
            for g, s, e in self.runs(M)
        ]
        return reference.grouped_linear(rows, self.b, self.offsets(M)), torch.cat(sizes)

    def call(self, kernel: Kernel, problem: Problem) -> Callable[[Tensor], None]:
        rows, weights = self.rows(problem.M), self.weights(problem.b_layouts)
        offsets = self.offsets(problem.M).to(self.b.device)
        return lambda out: kernel.launch(rows, weights(), offsets, None, out, linear=best_linear)

    def of_torch(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        if x.dtype == torch.bfloat16:
            ends = self.offsets(len(x))[1:].to(x.device)
            return lambda w: grouped_mm(x, w.mT, offs=ends)
        runs = [(g, x[start:end]) for g, start, end in self.runs(len(x))]
        return lambda w: torch.cat([linear(rows, w[g]) for g, rows in runs])


class GatedLinear(Operands):
    """silu(a @ b[0].T) * (a @ b[1].T) of a (M, K) and b (2, N, K)."""

    op = "gated_linear"

    def __init__(self, a: Activations, b: ScaledTensor, out: torch.dtype, beyond: int):
        super().__init__(a, b, out, beyond)
        self._pairs: dict[Layouts, Iterator[tuple[ScaledTensor, ScaledTensor]]] = {}

    def pairs(self, layouts: Layouts) -> Iterator[tuple[ScaledTensor, ScaledTensor]]:
        """The gate's and the other weights of the next copy, one iterator for all kernels: see Rotation."""
        if layouts not in self._pairs:
            self._pairs[layouts] = cycle([(w[0], w[1]) for w in self.weights(layouts).copies])
        return self._pairs[layouts]

    def _answer(self, M: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(M)
        (gate, up), (gate_size, up_size) = reference.matmul(rows, self.b), reference.magnitude(rows, self.b)
        # The gate's slope is 1.1 at most: so an error of either product becomes one of the result.
        size = 1.1 * gate_size * up.abs() + silu(gate).abs() * up_size
        return reference.gated_activation(gate, up), size

    def call(self, kernel: Kernel, problem: Problem) -> Callable[[Tensor], None]:
        rows, pairs = self.rows(problem.M), self.pairs(problem.b_layouts)
        return lambda out: kernel.launch(rows, *next(pairs), None, None, "silu", out, linear=best_linear)

    def of_torch(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda w: silu(linear(x, w[0])) * linear(x, w[1])


PRODUCTS: dict[str, type[Operands]] = {kind.op: kind for kind in (Linear, GroupedLinear, GatedLinear)}


def drawn(
    op: str,
    Ms: Sequence[int],
    N: int,
    K: int,
    format: Format,
    activations: str,
    scales: tuple[int, int],
    beyond: int,
    device: torch.device,
    *,
    L: int,
    G: int,
) -> Operands:
    """Operands of so many rows, with scale bytes from the lowest to the highest of `scales`.

    activations : "fp4" (of the weights' format) or a dtype name; the result is bf16 for fp4, else of that dtype.
    L : matrices of a linear. G : groups of a grouped_linear.
    """
    generator, kind, most = torch.Generator().manual_seed(0), PRODUCTS[op], max(Ms)
    out = torch.bfloat16 if activations == "fp4" else DTYPES[activations]
    batch = L if op == "linear" and L > 1 else None

    def matrices(count: int | None, rows: int) -> ScaledTensor:
        found = [draw(rows, K, format, scales, generator) for _ in range(count or 1)]
        return (found[0] if count is None else stack(found)).to(device)

    a: Activations
    if activations == "fp4":
        a = matrices(batch, most)
    else:
        a = torch.randn(*([batch] if batch else []), most, K, generator=generator).to(out).to(device)
    b = matrices({"grouped_linear": G, "gated_linear": 2}.get(op, batch), N)
    if op == "gated_linear" and b.global_scale is not None:
        b.global_scale.div_(math.sqrt(K))  # two sums of K are multiplied, and fp16 ends at 65,504
    found = kind(a, b, out, beyond)
    if isinstance(found, GroupedLinear):  # groups without rows are not read, and make no copy cold
        found.beyond = math.ceil(beyond / min(found.share(M) for M in Ms))
    return found


def legal_scales(op: str, format: Format, activations: str) -> tuple[int, int]:
    """Lowest and highest scale byte that a kernel must get right: those with which the result stays finite.

    Every e4m3 that is not negative; e8m0 up to 240 with activations near 1 (129 where the result is fp16), and a range
    in the middle where both operands have scales, or two products are multiplied.
    """
    if format.has_global_scale:
        return 0, format.scale_code.largest
    if op == "gated_linear":
        return (100, 121) if activations == "fp16" else (96, 150)
    return {"fp4": (64, 183), "fp16": (0, 129)}.get(activations, (0, 240))


def draw(rows: int, K: int, format: Format, scale_bytes: tuple[int, int], generator: torch.Generator) -> ScaledTensor:
    """(rows, K) of all 16 codes alike, and scale bytes from lowest to highest: each row its own short range of them."""
    (low, high), spread = scale_bytes, SPREAD[format.name]
    data = torch.randint(256, (rows, K // 2), dtype=torch.uint8, generator=generator)
    place = torch.randperm(rows, generator=generator) / max(rows - 1, 1)
    first = low + (place * (high - low - spread + 1)).round().int()
    steps = torch.randint(spread, (rows, K // format.block_size), generator=generator)
    scale = (first[:, None] + steps).to(torch.uint8)
    global_scale = (
        torch.rand((), dtype=torch.float32, generator=generator).add_(0.5).div_(448)
        if format.has_global_scale
        else None
    )
    return ScaledTensor(data, scale, format, global_scale)


def compare(got: Tensor, exact: Tensor, size: Tensor, K: int) -> tuple[float, str | None]:
    """The largest deviation from the float64 answer over the element's size, and what is wrong (None if nothing is).

    The size is the larger of |exact| and `size` (reference.magnitude). An element may be off by half a unit in its last
    place, and by the error of a sum of K terms in fp32: 1e-6, and a truncation of the running sum every 16 products.
    """
    deviation = (got.double() - exact).abs()
    size = torch.maximum(size, exact.abs())
    dtype = torch.finfo(got.dtype)
    half_ulp = dtype.eps / 2 * (size + dtype.tiny)
    allowed = half_ulp + (1e-6 + K * 2.0**-23 / 16) * size
    bad = ~(deviation <= allowed)
    error = (deviation / size).max().item()
    if not bad.any():
        return error, None
    excess = (deviation / allowed).nan_to_num(math.inf).max().item()
    return (
        error,
        f"{int(bad.sum())} of {bad.numel()} elements are wrong, the worst by {excess:.3g} times what is allowed",
    )
