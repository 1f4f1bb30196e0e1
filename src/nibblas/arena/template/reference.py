"""The problem itself: inputs of a case, the answer, and the check. Submissions never see this file."""

import torch
from task import input_t, output_t
from utils import BLOCK_SIZE, check_close, decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rounding to bf16 costs up to 2^-8 of an element; a sum of fp32 products loses far less than 2^-8 of its size, and an
# operand that was rounded to fewer bits than it has loses more.
TOLERANCE = 2**-8


def generate_input(m: int, n: int, k: int, seed: int) -> input_t:
    """x ~ N(0, 1); every code and 24 octaves of scales occur. Drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).bfloat16()
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
    # A row's blocks lie within four octaves, so that none drowns in the sum; the rows span many more.
    row = torch.randint(115, 136, (n, 1), generator=generator)
    scales = (row + torch.randint(4, (n, k // BLOCK_SIZE), generator=generator)).to(torch.uint8)
    return x.to(DEVICE), codes.to(DEVICE).view(torch.float4_e2m1fn_x2), scales.to(DEVICE).view(torch.float8_e8m0fnu)


def ref_kernel(data: input_t) -> output_t:
    """The product in float64, narrowed to bf16."""
    x, codes, scales = data
    return (x.double() @ decode(codes, scales, torch.float64).T).bfloat16()


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """Whether the output is right, and a message."""
    x, codes, scales = data
    if output.dtype != torch.bfloat16:
        return False, f"the dtype is {output.dtype}, need torch.bfloat16"
    a, b = x.double(), decode(codes, scales, torch.float64)
    return check_close(output, a @ b.T, (a.square() @ b.square().T).sqrt(), TOLERANCE)
