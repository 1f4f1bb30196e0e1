import torch
from task import Config


def generate_input(rows: int, width: int, layers: int, bias: bool, kind: str, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer.{i}": torch.nn.Parameter(torch.randn(width, width, generator=generator)) for i in range(layers)}
    scales = [torch.rand((), generator=generator) for _ in range(layers)]
    offset = torch.randn(width, generator=generator) if bias else None
    return torch.randn(rows, width, generator=generator), weights, scales, offset, Config(width, kind, 0.5)


def ref_kernel(data):
    x, weights, scales, offset, config = data
    for weight, scale in zip(weights.values(), scales, strict=True):
        x = torch.relu(x @ weight * scale) if config.kind == "relu" else torch.tanh(x @ weight * scale)
    x = x * config.factor
    return (x if offset is None else x + offset), x.argmax(-1)


def check_implementation(data, output):
    values, places = ref_kernel(data)
    good = torch.allclose(output[0], values, rtol=1e-4, atol=1e-4) and torch.equal(output[1], places)
    return good, "" if good else "values or places are wrong"
