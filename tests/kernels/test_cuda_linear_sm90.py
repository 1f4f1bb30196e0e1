"""The Hopper kernels: their machine code (no GPU needed), and on a GPU what test_kernels.py leaves out."""

import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from checks import assert_product, poisoned_empty, random_codes, random_dense
from hopper import (
    Recorder,
    assert_chain,
    assert_streams_agree,
    disassembled,
    generator,
    on_hopper,
    prepacked,
    prepacked_product,
)

from nibblas import dispatch, ops, reference
from nibblas.formats import FORMATS, MXFP4, NVFP4
from nibblas.kernels import cuda_linear_sm90, cuda_module
from nibblas.kernels.cuda_linear_sm90 import Config, configure, configure_invariant
from nibblas.kernels.cuda_prepacked_sm90 import LAYOUTS, TERMS
from nibblas.layouts import LINEAR
from nibblas.nn import FP4Linear
from nibblas.tensor import ScaledTensor

linear = partial(prepacked_product, cuda_linear_sm90.launch)


# --- the prepacked layouts -----------------------------------------------------------------------------------------


def fields(word: int) -> list[int]:
    """The four pairs that the device decodes from a word."""
    mask, full = 0x81C081C0, 0xFFFFFFFF
    rotated = (word >> 6 | word << 26) & full
    return [word & mask, word << 4 & mask, rotated & mask, (word << 6 & full ^ word >> 2) & mask]


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_lane_holds_the_codes_that_the_device_code_takes(format):
    b = random_codes((32, 256), format, generator(0))
    data_layout = LAYOUTS[format][1]
    stored = data_layout.to(b.data).view(torch.int32).reshape(2, 2, 2, 32, 4).tolist()
    codes = torch.stack((b.data & 15, b.data >> 4), -1).flatten(-2).tolist()
    for tile, chunk, half, lane, i in product(range(2), range(2), range(2), range(32), range(4)):
        g, t = divmod(lane, 4)
        first = 128 * chunk + (64 * half + 16 * t if format == NVFP4 else 32 * t + 16 * half) + 4 * i
        pairs = fields(stored[tile][chunk][half][lane][i] & 0xFFFFFFFF)
        for n, (row, k) in enumerate(product((0, 8), (0, 2))):
            pair = pairs[(n % 2) * 2 + n // 2]
            for j in range(2):
                bits = pair >> 16 * j & 0xFFFF
                assert codes[16 * tile + g + row][first + k + j] == (bits >> 12 & 8 | bits >> 6 & 7)


@pytest.mark.parametrize("shape", [(33, 288), (16, 128), (2, 40, 96), (1, 32), (3, 1024)], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_values_survive_prepacking(format, shape):
    b = random_codes(shape, format, generator(1), nan_scales=2)
    scale = b.scale.clone()
    scale[..., 0, 0] = 0
    if format == NVFP4:
        scale[..., -1, -1] |= 0x80
    b = ScaledTensor(b.data, scale, format, b.global_scale)
    stored = prepacked(b)
    back = stored.with_layout(LINEAR, LINEAR)
    before, after = reference.to_float64(b), reference.to_float64(back)
    torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(before.signbit() | before.isnan(), after.signbit() | after.isnan())
    again = prepacked(back)
    assert torch.equal(again.data, stored.data)
    assert torch.equal(again.scale, stored.scale)


def test_every_e4m3_scale_becomes_its_bf16():
    scale = torch.arange(1, 127, dtype=torch.uint8).reshape(1, 126)
    layout = LAYOUTS[NVFP4][0]
    word = layout.to(scale).view(torch.int32).reshape(16, 32).long() & 0xFFFFFFFF  # [chunk, lane]
    pair = [((w & 0x0FF00FF0) | 0x70007000) & 0xFFFF for w in (word, (word >> 8 | word << 24) & 0xFFFFFFFF)]
    row_0 = torch.stack(pair, 1)[:, :, :4].reshape(-1)[:126]  # [chunk, half, t], row g = 0
    value = row_0.to(torch.int32).to(torch.int16).view(torch.bfloat16).double() * 2.0**-119
    assert torch.equal(value, NVFP4.scale_code.decode(scale[0]).double())


# --- the machine code ----------------------------------------------------------------------------------------------


def machine_code(config: Config, format, terms: int, columns: int, tmp_path) -> tuple[str, str]:
    """The assembler's report, and the code ("" where there is no disassembler)."""
    options = (*config.options(format, terms, columns), "--ptxas-options=--verbose")
    content, report = cuda_module._compile(cuda_module.source_of(*cuda_linear_sm90.FILES), "sm_90a", options)
    return report, disassembled(content, tmp_path)


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
@pytest.mark.parametrize("columns", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_machine_code(format, columns, tmp_path):
    config = configure(7168, 16384, columns)
    report, code = machine_code(config, format, 1, columns, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "0 bytes stack frame" in report
    assert "serialized" not in report  # of wgmma
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert registers * config.threads <= 65536
    if not code:
        return
    loop = (8 if config.wgmma else 4 * 2) * config.row_tiles
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.(?:LTC128B\.)?128", code)) >= 2 * config.row_tiles
    assert len(re.findall(r"HMUL2\.BF16", code)) == 4 * loop
    products = re.findall("HGMMA.64x" if config.wgmma else r"HMMA\.16816\.F32\.BF16", code)
    assert len(products) == loop * (1 if config.wgmma else config.column_tiles(columns))
    assert not re.search(r"\b(LDL|STL)\b", code)


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
@pytest.mark.parametrize("columns", [1, 32])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_machine_code_of_one_chain_of_sums(format, columns, tmp_path):
    config = configure_invariant(7168, 16384)
    assert "-DONE_CHAIN" in config.options(format, 1, columns)
    report, code = machine_code(config, format, 1, columns, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    products = len(re.findall(r"HMMA\.16816\.F32\.BF16", code))
    assert not code or products == 8 * config.row_tiles * config.column_tiles(columns)


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
@pytest.mark.parametrize("columns", [1, 64])
def test_machine_code_of_a_dependent_launch(columns, tmp_path, monkeypatch):
    """Weights are asked for before the wait for the grid before, activations and results only after it."""
    config = configure(7168, 16384, columns)
    options = Config.options
    monkeypatch.setattr(Config, "options", lambda *arguments: (*options(*arguments), "-DDEPENDENT"))
    report, code = machine_code(config, NVFP4, 1, columns, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    if code:
        early, late = re.split(r"ACQBULK", code)
        assert "PREEXIT" in early
        assert "LDGSTS.E.BYPASS" in early
        assert not re.search(r"\b(LDG|STG)\.", early)
        assert "STG." in late


def test_a_kernel_on_disk_needs_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(cuda_module, "_compiler_version", lambda: "nvrtc 0.0")
    monkeypatch.setattr(cuda_module, "_compile", lambda *_: made.append(1) or (b"cubin", ""))
    for options in ((), (), ("-DX=1",)):
        assert cuda_module.compile_cubin("source", "sm_90a", options) == b"cubin"
    assert len(made) == 2
    assert len(list((tmp_path / "cuda").glob("*.cubin"))) == 2
    assert not list((tmp_path / "cuda").glob("*.partial"))


def at_once(program: str, processes: int, cache: Path) -> list[str]:
    """What a program prints in so many processes, which start together and share a cache."""
    environment = {**os.environ, "NIBBLAS_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return printed


COMPILE = """
import hashlib
from nibblas.kernels import cuda_module
source = cuda_module.source_of("cuda_linear_fp4_sm90.cu")
values = {"M": 1, "ROW_WARPS": 2, "K_WARPS": 2, "DEPTH": 2, "MIN_BLOCKS": 2, "LINES": 1}
cubin = cuda_module.compile_cubin(source, "sm_90a", tuple(f"-D{name}={value}" for name, value in values.items()))
print(hashlib.sha256(cubin).hexdigest())
"""


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
def test_processes_that_compile_the_same_kernel_at_once(tmp_path):
    printed = at_once(COMPILE, 4, tmp_path)
    (kept,) = (tmp_path / "cuda").iterdir()
    assert printed == [hashlib.sha256(kept.read_bytes()).hexdigest() + "\n"] * 4


# --- the launch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """What launches would have passed to the device code, a tuple of Arguments each."""
    recorder = Recorder(cuda_linear_sm90.ARGUMENTS)
    monkeypatch.setattr(cuda_linear_sm90, "_launches", cuda_module.Launches())
    monkeypatch.setattr(cuda_linear_sm90, "prepare", lambda *_: recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return recorder.seen


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=str)
def test_arguments_of_a_launch(launched, format, bias):
    g = generator(9)
    b = prepacked(random_codes((3, 40, 256), format, g))
    bias = None if bias is None else random_dense((40,), bias, g)
    a, out = random_dense((3, 5, 256), torch.bfloat16, g), torch.empty(3, 5, 40, dtype=torch.float16)
    cuda_linear_sm90.launch(a, b, bias, out)
    places = [b.data, b.scale, a, out, bias, b.global_scale]
    pitches = (512, 80, 5 * 512, 5 * 80, b.data.stride(0), b.scale.stride(0))
    sizes = (0 if b.global_scale is None else 1, 5, 40, 256, 0 if bias is None else 1, 2)
    assert launched == [(*(0 if t is None else t.data_ptr() for t in places), *pitches, *sizes)]


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_bound_launch_is_a_launch(launched, format):
    g = generator(10)
    b, bias = prepacked(random_codes((40, 256), format, g)), random_dense((40,), torch.bfloat16, g)
    a, out = random_dense((5, 256), torch.bfloat16, g), torch.empty(5, 40, dtype=torch.bfloat16)
    run = cuda_linear_sm90.bind(a, b, bias, out)
    other = prepacked(random_codes((40, 256), format, g))
    others = random_dense((5, 256), torch.bfloat16, g), torch.empty(5, 40, dtype=torch.bfloat16)
    cuda_linear_sm90.launch(others[0], other, None, others[1])  # uses the same buffer of arguments
    for x, y in ((a, out), others):
        run(x, y)
        cuda_linear_sm90.launch(x, b, bias, y)
        assert launched[-1] == launched[-2]
    unaligned = torch.empty(5 * 256 + 1, dtype=torch.bfloat16)[1:].view(5, 256)
    run(unaligned, out)
    assert launched[-1][2] not in (unaligned.data_ptr(), a.data_ptr())
    assert launched[-1][2] % 16 == 0


@pytest.mark.parametrize("enabled", [False, True])
def test_dependent_launch_is_asked_for(monkeypatch, enabled):
    made = []
    monkeypatch.setattr(cuda_linear_sm90, "_launches", cuda_module.Launches())
    monkeypatch.setattr(cuda_linear_sm90, "load", lambda *arguments: made.append(arguments[2]) or 0)
    monkeypatch.setattr(cuda_linear_sm90, "Launch", lambda *arguments: made.append(arguments[-1]))
    before = dispatch.age()
    ops.dependent_launch(enabled)
    try:
        cuda_linear_sm90.prepare(NVFP4, 1, 1, 64, 128, 1, 0)
    finally:
        ops.dependent_launch(False)
    options, attribute = made
    assert attribute is enabled
    assert ("-DDEPENDENT" in options) is enabled
    assert dispatch.age() > before  # what was bound is bound anew


# --- on a GPU ------------------------------------------------------------------------------------------------------

CONFIGS = [
    Config(4, 4, 4),
    Config(2, 2, 8, 2, 2),
    Config(1, 8, 1),
    Config(4, 1, 1, 1, 2, wgmma=True),
    Config(16, 1, 8, 2, 3, wgmma=True),
    Config(12, 1, 2, 1, 3, wgmma=True),
]


@on_hopper
@pytest.mark.parametrize("M", [1, 12, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_every_cut_of_the_work(format, dtype, M):
    for N, K in ((33, 32), (130, 2880), (17, 4192)):
        g = generator(M)
        narrow = None if format == NVFP4 else (100, 140)
        b = random_codes((N, K), format, g, scale_bytes=narrow, device="cuda")
        a, bias = random_dense((M, K), dtype, g, "cuda"), random_dense((N,), torch.bfloat16, g, "cuda")
        columns = min(M * TERMS[dtype], cuda_linear_sm90.MAX_COLUMNS)
        fits = [c for c in CONFIGS if c.shared_bytes(format, columns, K) <= cuda_module.SHARED_LIMIT_SM90]
        for config in (None, *fits):
            assert_product(a, b, bias, linear(a, b, bias, config=config), f"{format} {dtype} M={M} {(N, K)} {config}")


@on_hopper
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_nan_scales_give_nan_in_their_column(format, config):
    b = random_codes((3, 40, 256), format, generator(2), nan_scales=5, device="cuda")
    a = random_dense((3, 5, 256), torch.bfloat16, generator(3), "cuda")
    assert_product(a, b, None, linear(a, b, config=config), f"{format} {config}")


@on_hopper
@pytest.mark.parametrize("bytes_", [(0, 40), (214, 254)], ids=str)
def test_e8m0_scales_at_both_ends(bytes_):
    b = random_codes((64, 256), MXFP4, generator(4), scale_bytes=bytes_, device="cuda")
    a = random_dense((4, 256), torch.bfloat16, generator(5), "cuda")
    a = a * 2.0**20 if bytes_[0] == 0 else a * 2.0**-20
    assert_product(a, b, None, linear(a, b), str(bytes_))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_row_is_summed_alike_whatever_is_beside_it(format, dtype):
    for N, K in ((33, 32), (130, 2880), (4096, 7168)):
        b = prepacked(random_codes((N, K), format, generator(11), device="cuda"))
        a = random_dense((100, K), dtype, generator(12), "cuda")
        alone = torch.empty(1, N, device="cuda")
        cuda_linear_sm90.launch_invariant(a[:1], b, None, alone)
        for M in (2, 9, 17, 33, 100):
            out = torch.empty(M, N, device="cuda")
            cuda_linear_sm90.launch_invariant(a[:M], b, None, out)
            assert torch.equal(out[:1], alone)


@on_hopper
def test_results_repeat_on_two_streams():
    b = prepacked(random_codes((1024, 2048), NVFP4, generator(6), device="cuda"))
    assert_streams_agree(cuda_linear_sm90.launch, b, (1, 48))


@on_hopper
@pytest.mark.parametrize("M", [1, 16, 64])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_dependent_launches_find_what_those_before_them_wrote(format, M):
    assert_chain([cuda_linear_sm90.launch] * 8, format, M, dependent=True)


FIRST_PRODUCT = """
import torch
import nibblas as nb
generator = torch.Generator().manual_seed(0)
layer = nb.nn.FP4Linear.from_linear(torch.nn.Linear(512, 256, bias=False), nb.NVFP4).cuda()
x = torch.randn(3, 512, generator=generator).bfloat16().cuda()
y = layer(x)
exact = nb.reference.matmul(x, layer.weight_scaled)
assert (y.double() - exact).norm() < 0.01 * exact.norm()
print(layer.weight_scaled.data_layout)
"""


@on_hopper
def test_processes_that_start_cold_at_once(tmp_path):
    assert at_once(FIRST_PRODUCT, 8, tmp_path) == ["FRAGMENTS_NVFP4\n"] * 8
    assert not list((tmp_path / "cuda").glob("*.partial"))


@on_hopper
def test_a_cold_launch_can_be_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path))
    b = random_codes((256, 512), NVFP4, generator(7), device="cuda")
    stored = prepacked(b)
    a = random_dense((2, 512), torch.bfloat16, generator(8), "cuda")
    out = poisoned_empty((2, 256), torch.float32, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_linear_sm90.launch(a, stored, None, out, config=Config(2, 4, 2, 1, 6))
    graph.replay()
    assert_product(a, b, None, out, "captured")


@on_hopper
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_layer_that_is_called_again(format):
    dense = torch.nn.Linear(512, 264, device="cuda", dtype=torch.bfloat16)
    layer = FP4Linear.from_linear(dense, format)
    with torch.no_grad():
        for M in (1, 3, 40):
            for _ in range(3):
                x = torch.randn(M, 512, device="cuda", dtype=torch.bfloat16)
                assert torch.equal(layer(x), ops.linear(x, layer.weight_scaled, layer.bias))
