"""cuda_linear_wide_sm90: its cuts and machine code (no GPU needed), and on a GPU what test_kernels.py leaves out."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from checks import assert_product, random_codes, random_dense
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

from nibblas.formats import FORMATS, MXFP4, NVFP4
from nibblas.kernel import PACKAGE
from nibblas.kernels import cuda_linear_sm90, cuda_linear_wide_sm90, cuda_module
from nibblas.kernels.cuda_linear_wide_sm90 import KERNELS, Config, Prepared, configure
from nibblas.kernels.cuda_prepacked_sm90 import TERMS
from nibblas.problem import Problem
from nibblas.roofline import STATED

needs_nvrtc = pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
CONFIGS = [
    Config(1, 8, 2, 5, min_blocks=2),
    Config(1, 16, 3, 3, min_blocks=2),
    Config(2, 12, 4, 5),
    Config(2, 16, 7, 4, row_tiles=2),
    Config(3, 16, 1, 4),
    Config(2, 24, 2, 3),
    Config(2, 32, 1, 3),
]


linear = partial(prepacked_product, cuda_linear_wide_sm90.launch)


# --- how the work is cut -------------------------------------------------------------------------------------------


def test_every_problem_has_a_cut_that_fits():
    numbers = random.Random(0)
    for _ in range(200):
        N, K, columns = numbers.randint(1, 9000), numbers.randint(1, 900) * 32, numbers.randint(1, 9000)
        config = configure(N, K, columns, L=numbers.choice((1, 1, 3, 40)))
        assert all(config.shared_bytes(format) * config.min_blocks <= 227 * 1024 for format in FORMATS.values())
        assert config.cluster <= -(-K // 128)


def test_a_launch_is_made_of_whole_tiles(monkeypatch):
    made = []
    monkeypatch.setattr(cuda_linear_wide_sm90, "load", lambda *arguments: arguments[3])
    monkeypatch.setattr(cuda_linear_wide_sm90, "Launch", lambda *arguments, **_: made.append(arguments))
    ready = cuda_linear_wide_sm90.prepare(NVFP4, 2, 130, 200, 400, 3, 0, Config(2, 16, 3, 4))
    (arrange, _, arrange_grid, _), (multiply, _, grid, threads, _) = made
    assert (arrange, multiply) == ("nibblas_arrange", "nibblas_linear_wide")
    assert ready.blocks == 3  # of 64 rows, two columns each
    assert grid == (2 * 3 * 3, 3, 1)  # blocks of 128 rows of b, of rows of a, and CTAs of a cluster; matrices
    assert arrange_grid == (4 * 64 * 16 // 256, 3, 3)
    assert threads == 3 * 128
    assert ready.image_bytes == 3 * 3 * 4 * 128 * 256


@pytest.fixture
def launched(monkeypatch):
    """The launches of one problem, which record their arguments; scratch lies on the CPU."""
    arrange = Recorder(cuda_linear_wide_sm90.ARRANGE_ARGUMENTS)
    multiply = Recorder(cuda_linear_wide_sm90.ARGUMENTS)
    monkeypatch.setattr(cuda_linear_wide_sm90, "_launches", cuda_module.Launches())
    monkeypatch.setattr(cuda_linear_wide_sm90, "prepare", lambda *_: Prepared(arrange, multiply, 4096, 7))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return arrange, multiply


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=str)
def test_arguments_of_a_launch(launched, format, bias):
    g = generator(9)
    b = prepacked(random_codes((3, 40, 256), format, g))
    bias = None if bias is None else random_dense((40,), bias, g)
    a, out = random_dense((3, 70, 256), torch.bfloat16, g), torch.empty(3, 70, 40, dtype=torch.float16)
    cuda_linear_wide_sm90.launch(a, b, bias, out)
    (arranged,), (multiplied,) = (recorder.seen for recorder in launched)
    image = arranged[1]
    assert arranged == (a.data_ptr(), image, 512, 70 * 512, 70, 256)
    places = [0 if t is None else t.data_ptr() for t in (b.data, b.scale, out, bias, b.global_scale)]
    places.insert(2, image)
    pitches = (80, 70 * 80, b.data.stride(0), b.scale.stride(0), 0 if b.global_scale is None else 1)
    assert multiplied == (*places, *pitches, 70, 40, 256, 0 if bias is None else 1, 2, 7, 0)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_bound_launch_is_a_launch(launched, format):
    g = generator(10)
    b, bias = prepacked(random_codes((40, 256), format, g)), random_dense((40,), torch.bfloat16, g)
    a, out = random_dense((70, 256), torch.bfloat16, g), torch.empty(70, 40, dtype=torch.bfloat16)
    run = cuda_linear_wide_sm90.bind(a, b, bias, out)
    other = prepacked(random_codes((40, 256), format, g))
    others = random_dense((70, 256), torch.bfloat16, g), torch.empty(70, 40, dtype=torch.bfloat16)
    cuda_linear_wide_sm90.launch(others[0], other, None, others[1])  # uses the same buffers of arguments

    def seen(recorder, *but):
        return [tuple(x for i, x in enumerate(one) if i not in but) for one in recorder.seen[-2:]]

    for x, y in ((a, out), others):
        run(x, y)
        cuda_linear_wide_sm90.launch(x, b, bias, y)
        for recorder, image in zip(launched, (1, 2), strict=True):
            bound, unbound = seen(recorder, image)
            assert bound == unbound
        arranged, multiplied = (recorder.seen[-2] for recorder in launched)
        assert arranged[1] == multiplied[2], "what one kernel writes the other reads"
    odd = torch.empty(70 * 256 + 1, dtype=torch.bfloat16)[1:].view(70, 256)
    run(odd, out)
    assert launched[0].seen[-1][0] != odd.data_ptr()
    assert launched[0].seen[-1][0] % 4 == 0


def test_python_and_the_device_code_agree_on_numbers():
    text = (PACKAGE / "kernels" / cuda_linear_wide_sm90.FILES[1]).read_text()
    assert f"constexpr int ARRANGERS = {cuda_linear_wide_sm90.ARRANGERS};" in text
    assert f"COPYING = {cuda_linear_wide_sm90.COPYING};" in text


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
def test_more_than_a_grid_holds_is_refused(kernel):
    layouts = tuple(layout.name for layout in kernel.b_layouts[0])
    problem = Problem("linear", 1_000_000, 64, 128, b=kernel.operands[0][1], b_layouts=layouts, arch="sm_90")
    assert kernel.why_not(problem) is None
    assert "starts at most 65535 blocks of rows" in kernel.why_not(replace(problem, M=5_000_000))
    assert "needs 70000" in kernel.why_not(replace(problem, M=1, L=70_000))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_cost_leaves_few_rows_to_the_skinny_kernel(kernel):
    line = STATED["NVIDIA H200"]
    skinny = next(k for k in cuda_linear_sm90.KERNELS if k.b_layouts == kernel.b_layouts)
    a, b = kernel.operands[0]
    layouts = tuple(layout.name for layout in kernel.b_layouts[0])
    for M, wide_is_cheaper in ((1, False), (16, False), (128, True), (256, True), (2048, True)):
        problem = Problem("linear", M, 7168, 16384, a=a, b=b, b_layouts=layouts, arch="sm_90")
        assert (kernel.cost(problem, line) < skinny.cost(problem, line)) == wide_is_cheaper, M
        assert kernel.cost(problem, line) > line.floor(problem)
        assert kernel.cost(replace(problem, L=3), line) > kernel.cost(problem, line)
    for L, N, K in ((4, 4096, 7168), (8, 2048, 2048), (128, 512, 128)):
        problem = Problem("linear", 1, N, K, L=L, a=a, b=b, b_layouts=layouts, arch="sm_90")
        assert skinny.cost(problem, line) < kernel.cost(problem, line)
        assert skinny.cost(problem, line) < L * skinny.cost(replace(problem, L=1), line), "one launch does them all"


# --- the machine code ----------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("format", "terms"), [(NVFP4, 1), (MXFP4, 2)], ids=str)
def test_machine_code(config, format, terms, tmp_path):
    options = (*config.options(format, terms), "--ptxas-options=--verbose")
    content, report = cuda_module._compile(cuda_module.source_of(*cuda_linear_wide_sm90.FILES), "sm_90a", options)
    assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2
    assert "serialized" not in report  # of wgmma
    registers = max(map(int, re.findall(r"Used (\d+) registers", report)))
    assert registers * config.threads * config.min_blocks <= 65536
    code = disassembled(content, tmp_path)
    if not code:
        return
    assert len(re.findall(rf"HGMMA\.64x{config.columns}x16", code)) == 8 * config.row_tiles
    assert len(re.findall(r"HMUL2\.BF16", code)) == 32 * config.row_tiles
    assert "UBLKCP" in code  # chunks are copied whole
    assert len(re.findall(r"LDS\.128", code)) >= 2 * config.row_tiles
    assert not re.search(r"\b(LDL|STL)\b", code)
    # Weights are asked for before the wait for the kernel that arranges a, which lets this one start.
    assert "PREEXIT" in code
    assert "ACQBULK" in code


# --- on a GPU ------------------------------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("M", [1, 70, 200])
@pytest.mark.parametrize("dtype", TERMS, ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_every_cut_of_the_work(format, dtype, M):
    for N, K in ((33, 32), (130, 2880), (327, 4192)):
        g = generator(M)
        narrow = None if format == NVFP4 else (100, 140)
        b = random_codes((N, K), format, g, scale_bytes=narrow, device="cuda")
        a, bias = random_dense((M, K), dtype, g, "cuda"), random_dense((N,), torch.bfloat16, g, "cuda")
        for config in (None, *CONFIGS):
            assert_product(a, b, bias, linear(a, b, bias, config=config), f"{format} {dtype} M={M} {(N, K)} {config}")


@on_hopper
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_nan_scales_give_nan_in_their_column(format, config):
    b = random_codes((3, 40, 256), format, generator(2), nan_scales=5, device="cuda")
    a = random_dense((3, 5, 256), torch.bfloat16, generator(3), "cuda")
    assert_product(a, b, None, linear(a, b, config=config), f"{format} {config}")


@on_hopper
def test_operands_that_lie_apart():
    """Rows of a with other memory between them, at an odd place; out with its columns apart; N odd."""
    b = random_codes((51, 512), NVFP4, generator(4), device="cuda")
    a = random_dense((90, 1025), torch.bfloat16, generator(5), "cuda")[:, 1:513]
    for out in (torch.empty(90, 80, device="cuda")[:, 3:54], torch.empty(51, 90, device="cuda").T):
        cuda_linear_wide_sm90.launch(a, prepacked(b), None, out)
        assert_product(a, b, None, out, str(out.stride()))


@on_hopper
def test_results_repeat_on_two_streams():
    b = prepacked(random_codes((1024, 2048), NVFP4, generator(6), device="cuda"))
    assert_streams_agree(cuda_linear_wide_sm90.launch, b, (96, 300))


@on_hopper
@pytest.mark.parametrize("dependent", [False, True])
def test_a_chain_in_a_graph(dependent):
    """Alone, and beside a skinny kernel, which starts before the one before it has ended where it may."""
    assert_chain([cuda_linear_wide_sm90.launch] * 8, NVFP4, 100, dependent=dependent)
    assert_chain([cuda_linear_sm90.launch, cuda_linear_wide_sm90.launch] * 4, NVFP4, 60, dependent=dependent)


@on_hopper
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_activations_that_lie_once_for_a_batch_or_column_after_column(format):
    narrow = None if format == NVFP4 else (100, 140)
    b = random_codes((2, 200, 256), format, generator(17), scale_bytes=narrow, device="cuda")
    a = random_dense((2, 70, 256), torch.bfloat16, generator(18), "cuda")
    for left in (a[:1].expand(2, -1, -1), a.mT.contiguous().mT):
        assert_product(left, b, None, linear(left, b), f"{format} {left.stride()}")
