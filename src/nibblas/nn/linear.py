"""FP4Linear: nn.Linear with an FP4 weight."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from nibblas import operators, ops
from nibblas.dispatch import age, rank
from nibblas.formats import NVFP4, Format
from nibblas.kernel import Kernel
from nibblas.kernels.torch_linear import decode
from nibblas.nn.packed import PackedModule, check_dtype, check_options
from nibblas.operators import as_arguments, bind_linear, on_device, refuse_tangent
from nibblas.ops import as_rows, check_tensor
from nibblas.problem import Problem
from nibblas.quantize import rotate
from nibblas.roofline import threads_of
from nibblas.tensor import ScaledTensor


def _why_decoded(problem: Problem, device: torch.device) -> str:
    """Why no kernel takes the weight packed: what the one made for this architecture says."""
    for c in rank(problem, device, threads_of(device)):
        kernel = c.kernel
        if problem.arch in kernel.archs and kernel.b_layouts:
            scale, data = kernel.b_layouts[0]
            return f"{kernel} {kernel.why_not(replace(problem, b_layouts=(scale.name, data.name)))}"
    return "none is made for it yet"


@cache
def _warn_decoded(arch: str, why: str) -> None:
    warnings.warn(
        f"nibblas: no FP4 kernel runs on {arch} ({why}), so FP4Linear keeps its weights decoded, as large as before, "
        "and uses torch's matmul; `nibblas doctor` tells more",
        stacklevel=2,
    )


def _observed() -> bool:
    """Whether a compiler, a mode, a transform or a tracer looks on, which sees operators and nothing else."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


class _Bound(NamedTuple):
    """A product with a layer's weight whose checks and choice were made, and what they were made for."""

    run: Callable[[Tensor, Tensor], None]  # x as a matrix (M, K), y (M, N)
    weight: ScaledTensor
    bias: Tensor | None
    places: tuple[int, ...]  # their addresses, which `tensor.data = ...` changes
    shape: tuple[int, ...]  # of y
    strides: tuple[int, ...]
    device_type: str
    age: int  # of the choice: dispatch.age


def _places(w: ScaledTensor, bias: Tensor | None) -> tuple[int, ...]:
    """Addresses of a weight's parts and a bias, 0 for what there is none of."""
    factor = w.global_scale
    return (
        w.data.data_ptr(),
        w.scale.data_ptr(),
        0 if factor is None else factor.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


# Products that a layer keeps bound: of so many shapes of x, and threads.
MOST_BOUND = 16


class _QuantizedInput(torch.autograd.Function):
    """y as it is; a backward that needs x's gradient is refused, since x was quantized on the way to y."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise NotImplementedError(
            'FP4Linear: with activations="fp4" x has no gradient (inference only); call it under torch.no_grad()'
        )


# The codes and scales that a layer last gave to a state_dict, for the layers that share its weight to give as well.
_SAVED: WeakKeyDictionary["FP4Linear", tuple[ref, ref]] = WeakKeyDictionary()


class FP4Linear(PackedModule):
    """y = x @ weight.T + bias with an FP4 weight: nn.Linear for inference.

    Gives a gradient to x and bias; where activations are quantized a backward is refused that asks for x's.

    Made zero, to load a state_dict into; `from_linear` quantizes an nn.Linear.

    Parameters
    ----------
    in_features, out_features : K and N; K is a multiple of the format's block_size.
    bias : whether there is one; (N,), a Parameter.
    format : NVFP4 or MXFP4.
    scale_rule, rotation : as in `nibblas.quantize`, recorded of the weight; x is rotated at every call.
    activations : "none" leaves x as it is (W4A16). "fp4" quantizes x at every call, by the format's first scale rule
        and the global_scale of all rows together, so that a row's result depends on the others.
    device : of the weight.
    dtype : of the bias, and of the x to expect, by which the kernel is chosen; other dtypes of x work as well.

    weight, weight_scale and weight_global_scale lie in the layouts that the chosen kernel likes; `weight_scaled` says
    which. Where no kernel takes them, torch multiplies, and `decoded` keeps the weight decoded, exact code * scale: in
    bf16 for a bf16 layer, whose products are then rounded to bf16 once more than docs/formats.md asks; else in fp32.

    >>> layer = FP4Linear.from_linear(nn.Linear(64, 32), NVFP4, scale_rule="search")
    >>> layer
    FP4Linear(in_features=64, out_features=32, bias=True, nvfp4, scale_rule='search')
    >>> layer(torch.ones(2, 5, 64)).shape
    torch.Size([2, 5, 32])
    """

    weight: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None
    bias: nn.Parameter | None
    decoded: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: Format | str = NVFP4,
        *,
        scale_rule: str | None = None,
        rotation: int = 0,
        activations: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(format, scale_rule, rotation, dtype)
        check_options("FP4Linear", self.format, scale_rule, rotation, activations)
        self.in_features = in_features
        self.out_features = out_features
        self._activations = activations
        self._tied: list[FP4Linear] = []  # the others that share this weight
        self._spec = ""
        self._unrotated: ScaledTensor | None = None  # the weight as kernels take it
        self._bound: dict[tuple, _Bound] = {}  # by shape, dtype and device of x, and thread
        self.register_buffer("decoded", None, persistent=False)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=self.dtype)) if bias else None
        )
        self._declare("weight", (out_features, in_features), device)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: Format | str = NVFP4,
        scale_rule: str | None = None,
        rotation: int = 0,
        activations: str = "none",
    ) -> Self:
        """The layer with its weight quantized and the very bias of `linear`."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"FP4Linear: from_linear was given a {type(linear).__name__}, need an nn.Linear")
        format = ops.format_for("FP4Linear", format)
        check_options("FP4Linear", format, scale_rule, rotation, activations)
        format.check_K("FP4Linear", linear.in_features)
        w = ops.quantize(linear.weight.detach(), format, scale_rule=scale_rule, rotation=rotation)
        return cls._of(w, linear, activations)

    @classmethod
    def _of(cls, w: ScaledTensor, linear: nn.Linear, activations: str) -> Self:
        layer = cls(
            w.shape[1],
            w.shape[0],
            linear.bias is not None,
            w.format,
            scale_rule=w.scale_rule,
            rotation=w.rotation,
            activations=activations,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer.bias = linear.bias
        layer._store("weight", w)
        return layer.train(linear.training)

    @property
    def weight_scaled(self) -> ScaledTensor:
        """The weight (N, K) as it is stored."""
        return self._scaled("weight")

    @property
    def activations(self) -> str:
        """ "none" or "fp4": what happens to x. Setting it stores the weight anew for the kernel that then is best."""
        return self._activations

    @activations.setter
    def activations(self, mode: str) -> None:
        check_options("FP4Linear", self.format, None, 0, mode)
        self._activations = mode
        self._store_all()

    def _expected_activations(self) -> str:
        return self.format.name if self._activations == "fp4" else super()._expected_activations()

    def _tie(self, other: "FP4Linear") -> None:
        """Share other's weight, now and after either is moved or loaded."""
        group = [other, *other._tied]
        for layer in group:
            layer._tied = [*layer._tied, self]
        self._tied = group
        self._adopt(other)

    def _adopt(self, other: "FP4Linear") -> None:
        for key, value in other._buffers.items():
            self._buffers[key] = value
        self._layouts, self._spec, self._unrotated = dict(other._layouts), other._spec, other._unrotated
        self.scale_rule, self.rotation = other.scale_rule, other.rotation

    def _stored(self, kernel: Kernel, problem: Problem) -> None:
        w = replace(self.weight_scaled, rotation=0)
        self._spec, self._unrotated = as_arguments(w)[3], w
        self.decoded = None
        if kernel.decodes_weights and self._activations == "none":
            _warn_decoded(problem.arch, _why_decoded(problem, w.device))
            # A rotated x is fp32.
            keep_bf16 = self.dtype == torch.bfloat16 and not self.rotation
            self.decoded = decode(w).to(torch.bfloat16 if keep_bf16 else torch.float32)
        for layer in self._tied:
            layer._adopt(self)

    def swap(self, w: ScaledTensor) -> None:
        """Make w the weight without a copy or another choice of kernel: it is as `weight_scaled` is, in all but values.

        A weight that is kept decoded or shared does not follow.
        """
        self._buffers.update(weight=w.data, weight_scale=w.scale, weight_global_scale=w.global_scale)
        self._unrotated = replace(w, rotation=0) if w.rotation else w

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": {}}  # what is bound is this very layer's, in this process

    def _linear_parts(self, name, destination):
        for layer in self._tied:
            shared = [part() for part in _SAVED.get(layer, ())]
            if shared and all(any(part is entry for entry in destination.values()) for part in shared):
                return shared
        data, scale = super()._linear_parts(name, destination)
        _SAVED[self] = ref(data), ref(scale)
        return data, scale

    def _apply(self, fn, recurse=True):
        self.decoded = None  # made anew rather than moved
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) bf16, fp16 or fp32 -> (..., N) of x's dtype, or of autocast's."""
        if type(x) is not Tensor or _observed():
            return self._forward(x)
        key = (x.shape, x.dtype, x.device, get_ident())
        bound = self._bound.get(key)
        if bound is not None and self._holds(bound, x):
            y = x.new_empty_strided(bound.shape, bound.strides)
            bound.run(x, y)
            return y
        y = self._forward(x)
        self._bind(key, x, y)
        return y

    def _holds(self, bound: _Bound, x: Tensor) -> bool:
        """Whether a call with x may do what was bound, with no operator around it."""
        bias, w, held = bound.bias, bound.weight, self._buffers
        return (
            w is self._unrotated
            and w.data is held["weight"]
            and w.scale is held["weight_scale"]
            and w.global_scale is held["weight_global_scale"]
            and bias is self._parameters["bias"]
            and _places(w, bias) == bound.places
            and not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
            and bound.age == age()
            and x.is_contiguous()
            and not torch.is_autocast_enabled(bound.device_type)
        )

    def _bind(self, key: tuple, x: Tensor, y: Tensor) -> None:
        """Keep the product that made y of x for calls like this one, if it is one that can be kept."""
        w, bias = self._unrotated, self.bias
        if (
            w is None
            or not y.numel()
            or not x.numel()
            or x.is_meta
            or self.decoded is not None
            or self.rotation
            or self._activations != "none"
        ):
            return
        bound = _Bound(lambda x, y: None, w, bias, _places(w, bias), tuple(y.shape), y.stride(), y.device.type, age())
        if not self._holds(bound, x):
            return
        with on_device(w.device):
            run = bind_linear(x.view(-1, self.in_features), w, bias, y.view(-1, self.out_features))
        if len(self._bound) >= MOST_BOUND:
            self._bound.clear()
        self._bound[key] = bound._replace(run=run)

    def _forward(self, x: Tensor) -> Tensor:
        check_tensor("FP4Linear", "x", x)
        check_dtype("FP4Linear", "x", x.dtype)
        device = x.device
        if device != self.weight.device:
            raise ValueError(f"FP4Linear: x is on {device}, the weight on {self.weight.device}")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"FP4Linear: x has shape {tuple(x.shape)}, need (..., {self.in_features})")
        if not x.is_meta and torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                return self.forward(x.to(torch.get_autocast_dtype(device.type)))
        y = self._multiply(as_rows(x), x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if self._activations == "fp4":
            refuse_tangent('FP4Linear with activations="fp4"', rows)
            a = ops.quantize(rows, self.format, rotation=self.rotation)
            y = ops.linear(a, self.weight_scaled, self.bias, out_dtype=dtype)
            return _QuantizedInput.apply(rows, y) if torch.is_grad_enabled() and rows.requires_grad else y
        if self.rotation:
            rows = rotate(rows, self.rotation)
        return self._packed(rows, dtype) if self.decoded is None else self._dense(rows, self.decoded, dtype)

    def _packed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        bias = self.bias
        if bias is not None:
            check_dtype("FP4Linear", "bias", bias.dtype)
            if bias.shape != (self.out_features,):
                raise ValueError(f"FP4Linear: bias has shape {tuple(bias.shape)}, need ({self.out_features},)")
        weight = (self.weight, self.weight_scale, self.weight_global_scale, self._spec)
        return operators.linear(rows, None, None, "", *weight, bias, None, False, dtype)

    def _dense(self, rows: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
        common = torch.promote_types(rows.dtype, decoded.dtype)
        y = functional.linear(rows.to(common), decoded.to(common)).float()
        if self.weight_global_scale is not None:
            y = y * self.weight_global_scale
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(dtype)

    def extra_repr(self) -> str:
        parts = [
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
            f"{self.format}",
        ]
        parts += [f"scale_rule={self.scale_rule!r}"] if self.scale_rule else []
        parts += [f"rotation={self.rotation}"] if self.rotation else []
        parts += [f"activations={self.activations!r}"] if self.activations != "none" else []
        return ", ".join(parts)
