"""Modules with FP4 weights, and the conversion of a model's linear layers to them.

Weights are stored once, in the layouts that the kernel chosen for the layer likes best; they are brought there when
they are made, loaded or moved. A state_dict always holds them in LINEAR layouts, so it fits every machine. Its entries
are tensors only, as safetensors wants them, and layers that share a weight have the same tensors there, as with any
nn.Module: safetensors.torch.save_model and load_model take those, save_file does not. For a packed tensor called
`weight` the entries are

    weight               (..., N, K/2) uint8, packed codes
    weight_scale         (..., N, K/block_size) uint8, scale codes
    weight_global_scale  fp32, () or one a matrix; NVFP4 only
    _extra_state         uint8: the UTF-8 bytes of a JSON object {"format", "scale_rule", "rotation"}
"""

import inspect
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from nibblas import ops
from nibblas.dispatch import age, best_storage, rank
from nibblas.formats import NVFP4, Format, as_format
from nibblas.kernel import Kernel
from nibblas.kernels.composite import ACTIVATIONS
from nibblas.kernels.torch_linear import decode
from nibblas.layouts import LINEAR, Layout
from nibblas.memory import use_huge_pages
from nibblas.operators import as_arguments, bind_linear, on_device
from nibblas.problem import DTYPE_NAMES, Problem, arch_of
from nibblas.quantize import ROTATIONS, dequantize, rotate
from nibblas.roofline import threads_of
from nibblas.tensor import ScaledTensor, stack

PARTS = ("", "_scale", "_global_scale")  # what is added to a packed tensor's name: data, scale, global_scale
ACTIVATION_MODES = ("none", "fp4")


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
    """Whether a compiler, a mode, a functorch transform or a tracer looks on, which sees operators and nothing else."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class _Bound(NamedTuple):
    """A product with a layer's weight whose checks and choice were made, and what they were made for."""

    run: Callable[[Tensor, Tensor], None]  # x as a matrix (M, K), y (M, N)
    weight: ScaledTensor
    bias: Tensor | None
    bias_at: int  # its address
    shape: tuple[int, ...]  # of y
    strides: tuple[int, ...]
    device_type: str
    age: int  # of the choice: dispatch.age


# Products that a layer keeps bound: of so many shapes of x, and threads.
MOST_BOUND = 16


def _check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: {name} is {dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}")


def _check_tensor(op: str, name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} is a {type(t).__name__}, need a Tensor")


def _check_options(op: str, format: Format, scale_rule: str | None, rotation: int, activations: str = "none") -> None:
    if scale_rule is not None and scale_rule not in format.scale_rules:
        raise ValueError(f"{op}: scale_rule {scale_rule!r} is unknown; {format} has {', '.join(format.scale_rules)}")
    if rotation not in (0, *ROTATIONS):
        raise ValueError(f"{op}: rotation is {rotation!r}, need 0 or one of {', '.join(map(str, ROTATIONS))}")
    if activations not in ACTIVATION_MODES:
        raise ValueError(f"{op}: activations is {activations!r}, need one of {', '.join(ACTIVATION_MODES)}")


class _PackedModule(nn.Module):
    """A module that holds ScaledTensors as buffers: stored as their kernel likes it, saved in LINEAR layouts.

    dtype is that of the activations to expect, by which the kernel is chosen; it follows `.to(dtype)`.
    """

    def __init__(self, format: Format | str, scale_rule: str | None, rotation: int, dtype: torch.dtype | None):
        super().__init__()
        self.format = as_format(format)
        _check_options(type(self).__name__, self.format, scale_rule, rotation)
        self.scale_rule = scale_rule
        self.rotation = rotation
        self.dtype = dtype or torch.get_default_dtype()
        _check_dtype(type(self).__name__, "dtype", self.dtype)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._layouts: dict[str, tuple[Layout, Layout]] = {}

    def _declare(self, name: str, shape: tuple[int, ...], device: torch.device | str | None) -> None:
        """Make room for a packed tensor of logical shape (..., N, K): zeros, to be loaded or replaced."""
        self.format.check_K(type(self).__name__, shape[-1])
        self._check_rotation(shape[-1], self.rotation)
        self._shapes[name] = shape
        for part in PARTS:
            self.register_buffer(name + part, None)
        data = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
        scale = torch.zeros(*shape[:-1], shape[-1] // self.format.block_size, dtype=torch.uint8, device=device)
        global_scale = (
            torch.ones(shape[:-2], dtype=torch.float32, device=device) if self.format.has_global_scale else None
        )
        self._keep(name, data, scale, global_scale, (LINEAR, LINEAR))
        if not data.is_meta:
            self._store(name, self._scaled(name))

    def _check_rotation(self, K: int, rotation: int) -> None:
        if rotation and K % rotation:
            raise ValueError(f"{type(self).__name__}: K = {K} is not a multiple of rotation {rotation}")

    def _scaled(self, name: str) -> ScaledTensor:
        """The packed tensor of that name as it is stored."""
        data, scale, global_scale = (getattr(self, name + part) for part in PARTS)
        layout, data_layout = self._layouts[name]
        N, K = self._shapes[name][-2:]
        matrix = None if data_layout == LINEAR else (N, K)
        return ScaledTensor(
            data, scale, self.format, global_scale, layout, data_layout, self.scale_rule, self.rotation, matrix
        )

    def _keep(
        self,
        name: str,
        data: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        layouts: tuple[Layout, Layout],
    ) -> None:
        self._layouts[name] = layouts
        for part, value in zip(PARTS, (data, scale, global_scale), strict=True):
            setattr(self, name + part, value)

    def _store(self, name: str, w: ScaledTensor) -> None:
        """Make w the packed tensor of that name, in the layouts of the kernel that is best for one row of x."""
        problem = Problem(
            op="grouped_linear" if w.ndim == 3 else "linear",
            M=1,
            N=w.shape[-2],
            K=w.shape[-1],
            G=w.shape[0] if w.ndim == 3 else 1,
            a=self._expected_activations(),
            b=self.format.name,
            out=DTYPE_NAMES.get(self.dtype, "fp32"),
            arch=arch_of(w.device),
        )
        kernel, layouts = best_storage(problem, w.device)
        if w.ndim == 3 and kernel.b_layouts is None:  # made of linear products
            kernel, layouts = best_storage(replace(problem, op="linear", G=1), w.device)
        w = w.with_layout(*layouts)
        use_huge_pages(w.data)
        self._keep(name, w.data, w.scale, w.global_scale, layouts)
        self._stored(kernel, problem)

    def _stored(self, kernel: Kernel, problem: Problem) -> None:
        """Called after weights were stored for this kernel, the best for this problem."""

    def _expected_activations(self) -> str:
        return DTYPE_NAMES.get(self.dtype, "fp32")

    def _apply(self, fn, recurse=True):
        exact = {name: getattr(self, name + PARTS[2]) for name in self._shapes}
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = getattr(self, name + PARTS[2])
            if after is not None and after.dtype != torch.float32:  # .to(bf16) is about activations, not about this
                setattr(self, name + PARTS[2], before.to(after.device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self._device())).dtype
        self._store_all()
        return self

    def _store_all(self) -> None:
        if self._device().type != "meta":
            for name in self._shapes:
                self._store(name, self._scaled(name))

    def _device(self) -> torch.device:
        return getattr(self, next(iter(self._shapes))).device

    def get_extra_state(self) -> Tensor:
        """Format, scale rule and rotation as the bytes of a JSON object, (n,) uint8."""
        facts = {"format": self.format.name, "scale_rule": self.scale_rule, "rotation": self.rotation}
        return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Take scale rule and rotation from what get_extra_state gave; ValueError for another format."""
        facts = self._read_extra_state(state)
        self.scale_rule, self.rotation = facts["scale_rule"], facts["rotation"]

    def _read_extra_state(self, state: Tensor) -> dict:
        name = type(self).__name__
        try:
            facts = json.loads(bytes(state.cpu().tolist()))
            format, _, _ = facts["format"], facts["scale_rule"], facts["rotation"]
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{name}: the extra state is not understood ({error!r})") from None
        if format != self.format.name:
            raise ValueError(f"{name}: the state is of a module in {format}, this one is in {self.format}")
        _check_options(name, self.format, facts["scale_rule"], facts["rotation"])
        for *_, K in self._shapes.values():
            self._check_rotation(K, facts["rotation"])
        return facts

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._shapes:
            destination[prefix + name], destination[prefix + name + PARTS[1]] = self._linear_parts(name, destination)

    def _linear_parts(self, name: str, destination: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Codes and scales in LINEAR layouts, neither a part of a larger storage, which files would hold as well."""
        w = self._scaled(name)
        data, scale = (
            part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
            for part in (w.linear_data, w.linear_scale)
        )
        return data, scale

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        refusals = self._refusals(state_dict, prefix)
        if refusals:
            errors += refusals
            return
        for name, layouts in self._layouts.items():
            data, scale = prefix + name, prefix + name + PARTS[1]
            if data in state_dict:  # then the scale is too, or _refusals had named it
                # Together, as a layout may take other codes and scales of the same values.
                w = ScaledTensor(state_dict[data], state_dict[scale], self.format).with_layout(*layouts)
                state_dict[data], state_dict[scale] = w.data, w.scale
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._store_all()

    def _refusals(self, state_dict, prefix: str) -> list[str]:
        """What is wrong with the entries of this module; entries that are all missing are torch's business."""
        found = []
        extra = state_dict.get(prefix + "_extra_state")
        if extra is not None:
            try:
                self._read_extra_state(extra)
            except ValueError as error:
                found.append(f"{prefix}_extra_state: {error}")
        for name, (*batch, N, K) in self._shapes.items():
            need = {
                name: (torch.uint8, (*batch, N, K // 2)),
                name + PARTS[1]: (torch.uint8, (*batch, N, K // self.format.block_size)),
            }
            if self.format.has_global_scale:
                need[name + PARTS[2]] = (torch.float32, tuple(batch))
            present = [key for key in need if prefix + key in state_dict]
            if present and len(present) < len(need):
                lacking = ", ".join(prefix + key for key in need if key not in present)
                found.append(f"{prefix}{name}: {lacking} must come with it, {self.format} weights need all of them")
            for key in present:
                entry, (dtype, shape) = state_dict[prefix + key], need[key]
                if (entry.dtype, tuple(entry.shape)) != (dtype, shape):
                    found.append(
                        f"{prefix}{key}: is {entry.dtype} {tuple(entry.shape)}, need {dtype} {shape} "
                        f"for {self.format} weights of shape {(*batch, N, K)}"
                    )
                elif dtype == torch.float32 and not (entry.is_meta or entry.isfinite().all()):
                    found.append(f"{prefix}{key}: holds NaN or Inf, need finite factors")
        return found


# The codes and scales that a layer last gave to a state_dict, for the layers that share its weight to give as well.
_SAVED: WeakKeyDictionary["FP4Linear", tuple[ref, ref]] = WeakKeyDictionary()


class FP4Linear(_PackedModule):
    """y = x @ weight.T + bias with an FP4 weight: nn.Linear for inference. Gives a gradient to x and bias.

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
        _check_options("FP4Linear", self.format, scale_rule, rotation, activations)
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
        """The layer with its weight quantized and the very bias of `linear`; errors as in `nibblas.quantize`."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"FP4Linear: from_linear was given a {type(linear).__name__}, need an nn.Linear")
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
        _check_options("FP4Linear", self.format, None, 0, mode)
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
            and (bias is None or bias.data_ptr() == bound.bias_at)
            and not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
            and bound.age == age()
            and x.is_contiguous()
            and not torch.is_autocast_enabled(bound.device_type)
        )

    def _bind(self, key: tuple, x: Tensor, y: Tensor) -> None:
        """Keep the product that made y of x for calls like this one, if it is one that can be kept."""
        w, bias = self._unrotated, self.bias
        if w is None or not y.numel() or self.decoded is not None or self.rotation or self._activations != "none":
            return
        at, place = 0 if bias is None else bias.data_ptr(), (tuple(y.shape), y.stride(), y.device.type)
        bound = _Bound(lambda x, y: None, w, bias, at, *place, age())
        if not self._holds(bound, x):
            return
        with on_device(w.device):
            run = bind_linear(x.view(-1, self.in_features), w, bias, y.view(-1, self.out_features))
        if len(self._bound) >= MOST_BOUND:
            self._bound.clear()
        self._bound[key] = bound._replace(run=run)

    def _forward(self, x: Tensor) -> Tensor:
        _check_tensor("FP4Linear", "x", x)
        _check_dtype("FP4Linear", "x", x.dtype)
        device = x.device
        if device != self.weight.device:
            raise ValueError(f"FP4Linear: x is on {device}, the weight on {self.weight.device}")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"FP4Linear: x has shape {tuple(x.shape)}, need (..., {self.in_features})")
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                return self.forward(x.to(torch.get_autocast_dtype(device.type)))
        y = self._multiply(x.reshape(-1, self.in_features), x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if self._activations == "fp4":
            a = ops.quantize(rows, self.format, rotation=self.rotation)
            return ops.linear(a, self.weight_scaled, self.bias, out_dtype=dtype)
        if self.rotation:
            rows = rotate(rows, self.rotation)
        return self._packed(rows, dtype) if self.decoded is None else self._dense(rows, self.decoded, dtype)

    def _packed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        bias = self.bias
        if bias is not None:
            _check_dtype("FP4Linear", "bias", bias.dtype)
            if bias.shape != (self.out_features,):
                raise ValueError(f"FP4Linear: bias has shape {tuple(bias.shape)}, need ({self.out_features},)")
        weight = (self.weight, self.weight_scale, self.weight_global_scale, self._spec)
        return torch.ops.nibblas.linear(rows, None, None, "", *weight, bias, None, False, dtype)

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


class FP4Experts(_PackedModule):
    """A mixture of experts with FP4 weights: `nibblas.moe` as a module, for inference.

    Made zero, to load a state_dict into; `from_dense` quantizes dense weights, each expert by its own global_scale.

    Parameters
    ----------
    num_experts, intermediate, hidden : E, I and H; H and I are multiples of the format's block_size.
    format, scale_rule, rotation, device, dtype : as in FP4Linear.
    bias : whether there are bias_gate (E, I), bias_up (E, I) and bias_down (E, H), Parameters.
    activation : "silu" or "swiglu_clamped", as in `nibblas.gated_linear`.

    The packed tensors are w_gate and w_up (E, I, H) and w_down (E, H, I).
    """

    bias_gate: nn.Parameter | None
    bias_up: nn.Parameter | None
    bias_down: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        intermediate: int,
        hidden: int,
        format: Format | str = NVFP4,
        *,
        bias: bool = False,
        activation: str = "silu",
        scale_rule: str | None = None,
        rotation: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(format, scale_rule, rotation, dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"FP4Experts: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
        self.num_experts, self.intermediate, self.hidden = num_experts, intermediate, hidden
        self.activation = activation
        for name, N in (("bias_gate", intermediate), ("bias_up", intermediate), ("bias_down", hidden)):
            zeros = nn.Parameter(torch.zeros(num_experts, N, device=device, dtype=self.dtype)) if bias else None
            self.register_parameter(name, zeros)
        self._declare("w_gate", (num_experts, intermediate, hidden), device)
        self._declare("w_up", (num_experts, intermediate, hidden), device)
        self._declare("w_down", (num_experts, hidden, intermediate), device)

    @classmethod
    def from_dense(
        cls,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        bias_gate: Tensor | None = None,
        bias_up: Tensor | None = None,
        bias_down: Tensor | None = None,
        *,
        format: Format | str = NVFP4,
        scale_rule: str | None = None,
        rotation: int = 0,
        activation: str = "silu",
    ) -> Self:
        """The experts of dense w_gate, w_up (E, I, H), w_down (E, H, I) and biases (E, I), (E, I), (E, H) or none."""
        for name, dense in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            _check_tensor("FP4Experts", name, dense)
        if w_gate.ndim != 3 or w_up.shape != w_gate.shape or w_down.shape != w_gate.mT.shape:
            raise ValueError(
                f"FP4Experts: w_gate is {tuple(w_gate.shape)}, w_up {tuple(w_up.shape)}, w_down {tuple(w_down.shape)}; "
                "need (E, I, H), (E, I, H), (E, H, I)"
            )
        biases = {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": bias_down}
        if len({bias is None for bias in biases.values()}) > 1:
            raise ValueError("FP4Experts: some of bias_gate, bias_up, bias_down are given, need all or none")
        E, I, H = w_gate.shape
        experts = cls(
            E,
            I,
            H,
            format,
            bias=bias_gate is not None,
            activation=activation,
            scale_rule=scale_rule,
            rotation=rotation,
            device="meta",
            dtype=w_gate.dtype,
        )
        for name, bias in biases.items():
            if bias is not None:
                need = (E, H) if name == "bias_down" else (E, I)
                if tuple(bias.shape) != need:
                    raise ValueError(f"FP4Experts: {name} has shape {tuple(bias.shape)}, need {need}")
                setattr(experts, name, nn.Parameter(bias.detach(), requires_grad=bias.requires_grad))
        for name, dense in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            parts = [ops.quantize(m, format, scale_rule=scale_rule, rotation=rotation) for m in dense.detach()]
            experts.scale_rule = parts[0].scale_rule
            experts._store(name, stack(parts))
        return experts

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x (T, H); expert_ids (T, top_k), -1 for none; expert_weights (T, top_k) -> (T, H) of x's dtype.

        Under autocast too: of transformers' experts, the sum over a token's experts also has x's dtype.
        """
        _check_tensor("FP4Experts", "x", x)
        with torch.autocast(x.device.type, enabled=False):
            return ops.moe(
                x,
                expert_ids,
                expert_weights,
                self._scaled("w_gate"),
                self._scaled("w_up"),
                self._scaled("w_down"),
                self.bias_gate,
                self.bias_up,
                self.bias_down,
                activation=self.activation,
            )

    def extra_repr(self) -> str:
        parts = [f"num_experts={self.num_experts}, intermediate={self.intermediate}, hidden={self.hidden}"]
        parts += [f"bias={self.bias_gate is not None}, {self.format}, activation={self.activation!r}"]
        parts += [f"scale_rule={self.scale_rule!r}"] if self.scale_rule else []
        parts += [f"rotation={self.rotation}"] if self.rotation else []
        return ", ".join(parts)


class TransformersExperts(FP4Experts):
    """FP4Experts with the forward of transformers' fused expert modules: hidden states, expert ids, their weights.

    Arguments have the names they had in the module that was replaced; an id of num_experts means none.
    """

    routing_names: tuple[str, ...] = ("top_k_index", "top_k_weights")

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *routing: Tensor, **named: Tensor
    ) -> Tensor:
        expert_ids, expert_weights = *routing, *(named[name] for name in self.routing_names[len(routing) :])
        return super().forward(
            hidden_states, expert_ids.masked_fill(expert_ids >= self.num_experts, -1), expert_weights
        )


# Output heads, poolers and what routes tokens to experts: small, and errors in them cost most.
DEFAULT_EXCLUDE = (
    *("lm_head", "*.lm_head", "embed_out", "score", "classifier", "classifier.*", "qa_outputs", "cls.*"),
    *("pooler", "pooler.*", "*.pooler", "*.pooler.*"),
    *("*.gate", "*.router", "*.router.*", "*.shared_expert_gate"),
)
# Modules that read the weights of the Linears inside them, which a Linear with other weights would break.
READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class LayerReport:
    """What `convert` did with one layer: an nn.Linear, or a module of fused experts."""

    name: str
    converted: bool
    reason: str  # why it was left as it was; of a converted layer, what is worth knowing
    shape: tuple[int, ...]  # of the weight, (N, K); of experts (E, 2 * I, H)
    elements: int  # of all its weights
    nbytes: int  # of them in FP4; of a layer that was left, or shares another's weight, 0
    squared_error: float  # sum of (quantized - weight)^2
    squared_sum: float  # sum of weight^2

    @property
    def relative_mse(self) -> float:
        """squared_error / squared_sum; 0 where the weights are all zero."""
        return self.squared_error / self.squared_sum if self.squared_sum else 0.0


def conversion_report(model: nn.Module) -> tuple[LayerReport, ...]:
    """What `convert` did with each layer of the model, in the model's order; ValueError if it was never converted."""
    try:
        return tuple(model._nibblas_conversion.values())  # type: ignore[union-attr, operator]
    except AttributeError:
        raise ValueError(
            f"conversion_report: this {type(model).__name__} did not come from nibblas.nn.convert"
        ) from None


def convert(
    model: nn.Module,
    format: Format | str = NVFP4,
    scale_rule: str | None = None,
    *,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = DEFAULT_EXCLUDE,
    activations: str = "none",
    rotation: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by FP4 ones, in place, and return the model.

    nn.Linear becomes FP4Linear. Fused experts of transformers 5 become FP4Experts with their forward, weights only.
    Linears that share a weight go on sharing it. A layer that can't be converted stays as it is; `conversion_report`
    of the model says what was done with each layer, why, and what error it has.

    Parameters
    ----------
    model : any module; if it is an nn.Linear itself, the FP4Linear is returned.
    format, scale_rule, rotation, activations : as in FP4Linear.
    include : fnmatch patterns of qualified names ("model.layers.*.mlp.*"); None is all.
    exclude : patterns of what to leave; wins over include. By default output heads, poolers, routers and gates.
    progress : called with (layers done, layers in all, name of the next) before each layer.

    Raises ValueError for options that don't fit and for an include pattern that matches no layer. Weights are all
    quantized before any layer is replaced, so that an error leaves the model as it was.

    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), NVFP4, exclude="2")
    >>> [(layer.name, layer.converted, layer.reason) for layer in conversion_report(model)]
    [('0', True, ''), ('2', False, "excluded by '2'")]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}, need an nn.Module")
    format = as_format(format)
    _check_options("convert", format, scale_rule, rotation, activations)
    include = ("*",) if include is None else (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or _holds_fused_experts(m)}
    for pattern in include:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"convert: include pattern {pattern!r} matches none of {len(layers)} layers")

    reasons = {
        name: _excluded(name, include, exclude) or _why_not(model, name, layer, format, rotation)
        for name, layer in layers.items()
    }
    reasons |= _broken_ties(model, layers, reasons)
    wanted = [name for name in layers if not reasons[name]]
    made: dict[str, nn.Module] = {}
    reports: dict[str, LayerReport] = {}
    owners: dict[int, str] = {}  # name of the layer that was quantized for a weight
    for name, layer in layers.items():
        if reasons[name]:
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.gate_up_proj
            elements = sum(p.numel() for p in layer.parameters() if p.ndim >= 2)
            reports[name] = LayerReport(name, False, reasons[name], tuple(weight.shape), elements, 0, 0.0, 0.0)
            continue
        if progress is not None:
            progress(len(made), len(wanted), name)
        if isinstance(layer, nn.Linear):
            owner = owners.setdefault(id(layer.weight), name)
            if owner == name:
                made[name], reports[name] = _linear(name, layer, format, scale_rule, rotation, activations)
            else:
                first = made[owner]
                assert isinstance(first, FP4Linear)
                tied = FP4Linear._of(first.weight_scaled, layer, activations)
                tied._tie(first)
                made[name] = tied
                reports[name] = replace(reports[owner], name=name, reason=f"shares the weight of {owner}", nbytes=0)
        else:
            made[name], reports[name] = _experts(name, layer, format, scale_rule, rotation, activations)

    replacements = {id(layers[name]): new for name, new in made.items()}
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if id(module) in replacements:
                parent._modules[child] = replacements[id(module)]
    model = replacements.get(id(model), model)
    model._nibblas_conversion = {**getattr(model, "_nibblas_conversion", {}), **reports}  # type: ignore[assignment]
    return model


def _excluded(name: str, include: Iterable[str], exclude: Iterable[str]) -> str:
    for pattern in exclude:
        if fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    return "" if any(fnmatchcase(name, pattern) for pattern in include) else "not in include"


def _why_not(model: nn.Module, name: str, layer: nn.Module, format: Format, rotation: int) -> str:
    """Why a layer can't be converted, "" if it can."""
    weights = [parameter for parameter in layer.parameters(recurse=False) if parameter.ndim >= 2]
    if any(weight.is_meta for weight in weights):
        return "its weights are on the meta device, not loaded"
    if any(weight.dtype not in DTYPE_NAMES for weight in weights):
        return f"its weights are {weights[0].dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks) or "forward" in vars(layer):
        return "has hooks, which a replacement would lose"
    if isinstance(layer, nn.Linear):
        if type(layer) is not nn.Linear:
            return f"is a {type(layer).__name__}, which may do more than an nn.Linear"
        parent = model.get_submodule(name.rpartition(".")[0]) if name else layer
        if isinstance(parent, READS_WEIGHTS):
            return f"is inside {type(parent).__name__}, which reads its weight"
        contractions = [layer.in_features]
    else:
        reason = _why_not_fused(layer)
        if reason:
            return reason
        contractions = list(_fused_shape(layer)[1:])
    for K in contractions:
        if K % format.block_size:
            return f"K = {K} is not a multiple of {format}'s block_size {format.block_size}"
        if rotation and K % rotation:
            return f"K = {K} is not a multiple of rotation {rotation}"
    return ""


def _broken_ties(model: nn.Module, layers: dict[str, nn.Module], reasons: dict[str, str]) -> dict[str, str]:
    """Reasons to leave layers that share a weight with something that stays as it is."""
    users = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append(name)
    found = {}
    for name, layer in layers.items():
        if reasons[name]:
            continue
        for parameter in layer.parameters(recurse=False):
            staying = [user for user in users[id(parameter)] if reasons.get(user, "stays")]
            if parameter.ndim >= 2 and staying:
                found[name] = f"shares its weight with {staying[0]}, which is not converted"
    return found


def _squared(dense: Tensor, w: ScaledTensor) -> tuple[float, float]:
    """Sums of (dequantized - dense)^2 and of dense^2."""
    dense = dense.float()
    error = (dequantize(w) - dense).square_().sum(dtype=torch.float64)
    return error.item(), dense.square().sum(dtype=torch.float64).item()


@torch.no_grad()
def _linear(
    name: str, linear: nn.Linear, format: Format, scale_rule: str | None, rotation: int, activations: str
) -> tuple[FP4Linear, LayerReport]:
    weight = linear.weight.detach()
    w = ops.quantize(weight, format, scale_rule=scale_rule, rotation=rotation)
    report = LayerReport(name, True, "", tuple(weight.shape), weight.numel(), w.nbytes, *_squared(weight, w))
    return FP4Linear._of(w, linear, activations), report


def _holds_fused_experts(module: nn.Module) -> bool:
    gate_up = module._parameters.get("gate_up_proj")
    return gate_up is not None and gate_up.ndim == 3 and module._parameters.get("down_proj") is not None


def _fused_shape(module: Any) -> tuple[int, int, int]:
    """E, I, H of fused experts."""
    E, H, I = module.down_proj.mT.shape if module.is_transposed else module.down_proj.shape
    return E, I, H


def _why_not_fused(module: Any) -> str:
    """Why a module with gate_up_proj and down_proj is not one that FP4Experts can stand for, "" if it is.

    transformers 5 marks its fused experts with what their weights look like; the gate is known by what it computes.
    """
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    if not all(hasattr(module, mark) for mark in marks):
        return "fused experts without the marks of transformers 5"
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return "fused experts with another structure than down(act(gate) * up)"
    if getattr(module, "_is_expert_parallel", False):
        return "fused experts that are spread over devices"
    biases = {"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set()
    names = {name for name, _ in module.named_parameters()}
    if names != {"gate_up_proj", "down_proj"} | biases:
        return f"fused experts with the parameters {', '.join(sorted(names))}"
    if _activation_of(module) is None:
        return f"fused experts whose gate is none of {', '.join(ACTIVATIONS)}"
    return ""


@torch.no_grad()
def _activation_of(module: Any) -> str | None:
    """The name of the activation that a module's gate computes on a probe, None if it is none of ours."""
    _, I, _ = _fused_shape(module)
    probe = torch.linspace(-20, 20, 16 * I, device=module.down_proj.device)
    gate, up = probe.view(16, I), probe.flip(0).roll(7).view(16, I)
    joined = torch.cat((gate, up), -1) if module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
    try:
        computed = module._apply_gate(joined)
    except (RuntimeError, TypeError, ValueError):
        return None
    for name, activation in ACTIVATIONS.items():
        if computed.shape == gate.shape and torch.allclose(computed, activation(gate, up), rtol=1e-4, atol=1e-4):
            return name
    return None


def _split(module: Any, joined: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a dimension that holds both: (E, 2 * I, ...) -> two of (E, I, ...)."""
    if module.is_concatenated:
        gate, up = joined.chunk(2, 1)
        return gate, up
    return joined[:, ::2], joined[:, 1::2]


@torch.no_grad()
def _experts(
    name: str, module: Any, format: Format, scale_rule: str | None, rotation: int, activations: str
) -> tuple[FP4Experts, LayerReport]:
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    dense = (*_split(module, gate_up), down)
    biases = (*_split(module, module.gate_up_proj_bias.detach()), module.down_proj_bias) if module.has_bias else ()
    activation = _activation_of(module)
    assert activation is not None
    experts = TransformersExperts.from_dense(
        *dense, *biases, format=format, scale_rule=scale_rule, rotation=rotation, activation=activation
    )
    experts.train(module.training)
    experts.routing_names = tuple(inspect.signature(module.forward).parameters)[1:3]
    packed = [experts._scaled(part) for part in ("w_gate", "w_up", "w_down")]
    sums = [_squared(weights, w) for weights, w in zip(dense, packed, strict=True)]
    note = "weights only: experts take activations as they are" if activations == "fp4" else ""
    report = LayerReport(
        name,
        True,
        note,
        tuple(gate_up.shape),
        sum(weights.numel() for weights in dense),
        sum(w.nbytes for w in packed),
        sum(error for error, _ in sums),
        sum(square for _, square in sums),
    )
    return experts, report
