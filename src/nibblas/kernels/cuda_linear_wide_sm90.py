"""c = a @ b.T for many rows of a on Hopper, in CUDA C++: bound by the tensor cores.

b is prepacked as for cuda_linear_sm90.py (layouts.FragmentCodes) and decoded on its way from shared memory to wgmma's
operand A, anew for every 48 to 256 rows of a, while the tensor cores work. A kernel before it writes a as wgmma reads
it, into scratch of a's size (of fp16 twice that), while the first weights are fetched. K is split over the CTAs of a
cluster, whose partial sums are added in a fixed order.
fp16 activations are split into two bf16 terms, exactly, and cost twice the columns.
Some ten cuts of the work serve all M of one matrix; each is compiled when it is first met, in half a second, and kept.
Weakness: work is cut into whole tiles, which leaves up to a sixth of the multiprocessors idle; the kernel before and
the cluster's sums take 5 us, more than small matrices win.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import islice, product

import torch
from torch import Tensor

from nibblas.formats import NVFP4, Format
from nibblas.kernel import Kernel
from nibblas.kernels.cuda_module import SHARED_LIMIT_SM90, SOURCES, TYPES, Launch, Launches, load, missing, source_of
from nibblas.kernels.cuda_prepacked_sm90 import HEADER, LAYOUTS, TERMS, too_many
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

FILES = (HEADER, "cuda_linear_wide_sm90.cu")
# As the device code has them: threads of a CTA that arranges a, registers of a thread that copies.
ARRANGERS, COPYING = 256, 40


@dataclass(frozen=True)
class Config:
    """How the work is cut: see the device code."""

    warpgroups: int  # that multiply; another copies
    column_tiles: int
    cluster: int
    depth: int
    row_tiles: int = 1
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def columns(self) -> int:
        """Columns of c.T that a CTA computes."""
        return 8 * self.column_tiles

    @property
    def rows(self) -> int:
        """Rows of b that a cluster computes."""
        return 64 * self.warpgroups * self.row_tiles

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies, once the copying ones have given back theirs, beside its sums."""
        at_start = 65536 // (self.threads * self.min_blocks) // 8 * 8
        able = min((at_start * self.threads - COPYING * 128) // (128 * self.warpgroups) // 8 * 8, 240)
        return able - 4 * self.row_tiles * self.column_tiles

    def options(self, format: Format, terms: int) -> tuple[str, ...]:
        """The device code's compile-time values, as compiler options."""
        values = {
            "FORMAT": format.block_size,
            "TERMS": terms,
            "COLUMN_TILES": self.column_tiles,
            "WARPGROUPS": self.warpgroups,
            "ROW_TILES": self.row_tiles,
            "CLUSTER": self.cluster,
            "DEPTH": self.depth,
            "MIN_BLOCKS": self.min_blocks,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    def shared_bytes(self, format: Format) -> int:
        """Shared memory of a CTA: barriers; the ring of chunks of a and b, or the sums that take its place."""
        ring = self.depth * (self.columns * 256 + self.rows // 16 * (1024 + 2048 // format.block_size))
        return 1024 + max(ring, self.columns * (self.rows + 4) * 4)


# The device code's Arguments: addresses of codes, scales, a's image, out, bias and global_scale; bytes between rows of
# out, and between matrices of out, codes and scales; floats between global scales; M, N, K; types of bias and out;
# blocks of rows of a.
ARGUMENTS = struct.Struct("10QI6iI")
# ArrangeArguments: addresses of a and of its image; bytes between rows and between matrices of a; M, K.
ARRANGE_ARGUMENTS = struct.Struct("4Q2i")
# Two addresses differ from call to call: a's and its image's in ArrangeArguments, the image's and out's in Arguments.
PLACES, PLACES_AT = struct.Struct("2Q"), 16


def _chunks(K: int) -> int:
    return -(-K // 128)


@cache
def configs() -> tuple[Config, ...]:
    """All cuts for which registers and shared memory suffice, each with as deep a ring as there is room for."""
    found = []
    shapes = product((1, 2, 3), (6, 8, 12, 16, 24, 32), range(1, 9), (1, 2), (1, 2))
    for warpgroups, column_tiles, cluster, row_tiles, min_blocks in shapes:
        cuts = (Config(warpgroups, column_tiles, cluster, depth, row_tiles, min_blocks) for depth in range(8, 2, -1))
        fitting = (cut for cut in cuts if (cut.shared_bytes(NVFP4) + 1024) * min_blocks <= 228 * 1024)
        found += [cut for cut in islice(fitting, 1) if cut.registers >= 60]
    return tuple(found)


# CTAs at a time, one a multiprocessor, of an H200: its GPCs hold clusters of three and more with some left over.
MULTIPROCESSORS, CLUSTERED = 132, 114
SUSTAINED = 0.87  # of the tensor cores' rate, from some 500 rows on


def estimate(config: Config, N: int, K: int, columns: int, L: int = 1) -> float:
    """Microseconds that an H200 takes: fitted to 6344 measurements of NVFP4 up to 512 rows, with an RMS error of 9 %.

    Of five things that overlap the slowest counts: the tensor cores, the decoding and the copies of a on a
    multiprocessor, a warp's own steps, and the memory; the sums' way out comes on top, for each wave of CTAs, and a's
    arrangement once.
    """
    chunks, groups, blocks = _chunks(K), -(-N // config.rows), -(-columns // config.columns)
    CTAs = groups * blocks * config.cluster * L
    at_once = MULTIPROCESSORS if config.cluster <= 2 else CLUSTERED
    waves, resident = -(-CTAs // (at_once * config.min_blocks)), min(config.min_blocks, -(-CTAs // at_once))
    steps, bands = -(-chunks // config.cluster), config.rows // 64 * resident
    tensor = 0.0189 * config.column_tiles * bands * steps
    decoding = 0.166 * bands * steps
    copies = 0.0145 * config.column_tiles * resident * steps
    chain = 0.224 * config.row_tiles * steps * (1 + 0.0529 * config.column_tiles)
    memory = L * groups * config.rows * chunks * 128 * 0.5625 / 4.4e6 * blocks**0.3
    overlapping = sum(t**6 for t in (tensor, decoding, copies, chain, memory)) ** (1 / 6)
    sums = 1.92e-4 * config.rows * config.columns * resident
    overhead = 4.85 + 0.042 * config.cluster + 1.96 * (waves - 1)
    return overhead + 0.996e-6 * columns * K * L + waves * (overlapping + sums)


@lru_cache(maxsize=4096)
def configure(N: int, K: int, columns: int, L: int = 1) -> Config:
    """The cut with the least estimate for b ([L,] N, K) and so many columns of c.T (rows of a, times their terms)."""
    able = (config for config in configs() if config.cluster <= _chunks(K))
    return min(able, key=lambda config: estimate(config, N, K, columns, L))


@dataclass(frozen=True)
class Prepared:
    """Both launches for some sizes, their arguments yet to be packed into them, and what they need."""

    arrange: Launch
    multiply: Launch
    image_bytes: int
    blocks: int


_launches = Launches()


def prepare(format: Format, terms: int, M: int, N: int, K: int, L: int, device: int, config: Config) -> Prepared:
    """The launches for these sizes."""
    source, options = source_of(*FILES), config.options(format, terms)
    rows = config.columns // terms
    blocks, chunks = -(-M // rows), _chunks(K)
    arrange = Launch(
        load(source, "sm_90a", options, "nibblas_arrange", 0, device),
        bytearray(ARRANGE_ARGUMENTS.size),
        (-(-chunks * rows * 16 // ARRANGERS), blocks, L),
        ARRANGERS,
    )
    multiply = Launch(
        load(source, "sm_90a", options, "nibblas_linear_wide", SHARED_LIMIT_SM90, device),
        bytearray(ARGUMENTS.size),
        (-(-N // config.rows) * blocks * config.cluster, L, 1),
        config.threads,
        config.shared_bytes(format),
        dependent=True,
    )
    return Prepared(arrange, multiply, L * blocks * chunks * config.columns * 256, blocks)


def _ready(a: Tensor, b: ScaledTensor, N: int, config: Config | None) -> Prepared:
    """This thread's launches for these sizes."""
    (M, K), L, terms, device = a.shape[-2:], a.shape[0] if a.ndim == 3 else 1, TERMS[a.dtype], b.data.device.index
    config = config or configure(N, K, M * terms, L)
    key = (b.format.name, terms, M, N, K, L, device, config)
    return _launches.get(key, lambda: prepare(b.format, terms, M, N, K, L, device, config))


def _pack(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, image: int, blocks: int) -> tuple[bytes, bytes]:
    """The device code's ArrangeArguments and Arguments."""
    batched = a.ndim == 3 and a.shape[0] > 1
    (M, K), global_scale = a.shape[-2:], b.global_scale
    arrange = ARRANGE_ARGUMENTS.pack(
        a.data_ptr(),
        image,
        a.stride(-2) * a.itemsize,
        a.stride(0) * a.itemsize if batched else 0,
        M,
        K,
    )
    multiply = ARGUMENTS.pack(
        b.data.data_ptr(),
        b.scale.data_ptr(),
        image,
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        out.stride(-2) * out.itemsize,
        out.stride(0) * out.itemsize if batched else 0,
        b.data.stride(0) if batched else 0,
        b.scale.stride(0) if batched else 0,
        global_scale.stride(0) if batched and global_scale is not None and global_scale.ndim else 0,
        M,
        out.shape[-1],
        K,
        0 if bias is None else TYPES[bias.dtype],
        TYPES[out.dtype],
        blocks,
        0,
    )
    return arrange, multiply


def launch(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, config: Config | None = None) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K) prepacked, bias (N,), out ([L,] M, N)."""
    if (not a.is_contiguous() and (a.stride(-1) != 1 or any(stride % 2 for stride in a.stride()))) or a.data_ptr() % 4:
        a = a.clone(memory_format=torch.contiguous_format)  # elements are read in pairs
    result = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    if a.ndim == 3 and a.shape[0] > 1 and not (b.data[0].is_contiguous() and b.scale[0].is_contiguous()):
        b = b.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    ready = _ready(a, b, out.shape[-1], config)
    image = torch.empty(ready.image_bytes, dtype=torch.uint8, device=a.device)
    arrange, multiply = _pack(a, b, bias, result, image.data_ptr(), ready.blocks)
    ready.arrange.arguments[:] = arrange
    ready.multiply.arguments[:] = multiply
    stream = torch._C._cuda_getCurrentRawStream(a.device.index)
    ready.arrange(stream)
    ready.multiply(stream)
    if result is not out:
        out.copy_(result)


def bind(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Kernel.bind: what `launch` finds out of operands is found out once."""
    if bias is not None:
        bias = bias.detach().contiguous()
    ready, device = _ready(a, b, out.shape[-1], None), a.device
    to_arrange, to_multiply = ready.arrange.arguments, ready.multiply.arguments
    arrange, multiply = _pack(a, b, bias, out, 0, ready.blocks)

    def run(a: Tensor, out: Tensor, _keep=(b, bias)) -> None:
        if a.data_ptr() % 4:
            a = a.clone()
        image = torch.empty(ready.image_bytes, dtype=torch.uint8, device=device)
        to_arrange[:], to_multiply[:] = arrange, multiply
        PLACES.pack_into(to_arrange, 0, a.data_ptr(), image.data_ptr())
        PLACES.pack_into(to_multiply, PLACES_AT, image.data_ptr(), out.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        ready.arrange(stream)
        ready.multiply(stream)

    return run


def cost(problem: Problem, line: Roofline) -> float:
    """What `estimate` says of an H200, scaled to the device's bandwidth; with many rows, the tensor cores' rate."""
    terms = TERMS[DTYPES[problem.a]]
    columns = problem.M * terms
    config = configure(problem.N, problem.K, columns, problem.L)
    H200 = estimate(config, problem.N, problem.K, columns, problem.L)
    return max(H200 * 1e-6 * 4.4e12 / line.read_bandwidth, terms * problem.operations / (SUSTAINED * line.rate("bf16")))


def also(problem: Problem) -> str | None:
    """Why a launch of the kernels can't be made, beyond what its record says."""
    fewest = min(config.columns for config in configs()) // TERMS[DTYPES[problem.a]]
    return missing() or too_many(-(-problem.M // fewest), problem.L)


_kernel = partial(
    Kernel,
    op="linear",
    archs=("sm_90",),
    outs=tuple(DTYPES),
    launch=launch,
    bind=bind,
    cost=cost,
    also=also,
    sources=(
        *(f"kernels/{name}" for name in FILES),
        "kernels/cuda_linear_wide_sm90.py",
        "kernels/cuda_prepacked_sm90.py",
        *SOURCES,
    ),
    batched=True,
)
KERNELS = tuple(
    _kernel(
        name=f"cuda_linear_wide_sm90_{format.name}",
        operands=(("bf16", format.name), ("fp16", format.name)),
        b_layouts=(layouts,),
    )
    for format, layouts in LAYOUTS.items()
)
