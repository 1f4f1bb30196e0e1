"""c = a @ b.T with FP4 weights in Triton: b is decoded to bf16 or fp16 in registers, exactly, and meets tensor cores.

Right on every GPU that Triton compiles for; on Hopper hand-written CUDA is faster, this is the fallback and the check.
Any M, N, L; K of whole blocks; codes row after row, and so scales, which are put there first where they come blocked or
shuffled. a is bf16, fp16, fp32 (fp32, and fp16 with MXFP4, as two or three bf16 terms whose sum
is exact) or FP4. Small M: bound by decoding b (about 2.5 instructions an element and one trip through shared memory),
then by reading it. K is split over programs, and a second kernel adds the partial sums in a fixed order: no atomics, a
workspace a call. Large M: bound by tensor cores that wait for decoding, which every row of tiles repeats.
A product without tensor cores (M = 1) was tried and is no faster than a padded tile of 16 rows.

`triton_linear_invariant` is the same with one tile shape and no split whatever M is. `triton_linear_native` needs FP4 x
FP4 and tensor cores that take block scales: dot_scaled with scales in BLOCKED_128x4. Native means BLOCK_M = 128 on
sm_100 and sm_103 (below, triton 3.6 fails or decodes to bf16 without a word), 16 to 128 on sm_120 and gfx950. gfx950
takes MXFP4 only; there dot_scaled of NVFP4 does not compile, elsewhere it decodes with heavy spills. Negative e4m3
scales, which no quantizer writes, are not native (their sign is ignored). It was compiled, never run.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nibblas.formats import FORMATS, MXFP4
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import (
    ARCHS,
    DEVICE_CODE,
    Launch,
    Target,
    also,
    batch_arguments,
    block_size,
    dot_dtype,
    operand_arguments,
    rows_contiguous,
    scale_align,
    target_of,
    tl_dtype,
)
from nibblas.kernels.triton_sums import sums_launch
from nibblas.layouts import LINEAR, BLOCKED_128x4, CDNA_32x8
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor


@dataclass(frozen=True)
class Config:
    """Tile sizes, programs along K (SPLIT), row tiles that run together (GROUP), and how a launch is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    SPLIT: int = 1
    GROUP: int = 8
    num_warps: int = 4
    num_stages: int = 3

    @property
    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name.isupper()}

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def operands_in_registers(target: Target) -> bool:
    """Whether tensor cores take both operands from registers: all of NVIDIA's but Hopper's and large Blackwell's."""
    return target.ptx and target.arch not in ("sm_90", "sm_100", "sm_103", "sm_110")


def stages_for(target: Target) -> int:
    """Steps of K in flight: below 128 KiB of shared memory one less."""
    return 3 if target.shared_memory > 128 << 10 else 2


def is_crowded(a: Tensor | ScaledTensor, align: int) -> bool:
    """Whether registers hold more than b: an `a` that is decoded too, or scales too narrow for asynchronous copies."""
    return isinstance(a, ScaledTensor) or align < 4


def tile_for(rows: float, terms: int, crowded: bool, target: Target) -> Config:
    """The tile for up to 64 rows; where operands_in_registers, for any number.

    An `a` in terms spills unless steps of K are small: with sm_80's code an H200 takes 7 times as long then. Where
    operands_in_registers, 128 rows spill too, or take 8 warps that decode the same columns again, and so do large steps
    where it is_crowded: up to 1.4 times as long.
    """
    BLOCK_M = 16 if rows <= 16 else 32 if rows <= 32 else 64
    # 4 bytes of scales a thread and step: fewer can't be copied asynchronously.
    BLOCK_N, BLOCK_K = (64, 256) if rows <= 32 else (128, 128)
    if terms > 1 and target.ptx:
        BLOCK_N, BLOCK_K = 64, 32
    elif crowded and rows > 32 and operands_in_registers(target):
        BLOCK_K = 64
    return Config(BLOCK_M, BLOCK_N, BLOCK_K, num_stages=stages_for(target))


def config_for(M: int, N: int, K: int, L: int, block_size: int, terms: int, crowded: bool, target: Target) -> Config:
    """The tile for a product with b of this block_size, by M and by how many programs fill the device.

    From timing 274 configurations at N = 7168, K = 16384 on an H200.
    """
    stages = stages_for(target)
    if M <= 64 or operands_in_registers(target):
        config, programs = tile_for(M, terms, crowded, target), 6.0 if M <= 32 else 2.0
    elif terms > 1:
        config, programs = Config(64, 64, 64, num_stages=2), 2.0
    else:
        BLOCK_K = 64 if block_size == 16 or stages == 2 else 128
        config, programs = Config(128, 128, BLOCK_K, num_warps=4 if M > 1024 else 8, num_stages=stages), 1.5
    tiles = L * -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N)
    return replace(config, SPLIT=split_for(tiles, -(-K // config.BLOCK_K), round(programs * target.multiprocessors)))


def split_for(tiles: int, steps: int, programs: int) -> int:
    """Splits of K, a power of two up to 16: enough for `programs` programs, each with four steps at least."""
    split = 1
    while split < 16 and tiles * split < programs and steps >= 8 * split:
        split *= 2
    return split


INVARIANT = Config(64, 64, 128)


def linear_launches(
    a: Tensor | ScaledTensor,
    b: ScaledTensor,
    bias: Tensor | None,
    out: Tensor,
    target: Target,
    config: Config | None = None,
) -> list[Launch]:
    """The launches that write a @ b.T + bias to out; shapes as in `launch`."""
    a, b = rows_contiguous(a), rows_contiguous(b)
    (M, K), N, L = a.shape[-2:], b.shape[-2], b.shape[0] if b.ndim == 3 else 1
    dtype, terms = dot_dtype(a, b.format, target)
    align = scale_align((a, b))
    config = config or config_for(M, N, K, L, b.format.block_size, terms, is_crowded(a, align), target)
    split = config.SPLIT
    partial_sums = out.new_empty((split, L, M, N), dtype=torch.float32) if split > 1 else None
    blocks = {"A_BLOCK": block_size(a), "B_BLOCK": block_size(b)}
    batch_a, batch_b = batch_arguments("a", a, align), batch_arguments("b", b, align)
    out_strides = {"out_stride": out.stride(-2), "out_batch": out.stride(0) if out.ndim == 3 else 0}
    product = Launch(
        "triton_linear_device",
        "linear_kernel",
        -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N) * L * split,
        {
            **operand_arguments("a", a, align),
            **operand_arguments("b", b, align),
            **batch_a,
            **batch_b,
            "bias": bias,
            "out": out if partial_sums is None else partial_sums,
            **{"M": M, "N": N, "K": K, "L": L},
            **out_strides,
            **config.constants,
            **blocks,
            "SCALE_ALIGN": align,
            "DTYPE": tl_dtype(dtype),
            "TERMS": terms,
            "PTX": target.ptx,
            "TAIL": K % config.BLOCK_K != 0,
        },
        config.options,
    )
    if partial_sums is None:
        return [product]
    return [product, sums_launch(partial_sums, a, b, bias, out, block=256, num_warps=2)]


def native_config(target: Target) -> Config:
    """The tile on FP4 tensor cores: 128 rows where less is not native, 64 where 128 would spill."""
    if target.arch in ("sm_120", "sm_121", "gfx950"):
        return Config(64, 128, 256, num_stages=2)
    return Config(128, 128, 256)


def native_launch(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, target: Target) -> Launch:
    """The launch that writes a @ b.T + bias to out on FP4 tensor cores; scales of both in BLOCKED_128x4."""
    M, N, K, L = a.shape[-2], b.shape[-2], b.K, b.shape[0] if b.ndim == 3 else 1
    config = native_config(target)
    constants = config.constants
    del constants["SPLIT"]
    arguments = {
        **operand_arguments("a", a, 1),
        **operand_arguments("b", b, 1),
        **batch_arguments("a", a, 1),
        **batch_arguments("b", b, 1),
        "bias": bias,
        "out": out,
        **{"M": M, "N": N, "K": K},
        "out_stride": out.stride(-2),
        "out_batch": out.stride(0) if out.ndim == 3 else 0,
        **constants,
        "BLOCK_SIZE": b.format.block_size,
        "TAIL": K % config.BLOCK_K != 0,
    }
    del arguments["a_scale_stride"], arguments["b_scale_stride"]  # BLOCKED_128x4 has no rows
    return Launch(
        "triton_linear_device",
        "native_kernel",
        -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N) * L,
        arguments,
        config.options,
    )


def launch(
    a: Tensor | ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, config: Config | None = None
) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K), bias (N,), out ([L,] M, N); scales in SCALES."""
    if isinstance(a, ScaledTensor):
        a = a.with_layout(LINEAR)
    for each in linear_launches(a, b.with_layout(LINEAR), bias, out, target_of(out.device), config):
        each.run()


def launch_native(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a @ b.T + bias to out: shapes as in `launch`, both FP4 of one format, scales in BLOCKED_128x4."""
    native_launch(a, b, bias, out, target_of(out.device)).run()


def cost(problem: Problem, line: Roofline) -> float:
    """Fitted to some shapes on an H200: launch, prologue and the adding of splits, then some floors, or, where tiles of
    both operands are decoded, the rate at which that goes.
    """
    floors = 2.4 if problem.M <= 16 else 3.1 if problem.M <= 64 else 2.4 if problem.M <= 1024 else 1.9
    return 6.5e-6 + max(floors * line.floor(problem), decoding_both(problem, line)) + rearranging(problem, line)


def rearranging(problem: Problem, line: Roofline) -> float:
    """Seconds that it takes to put scales into rows: a copy by bytes for each operand whose scales lie otherwise."""
    seconds = 0.0
    for name, rows, layouts in (
        (problem.a, problem.M, problem.a_layouts),
        (problem.b, problem.N, problem.b_layouts),
    ):
        if layouts[0] != LINEAR.name:
            scales = rows * problem.K * problem.L // FORMATS[name].block_size
            seconds += 2e-6 + scales / (0.15 * line.read_bandwidth)
    return seconds


def decoding_both(problem: Problem, line: Roofline) -> float:
    """Seconds at least where tiles of both operands are decoded, on NVIDIA's; 0 where that does not decide."""
    if problem.a not in FORMATS or not problem.arch.startswith("sm_"):
        return 0.0
    # A gated product decodes `a` once for both of its weights.
    return problem.operations / ((0.25 if problem.op == "gated_linear" else 0.18) * line.rate("bf16"))


def cost_invariant(problem: Problem, line: Roofline) -> float:
    """As `cost`, and twice the floors where unsplit K leaves multiprocessors idle."""
    floors = max(6 * line.floor(problem), 1.2 * decoding_both(problem, line))
    return 6.5e-6 + floors + rearranging(problem, line)


def cost_native(problem: Problem, line: Roofline) -> float:
    """Half as much again as the traffic or the operations take; at four times bf16's rate where FP4's is not known."""
    rate = line.rates.get("fp4", 4 * line.rate("bf16"))
    return 6e-6 + 1.5 * max(problem.bytes / line.read_bandwidth, problem.operations / rate)


SCALES = LINEAR, BLOCKED_128x4, CDNA_32x8
_decoding = partial(
    Kernel,
    op="linear",
    archs=ARCHS,
    a_layouts=tuple((scale, LINEAR) for scale in SCALES),
    b_layouts=tuple((scale, LINEAR) for scale in SCALES),
    operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, *FORMATS)),
    outs=tuple(DTYPES),
    sources=(*DEVICE_CODE, "kernels/triton_linear.py", "kernels/triton_linear_device.py", "kernels/triton_sums.py"),
    also=also,
    batched=True,
)
_native = partial(
    _decoding,
    a_layouts=((BLOCKED_128x4, LINEAR),),
    b_layouts=((BLOCKED_128x4, LINEAR),),
    launch=launch_native,
    cost=cost_native,
    batch_invariant=True,
)
KERNELS = (
    _decoding(name="triton_linear", launch=launch, cost=cost),
    _decoding(
        name="triton_linear_invariant",
        launch=partial(launch, config=INVARIANT),
        cost=cost_invariant,
        batch_invariant=True,
    ),
    _native(
        name="triton_linear_native",
        archs=("sm_100", "sm_103", "sm_120", "sm_121"),
        operands=tuple((name, name) for name in FORMATS),
    ),
    _native(name="triton_linear_native_gfx950", archs=("gfx950",), operands=((MXFP4.name, MXFP4.name),)),
)
