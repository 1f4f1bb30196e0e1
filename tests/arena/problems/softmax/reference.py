import torch


def generate_input(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def ref_kernel(data: torch.Tensor) -> torch.Tensor:
    return torch.softmax(data, dim=-1)


def check_implementation(data: torch.Tensor, output: torch.Tensor) -> str:
    """What is wrong, or nothing."""
    if torch.allclose(output, ref_kernel(data), rtol=1e-3, atol=1e-2):
        return ""
    return "the probabilities are wrong"
