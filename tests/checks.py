"""What the kernel tests share: inputs drawn as codes and scale bytes, poisoned memory, and the comparison."""

import math

import torch
from torch import Tensor

from nibblas import reference
from nibblas.formats import E4M3, Format, as_format, pack
from nibblas.layouts import LINEAR, TiledLayout, as_layout
from nibblas.tensor import ScaledTensor

# Scale bytes drawn unless a test asks for others. e4m3: all that are finite and not negative. e8m0: those with which
# a product of two FP4 tensors stays within fp16; (0, 240) is every scale whose product with x near 1 stays within fp32.
SCALE_BYTES = {"e4m3": (0, E4M3.largest), "e8m0": (107, 129)}
# Of moderate size, by format: for products whose operands both have some.
NARROW = {"nvfp4": (32, 96), "mxfp4": (117, 129)}
# Within a row, scales lie this many codes apart at most (two octaves of e4m3, four of e8m0): of two blocks in a sum
# neither vanishes in the rounding of the other.
SCALE_SPREAD = {"e4m3": 16, "e8m0": 4}


def random_codes(
    shape: tuple[int, ...],
    format: Format | str,
    generator: torch.Generator,
    *,
    layout: TiledLayout | str = LINEAR,
    data_layout: TiledLayout | str = LINEAR,
    scale_bytes: tuple[int, int] | None = None,
    nan_scales: int = 0,
    global_scale: bool = True,
    device: torch.device | str = "cpu",
) -> ScaledTensor:
    """A ScaledTensor of logical shape (..., N, K) drawn without any quantizer; padding of layouts is 0xFF, never zero.

    All 16 codes are drawn alike. Each row has a window of scale bytes of its own, and the windows of all rows together
    span `scale_bytes`, (lowest, highest): rows differ in size, so compare with `magnitude=reference.magnitude(a, b)`.
    `nan_scales` blocks get a NaN scale. NVFP4 gets a global_scale for each matrix unless told otherwise.
    """
    format, layout, data_layout = as_format(format), as_layout(layout), as_layout(data_layout)
    *batch, N, K = shape
    format.check_K("random_codes", K)
    code = format.scale_code
    blocks, rows = K // format.block_size, math.prod(batch) * N
    data = pack(torch.randint(16, shape, dtype=torch.uint8, generator=generator))
    low, high = scale_bytes or SCALE_BYTES[code.name]
    spread = min(SCALE_SPREAD[code.name], high - low + 1)
    place = (torch.randperm(rows, generator=generator) + torch.rand(rows, generator=generator)) / max(rows, 1)
    first = low + (place * (high - low - spread + 2)).floor().clamp(max=high - low - spread + 1)
    scale = first.long()[:, None] + torch.randint(spread, (rows, blocks), generator=generator)
    nan_blocks = torch.randperm(rows * blocks, generator=generator)[:nan_scales]
    scale.view(-1)[nan_blocks[0::2]] = code.nan
    scale.view(-1)[nan_blocks[1::2]] = 0xFF  # the other NaN of e4m3
    scale = scale.to(torch.uint8).reshape(*batch, N, blocks)
    factor = None
    if format.has_global_scale and global_scale:
        factor = (0.5 + torch.rand(batch, generator=generator)) / code.max
    return ScaledTensor(
        _stored(data, data_layout),
        _stored(scale, layout),
        format,
        factor,
        layout,
        data_layout,
        matrix=None if data_layout == LINEAR else (N, K),
    ).to(device)


def _stored(matrix: Tensor, layout: TiledLayout) -> Tensor:
    """The matrix in a layout, whose padding is 0xFF: NaN as a scale, -6 -6 as codes."""
    is_padding = layout.to(torch.ones_like(matrix)) == 0
    return layout.to(matrix).masked_fill(is_padding, 0xFF)


def random_dense(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """Normal values rounded to a dtype."""
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def poisoned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Memory of which every byte is 0xFF: NaN in every float dtype, the NaN code of every scale."""
    poison = torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return poison.view(dtype).reshape(shape)


# The error of an fp32 sum relative to the size of the result: a few roundings, and one truncation of the running sum
# every 16 products, as tensor cores do it.
FP32_SUM = 1e-6
FP32_SUM_PER_K = torch.finfo(torch.float32).eps / 16


def assert_close(
    got: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    *,
    K: int,
    what: str,
    magnitude: Tensor | None = None,
    intermediate: torch.dtype | None = None,
) -> None:
    """Fail unless `got` is the float64 answer `exact`, summed over K in fp32 and rounded once to `dtype`.

    An element may be off by half a unit in its last place of `dtype`, plus the error of the sum relative to its size:
    the larger of |exact| and `magnitude` (see reference.magnitude), by default the RMS of all finite elements.
    `intermediate` is a dtype the operation rounds a hidden tensor to on its way.
    NaN and Inf must stand exactly where `exact` rounded to `dtype` has them. Shape, dtype and device must be equal.
    A comparison that could not fail is refused: nothing finite and nonzero in `exact`, or a magnitude that is too large
    for most elements.
    """
    facts = (tuple(got.shape), got.dtype, got.device)
    need = (tuple(exact.shape), dtype, exact.device)
    assert facts == need, f"{what}: got shape, dtype, device {facts}, need {need}"
    assert exact.dtype == torch.float64, f"{what}: exact is {exact.dtype}, need torch.float64"
    if not exact.numel():
        return
    value, rounded = got.double(), exact.to(dtype).double()
    finite = rounded.isfinite()
    rms = exact[finite].square().mean().sqrt().item() if finite.any() else 0.0
    assert rms > 0, f"{what}: the exact answer has no element that is finite and not zero, so nothing is compared"
    size = torch.full_like(exact, rms) if magnitude is None else magnitude.expand_as(exact)
    typical = exact[finite & (exact != 0)].abs() / size[finite & (exact != 0)]
    assert typical.median() > 0.01, (
        f"{what}: most elements are below 1% of what their error is compared with, so it would not be seen; "
        "pass magnitude=reference.magnitude(a, b) or draw rows of one size"
    )
    size = torch.maximum(size, exact.abs())
    tolerance = (FP32_SUM + K * FP32_SUM_PER_K) * size
    if intermediate is not None:
        tolerance = tolerance + torch.finfo(intermediate).eps * size
    tolerance = tolerance + _half_ulp(exact.abs() + tolerance, dtype)
    error = (value - exact).abs()
    same_special = (value == rounded) | (value.isnan() & rounded.isnan())
    good = torch.where(finite, error <= tolerance, same_special)
    if good.all():
        return
    excess = torch.where(finite, (error / tolerance).nan_to_num(math.inf, math.inf), math.inf).masked_fill(good, -1.0)
    worst = tuple(i.item() for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{what}: {(~good).sum().item()} of {good.numel()} elements are wrong; worst at {worst}: "
        f"got {value[worst].item():.9g}, exact {exact[worst].item():.9g}, error {error[worst].item():.3g} = "
        f"{error[worst].item() / rms:.3g} of the RMS {rms:.3g}, allowed {tolerance[worst].item():.3g} ({dtype}, K={K})"
    )


def _half_ulp(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of `dtype` at nonnegative sizes, subnormals included."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.clamp(min=info.smallest_normal))
    return torch.exp2((exponent - 1).double()) * (info.eps / 2)


def assert_product(a: Tensor | ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, what: str) -> None:
    """`assert_close` of a @ b.T + bias, each element compared with the size of what was added up in it."""
    size = reference.magnitude(a, b)
    size = size if bias is None else torch.maximum(size, bias.double().abs())
    assert_close(out, reference.matmul(a, b, bias), out.dtype, K=b.K, what=what, magnitude=size)
