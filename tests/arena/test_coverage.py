"""Which values inputs hold."""

import math

import pytest
import torch

from nibblas.arena.coverage import bytes_of, combined, coverage, gaps, ranges_of

FP4 = torch.float4_e2m1fn_x2


def one(tensor):
    (found,) = coverage((tensor,))
    return found


def test_each_nibble_has_its_codes():
    found = one(torch.tensor([0x80, 0x80, 0x15, 0x1F], dtype=torch.uint8).view(FP4))
    assert (found.kind, found.low_codes, found.high_codes) == ("e2m1 pairs", "05f", "18")
    assert (found.zero, found.negative) == (0.5, 3 / 8)  # -0 is zero, and has a sign
    assert (found.smallest, found.largest) == (0.5, 6.0)
    assert one(torch.zeros(2, dtype=torch.uint8)).kind == "perhaps e2m1 pairs"


def test_scales():
    found = one(torch.tensor([0, 1, 0x38, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert (found.kind, found.byte_codes) == ("e4m3", "00-01 38 7f")
    assert (found.zero, found.nan, found.smallest, found.largest) == (0.25, 0.25, 2.0**-9, 1.0)
    found = one(torch.tensor([0, 127, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert (found.kind, found.byte_codes) == ("e8m0", "00 7f fe-ff")
    assert (found.zero, found.nan, found.smallest, found.largest) == (0.0, 0.25, 2.0**-127, 2.0**127)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_floats(dtype):
    values = torch.tensor([0.0, -0.0, 2.0, -0.25, math.nan, math.inf, -math.inf, 1.0])
    values = torch.view_as_complex(values.view(4, 2)) if dtype.is_complex else values
    found = one(values.to(dtype))
    assert (found.kind, found.zero, found.negative, found.nan, found.infinite) == ("float", 0.25, 3 / 8, 1 / 8, 0.25)
    assert (found.smallest, found.largest) == (0.25, 2.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16], ids=str)
def test_integers(dtype):
    found = one(torch.tensor([0, 3, 100, 7]).to(dtype))
    assert (found.kind, found.zero, found.smallest, found.largest) == ("integer", 0.25, 3, 100)


def test_bools_empty_tensors_and_places():
    data = (torch.tensor([True, False]), {"x": [torch.empty(0, 4)]}, 7)
    found = coverage(data)
    assert [c.tensor for c in found] == ["data[0]", "data[1]['x'][0]"]
    assert (found[0].kind, found[0].zero) == ("bool", 0.5)
    assert (found[1].kind, found[1].shape, found[1].largest) == ("other", (0, 4), None)


def test_several_calls_together():
    def call(byte, value):
        return coverage((torch.tensor([byte], dtype=torch.uint8).view(FP4), torch.tensor([value])))

    codes, floats = combined([*call(0x10, 0.0), *call(0x21, -3.0)])
    assert (codes.low_codes, codes.high_codes) == ("01", "12")
    assert (floats.zero, floats.negative, floats.smallest, floats.largest) == (0.5, 0.5, 3.0, 3.0)
    scales = [one(torch.tensor([b], dtype=torch.uint8).view(torch.float8_e4m3fn)) for b in (3, 4, 9)]
    assert combined(scales)[0].byte_codes == "03-04 09"


def test_ranges_have_an_inverse():
    for codes in (set(), {0}, {255}, set(range(256)), {1, 2, 5, 6, 7, 200}):
        assert bytes_of(ranges_of(codes)) == codes


def test_large_tensors_are_read_piece_by_piece(monkeypatch):
    values = torch.tensor([[0.0, -1.0, 2.0], [4.0, -0.5, math.inf]]).t()
    whole = one(values), one(torch.arange(9, dtype=torch.uint8).view(FP4))
    monkeypatch.setattr("nibblas.arena.coverage.CHUNK", 2)
    assert (one(values), one(torch.arange(9, dtype=torch.uint8).view(FP4))) == whole
    assert (whole[0].zero, whole[0].negative, whole[0].smallest, whole[0].largest) == (1 / 6, 1 / 3, 0.5, 4.0)


def test_gaps_in_words():
    codes = torch.tensor([0x01, 0x02], dtype=torch.uint8).view(FP4)
    scales = torch.tensor([0.0, 1.0]).to(torch.float8_e4m3fn)
    assert gaps(coverage((codes, codes, scales))) == (
        "data[0], data[1]: only 2 of 16 codes in low nibbles (12), 1 of 16 codes in high nibbles (0)",
        "data[2]: only 2 scale codes (00 38)",
    )
    assert gaps(coverage((scales, torch.zeros(2, dtype=torch.uint8)))) == ()  # no FP4 here
    every = torch.arange(256, dtype=torch.uint8)
    assert gaps(coverage((every.view(FP4), every.view(torch.float8_e4m3fn)))) == ()
