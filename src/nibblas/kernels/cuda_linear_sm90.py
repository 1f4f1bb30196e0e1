"""c = a @ b.T for few rows of a on Hopper, in CUDA C++: bound by reading b once.

More than 64 rows (32 of fp16) are done 64 at a time, each time with all of b: right, and slow from 128 rows on.

b is prepacked as the registers of mma's operand A (layouts.FragmentCodes); a lane copies and reads bytes of its own;
eight codes become four pairs of bf16 in eight operations and four multiplications by their block's scale, exactly. K is
split over the warps of a CTA and the CTAs of a cluster, whose partial sums are added in a fixed order.
fp16 activations are split into two bf16 terms, exactly, and cost twice the columns.
Weakness: a matrix of few bytes takes the launch, a trip to memory and one through the cluster, 3 us; from M = 32 on
the decoding and the tensor cores take turns where they should overlap.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from nibblas.formats import NVFP4, Format
from nibblas.kernel import Kernel
from nibblas.kernels import cuda_module
from nibblas.kernels.cuda_module import SHARED_LIMIT_SM90, SOURCES, TYPES, Launch, Launches, load, missing, source_of
from nibblas.kernels.cuda_prepacked_sm90 import HEADER, LAYOUTS, TERMS, too_many
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

FILES = (HEADER, "cuda_linear_sm90.cu")
MAX_COLUMNS = 64
INVARIANT_COLUMNS = 32


@dataclass(frozen=True)
class Config:
    """How the work is cut: see the device code."""

    row_warps: int
    k_warps: int
    cluster: int
    row_tiles: int = 1
    depth: int = 4
    min_blocks: int = 1
    wgmma: bool = False
    one_chain: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    @property
    def rows(self) -> int:
        """Rows of b that a cluster computes."""
        return 16 * self.row_warps * self.row_tiles

    def column_tiles(self, columns: int) -> int:
        """Tiles of 8 columns of c.T that hold so many; wgmma is written for 2, 4 and 8."""
        tiles = -(-columns // 8)
        return next(n for n in (2, 4, 8) if n >= tiles) if self.wgmma else tiles

    def options(self, format: Format, terms: int, columns: int) -> tuple[str, ...]:
        """The device code's compile-time values, as compiler options."""
        values = {
            "FORMAT": format.block_size,
            "TERMS": terms,
            "COLUMN_TILES": self.column_tiles(columns),
            "ROW_WARPS": self.row_warps,
            "K_WARPS": self.k_warps,
            "CLUSTER": self.cluster,
            "ROW_TILES": self.row_tiles,
            "DEPTH": self.depth,
            "MIN_BLOCKS": self.min_blocks,
        }
        flags = {"WARPGROUPS": self.wgmma, "ONE_CHAIN": self.one_chain}
        defined = (f"-D{name}" for name, is_set in flags.items() if is_set)
        return (*(f"-D{name}={value}" for name, value in values.items()), *defined)

    def shared_bytes(self, format: Format, columns: int, K: int) -> int:
        """Shared memory of a CTA: partial sums of the rows that it writes, rings of chunks, its part of a."""
        owned = -(-self.row_warps * self.row_tiles // self.cluster)
        sums = self.cluster * self.k_warps * owned * self.column_tiles(columns) * 512
        ring = self.row_warps * self.k_warps * self.depth * self.row_tiles * (1024 + 2048 // format.block_size)
        if self.wgmma:
            return 1024 + max(sums, ring + (self.depth + 2) * self.column_tiles(columns) * 2048)
        return 128 + sums + ring + columns * (-(-_chunks(K) // self.cluster) * 256 + 64)


# The device code's Arguments: addresses of codes, scales, a, out, bias and global_scale; bytes between rows of a and
# out, and between matrices of a, out, codes and scales; floats between global scales; M, N, K; types of bias and out.
ARGUMENTS = struct.Struct("12Q6i")
# a and out among them.
PLACES, PLACES_AT = struct.Struct("2Q"), 16


def _chunks(K: int) -> int:
    return -(-K // 128)


# Clusters of CTAs, each CTA with a multiprocessor of its own, that an H200 runs at a time: its GPCs differ in size.
CTAS_AT_ONCE = {1: 132, 2: 132, 4: 120, 8: 120}


def _candidates(N: int, K: int, columns: int) -> Iterator[Config]:
    tiles, chunks = -(-N // 16), _chunks(K)
    for cluster, row_tiles in product(CTAS_AT_ONCE, (1, 2)):
        if cluster > chunks:
            continue
        if row_tiles == 1 and columns > 8:
            yield from (Config(row_warps, 1, cluster, 1, 3, wgmma=True) for row_warps in (4, 8, 12, 16))
        if row_tiles * columns > 64 or columns > 32:
            continue
        for row_warps, k_warps in product((1, 2, 3, 4, 6, 7, 8, 12, 14, 16), (1, 2, 4, 8, 16)):
            if row_warps * k_warps in (4, 8, 12, 14, 16) and row_warps * row_tiles <= max(tiles, 4):
                steps = -(-chunks // (cluster * k_warps))
                yield Config(row_warps, k_warps, cluster, row_tiles, 5 - row_tiles if steps > 4 else 2)


def estimate(config: Config, N: int, K: int, columns: int, L: int = 1) -> float:
    """Microseconds that an H200 takes: fitted to 856 measurements of NVFP4, with an RMS error of 9 %.

    Of three things that overlap the slowest counts: the memory, the decoding on a multiprocessor, and a warp's own
    steps; a's way into shared memory and the partial sums' way out of it come on top, for each wave of CTAs.
    """
    tiles, chunks, column_tiles = -(-N // 16), _chunks(K), config.column_tiles(columns)
    warps, cluster = config.threads // 32, config.cluster
    CTAs = -(-N // config.rows) * cluster * L
    fit = SHARED_LIMIT_SM90 // (config.shared_bytes(NVFP4, columns, K) + 1024)
    resident = max(1, min(fit, 64 // warps, 2048 // warps // (112 if config.wgmma else 80)))
    at_once = CTAS_AT_ONCE[cluster]
    waves, resident = -(-CTAs // (at_once * resident)), min(resident, -(-CTAs // at_once))
    steps = -(-chunks // (cluster * config.k_warps)) * config.row_tiles
    memory = L * tiles * 16 * chunks * 128 * 0.5625 / 4.4e6 * 1.14
    decoding = (0.15 + 0.014 * column_tiles) if config.wgmma else (0.085 + 0.031 * column_tiles)
    decoding *= waves * steps * warps * resident / 4
    chain = (0.25 + 0.031 * column_tiles) if config.wgmma else (0.12 + 0.031 * column_tiles)
    chain *= waves * steps
    a = waves * resident * columns * -(-chunks // cluster) * (0.0021 if config.wgmma else 0.0074)
    owned = -(-config.row_warps * config.row_tiles // cluster)
    sums = cluster * config.k_warps * owned * column_tiles / warps * (0.11 if config.wgmma else 0.16)
    overhead = 2.7 + {1: 0.0, 2: 0.09, 4: 0.15, 8: 0.4}[cluster] + 0.1 * config.wgmma + 1.57 * (waves - 1)
    return overhead + (memory**6.5 + decoding**6.5 + chain**6.5) ** (1 / 6.5) + a + sums


@lru_cache(maxsize=4096)
def configure(N: int, K: int, columns: int, L: int = 1) -> Config:
    """The cut with the least estimate for b ([L,] N, K) and so many columns of c.T (rows of a, times their terms)."""
    fitting = (c for c in _candidates(N, K, columns) if c.shared_bytes(NVFP4, columns, K) <= SHARED_LIMIT_SM90)
    return min(fitting, key=lambda config: estimate(config, N, K, columns, L))


@cache
def configure_invariant(N: int, K: int) -> Config:
    """The cut for b (N, K) by which a row of a is summed alike whatever is beside it: the best one for few rows that
    can do INVARIANT_COLUMNS at a time.
    """
    able = [c for c in _candidates(N, K, INVARIANT_COLUMNS) if not c.wgmma]
    fitting = (c for c in able if c.shared_bytes(NVFP4, INVARIANT_COLUMNS, K) <= SHARED_LIMIT_SM90)
    return replace(min(fitting, key=lambda config: estimate(config, N, K, 8)), one_chain=True)


_launches = Launches()


def prepare(
    format: Format, terms: int, M: int, N: int, K: int, L: int, device: int, config: Config | None = None
) -> Launch:
    """A launch of the kernel for these sizes, its arguments (`ARGUMENTS`) yet to be packed into it."""
    columns = min(M * terms, INVARIANT_COLUMNS if config and config.one_chain else MAX_COLUMNS)
    config = config or configure(N, K, columns, L)
    rows = config.column_tiles(columns) * 8 // terms
    shared_bytes = config.shared_bytes(format, columns, K)
    options = config.options(format, terms, columns)
    if cuda_module.dependent:
        options += ("-DDEPENDENT",)
    kernel = load(source_of(*FILES), "sm_90a", options, "nibblas_linear", SHARED_LIMIT_SM90, device)
    grid = (-(-N // config.rows) * config.cluster, L, -(-M // rows))
    return Launch(kernel, bytearray(ARGUMENTS.size), grid, config.threads, shared_bytes, cuda_module.dependent)


def _ready(format: Format, terms: int, M: int, N: int, K: int, L: int, device: int, config: Config | None) -> Launch:
    """This thread's launch for these sizes."""
    key = (format.name, terms, M, N, K, L, device, config, cuda_module.dependent)
    return _launches.get(key, lambda: prepare(format, terms, M, N, K, L, device, config))


def _pack(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> bytes:
    """The device code's Arguments."""
    batched = a.ndim == 3 and a.shape[0] > 1
    global_scale = b.global_scale
    return ARGUMENTS.pack(
        b.data.data_ptr(),
        b.scale.data_ptr(),
        a.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        a.stride(-2) * a.itemsize,
        out.stride(-2) * out.itemsize,
        a.stride(0) * a.itemsize if batched else 0,
        out.stride(0) * out.itemsize if batched else 0,
        b.data.stride(0) if batched else 0,
        b.scale.stride(0) if batched else 0,
        global_scale.stride(0) if batched and global_scale is not None and global_scale.ndim else 0,
        a.shape[-2],
        out.shape[-1],
        a.shape[-1],
        0 if bias is None else TYPES[bias.dtype],
        TYPES[out.dtype],
    )


def launch_invariant(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """`launch` by a cut that does not depend on M."""
    launch(a, b, bias, out, config=configure_invariant(out.shape[-1], a.shape[-1]))


def launch(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, config: Config | None = None) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K) prepacked, bias (N,), out ([L,] M, N)."""
    (M, K), N, L = a.shape[-2:], out.shape[-1], a.shape[0] if a.ndim == 3 else 1
    if (not a.is_contiguous() and (a.stride(-1) != 1 or any(stride % 8 for stride in a.stride()))) or a.data_ptr() % 16:
        a = a.clone(memory_format=torch.contiguous_format)  # rows are read 16 bytes at a time
    result = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    if L > 1 and not (b.data[0].is_contiguous() and b.scale[0].is_contiguous()):
        b = b.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    device = b.data.device.index
    ready = _ready(b.format, TERMS[a.dtype], M, N, K, L, device, config)
    ready.arguments[:] = _pack(a, b, bias, result)
    ready(torch._C._cuda_getCurrentRawStream(device))
    if result is not out:
        out.copy_(result)


def bind(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Kernel.bind: what `launch` finds out of operands is found out once."""
    if bias is not None:
        bias = bias.detach().contiguous()
    (M, K), N, device = a.shape, out.shape[-1], b.data.device.index
    ready = _ready(b.format, TERMS[a.dtype], M, N, K, 1, device, None)
    arguments, packed = ready.arguments, _pack(a, b, bias, out)

    def run(a: Tensor, out: Tensor, _keep=(b, bias)) -> None:
        place = a.data_ptr()
        if place % 16:
            a = a.clone()
            place = a.data_ptr()
        arguments[:] = packed
        PLACES.pack_into(arguments, PLACES_AT, place, out.data_ptr())
        ready(torch._C._cuda_getCurrentRawStream(device))

    return run


def cost(problem: Problem, line: Roofline) -> float:
    """What `estimate` says of an H200, scaled to the device's bandwidth, for every 64 columns of c.T."""
    N, K, L = problem.N, problem.K, problem.L
    columns = problem.M * TERMS[DTYPES[problem.a]]
    blocks, last = divmod(columns, MAX_COLUMNS)
    times = [(blocks, MAX_COLUMNS)] * (blocks > 0) + [(1, last)] * (last > 0)
    H200 = sum(count * estimate(configure(N, K, block, L), N, K, block, L) for count, block in times)
    return H200 * 1e-6 * 4.4e12 / line.read_bandwidth


def cost_invariant(problem: Problem, line: Roofline) -> float:
    """The same of the cut that does not depend on M, for every 32 columns of c.T."""
    N, K, L = problem.N, problem.K, problem.L
    columns = problem.M * TERMS[DTYPES[problem.a]]
    config = configure_invariant(N, K)
    H200 = -(-columns // INVARIANT_COLUMNS) * estimate(config, N, K, min(columns, INVARIANT_COLUMNS), L)
    return H200 * 1e-6 * 4.4e12 / line.read_bandwidth


def also(problem: Problem) -> str | None:
    """Why a launch of the kernel can't be made, beyond what its record says."""
    return missing() or too_many(-(-problem.M * TERMS[DTYPES[problem.a]] // INVARIANT_COLUMNS), problem.L)


_kernel = partial(
    Kernel,
    op="linear",
    archs=("sm_90",),
    outs=tuple(DTYPES),
    also=also,
    sources=(
        *(f"kernels/{name}" for name in FILES),
        "kernels/cuda_linear_sm90.py",
        "kernels/cuda_prepacked_sm90.py",
        *SOURCES,
    ),
    batched=True,
)
KERNELS = tuple(
    _kernel(
        name=f"cuda_linear_sm90{suffix}_{format.name}",
        operands=(("bf16", format.name), ("fp16", format.name)),
        b_layouts=(layouts,),
        **facts,
    )
    for format, layouts in LAYOUTS.items()
    for suffix, facts in (
        ("", {"launch": launch, "bind": bind, "cost": cost}),
        ("_invariant", {"launch": launch_invariant, "cost": cost_invariant, "batch_invariant": True}),
    )
)
