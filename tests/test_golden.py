"""What other tools wrote for the same inputs, byte for byte; where nibblas differs on purpose, how, and on what.

tests/golden/README.md says where the arrays come from; docs/formats.md lists the differences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from nibblas.formats import (
    E2M1_MIDPOINTS,
    E4M3,
    E8M0,
    MXFP4,
    NVFP4,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack,
    unpack,
)
from nibblas.layouts import BLOCKED_128x4
from nibblas.quantize import RULES, SMALLEST_GLOBAL_SCALE, dequantize, quantize
from nibblas.tensor import ScaledTensor

GOLDEN = Path(__file__).parent / "golden"
CASES = ("randn", "outlier", "ties", "mxscale", "nvscale", "mostly_zero", "huge")  # zeros and tiny are taken apart


@cache
def golden(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key].astype(np.int32) if "bits" in key else arrays[key]) for key in arrays}


def from_bf16_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def given(case: str) -> torch.Tensor:
    return from_bf16_bits(golden("inputs")[f"{case}.bf16_bits"])


def blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, block_size))


def block_amax(x: torch.Tensor, block_size: int) -> torch.Tensor:
    return blocks(x.float(), block_size).abs().amax(-1)


def block_error(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | float = 1.0):
    """Squared error of each block in float64, from stored codes (N, K) and decoded scales (N, K / block_size)."""
    block_size = x.shape[-1] // scale.shape[-1]
    values = blocks(e2m1_decode(codes).double(), block_size) * (scale.double() * float(global_scale)).unsqueeze(-1)
    return (blocks(x.double(), block_size) - values).square().sum(-1)


def same_but_sign_of_zero(codes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (codes == others) | ((codes & 7) + (others & 7) == 0)


@dataclass(frozen=True)
class Peer:
    """An NVFP4 quantizer and its intended differences: its scale bytes and its order of operations, from ours."""

    file: str
    codes: str = "weight"
    scale: str = "weight_scale"
    global_scale: float | None = None
    scale_bytes: Callable = lambda ours, amax: ours
    quotient: Callable = lambda x, scale, global_scale: x / (scale * global_scale)
    keeps_zero_sign: bool = True

    def __str__(self):
        return self.file

    def read(self, case: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = golden(self.file)
        return unpack(data[f"{case}.{self.codes}"]), data[f"{case}.{self.scale}"]


def reciprocal_first(x, scale, global_scale):
    return x * (1 / (scale * global_scale))


PEERS = (
    # A block of zeros gets scale 1, one that underflows the smallest scale.
    Peer(
        "modelopt_nvfp4",
        scale_bytes=lambda ours, amax: torch.where(ours == 0, torch.where(amax == 0, 0x38, 0x01), ours),
    ),
    Peer("diffusers_bfl_nvfp4"),
    Peer("quark_nvfp4", keeps_zero_sign=False),
    # Block scales are at least 2^-6.
    Peer(
        "torchao_nvfp4_two_level",
        codes="qdata",
        scale="scale",
        scale_bytes=lambda ours, amax: ours.clamp(min=0x08),
        quotient=lambda x, scale, global_scale: x * ((1 / global_scale) / scale),
    ),
    Peer(
        "torchao_nvfp4_single_level",
        codes="qdata",
        scale="scale",
        global_scale=1.0,
        scale_bytes=lambda ours, amax: ours.clamp(min=0x08),
        quotient=reciprocal_first,
    ),
    Peer("te_ref_nvfp4", codes="ret0", scale="ret1", quotient=reciprocal_first),
    Peer("fouroversix_nvfp4_static_6", codes="values", scale="scale_factors", quotient=reciprocal_first),
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_nvfp4_absmax_scale_bytes_are_the_peers(peer, case):
    x = given(case)
    ours = quantize(x, NVFP4, scale_rule="absmax", global_scale=peer.global_scale).scale
    _, theirs = peer.read(case)
    assert torch.equal(theirs, peer.scale_bytes(ours, block_amax(x, 16)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_nvfp4_absmax_codes_are_the_peers(peer, case):
    """Equal where scale bytes are and the scale is not 0, except where another order of operations crosses a tie."""
    x = given(case)
    w = quantize(x, NVFP4, scale_rule="absmax", global_scale=peer.global_scale)
    codes, scale = peer.read(case)
    ours, theirs = blocks(unpack(w.data), 16), blocks(codes, 16)
    same_scale = ((scale == w.scale) & (w.scale != 0)).unsqueeze(-1)
    exact = blocks(x.double(), 16).abs() / (E4M3.decode(w.scale).double() * w.global_scale.double()).unsqueeze(-1)
    midpoints = torch.tensor(E2M1_MIDPOINTS, dtype=torch.float64)
    near_tie = ((exact.unsqueeze(-1) - midpoints).abs() < 2.0**-21 * midpoints).any(-1)
    if peer.quotient is Peer.quotient:
        near_tie = torch.zeros_like(near_tie)
    equal = ours == theirs if peer.keeps_zero_sign else same_but_sign_of_zero(ours, theirs)
    # This reference wraps a code above 6 to -0; it takes a subnormal scale that was rounded down to get there.
    wraps = torch.zeros_like(equal)
    if (peer.file, case) == ("fouroversix_nvfp4_static_6", "nvscale"):
        wraps = (theirs & 7 == 0) & (exact > 6) & same_scale
        assert wraps.sum() == 20
    assert (equal | near_tie | wraps | ~same_scale).all()
    if not peer.keeps_zero_sign:
        assert not ((theirs == 8) & same_scale).any()


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_a_difference_in_codes_is_the_order_of_operations(peer):
    """With the peer's own quotient in place of x / (scale * global_scale) its codes come out on `outlier`."""
    x = given("outlier").float()
    codes, scale = peer.read("outlier")
    global_scale = torch.tensor(1.0) if peer.global_scale else x.abs().amax() / 2688
    quotient = peer.quotient(blocks(x, 16), E4M3.decode(scale).unsqueeze(-1), global_scale)
    assert same_but_sign_of_zero(e2m1_encode(quotient), blocks(codes, 16)).all()


def test_order_of_operations_matters_to_a_few_codes_only():
    changed = {}
    ours = unpack(quantize(given("outlier"), NVFP4).data)
    for peer in PEERS:
        codes, _ = peer.read("outlier")
        if peer.global_scale is None:
            changed[peer.file] = int((~same_but_sign_of_zero(ours, codes)).sum())
    assert changed == {
        "modelopt_nvfp4": 0,
        "diffusers_bfl_nvfp4": 0,
        "quark_nvfp4": 0,
        "torchao_nvfp4_two_level": 11,
        "te_ref_nvfp4": 5,
        "fouroversix_nvfp4_static_6": 5,
    }


def test_a_scale_of_zero_has_codes_zero_unlike_some_peers():
    """Below half the smallest scale a block is all zeros; Transformer Engine and Quark leave codes under that scale."""
    w = quantize(given("mxscale"), NVFP4)
    dead = (w.scale == 0).repeat_interleave(16, dim=1)
    assert dead.any()
    assert not unpack(w.data)[dead].any()
    for file, codes in (("te_ref_nvfp4", "ret0"), ("quark_nvfp4", "weight")):
        assert (unpack(golden(file)[f"mxscale.{codes}"])[dead] & 7).any()


def test_nvfp4_global_scale_is_modelopts():
    for case in CASES:
        for file in ("modelopt_nvfp4", "diffusers_bfl_nvfp4", "quark_nvfp4"):
            assert quantize(given(case), NVFP4).global_scale == golden(file)[f"{case}.weight_scale_2"]


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_nvfp4(case):
    """Given 1 / its divisor, codes agree wherever scale bytes do; its scales come from amax / 6 rounded to bf16."""
    x, data = given(case), golden("compressed_tensors_nvfp4")
    divisor = data[f"{case}.weight_global_scale"]
    w = quantize(x, NVFP4, scale_rule="absmax", global_scale=1 / divisor)
    theirs = data[f"{case}.weight_scale"]
    rounded = e4m3_encode(divisor * (blocks(x, 16).abs().amax(-1) / 6).float())
    assert torch.equal(theirs, torch.where(rounded == 0, 0x20, rounded))
    live = theirs != 0x20
    apart = int((theirs != w.scale)[live].sum())
    assert apart == {"randn": 11, "outlier": 3}.get(case, 0)
    same = (live & (theirs == w.scale)).repeat_interleave(16, dim=1)
    assert torch.equal(unpack(data[f"{case}.weight_packed"])[same], unpack(w.data)[same])


@pytest.mark.parametrize("case", CASES)
def test_comfy_kitchen_nvfp4(case):
    """High nibble first, scales in BLOCKED_128x4, a global_scale rounded to bf16: then byte for byte."""
    x, data = given(case), golden("comfy_kitchen_nvfp4")
    w = quantize(x, NVFP4, scale_rule="absmax", global_scale=data[f"{case}.weight_scale_2"])
    rows, K = x.shape
    stored = data[f"{case}.weight"]
    swapped = (stored >> 4) | (stored << 4)
    padded_rows = stored.shape[0]
    scale = BLOCKED_128x4.from_(data[f"{case}.weight_scale"], padded_rows, K // 16)
    assert torch.equal(swapped[:rows], w.data)
    assert torch.equal(scale[:rows], w.scale)
    if padded_rows == rows:
        assert torch.equal(data[f"{case}.weight_scale"], w.with_layout(BLOCKED_128x4).scale)


@pytest.mark.parametrize("case", ["randn", "nvscale"])
def test_torchao_blocked_scales(case):
    linear, blocked = (golden(f"torchao_nvfp4_two_level{suffix}")[f"{case}.scale"] for suffix in ("", "_swizzled"))
    assert torch.equal(BLOCKED_128x4.to(linear).flatten(), blocked.flatten())


FOUR_OVER_SIX = {"fouroversix_nvfp4_mse": ("values", "scale_factors"), "te_ref_nvfp4_4over6_mse_256": ("ret0", "ret1")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("file", FOUR_OVER_SIX)
def test_four_over_six(file, case):
    """Where the choice differs our error is no larger: a candidate rounded another way, or squares that overflowed."""
    x, data = given(case), golden(file)
    w = quantize(x, NVFP4, scale_rule="four_over_six")
    codes_key, scale_key = FOUR_OVER_SIX[file]
    codes, scale = unpack(data[f"{case}.{codes_key}"]), data[f"{case}.{scale_key}"]
    apart = scale != w.scale
    expected = {"outlier": 1, "nvscale": 14 if file.startswith("four") else 2, "huge": 14}
    assert apart.sum() == expected.get(case, 0)
    ours = block_error(x, unpack(w.data), E4M3.decode(w.scale), w.global_scale)
    theirs = block_error(x, codes, E4M3.decode(scale), w.global_scale)
    assert (ours <= theirs * (1 + 1e-6))[apart].all()
    same = (~apart & (w.scale != 0)).repeat_interleave(16, dim=1)
    different = (unpack(w.data) != codes) & same
    assert different.sum() == {"outlier": 5, "nvscale": 10}.get(case, 0)  # order of operations, as above
    # A code across a tie costs nothing.
    blocks_apart = blocks(different, 16).any(-1)
    torch.testing.assert_close(ours[blocks_apart], theirs[blocks_apart], rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", ["randn", "outlier"])
def test_nvfp4_search_is_no_worse_than_qwantize(case):
    """Same global_scale, exhaustive search on both sides: the same least error in every block."""
    x, data = given(case), golden("qwantize_nvfp4_sse_optimal")
    global_scale = data[f"{case}.tensor_scale_by_us"]
    w = quantize(x, NVFP4, scale_rule="search", global_scale=global_scale)
    theirs = data[f"{case}.scales"]
    quotient = blocks(x.float(), 16) / (theirs * global_scale).unsqueeze(-1)
    optimum = block_error(x, e2m1_encode(quotient).flatten(-2), theirs, global_scale)
    ours = block_error(x, unpack(w.data), E4M3.decode(w.scale), global_scale)
    torch.testing.assert_close(ours, optimum, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["randn", "outlier"])
def test_mxfp4_search_is_no_worse_than_qwantize(case):
    x, theirs = given(case), golden("qwantize_mxfp4_sse_optimal")[f"{case}.scales"]
    w = quantize(x, MXFP4, scale_rule="search")
    assert torch.equal(E8M0.decode(w.scale), theirs)


def test_all_zeros_are_finite_here_and_nan_in_some_files():
    x = given("zeros")
    for format in (NVFP4, MXFP4):
        for rule in format.scale_rules:
            w = quantize(x, format, scale_rule=rule)
            assert not w.scale.any()
            assert not dequantize(w).any()
    assert quantize(x, NVFP4).global_scale == SMALLEST_GLOBAL_SCALE
    written = {
        "modelopt_nvfp4.weight_scale": 0xFF,
        "torchao_nvfp4_two_level.scale": 0xFF,
        "diffusers_bfl_nvfp4.weight_scale": 0xFF,
        "comfy_kitchen_nvfp4.weight_scale": 0xFF,
        "compressed_tensors_nvfp4.weight_scale": 0x20,
        "quark_nvfp4.weight_scale": 0x38,
        "te_ref_nvfp4.ret1": 0x00,
        "fouroversix_nvfp4_static_6.scale_factors": 0x00,
        "torchao_mxfp4_even.scale": 0,
        "compressed_tensors_mxfp4.weight_scale": 0,
        "quark_mxfp4_even.weight_scale": 1,
    }
    for key, byte in written.items():
        file, field = key.split(".")
        assert golden(file)[f"zeros.{field}"][0, 0] == byte, key


def test_tiny_global_scale_has_a_finite_inverse():
    """amax / 2688 is an fp32 subnormal whose inverse overflows; ours is 2^-126, and no less accurate."""
    x, theirs = given("tiny"), golden("modelopt_nvfp4")
    w = quantize(x, NVFP4)
    assert w.global_scale == SMALLEST_GLOBAL_SCALE
    assert (1 / w.global_scale).isfinite()
    assert (1 / theirs["tiny.weight_scale_2"]).isinf()
    ours = block_error(x, unpack(w.data), E4M3.decode(w.scale), w.global_scale).sum()
    other = block_error(
        x, unpack(theirs["tiny.weight"]), E4M3.decode(theirs["tiny.weight_scale"]), theirs["tiny.weight_scale_2"]
    ).sum()
    assert 0 < ours <= other


@pytest.mark.parametrize("case", [*CASES, "zeros"])
@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_torchao_mxfp4_is_equal(rule, case):
    w, data = quantize(given(case), MXFP4, scale_rule=rule), golden(f"torchao_mxfp4_{rule}")
    assert torch.equal(w.scale, data[f"{case}.scale"])
    assert torch.equal(w.data, data[f"{case}.qdata"])


@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_torchao_mxfp4_loses_subnormals(rule):
    """Scale byte 0 is 2^-127: same bytes, but torchao divides by a larger number. Our error is smaller."""
    x, data = given("tiny"), golden(f"torchao_mxfp4_{rule}")
    w = quantize(x, MXFP4, scale_rule=rule)
    assert torch.equal(w.scale, data["tiny.scale"])
    ours = block_error(x, unpack(w.data), E8M0.decode(w.scale))
    theirs = block_error(x, unpack(data["tiny.qdata"]), E8M0.decode(w.scale))
    assert (ours <= theirs).all()
    assert ours.sum() < theirs.sum()


@pytest.mark.parametrize("case", [*CASES, "zeros"])
def test_compressed_tensors_mxfp4(case):
    """`even`, equal but for elements that are -0, and a byte 127 where the amax rounds up to 2^128 (ours: 253)."""
    w, data = quantize(given(case), MXFP4, scale_rule="even"), golden("compressed_tensors_mxfp4")
    theirs = data[f"{case}.weight_scale"]
    apart = theirs != w.scale
    assert apart.sum() == (2 if case == "huge" else 0)
    assert (theirs[apart] == 127).all()
    assert (w.scale[apart] == 253).all()
    codes, others = unpack(w.data), unpack(data[f"{case}.weight_packed"])
    same = (~apart).repeat_interleave(32, dim=1)
    live = same & (given(case) != 0)
    assert torch.equal(codes[live], others[live])
    assert same_but_sign_of_zero(codes[same], others[same]).all()


@pytest.mark.parametrize("case", [*CASES, "zeros", "tiny"])
def test_quark_mxfp4(case):
    """`even` with bytes in 1..254: 1 for ours of 0, 254 where the amax rounds up to 2^128; it writes no -0."""
    w, data = quantize(given(case), MXFP4, scale_rule="even"), golden("quark_mxfp4_even")
    theirs = data[f"{case}.weight_scale"]
    top = (theirs == 254) & (w.scale == 253)
    assert top.sum() == (2 if case == "huge" else 0)
    assert torch.equal(theirs[~top], w.scale.clamp(min=1)[~top])
    same = (theirs == w.scale).repeat_interleave(32, dim=1)
    codes, others = unpack(w.data), unpack(data[f"{case}.weight"])
    assert same_but_sign_of_zero(codes[same], others[same]).all()
    assert not (others == 8).any()


@pytest.mark.parametrize("case", [*CASES, "zeros"])
def test_fouroversix_mxfp4(case):
    """`rceil`, equal but for elements that are -0."""
    w, data = quantize(given(case), MXFP4, scale_rule="rceil"), golden("fouroversix_mxfp4_static_6")
    assert torch.equal(w.scale, data[f"{case}.scale_factors"])
    codes, others = unpack(w.data), unpack(data[f"{case}.values"])
    live = given(case) != 0
    assert torch.equal(codes[live], others[live])
    assert same_but_sign_of_zero(codes, others).all()


@pytest.mark.parametrize(
    ("tool", "rule", "lowest", "highest", "byte"),
    [
        ("torchao.FLOOR", "floor", None, None, None),
        ("torchao.EVEN", "even", None, None, None),
        ("torchao.RCEIL", "rceil", None, None, None),
        ("aiter.RoundDown", "floor", None, None, None),
        # aiter flushes a subnormal amax / 6, and lets an amax of 1.75 * 2^127 round to NaN.
        ("aiter.RoundUp", "rceil", 2.0**-126, 6 * 2.0**-127, 1),
        ("aiter.Even", "even", 1.75 * 2.0**127, torch.inf, 255),
    ],
)
def test_scale_of_every_normal_bf16_amax(tool, rule, lowest, highest, byte):
    table = golden("mx_scale_table")
    amax = from_bf16_bits(table["amax_bf16_bits"]).float()
    ours = RULES[MXFP4][rule](amax.unsqueeze(-1), amax, torch.ones_like(amax))
    if byte is None:
        assert torch.equal(ours, table[tool])
        return
    apart = ours != table[tool]
    assert torch.equal(apart, (amax >= lowest) & (amax <= highest))
    assert (table[tool][apart] == byte).all()


def test_e2m1_code_of_every_bf16():
    table = golden("tables")
    values = from_bf16_bits(table["bf16_bits"]).float()
    number = ~values.isnan()
    for tool in ("ml_dtypes.bf16_to_float4_e2m1fn", "torchao.f32_to_f4_unpacked(bf16)"):
        assert torch.equal(e2m1_encode(values)[number], table[tool][number]), tool


def test_e4m3_code_of_every_bf16():
    table = golden("tables")
    values = from_bf16_bits(table["bf16_bits"]).float()
    ours = e4m3_encode(values)
    number = ~values.isnan()
    assert torch.equal(ours[number], table["torch.bf16_to_float8_e4m3fn"][number])
    # ml_dtypes gives NaN above 464; clamp first.
    inside = number & (values.abs() <= 464)
    assert torch.equal(ours[inside], table["ml_dtypes.bf16_to_float8_e4m3fn"][inside])
    beyond = number & ~inside
    assert (table["ml_dtypes.bf16_to_float8_e4m3fn"][beyond] & 0x7F == 0x7F).all()
    assert (ours[beyond] & 0x7F == 0x7E).all()


def test_decode_tables():
    table, byte = golden("tables"), torch.arange(256, dtype=torch.uint8)
    bits = lambda values: values.view(torch.int32)  # noqa: E731
    assert torch.equal(bits(e2m1_decode(torch.arange(16))), bits(table["decode.e2m1_f32"]))
    for ours, theirs in (
        (E4M3.decode(byte), table["decode.e4m3fn_f32"]),
        (E8M0.decode(byte), table["decode.e8m0_f32_ml_dtypes"]),
        (E8M0.decode(byte), table["decode.e8m0_f32_torch"]),
    ):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(bits(ours)[~ours.isnan()], bits(theirs)[~theirs.isnan()])


@pytest.mark.parametrize("shape", ["128x4", "128x8", "256x16", "64x16", "130x5", "300x20"])
@pytest.mark.parametrize("tool", ["torchao", "comfy"])
def test_blocked_permutation(tool, shape):
    rows, cols = map(int, shape.split("x"))
    element = torch.arange(1, rows * cols + 1, dtype=torch.int32).view(rows, cols)
    assert torch.equal(BLOCKED_128x4.to(element).flatten(), golden("tables")[f"swizzle.{tool}_to_blocked.{shape}"])


def test_gpt_oss_dequantization():
    """Experts in blocks of 16 bytes, scale bytes 0, 1, 127 and 254 among them."""
    data = golden("gpt_oss_mxfp4")
    assert set(data["scales"].flatten().tolist()) >= {0, 1, 127, 254}
    w = ScaledTensor.from_parts(data["blocks"].flatten(-2), data["scales"], MXFP4)
    assert torch.equal(dequantize(w), data["dequant_openai_ENK_f32"])
    assert torch.equal(dequantize(w), data["dequant_transformers_EKN_f32"].mT)
    assert torch.equal(dequantize(w, torch.bfloat16).float(), data["dequant_transformers_bf16_as_f32"].mT)


def test_onnx_packing():
    data = golden("onnx_float4e2m1")
    assert torch.equal(pack(e2m1_encode(data["w_values"])).flatten(), data["w_raw"])
    scale = data["w_scale"]
    w = ScaledTensor.from_parts(data["w_raw"].view(8, 32), (scale.view(torch.int32) >> 23).to(torch.uint8), MXFP4)
    assert torch.equal(dequantize(w), data["dequant"])
    odd = torch.nn.functional.pad(e2m1_encode(data["odd5_values"]), (0, 1))
    assert torch.equal(pack(odd), data["odd5_raw"])
