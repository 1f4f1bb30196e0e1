"""triton_linear_decoded, and gated, under triton's interpreter, a process of its own: `TRITON_INTERPRET=1 python` this.

The interpreter has no right bf16: operands are decoded to fp32 here, and to fp16 where that is what a GPU does, and
torch multiplies in fp32. Any failure raises.
"""

import os
import sys
import time
import zlib
from pathlib import Path

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Python starts"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from checks import NARROW, assert_product, poisoned_empty, random_codes, random_dense  # noqa: E402

from nibblas import reference  # noqa: E402
from nibblas.formats import FORMATS, MXFP4, NVFP4, Format  # noqa: E402
from nibblas.kernels import triton_gated_linear_decoded as gated  # noqa: E402
from nibblas.kernels import triton_linear_decoded as decoded  # noqa: E402
from nibblas.kernels.torch_linear import decode  # noqa: E402
from nibblas.kernels.triton_launch import target_of  # noqa: E402
from nibblas.layouts import LINEAR, BLOCKED_128x4  # noqa: E402
from nibblas.tensor import ScaledTensor  # noqa: E402

torch.set_num_threads(1)
TARGET = target_of(torch.device("cpu"))
EVERY_SCALE = {"nvfp4": (0, 126), "mxfp4": (0, 254)}
rounded = []  # how often the library's own result was what is asked


def multiply_rounded(a, w, factor, out) -> None:
    out.copy_(factor * (a.float() @ w.float().T))
    rounded.append(factor)


decoded.multiply = lambda a, w, sums: torch.matmul(a.float(), w.float().mT, out=sums)
decoded.multiply_rounded = multiply_rounded
gated.multiply = lambda x, w, sums: torch.matmul(x.float()[:, None], w.float().mT, out=sums)


def codes(shape: tuple[int, ...], format: Format, scale_bytes: tuple[int, int], layout=LINEAR, **options):
    """Codes and scales; scales that are padding are NaN."""
    g = torch.Generator().manual_seed(zlib.crc32(repr((shape, format.name)).encode()))
    t = random_codes(shape, format, g, scale_bytes=scale_bytes, **options)
    if layout == LINEAR:
        return t
    real = layout.to(torch.ones_like(t.scale))
    stored = layout.to(t.scale)
    stored[real == 0] = 0xFF
    return ScaledTensor(t.data, stored, format, t.global_scale, layout)


def test_decode() -> None:
    """Bit for bit what the layouts say the elements are, the sign of zero included; NaN where they are."""
    shapes = [(130, 128), (5, 512), (40, 2048), (2, 40, 1120), (3, 16, 32), (1, 1, 672), (257, 544)]
    for format in FORMATS.values():
        for shape in (*shapes, (40, 1168), (7, 16)) if format == NVFP4 else shapes:
            for layout in (LINEAR, BLOCKED_128x4):
                t = codes(shape, format, EVERY_SCALE[format.name], layout, nan_scales=3)
                exact = decode(t.with_layout(LINEAR), 1 / decoded.UNIT[format.name])
                for dtype in (torch.float32, torch.float16) if format == NVFP4 else (torch.float32,):
                    out = poisoned_empty(shape if len(shape) == 3 else (1, *shape), dtype)
                    decoded.decode_launch(t, out, TARGET).run()
                    got = out.float().view(shape)
                    same = (got.view(torch.int32) == exact.view(torch.int32)) | (got.isnan() & exact.isnan())
                    assert same.all(), f"{t} {dtype}: {(~same).sum()} of {same.numel()} elements differ"


def test_decode_of_views() -> None:
    """Rows that don't follow one another, matrices of a batch that lie apart, and a batch that lies last."""
    whole = codes((6, 40, 256), NVFP4, NARROW["nvfp4"])
    last = ScaledTensor.from_batch_last(
        whole.data.permute(1, 2, 0), whole.scale.permute(1, 2, 0).view(torch.float8_e4m3fn), NVFP4
    )
    for view in (
        whole.slice(-2, 3, 20),
        whole.slice(-1, 64, 192),
        whole.slice(0, 2, 5),
        whole[3].slice(-2, 0, 7),
        last,
    ):
        exact = decode(view.with_layout(LINEAR), 1 / decoded.UNIT["nvfp4"])
        assert torch.equal(decoded.decoded(view, torch.float32, TARGET).view(exact.shape), exact), view


def test_product() -> None:
    """Everything but cuBLAS: dense and FP4 activations, scales in both layouts, bias, global scales, batches."""
    g = torch.Generator().manual_seed(3)
    for format in FORMATS.values():
        for batch, M, N, K, dtype in (((), 65, 130, 288, torch.float16), ((3,), 20, 33, 160, torch.float32)):
            for layout in (LINEAR, BLOCKED_128x4):
                b = codes((*batch, N, K), format, NARROW[format.name], layout, nan_scales=1)
                bias = random_dense((N,), torch.float16, g)
                dense = random_dense((*batch, M, K), torch.float16, g)
                for a in (dense, codes((*batch, M, K), format, NARROW[format.name], layout)):
                    for each in (None, bias):
                        out = poisoned_empty((*batch, M, N), dtype)
                        decoded.launch(a, b, each, out)
                        assert_product(a, b, each, out, f"{b} {dtype}")
        assert format == MXFP4 or not rounded, "global scales were left out"
    rounded.clear()


def test_product_that_is_rounded_by_the_library() -> None:
    """FP4 without global scales to fp16: no second pass for one matrix; one for a batch, and with MXFP4."""
    for batch in ((), (2,)):
        a, b = (
            ScaledTensor(t.data, t.scale, NVFP4)
            for t in (codes((*batch, rows, 64), NVFP4, NARROW["nvfp4"]) for rows in (9, 17))
        )
        wide = codes((*batch, 9, 64), MXFP4, NARROW["mxfp4"])
        for rows, is_rounded in ((a, not batch), (wide, False)):
            out = poisoned_empty((*batch, 9, 17), torch.float16)
            decoded.launch(rows, b, None, out)
            assert rounded == [2.0**14] * is_rounded
            rounded.clear()
            assert_product(rows, b, None, out, f"{rows} {b}")


def test_gated() -> None:
    for format in FORMATS.values():
        gate, up = (codes((40, 96), format, NARROW[format.name], layout) for layout in (LINEAR, BLOCKED_128x4))
        for x in (
            codes((21, 96), format, NARROW[format.name]),
            random_dense((21, 96), torch.float16, torch.Generator()),
        ):
            for activation in ("silu", "swiglu_clamped"):
                out = poisoned_empty((21, 40), torch.float32)
                gated.launch(x, gate, up, None, None, activation, out)
                exact = reference.gated_linear(x, gate, up, activation=activation)
                assert torch.allclose(out.double(), exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            start = time.perf_counter()
            test()
            print(f"{name} {time.perf_counter() - start:.1f} s")
