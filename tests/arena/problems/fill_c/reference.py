import torch
from utils import batch_last


def generate_input(m: int, n: int, k: int, l: int, seed: int):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a, b, c = (batch_last(*shape, l, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    return a.to("cuda"), b.to("cuda"), c.to("cuda")


def ref_kernel(data):
    a, b, c = data
    for i in range(c.shape[2]):
        c[:, :, i] = a[:, :, i] @ b[:, :, i].t()
    return c


def check_implementation(data, output):
    expected = ref_kernel(data)
    if not torch.allclose(output, expected, rtol=1e-4, atol=1e-4):
        return False, f"the largest difference is {(output - expected).abs().max().item()}"
    return True, ""
