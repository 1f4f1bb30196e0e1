"""Made-up submissions in the layout of KernelBot's data set, for load tests. They only look like kernels.

    python -m nibblas.index.synthetic 100000 synthetic.parquet
    nibblas index add synthetic.parquet --db synthetic.sqlite --terms MIT

The same count and seed give the same rows.
"""

import argparse
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

BOARDS = ("toy_gemv", "toy_gemm", "toy_dual_gemm", "toy_group_gemm", "toy_mxfp4_gemm", "toy_quantize", "toy_moe")
RUNNERS = ("NVIDIA", "B200", "H100", "A100", "MI300", "MI355X")
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lotus")
ROW_GROUP = 5000

TRITON_HEAD = """import torch
import triton
import triton.language as tl
from task import input_t, output_t

BLOCK_M, BLOCK_N, BLOCK_K = {m}, {n}, {k}


@triton.autotune([triton.Config({{"BLOCK_K": {k}}}, num_warps={warps}, num_stages={stages})], key=["M", "K"])
@triton.jit
def {name}_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + row * K + at, mask=at < K, other=0.0, eviction_policy="evict_first")
        b = tl.load(b_ptr + at, mask=at < K, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    {store}
"""
TRITON_STORES = (
    "tl.store(c_ptr + row, tl.sum(total, axis=0))",
    "tl.atomic_add(c_ptr + row, tl.sum(total, axis=0))",
)
TRITON_TAIL = """

def custom_kernel(data: input_t) -> output_t:
    a, b, c = data
    M, K = a.shape
    {name}_kernel[(M,)](a, b, c, M, 1, K, BLOCK_K=BLOCK_K)
    return c
"""
CUDA_HEAD = '''import torch
from torch.utils.cpp_extension import load_inline
from task import input_t, output_t

source = r"""
#include <cuda_fp16.h>
#include <cuda_fp8.h>

constexpr int ROWS = {m};
constexpr int THREADS = {threads};
'''
CUDA_TAIL = '''
extern "C" __global__ __launch_bounds__(THREADS) void {name}(const uint4* a, const uint4* b, float* c, int K) {{
    __shared__ uint4 tile[2][ROWS];
    float total = 0.0f;
    for (int k = threadIdx.x; k < K; k += THREADS) {{
        tile[k & 1][threadIdx.x % ROWS] = a[k];
        __syncthreads();
        total += __half2float(__ushort_as_half(tile[k & 1][0].x & 0xffff)) * {scale}f;
    }}
    {finish}
}}
"""

module = load_inline("{name}", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-arch={arch}"])


def custom_kernel(data: input_t) -> output_t:
    a, b, c = data
    module.{name}(a, b, c, a.shape[1])
    return c
'''
CUDA_FINISHES = (
    "c[blockIdx.x] = total;",
    "atomicAdd(c + blockIdx.x, total);",
    "total += __shfl_xor_sync(0xffffffff, total, 16);\n    c[blockIdx.x] = total;",
)
CUDA_PIECES = (
    """__device__ __forceinline__ void copy_{i}(void* to, const void* from) {{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "l"(to), "l"(from));
}}
""",
    """__device__ __forceinline__ uint4 load_{i}(const uint4* from) {{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {{%0,%1,%2,%3}}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}}
""",
    """__device__ __forceinline__ float reduce_{i}(float v) {{
    for (int lane = 16; lane > 0; lane /= 2) v += __shfl_down_sync(0xffffffff, v, lane);
    return v;  // of {m} rows
}}
""",
    """__device__ __forceinline__ half2 scale_{i}(half2 v, half2 by) {{
    return __hfma2(v, by, __float2half2_rn({scale}f));
}}
""",
)
PYTHON_PIECES = (
    '''
def plan_{i}(M: int, K: int) -> int:
    """How many parts K is split into."""
    return max(1, min({warps}, K // {k}))
''',
    """
TABLE_{i} = {{(128, 256): ({m}, {k}), (256, 7168): ({n}, {warps}), (4096, 7168): ({m}, {stages})}}
""",
    """
@triton.jit
def decode_{i}(codes):
    magnitude = codes & 7
    sign = tl.where(codes & 8, -1.0, 1.0)
    return sign * magnitude * {scale}
""",
)


def rows(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of the flat layout; every seventh has the code of the one before, as where people hand in again."""
    draw = random.Random(seed)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    code = ""
    for number in range(1, count + 1):
        if not code or number % 7:
            code = _code(draw, number)
        board = draw.choice(BOARDS)
        person = draw.randrange(max(1, count // 40))
        yield {
            "submission_id": number,
            "leaderboard_id": BOARDS.index(board),
            "problem_name": board,
            "user_id": str(person),
            "user_name": f"{WORDS[person % len(WORDS)]}_{WORDS[person // len(WORDS) % len(WORDS)]}_{person}",
            "code_id": number,
            "file_name": "submission.py",
            "submission_time": start + timedelta(seconds=60 * number),
            "status": "active",
            "score": draw.lognormvariate(-10, 1),
            "passed": True,
            "mode": "leaderboard",
            "runner": draw.choice(RUNNERS),
            "code": code,
        }


def _code(draw: random.Random, number: int) -> str:
    name = f"{draw.choice(WORDS)}_{draw.choice(WORDS)}_{number}"

    def values(i: int = 0) -> dict[str, Any]:
        return {
            "i": i,
            "name": name,
            "m": draw.choice((16, 32, 64, 128)),
            "n": draw.choice((32, 64, 128, 256)),
            "k": draw.choice((64, 128, 256, 512)),
            "warps": draw.choice((1, 2, 4, 8)),
            "stages": draw.randrange(1, 6),
            "threads": draw.choice((64, 128, 256)),
            "scale": draw.random(),
            "arch": draw.choice(("sm_90a", "sm_100a", "sm_103a", "sm_80")),
            "store": draw.choice(TRITON_STORES),
            "finish": draw.choice(CUDA_FINISHES),
        }

    pieces = range(draw.randrange(2, 14))
    if draw.random() < 0.5:
        middle = "".join(draw.choice(PYTHON_PIECES).format(**values(i)) for i in pieces)
        return TRITON_HEAD.format(**values()) + middle + TRITON_TAIL.format(**values())
    middle = "".join(draw.choice(CUDA_PIECES).format(**values(i)) for i in pieces)
    return CUDA_HEAD.format(**values()) + middle + CUDA_TAIL.format(**values())


def write(path: Path, count: int, seed: int = 0) -> None:
    """Write so many rows to a parquet file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema(
        [
            ("submission_id", pa.int64()),
            ("leaderboard_id", pa.int64()),
            ("problem_name", pa.string()),
            ("user_id", pa.string()),
            ("user_name", pa.string()),
            ("code_id", pa.int64()),
            ("file_name", pa.string()),
            ("submission_time", pa.timestamp("us", tz="UTC")),
            ("status", pa.string()),
            ("score", pa.float64()),
            ("passed", pa.bool_()),
            ("mode", pa.string()),
            ("runner", pa.string()),
            ("code", pa.string()),
        ]
    )
    with ParquetWriter(path, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows(count, seed):
            batch.append(row)
            if len(batch) == ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m nibblas.index.synthetic", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("count", type=int, help="how many submissions")
    parser.add_argument("path", type=Path, help="the Parquet file to write")
    given = parser.parse_args()
    write(given.path, given.count)
