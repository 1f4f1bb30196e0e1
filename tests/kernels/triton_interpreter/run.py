"""The Triton kernels under triton's interpreter, a process of its own: `TRITON_INTERPRET=1 python run.py`.

The interpreter has no right bf16, so operands and results are fp16 and fp32 here and products take the fp32 path; bf16,
inline PTX and the fused division run on GPUs only. A program costs milliseconds: few, big ones. Any failure raises.
"""

import os
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Python starts"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from checks import NARROW, assert_close, assert_product, poisoned_empty, random_codes, random_dense  # noqa: E402

from nibblas import reference  # noqa: E402
from nibblas.formats import FORMATS, MXFP4, NVFP4  # noqa: E402
from nibblas.kernels import triton_gated_linear, triton_grouped_linear, triton_linear, triton_quantize  # noqa: E402
from nibblas.kernels.triton_launch import target_of  # noqa: E402
from nibblas.kernels.triton_linear import Config  # noqa: E402
from nibblas.layouts import BLOCKED_128x4  # noqa: E402
from nibblas.quantize import dequantize, quantize  # noqa: E402

torch.set_num_threads(1)
TARGET = target_of(torch.device("cpu"))


def generator(*facts) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(list(map(str, facts))).encode()))


def run(launches) -> None:
    for launch in launches:
        launch.run()


def check_linear(a, b, bias, dtype, config=None, what=""):
    shape = (*b.shape[:-2], a.shape[-2], b.shape[-2])
    out = poisoned_empty(shape, dtype)
    run(triton_linear.linear_launches(a, b, bias, out, TARGET, config))
    assert_product(a, b, bias, out, what)
    return out


def test_linear() -> None:
    for format in FORMATS.values():
        for K in (48, 80, 112) if format == NVFP4 else (96, 160):
            g = generator("linear", format, K)
            # 21 rows and 70 columns: tails of M and N in one tile each.
            b = random_codes((70, K), format, g, scale_bytes=NARROW[format.name], nan_scales=3)
            a = random_dense((21, K), torch.float32 if K % 32 else torch.float16, g)
            bias = random_dense((70,), torch.float32, g)
            check_linear(a, b, bias, torch.float32, Config(32, 128, 64), f"linear {format} {K}")
        a = random_codes((21, 96), format, g, scale_bytes=NARROW[format.name])
        b = random_codes((70, 96), format, g, scale_bytes=NARROW[format.name])
        check_linear(a, b, None, torch.float16, Config(32, 128, 64), f"FP4 x FP4 {format}")


def test_all_scales() -> None:
    """Every scale byte that is no NaN, one a row, against ones: what the decoding of scales comes to."""
    for format, highest in ((NVFP4, 0xFE), (MXFP4, 240)):
        codes = torch.tensor([c for c in range(highest + 1) if c != 0x7F or format == MXFP4], dtype=torch.uint8)
        block_size = format.block_size
        data = torch.full((len(codes), block_size // 2), 0x12, dtype=torch.uint8)  # codes 2 and 1: 1.0, 0.5
        b = random_codes((len(codes), block_size), format, generator(), global_scale=False)
        b = replace(b, data=data, scale=codes[:, None].contiguous())
        a = torch.ones(1, block_size)
        exact = 0.75 * block_size * format.scale_code.decode(codes).double()
        out = poisoned_empty((1, len(codes)), torch.float32)
        run(triton_linear.linear_launches(a, b, None, out, TARGET, Config(16, 256, block_size)))
        assert torch.equal(out[0].double(), exact), format


def test_split_and_batch() -> None:
    g = generator("split")
    b = random_codes((2, 40, 320), NVFP4, g)
    a = random_dense((2, 3, 320), torch.float16, g)
    bias = random_dense((40,), torch.float16, g)
    whole = check_linear(a, b, bias, torch.float32, Config(16, 64, 64), "batched")
    # 5 steps over 4 splits: two steps, two, one, none.
    check_linear(a, b, bias, torch.float32, Config(16, 64, 64, SPLIT=4), "split")
    # 3 steps, the last one half: a step, a step, the half, none.
    check_linear(a, b, bias, torch.float32, Config(16, 64, 128, SPLIT=4), "split with a tail")
    doubled = check_linear(a, replace(b, global_scale=b.global_scale * 2), None, torch.float32, Config(16, 64, 64))
    plain = check_linear(a, b, None, torch.float32, Config(16, 64, 64))
    assert torch.equal(doubled, plain * 2)
    # One matrix for both batches (stride 0), and columns of a larger x.
    wide = random_dense((3, 400), torch.float16, g)[:, 16:336]
    same = check_linear(wide.expand(2, 3, 320), b, bias, torch.float32, Config(16, 64, 64), "views")
    assert not torch.equal(same, whole)


def test_grouped() -> None:
    for format, sizes, before, after in ((NVFP4, [0, 3, 0, 19, 0], 2, 3), (MXFP4, [0, 0], 0, 2), (MXFP4, [5], 0, 0)):
        g = generator("grouped", sizes)
        w = random_codes((len(sizes), 24, 96), format, g, scale_bytes=NARROW[format.name])
        x = random_dense((before + sum(sizes) + after, 96), torch.float16, g)
        bias = random_dense((len(sizes), 24), torch.float32, g)
        offsets = before + torch.tensor([0, *sizes]).cumsum(0)
        out = poisoned_empty((len(x), 24), torch.float32)
        triton_grouped_linear.grouped_launch(x, w, offsets, bias, out, TARGET, config=Config(16, 32, 128)).run()
        assert not out[:before].any()
        assert not out[before + sum(sizes) :].any()
        for i in range(len(sizes)):
            start, end = offsets[i : i + 2].tolist()
            rows, exact = x[start:end], reference.linear(x[start:end], w[i], bias[i])
            size = reference.magnitude(rows, w[i]) + 4
            assert_close(out[start:end], exact, torch.float32, K=96, what=f"group {i} of {sizes}", magnitude=size)


def test_gated() -> None:
    for activation in reference.ACTIVATIONS:
        for format, low, high in ((NVFP4, 40, 58), (MXFP4, 121, 125)):
            g = generator("gated", activation)
            gate, up = (random_codes((40, 160), format, g, scale_bytes=(low, high), global_scale=False) for _ in "ab")
            if format == NVFP4:
                gate, up = (replace(w, global_scale=torch.tensor(0.05)) for w in (gate, up))
            x = random_dense((17, 160), torch.float32, g)
            biases = [random_dense((40,), torch.float32, g) for _ in "ab"]
            exact = reference.gated_linear(x, gate, up, *biases, activation)
            size = (reference.magnitude(x, gate) + 1) * (reference.magnitude(x, up) + 1)
            for split in (1, 4):
                out = poisoned_empty((17, 40), torch.float32)
                config = Config(32, 64, 128, SPLIT=split)
                run(triton_gated_linear.gated_launches(x, gate, up, *biases, activation, out, TARGET, config))
                assert_close(out, exact, torch.float32, K=160, what=f"gated {format} {activation}", magnitude=size)


def special_values(g: torch.Generator) -> torch.Tensor:
    """Rows that meet every branch of a quantizer: ties, zeros, signed zeros, tiny, huge, NaN and Inf blocks."""
    x = torch.randn(20, 192, generator=g)
    x[1] = 0
    x[2, :64] = -0.0
    x[3] *= torch.exp2(torch.randint(-20, 20, (192,), generator=g).float())
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[4] = ties.repeat(24) * torch.tensor([1, -1]).repeat(96)
    x[5] *= 2.0**-14
    x[6] *= 1000
    x[7, 37], x[8, 70], x[9, 70] = torch.nan, torch.inf, -torch.inf
    x[10] = (x[10].view(torch.int32) | 1).view(torch.float32) * 3e-5
    return x


def test_quantize() -> None:
    for format in FORMATS.values():
        for rule in format.scale_rules:
            cases = [(torch.float32, None), (torch.float16, None)]
            if format == NVFP4 and rule != "search":
                cases += [(torch.float32, 0.0123), (torch.float32, 2.0**-140), (torch.float32, 1e30)]
            for dtype, given in cases:
                x = special_values(generator("quantize", format, rule)).to(dtype)
                given = None if given is None else torch.tensor(given)
                got, launches = triton_quantize.quantize_launches(x, format, rule, given, TARGET)
                run(launches)
                want = quantize(x, format, scale_rule=rule, global_scale=given)
                what = f"quantize {format} {rule} {dtype} {given}"
                if given is None and format == NVFP4:
                    assert torch.equal(got.global_scale, want.global_scale), what
                assert torch.equal(got.scale, want.scale), what
                assert torch.equal(got.data, want.data), what
    for x in (torch.zeros(0, 64), torch.zeros(3, 0), torch.zeros(2, 32)):
        got, launches = triton_quantize.quantize_launches(x, NVFP4, "absmax", None, TARGET)
        run(launches)
        want = quantize(x, NVFP4)
        assert torch.equal(got.scale, want.scale)
        assert torch.equal(got.data, want.data)
        assert torch.equal(got.global_scale, want.global_scale)


def test_dequantize() -> None:
    for format in FORMATS.values():
        w = random_codes((3, 30, 96), format, generator(format), scale_bytes=(0, 255 if format == MXFP4 else 126))
        for dtype in (torch.float32, torch.float16):
            got = triton_quantize.dequantize(w.with_layout(BLOCKED_128x4), dtype)
            assert torch.equal(got.view(torch.uint8), dequantize(w, dtype).view(torch.uint8)), (format, dtype)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            start = time.perf_counter()
            test()
            print(f"{name} {time.perf_counter() - start:.1f} s")
