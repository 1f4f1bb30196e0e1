"""A small index that has something of everything a page can show."""

from dataclasses import replace

from made_up import OPERATION, RUN, make_item

from nibblas.index.ingest import scan
from nibblas.index.machine_code import Confirmation
from nibblas.index.model import (
    Environment,
    Event,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    Source,
    SourceFile,
    Workload,
)
from nibblas.index.store import Store
from nibblas.index.techniques import find

MIT = Source("file", "~/kernels", terms="MIT")
KERNEL = """# SPDX-License-Identifier: MIT
# Taken from https://example.org/kernels/gemv.cuh
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(a, c, K: tl.constexpr):
    k = tl.arange(0, K)
    tl.atomic_add(c, tl.sum(tl.load(a + k)))


def custom_kernel(data):
    kernel[(1,)](data[0], data[1], 128)
    return data[1]
"""
BUILT_FOR_B200 = """import torch
from torch.utils.cpp_extension import load_inline

module = load_inline("gemv", cpp_sources="", cuda_sources="", extra_cuda_cflags=["-arch=sm_100a"])


def custom_kernel(data):
    add[(1,)](data[1])
    return module.gemv(*data)
"""
# More lines with one technique, and a longer instruction, than a phone is wide.
BUILT_FOR_B200 += (
    "\n\nimport triton\nimport triton.language as tl\n\n@triton.jit\ndef add(c):\n"
    + "    # atomicAdd of a warp\n    tl.atomic_add(c, 1)\n" * 12
)
LINEAR = Operation("linear", "linear", "gemm", ("L", "M", "N", "K"), semantics="c = a @ b.T")
HOSTILE = '<script>alert("x")</script>'


def timed(run: Run, seconds: float, low: float, high: float, **changes) -> Run:
    figures = (Figure("latency", "median", seconds, low, high, 20),)
    samples = tuple(low + (high - low) * (7 * i % 20) / 19 for i in range(20))
    return replace(run, **{"figures": figures, "samples": samples, "floor": seconds / 2, **changes})


def linear(M: int) -> Workload:
    sizes = {"L": 1, "M": M, "N": 4096, "K": 4096}
    return Workload(LINEAR, f"linear M={M} N=4096 K=4096", sizes, {"a": "bf16", "b": "nvfp4", "out": "bf16"})


def one_file(slug: str, name: str, path: str, code: str, runs: tuple[Run, ...] = (), **fields) -> Item:
    raw = code.encode()
    known = {"operation": OPERATION, "language": "python", **fields}
    source = known.pop("source", MIT)
    implementation = Implementation(slug, name, source, (SourceFile.of(path, raw),), **known)
    return Item(implementation, {path: raw}, runs)


def fill(store: Store) -> None:
    """Two revisions, a tie, a claim, hidden source, a hostile name, a dispute, a roofline, machine code."""
    for number, code in enumerate((KERNEL, KERNEL.replace("128", "256")), 1):
        run = timed(
            RUN, 1e-5 / number, 0.9e-5 / number, 1.1e-5 / number, observed_at=f"2026-02-0{number}T00:00:00+00:00"
        )
        store.add(one_file("gemv-fast", "gemv_fast", "gemv.py", code, (run,), authors=("ann",), licence="MIT"))
    store.add(one_file("gemv-tied", "gemv_tied", "tied.py", KERNEL, (timed(RUN, 5.4e-6, 5e-6, 6e-6),)))
    store.add(one_file("gemv-slow", "gemv_slow", "slow.py", KERNEL, (timed(RUN, 2e-4, 1.9e-4, 2.1e-4),)))
    claimed = timed(RUN, 3e-6, 3e-6, 3e-6, claimed=True, samples=(), floor=None, error=None, hardened=False)
    source = Source("catalog-page", "https://example.org/a", terms="LicenseRef-Unknown-1.0", attribution="by somebody")
    store.add(make_item(7, b"x = 1\n", (claimed,), source=source, licence=None, origin="model"))
    store.add(
        one_file(
            "hostile", HOSTILE, "a 'b' <c>.py", f'"""{HOSTILE}</code></pre>{HOSTILE}"""\n', authors=('" onload="x',)
        )
    )
    store.add(one_file("gemv-b200", "gemv_b200", "b200.py", BUILT_FOR_B200))
    device = Environment("Intel(R) Xeon(R) Processor (6/207)", "cpu", 2, facts={"host": "x"})
    runs = tuple(
        timed(
            replace(RUN, operation=LINEAR, workload=linear(M), environment=device, protocol=Protocol("bench")), *times
        )
        for M, times in ((1, (1e-3, 0.9e-3, 1.1e-3)), (64, (8e-3, 7e-3, 9e-3)))
    )
    store.add(one_file("linear", "linear_kernel", "linear.py", KERNEL, runs, operation=LINEAR))
    wrong = replace(RUN, status="wrong", reason="NaN at (0, 0)", figures=(), samples=(), error=None)
    store.add(one_file("gemv-wrong", "gemv_wrong", "wrong.py", KERNEL.replace("atomic_add", "store"), (wrong,)))
    scan(store)
    built = store.implementation("gemv-b200").digest
    use = next(one for one in find("b200.py", BUILT_FOR_B200) if (one.technique, one.kind) == ("atomics", "use"))
    confirmed = Confirmation(use, "confirmed", "REDG.E.ADD.F32.FTZ.RN.STRONG.GPU")
    store.confirm(built, "b200.py", confirmed, "nvcc 13.0 for sm_100a")
    disputed = store.connection.execute("SELECT digest FROM implementation WHERE slug = 'gemv-slow'").fetchone()[0]
    store.record(Event("dispute", disputed, by="bob", reason="it was timed on a shared card"))
