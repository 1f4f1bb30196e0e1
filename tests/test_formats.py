"""Codes, scale codes, packing, and docs/formats.md: every table and every example in it."""

import ast
import doctest
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nibblas.formats
from nibblas.formats import (
    E2M1_MIDPOINTS,
    E2M1_VALUES,
    E4M3,
    E8M0,
    FORMATS,
    MXFP4,
    NVFP4,
    as_format,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack,
    unpack,
)
from nibblas.layouts import FRAGMENT_SCALES_MXFP4, LAYOUTS, FragmentCodes, FragmentScales
from nibblas.quantize import RULES, dequantize, quantize
from nibblas.tensor import ScaledTensor

BYTES = torch.arange(256, dtype=torch.uint8)


def fp32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def neighbour(value: float, towards: float) -> float:
    return torch.nextafter(fp32(value), fp32(towards)).item()


def test_every_code_decodes_and_encodes_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1_decode(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(e2m1_encode(values), codes)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("below", range(7))
def test_midpoints_and_their_neighbours(below, sign):
    midpoint = (E2M1_VALUES[below] + E2M1_VALUES[below + 1]) / 2
    assert midpoint == E2M1_MIDPOINTS[below]
    even = below + below % 2
    got = e2m1_encode(sign * fp32(neighbour(midpoint, 0), midpoint, neighbour(midpoint, 9)))
    assert (got & 7).tolist() == [below, even, below + 1]
    assert (got >> 3).tolist() == [sign < 0] * 3


def test_encode_saturates_and_keeps_the_sign_of_zero():
    assert e2m1_encode(fp32(5.0000005, 6, 7, 1e30, math.inf)).tolist() == [7] * 5
    assert e2m1_encode(fp32(-7, -math.inf)).tolist() == [15, 15]
    assert e2m1_encode(fp32(0.0, -0.0, 0.25, -0.25, 2.0**-149, -(2.0**-149))).tolist() == [0, 8, 0, 8, 0, 8]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_encode_is_nearest(value):
    got = e2m1_decode(e2m1_encode(fp32(value))).item()
    assert abs(got - value) == min(abs(other - value) for other in E2M1_VALUES)


def test_even_k_is_the_low_nibble():
    assert e2m1_decode(unpack(torch.tensor([0x52], dtype=torch.uint8))).tolist() == [1.0, 3.0]
    assert pack(e2m1_encode(fp32(1.0, 3.0))).tolist() == [0x52]


def test_pack_and_unpack_are_inverse_for_every_byte():
    assert torch.equal(pack(unpack(BYTES)), BYTES)
    codes = unpack(BYTES.view(4, 64))
    assert codes.shape == (4, 128)
    assert torch.equal(unpack(pack(codes)), codes)


def test_pack_refuses_odd_and_wide():
    with pytest.raises(ValueError, match="pack: the last dimension is 3"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"pack: codes have dtype torch\.int64"):
        pack(torch.zeros(2, 4, dtype=torch.int64))


def e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e8m0_value(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


@pytest.mark.parametrize(("code", "value_of"), [(E4M3, e4m3_value), (E8M0, e8m0_value)])
def test_every_scale_byte(code, value_of):
    want = torch.tensor([value_of(byte) for byte in range(256)], dtype=torch.float64).float()
    got = code.decode(BYTES)
    assert torch.equal(got.nan_to_num(nan=-7.0), want.nan_to_num(nan=-7.0))
    assert torch.equal(code.is_nan(BYTES), want.isnan())
    assert got[code.one] == 1
    assert got[code.nan].isnan()
    assert got[code.largest] == code.max == got[~got.isnan()].max()


def test_e8m0_ends():
    """0 is 2^-127, not zero; 255 is NaN, not infinity."""
    got = E8M0.decode(torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8))
    assert got[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1, 2, 2.0**127]
    assert got[0].view(torch.int32) == 0x00400000
    assert got[6].isnan()


@pytest.mark.parametrize("format", [NVFP4, MXFP4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_scale_byte_dequantizes(format, dtype):
    """A NaN scale makes the whole block NaN, code 0 too."""
    half = format.block_size // 2
    data = torch.tensor([0x20] * half, dtype=torch.uint8).expand(256, half).contiguous()  # codes 0, 2, 0, 2, ...
    got = dequantize(ScaledTensor(data, BYTES.unsqueeze(1), format), dtype)
    scale = format.scale_code.decode(BYTES).to(dtype).unsqueeze(1)
    nan = format.scale_code.is_nan(BYTES)
    assert got[nan].isnan().all()
    assert torch.equal(got[~nan][:, 1::2], scale[~nan].expand(-1, half))
    assert not got[~nan][:, 0::2].any()


def test_e4m3_encode_saturates():
    """ml_dtypes and others give NaN from 464.1 on."""
    got = e4m3_encode(fp32(448, 464, 464.1, 465, 480, 896, 1e30, math.inf, -465, -math.inf))
    assert got.tolist() == [0x7E] * 8 + [0xFE] * 2
    assert e4m3_encode(fp32(math.nan)).tolist() == [0x7F]


def test_e4m3_encode_rounds_to_nearest_even():
    """Every midpoint of two codes, and its neighbours."""
    values = E4M3.decode(BYTES[:127])
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    lower = torch.arange(126, dtype=torch.uint8)
    assert torch.equal(e4m3_encode(middle), lower + lower % 2)
    assert torch.equal(e4m3_encode(torch.nextafter(middle, low)), lower)
    assert torch.equal(e4m3_encode(torch.nextafter(middle, high)), lower + 1)
    assert torch.equal(e4m3_encode(values), BYTES[:127])


def test_as_format():
    assert as_format("NVFP4") is NVFP4
    assert as_format(MXFP4) is MXFP4
    for unknown in ("nf4", None, 4):
        with pytest.raises(ValueError, match="formats are nvfp4, mxfp4"):
            as_format(unknown)


def test_check_K():
    for K in (0, 16, 48, 80, 112):
        NVFP4.check_K("op", K)
    for format, K, padded in ((NVFP4, 24, 32), (NVFP4, 33, 48), (MXFP4, 48, 64)):
        with pytest.raises(ValueError, match=rf"op: K = {K} is not a multiple of {format}'s .*pad K .* to {padded}"):
            format.check_K("op", K)


def test_facts_agree_with_the_rules():
    assert {format: tuple(rules) for format, rules in RULES.items()} == {
        format: format.scale_rules for format in FORMATS.values()
    }


def test_docstrings():
    result = doctest.testmod(nibblas.formats)
    assert result.failed == 0
    assert result.attempted > 0


DOC = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()


def tables() -> list[list[list[str]]]:
    """Every table of the document as rows of cells, the header first, without its rule and its backticks."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in DOC.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            if not re.fullmatch(r"[|\-]+", line):
                found[-1].append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
        previous = line
    return found


def table(*header: str) -> list[list[str]]:
    """The rows below the header of the one table whose header starts so."""
    matching = [rows for rows in tables() if rows[0][: len(header)] == list(header)]
    assert len(matching) == 1, f"docs/formats.md has {len(matching)} tables with header {header}"
    return matching[0][1:]


def transposed(first: str) -> tuple[list[str], list[str]]:
    """The two rows of a table that lies on its side, without the cells that name them."""
    (rows,) = (rows for rows in tables() if rows[0][0] == first)
    return rows[0][1:], rows[1][1:]


def number(text: str) -> float:
    base, power, exponent = text.partition("^")
    return float(base) ** int(exponent) if power else float(base)


def test_doc_e2m1():
    codes, values = transposed("code")
    assert [float(v) for v in values] == [E2M1_VALUES[int(c)] for c in codes]
    midpoints, on_tie = transposed("midpoint")
    assert e2m1_encode(fp32(*map(float, midpoints))).tolist() == list(map(int, on_tie))


@pytest.mark.parametrize(("first", "code"), [("e4m3 byte", E4M3), ("e8m0 byte", E8M0)])
def test_doc_scale_bytes(first, code):
    given_bytes, values = transposed(first)
    decoded = code.decode(torch.tensor([int(b, 0) for b in given_bytes], dtype=torch.uint8))
    assert decoded.tolist() == [number(v) for v in values]


def test_doc_formats():
    rows = table("format", "block_size")
    assert len(rows) == len(FORMATS)
    for name, block_size, scale, global_scale, bits in rows:
        format = FORMATS[name]
        assert int(block_size) == format.block_size
        assert scale == format.scale_code.name
        assert (global_scale == "fp32") == format.has_global_scale
        assert float(bits) == format.bits_per_element


def test_doc_names_every_rule():
    assert {row[0] for row in table("rule", "scale code")} == set(NVFP4.scale_rules)
    assert {row[0] for row in table("rule", "rounding")} | {"search"} == set(MXFP4.scale_rules)


def test_doc_mx_rounding():
    """The formula with the document's constants, and the stated range of amax / scale, on random magnitudes."""
    amax = torch.randn(4096, generator=torch.Generator().manual_seed(0)).abs() * 37
    bits = amax.view(torch.int32)
    for rule, rounding, interval, _ in table("rule", "rounding"):
        code = (((bits + int(rounding, 0)) >> 23) - 2).clamp(0, 254).to(torch.uint8)
        assert torch.equal(code, RULES[MXFP4][rule](amax.unsqueeze(1), amax, torch.ones_like(amax)))
        low, high = map(float, interval.strip("[]()").split(","))
        ratio = amax / E8M0.decode(code)
        assert ((ratio >= low) if interval[0] == "[" else (ratio > low)).all()
        assert ((ratio <= high) if interval[-1] == "]" else (ratio < high)).all()


def test_doc_mx_bytes():
    rows = table("block_amax")
    assert len(rows) == 8
    for amax, *expected in rows:
        x = torch.zeros(1, 32)
        x[0, 5] = -float(amax)
        got = [quantize(x, MXFP4, scale_rule=rule).scale.item() for rule in ("floor", "even", "rceil")]
        assert got == list(map(int, expected)), amax


def test_doc_layouts():
    rows = table("layout", "holds")
    assert [row[0] for row in rows] == list(LAYOUTS)
    for name, _, tile, formula in rows:
        layout = LAYOUTS[name]
        tile_rows, tile_cols = map(int, tile.split(" x "))
        if isinstance(layout, FragmentCodes | FragmentScales):
            extra = layout == FRAGMENT_SCALES_MXFP4
            assert layout.shape(tile_rows, tile_cols) == (tile_rows, tile_cols + extra)
            assert layout.shape(tile_rows + 1, tile_cols + 1) == (2 * tile_rows, 2 * tile_cols + extra)
            assert formula == "below"
            continue
        assert layout.tile == (tile_rows, tile_cols)
        inside = compiled(formula)
        cols = 3 * tile_cols - tile_cols // 2
        for r in range(0, 2 * tile_rows):
            for c in range(cols):
                want = ((r // tile_rows) * -(-cols // tile_cols) + c // tile_cols) * tile_rows * tile_cols
                want += eval(inside, {}, {"r": r % tile_rows, "c": c % tile_cols})
                assert layout.offset(r, c, cols=cols) == want


def compiled(formula: str):
    return compile(ast.parse(formula, mode="eval"), formula, "eval")


def places(layout: str) -> dict:
    """The formulas of the one table whose header names the layout (or the format): what is placed -> code object."""
    found = {}
    for header, *rows in tables():
        if header[0] == "place" and layout in header:
            column = header.index(layout)
            found |= {row[0]: compiled(row[1] if row[column] == "the same" else row[column]) for row in rows}
    assert found, layout
    return found


def words(stored: torch.Tensor) -> list[int]:
    """The little-endian words of a matrix in a layout of fragments."""
    return [word & 0xFFFFFFFF for word in stored.view(torch.int32).flatten().tolist()]


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_doc_fragments_of_codes(format):
    rows, K = 33, 192
    codes = torch.randint(16, (rows, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = words(LAYOUTS[f"FRAGMENTS_{format.name.upper()}"].to(pack(codes)))
    place = places(format.name.upper())
    bits = {row[0]: [[int(bit) for bit in cell.split(" ^ ")] for cell in row[1:]] for row in table("code of a word")}
    assert len(bits) == 8
    held = set()
    for r in range(rows):
        for k in range(K):
            here = {"r": r, "k": k, "chunks": -(-K // 128)}
            here |= {name: eval(place[name], {}, here) for name in ("t", "half")}
            word, i = (eval(place[name], {}, here) for name in ("word", "i"))
            code = 0
            for terms in bits[f"c{i}"]:
                code = code << 1 | sum(stored[word] >> bit for bit in terms) & 1
            assert code == codes[r, k]
            held.add((word, i))
    assert len(held) == rows * K
    assert len(stored) == 48 * 256 // 8
    used = {word for word, _ in held}
    assert not any(stored[word] for word in range(len(stored)) if word not in used)


def test_doc_fragment_pairs():
    """The masks of the document give the bf16 numbers that it says, for words whose codes its bit table gives."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (16, 128), dtype=torch.uint8, generator=generator)
    stored = words(LAYOUTS["FRAGMENTS_NVFP4"].to(pack(codes)))
    names = {"m": 0x81C081C0, "rotate": lambda x, n: (x >> n | x << 32 - n) & 0xFFFFFFFF}
    rows = table("codes", "pair")
    assert len(rows) == 4
    for g in range(8):
        for n, (_, formula) in enumerate(rows):
            pair = eval(compiled(formula), names, {"x": stored[16 * g]}) & 0xFFFFFFFF
            values = bf16(pair & 0xFFFF, pair >> 16) * 2.0**126
            r, k = g + 8 * (n % 2), 2 * (n // 2)
            assert values.tolist() == e2m1_decode(codes[r, k : k + 2]).tolist()


def bf16(*bits: int) -> torch.Tensor:
    """fp64 values of bf16 patterns."""
    return (torch.tensor(bits, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32).double()


def test_doc_e5m3():
    e4m3, e5m3 = transposed("e4m3 scale")
    scale = torch.zeros(16, 8, dtype=torch.uint8)
    scale[:7, 0] = torch.tensor([int(byte, 0) for byte in e4m3], dtype=torch.uint8)
    stored = words(LAYOUTS["FRAGMENT_SCALES_NVFP4"].to(scale))
    assert [stored[4 * r] >> 4 & 0xFF for r in range(7)] == [int(byte, 0) for byte in e5m3]


def test_doc_fragments_of_nvfp4_scales():
    """Every e4m3 scale that is positive, at the word and byte of the formulas, as e5m3 and as the bf16 it becomes."""
    rows, cols = 33, 12
    scale = (torch.arange(rows * cols) % 126 + 1).to(torch.uint8).view(rows, cols)
    stored = words(LAYOUTS["FRAGMENT_SCALES_NVFP4"].to(scale))
    place = places("FRAGMENT_SCALES_NVFP4")
    values = E4M3.decode(scale)
    used = set()
    for r in range(rows):
        for c in range(cols):
            word, j = (eval(place[name], {}, {"r": r, "c": c, "chunks": 2}) for name in ("word", "j"))
            used.add(word)
            rotated = (stored[word] >> 4 | stored[word] << 28) & 0xFFFFFFFF
            e, m = divmod(rotated >> 8 * j & 0xFF, 8)
            assert (1 + m / 8) * 2.0 ** (e - 22) == values[r, c]
            x = stored[word] if j % 2 == 0 else (stored[word] >> 8 | stored[word] << 24) & 0xFFFFFFFF
            pair = x & 0x0FF00FF0 | 0x70007000
            assert bf16(pair >> 16 * (j // 2) & 0xFFFF) == values[r, c].double() * 2.0**119
    assert not any(stored[word] for word in range(len(stored)) if word not in used)


def test_doc_fragments_of_mxfp4_scales():
    rows, cols = 33, 6
    scale = torch.randint(100, 140, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale[3, 2] = 255
    scale[4] = 255
    stored = LAYOUTS["FRAGMENT_SCALES_MXFP4"].to(scale).flatten()
    place = places("FRAGMENT_SCALES_MXFP4")
    written = torch.zeros_like(stored)
    for r in range(rows):
        largest = max((byte for byte in scale[r].tolist() if byte != 255), default=127)
        at = eval(place["largest"], {}, {"r": r, "chunks": 2})
        written[at] = largest
        for c in range(cols):
            byte = scale[r, c].item()
            at = eval(place["scale"], {}, {"r": r, "c": c, "chunks": 2})
            written[at] = 255 if byte == 255 else byte - largest + 254
    assert torch.equal(stored, written)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_doc_canonical(format):
    """The table's rules block by block, on every scale byte; the values of the tensor stay."""
    rows = [row for row in table("format", "a block whose scale is") if row[0] == format.name.upper()]
    assert len(rows) == {NVFP4: 3, MXFP4: 2}[format]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (128, 4, format.block_size), dtype=torch.uint8, generator=generator)
    codes[::3, 1] &= 8
    scale = torch.arange(512).remainder(256).to(torch.uint8)[torch.randperm(512, generator=generator)].view(128, 4)
    scale[7] = 255
    w = ScaledTensor(pack(codes.view(128, -1)), scale, format)
    name = format.name.upper()
    back = w.with_layout(f"FRAGMENT_SCALES_{name}", f"FRAGMENTS_{name}").with_layout("LINEAR", "LINEAR")
    want_codes, want_scale = codes.clone(), scale.clone()
    for r in range(128):
        holding = [b for b in range(4) if (codes[r, b] & 7).any() and scale[r, b] != 255]
        largest = max((scale[r, b].item() for b in holding), default=127)
        for b in range(4):
            byte, block = scale[r, b].item(), want_codes[r, b]
            if format is MXFP4:
                if byte == 255:
                    block.zero_()
                elif b not in holding:
                    want_scale[r, b] = min(byte, largest)
                continue
            if byte & 0x7F == 0x7F:
                want_scale[r, b] = 0x7F
                continue
            block ^= 8 * (byte >> 7)
            want_scale[r, b] = byte & 0x7F
            if byte & 0x7F == 0:
                block &= 8
    assert torch.equal(back.scale, want_scale)
    assert torch.equal(unpack(back.data).view_as(codes), want_codes)
    before, after = dequantize(w), dequantize(back)
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(before.signbit() | before.isnan(), after.signbit() | after.isnan())


def test_doc_offsets():
    rows = table("layout", "cols")
    assert len(rows) == 15
    for name, cols, position, offset in rows:
        row, col = ast.literal_eval(position)
        assert LAYOUTS[name].offset(row, col, cols=int(cols)) == int(offset)


def test_doc_examples():
    examples = "\n".join(re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(
        examples,
        dict(globals()),
        "formats.md",
        "docs/formats.md",
        0,
    )
    assert len(test.examples) == 15
    assert doctest.DocTestRunner().run(test).failed == 0
