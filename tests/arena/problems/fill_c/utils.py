import torch


def batch_last(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Random values of shape (rows, columns, batch), where columns vary fastest in memory."""
    rows, columns, batch = shape
    return torch.randn(batch, rows, columns, generator=generator).permute(1, 2, 0)
