"""triton_linear_decoded_sm90 under triton's interpreter, a process of its own: `TRITON_INTERPRET=1 python` this file.

The interpreter has no right bf16: b is decoded to fp32 here, and to fp16 where that is what a GPU does, and torch
multiplies in fp32. Any failure raises.
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
from checks import NARROW, assert_product, poisoned_empty, random_codes, random_dense  # noqa: E402

from nibblas.formats import FORMATS, NVFP4, Format  # noqa: E402
from nibblas.kernels import triton_linear_decoded_sm90 as decoded  # noqa: E402
from nibblas.kernels.torch_linear import decode  # noqa: E402
from nibblas.tensor import ScaledTensor  # noqa: E402

torch.set_num_threads(1)
LAYOUTS = {kernel.operands[0][1]: kernel.b_layouts[0] for kernel in decoded.KERNELS}
UNIT = {"nvfp4": 2.0**7, "mxfp4": 2.0**2}
EVERY_SCALE = {"nvfp4": (0, 126), "mxfp4": (0, 254)}


def prepacked(shape: tuple[int, ...], format: Format, scale_bytes: tuple[int, int], **options) -> ScaledTensor:
    """Codes and scales in their fragments, with NaN scales wherever those are padded."""
    g = torch.Generator().manual_seed(zlib.crc32(repr((shape, format.name)).encode()))
    *batch, N, K = shape
    padded = (*batch, -(-N // 16) * 16, -(-K // 128) * 128)
    b = random_codes(padded, format, g, scale_bytes=scale_bytes, **options)
    b.scale[..., N:, :] = 0xFF
    b.scale[..., K // format.block_size :] = 0xFF
    return replace(b.with_layout(*LAYOUTS[format.name]), matrix=(N, K))


def test_decode() -> None:
    """Bit for bit what the layouts say the elements are, the sign of zero included; NaN where they are."""
    shapes = [(2112, 128), (2880, 512), (40, 2048), (2, 40, 1120), (3, 16, 32), (1, 1, 672), (17, 544)]
    for format in FORMATS.values():
        for shape in (*shapes, (40, 1168)) if format == NVFP4 else shapes:
            b = prepacked(shape, format, EVERY_SCALE[format.name], nan_scales=3)
            exact = decode(b, 1 / UNIT[format.name])
            for dtype in (torch.float32, torch.float16) if format == NVFP4 else (torch.float32,):
                out = poisoned_empty(shape if len(shape) == 3 else (1, *shape), dtype)
                decoded.decode_launch(b, out).run()
                got = out.float().view(shape)
                same = (got.view(torch.int32) == exact.view(torch.int32)) | (got.isnan() & exact.isnan())
                assert same.all(), f"{format} {shape} {dtype}: {(~same).sum()} of {same.numel()} elements differ"


def test_product() -> None:
    """Everything but cuBLAS: results that need one narrowing, both kinds of bias, one global scale or one a matrix."""
    decoded.multiply = lambda a, w, sums: torch.matmul(a.float(), w.float().mT, out=sums)
    for format in FORMATS.values():
        for shape, M, dtype in (((130, 288), 65, torch.float16), ((3, 33, 160), 20, torch.float32)):
            b = prepacked(shape, format, NARROW[format.name], nan_scales=1)
            a = random_dense((*shape[:-2], M, shape[-1]), torch.float16, torch.Generator().manual_seed(M))
            bias = random_dense(shape[-2:-1], torch.float16, torch.Generator().manual_seed(1))
            for each in (None, bias, bias.float()):
                out = poisoned_empty((*shape[:-2], M, shape[-2]), dtype)
                decoded.launch(a, b, each, out)
                assert_product(a, b, each, out, f"{format} {shape} {dtype}")


def test_sums_of_terms() -> None:
    sums = torch.arange(2 * 2 * 3 * 40, dtype=torch.float32).view(2, 2, 3, 40)
    b = prepacked((2, 40, 32), NVFP4, NARROW["nvfp4"])
    wide = poisoned_empty((2, 3, 56), torch.float32)
    decoded.finish_launch(sums, wide, b, None, wide[..., :40]).run()
    assert torch.equal(wide[..., :40], sums.sum(0) * (b.global_scale * UNIT["nvfp4"]).view(2, 1, 1))
    assert wide[..., 40:].isnan().all()


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            start = time.perf_counter()
            test()
            print(f"{name} {time.perf_counter() - start:.1f} s")
