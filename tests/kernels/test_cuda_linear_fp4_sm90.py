"""The Hopper kernel for two FP4 operands: its machine code, and what it computes, on a GPU or compiled for this CPU."""

import ctypes
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from checks import assert_product, poisoned_empty, random_codes, random_dense
from hopper import WHERE, generator, library_for_cpu

from nibblas import reference
from nibblas.formats import NVFP4
from nibblas.kernels import cuda_linear_fp4_sm90 as kernel
from nibblas.kernels import cuda_module
from nibblas.kernels.cuda_linear_fp4_sm90 import Config
from nibblas.problem import Problem
from nibblas.tensor import ScaledTensor

RUN = """
extern "C" void run(const Arguments* arguments, int blocks_x, int blocks_y, int threads) {
    run_blocks([arguments] { nibblas_linear_fp4(*arguments); }, blocks_x, blocks_y, threads);
}
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The device code compiled for this CPU, by its compile-time values, as a function of a launch's arguments."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    @cache
    def compiled(options: tuple[str, ...]) -> ctypes.CDLL:
        return library_for_cpu(folder, kernel.SOURCE, ("-O1", *options), RUN)

    class Launch:
        def __init__(self, M, N, K, L, device, config):
            config = config or kernel.configure(M, N, K, L)
            assert config.shared_bytes(M, K) <= cuda_module.SHARED_LIMIT_SM90
            self.arguments = bytearray(kernel.ARGUMENTS.size)
            self.run, self.grid = compiled(config.options(M)).run, (-(-N // config.rows), L, config.threads)

        def __call__(self, stream):
            self.run(bytes(self.arguments), *self.grid)

    return Launch


@pytest.fixture
def linear(on_cpu, monkeypatch):
    """The launch on a device, with whatever stands in for it on the CPU."""

    def run(a, b, bias=None, dtype=torch.float32, config=None):
        device = a.data.device.type
        if device == "cpu":
            monkeypatch.setattr(kernel, "prepare", on_cpu)
            monkeypatch.setattr(kernel, "_launches", cuda_module.Launches())
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
        out = poisoned_empty((*b.shape[:-2], a.shape[-2], b.shape[-2]), dtype, device)
        kernel.launch(a, b, bias, out, config=config)
        return out

    return run


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(
    ("L", "M", "N", "K", "config"),
    [
        (1, 1, 40, 2048, Config(1, 4)),
        (1, 1, 40, 2048, Config(2, 2, depth=4)),
        (1, 1, 150, 640, Config(8, 1)),
        (1, 1, 150, 640, Config(4, 2, lines=False)),
        (2, 3, 17, 640, Config(1, 16, depth=3)),
        (3, 8, 33, 128, Config(4, 2)),
        (2, 2, 33, 1024, Config(2, 4, depth=3)),
        (1, 5, 16, 1152, Config(1, 8)),
        (2, 4, 70, 896, None),
    ],
)
def test_products(linear, device, L, M, N, K, config):
    g = generator(N)
    a, b = (random_codes((L, rows, K), NVFP4, g, device=device) for rows in (M, N))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = None if dtype == torch.float32 else random_dense((N,), torch.bfloat16, g, device)
        small = a if dtype != torch.float16 else replace(a, global_scale=a.global_scale * 2.0**-20)
        assert_product(small, b, bias, linear(small, b, bias, dtype, config), f"{dtype}")


@pytest.mark.parametrize("device", WHERE)
def test_every_scale_times_every_code(linear, device):
    """One block that is not zero in each row, so that nothing hides behind a larger neighbour."""
    scales = torch.arange(256, dtype=torch.uint8, device=device)
    scale = torch.zeros(256, 8, dtype=torch.uint8, device=device)
    scale[scales.long(), scales.long() % 8] = scales
    codes = torch.stack([torch.arange(64, dtype=torch.uint8, device=device) * 37 + 11 * i for i in range(256)])
    b = ScaledTensor(codes, scale, NVFP4, torch.ones((), device=device))
    one = torch.full((4, 64), 0x22, dtype=torch.uint8, device=device)
    one[1, ::2], one[2, 1::2], one[3, ::3] = 0x90, 0x07, 0xF1
    ones = torch.full((4, 8), 0x38, dtype=torch.uint8, device=device)
    a = ScaledTensor(one, ones, NVFP4, torch.ones((), device=device))
    expected = reference.matmul(a, b)
    out = linear(a, b)
    assert expected.isnan().any(0).nonzero().flatten().tolist() == [0x7F, 0xFF]
    torch.testing.assert_close(out.double().cpu(), expected.cpu(), rtol=2**-20, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", WHERE)
def test_nan_scales_stay_in_their_row_and_column(linear, device):
    for rows_of_a, nan_scales in ((2, (0, 5)), (5, (2, 0)), (5, (2, 5))):
        b = random_codes((2, 40, 384), NVFP4, generator(1), nan_scales=nan_scales[1], device=device)
        a = random_codes((2, rows_of_a, 384), NVFP4, generator(2), nan_scales=nan_scales[0], device=device)
        assert_product(a, b, None, linear(a, b), f"NaN {nan_scales}")


@pytest.mark.parametrize("device", WHERE)
def test_operands_that_lie_anywhere(linear, device):
    g = generator(3)
    a, b = (random_codes((2, rows, 256), NVFP4, g, device=device) for rows in (2, 20))
    expected = linear(a, b)
    wide = torch.cat((b.data, b.data), -1)[..., :128]
    odd = torch.empty(b.scale.numel() + 1, dtype=torch.uint8, device=device)[1:].view(b.scale.shape).copy_(b.scale)
    assert torch.equal(linear(a, ScaledTensor(wide, odd, NVFP4, b.global_scale)), expected)
    last = a.data.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(linear(ScaledTensor(last, a.scale, NVFP4, a.global_scale), b), expected)


def test_what_it_takes():
    taken = Problem("linear", a="nvfp4", b="nvfp4", out="fp16", M=1, N=7168, K=16384, arch="sm_90")
    (found,) = kernel.KERNELS
    missing = cuda_module.missing()
    assert found.why_not(taken) == missing
    for change, why in (
        ({"M": 9}, "at most 8 rows of a, got 9"),
        ({"K": 16400}, "K a multiple of 128, got 16400"),
        ({"M": 8}, "keeps a in shared memory: 315,904 bytes, there are 232,448"),
        ({"b": "mxfp4"}, "asked for nvfp4 x mxfp4"),
    ):
        assert why in found.why_not(replace(taken, **change))


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
@pytest.mark.parametrize(
    ("M", "K"), [(1, 16384), (1, 7168), (1, 2048), (2, 7168), (3, 512), (4, 7168), (7, 2048), (8, 7168)]
)
def test_machine_code(M, K):
    config = kernel.configure(M, 4096, K, 1)
    options = (*config.options(M), "--ptxas-options=--verbose")
    _, report = cuda_module._compile(cuda_module.source_of(kernel.SOURCE), "sm_90a", options)
    if not report:
        pytest.skip("the compiler had kept the result, and says nothing of it")
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= (16 if M == 7 else 0)  # NVRTC 13.0 spills a few
    assert int(re.search(r"Used (\d+) registers", report)[1]) * config.threads * config.min_blocks <= 65536
