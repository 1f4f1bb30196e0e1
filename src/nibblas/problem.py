"""Problem: what is asked, as data that dispatch, kernels, evidence and the index share."""

from dataclasses import asdict, dataclass, fields
from functools import cache

import torch
from torch import Tensor

from nibblas.formats import FORMATS
from nibblas.layouts import LINEAR
from nibblas.tensor import ScaledTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
OPS = ("linear", "grouped_linear", "gated_linear", "quantize")


@dataclass(frozen=True)
class Problem:
    """One question to the dispatcher. All sizes are logical elements.

    linear: c (L, M, N) = a (L, M, K) @ b (L, N, K).T (+ bias); L = 1 for a plain product.
    grouped_linear: rows of a (M, K) in G runs, each with its own b (G, N, K).
    gated_linear: act(a @ b1.T) * (a @ b2.T), b1 and b2 both (N, K).
    quantize: a (M, K) into format b; N is 0.
    """

    op: str
    M: int
    N: int
    K: int
    L: int = 1
    G: int = 1
    a: str = "bf16"  # a dtype name or a format name
    b: str = "nvfp4"
    out: str = "bf16"
    a_layouts: tuple[str, str] = ("LINEAR", "LINEAR")  # of scale and of data; LINEAR where a is dense
    b_layouts: tuple[str, str] = ("LINEAR", "LINEAR")
    bias: bool = False
    rule: str = ""  # quantize only: the scale rule
    batch_invariant: bool = False
    arch: str = "cpu"

    def __str__(self) -> str:
        quantizes = self.op == "quantize"
        sizes = f"M={self.M} K={self.K}" if quantizes else f"M={self.M} N={self.N} K={self.K}"
        sizes += f" L={self.L}" if self.L != 1 else ""
        sizes += f" G={self.G}" if self.op == "grouped_linear" else ""
        extras = "".join(
            [
                " +bias" if self.bias else "",
                f" {self.rule}" if self.rule else "",
                f" b in {'/'.join(self.b_layouts)}" if self.b_layouts != ("LINEAR", "LINEAR") else "",
                " batch_invariant" if self.batch_invariant else "",
            ]
        )
        operands = self.a if quantizes else f"{self.a} x {self.b}"
        return f"{self.op} {sizes} {operands} -> {self.out}{extras} on {self.arch}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product (2 M N K for each of L, twice that when gated)."""
        if self.op == "quantize":
            return 0
        return 2 * self.M * self.N * self.K * self.L * (2 if self.op == "gated_linear" else 1)

    @property
    def bytes(self) -> int:
        """The least traffic: operands read once (of G weights those that can have rows), the result written once."""
        if self.op == "quantize":
            return round(self.L * self.M * self.K * (bits(self.a) + bits(self.b)) / 8)
        weights = self.L
        if self.op == "grouped_linear":
            weights = min(self.G, self.M)
        elif self.op == "gated_linear":
            weights *= 2
        total = self.L * self.M * (self.K * bits(self.a) + self.N * bits(self.out))
        total += weights * self.N * self.K * bits(self.b)
        return round(total / 8)

    def as_dict(self) -> dict:
        """The fields that differ from their default, as JSON can hold them."""
        default = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    @classmethod
    def from_dict(cls, values: dict) -> "Problem":
        """The inverse of as_dict."""
        values = {k: tuple(v) if k.endswith("_layouts") else v for k, v in values.items()}
        return cls(**values)


def bits(name: str) -> float:
    """Bits an element of this dtype or format costs, scales included."""
    if name in FORMATS:
        return FORMATS[name].bits_per_element
    return DTYPES[name].itemsize * 8


def check_layout(op: str, name: str, t: Tensor) -> None:
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {name} is {t.layout}, need a dense tensor (to_dense makes one)")


def operand_name(t: Tensor | ScaledTensor, op: str, name: str = "a tensor") -> str:
    """The dtype or format name of an operand; raises TypeError with the operation's and its name for another dtype.

    And for a layout of torch's other than strided.
    """
    if isinstance(t, ScaledTensor):
        return t.format.name
    check_layout(op, name, t)
    try:
        return DTYPE_NAMES[t.dtype]
    except KeyError:
        names = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
        raise TypeError(f"{op}: {name} has dtype {t.dtype}, need one of {names} or a ScaledTensor") from None


def operand_layouts(t: Tensor | ScaledTensor) -> tuple[str, str]:
    """Names of the scale layout and the data layout; LINEAR for a dense tensor."""
    if isinstance(t, ScaledTensor):
        return t.layout.name, t.data_layout.name
    return LINEAR.name, LINEAR.name


@cache
def arch_of(device: torch.device) -> str:
    """What kernels are made for: "cpu", "sm_90", "gfx950" ...; the device's type where torch says no more."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
