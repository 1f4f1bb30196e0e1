import torch

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def generate_input(m: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (m, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 3, (m, k // 16), generator=generator).to(torch.float8_e4m3fn)
    return codes.view(torch.float4_e2m1fn_x2), scales, torch.randn(k, generator=generator)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    values = VALUES[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    return values * scales.float().repeat_interleave(16, 1)


def ref_kernel(data: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    codes, scales, x = data
    return (decoded(codes.view(torch.uint8), scales).double() @ x.double()).float()


def check_implementation(data, output: torch.Tensor) -> tuple[bool, str]:
    is_close = torch.allclose(output, ref_kernel(data), rtol=1e-3, atol=1e-3)
    return is_close, "" if is_close else "c is wrong"
