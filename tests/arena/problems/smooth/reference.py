import torch


def generate_input(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to("cuda")


def ref_kernel(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = x.tanh()
    return x


def check_implementation(x: torch.Tensor, y: torch.Tensor) -> tuple[bool, str]:
    is_close = torch.allclose(y, ref_kernel(x), rtol=1e-4, atol=1e-6)
    return is_close, "" if is_close else "y is wrong"
