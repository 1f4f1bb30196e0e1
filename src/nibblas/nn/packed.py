"""What modules with FP4 weights share: how they keep packed tensors, and save and load them.

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

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nibblas.dispatch import best_storage
from nibblas.formats import Format
from nibblas.kernel import Kernel
from nibblas.layouts import LINEAR, Layout
from nibblas.memory import use_huge_pages
from nibblas.ops import format_for
from nibblas.problem import DTYPE_NAMES, Problem, arch_of
from nibblas.quantize import ROTATIONS
from nibblas.tensor import ScaledTensor

PARTS = ("", "_scale", "_global_scale")  # what is added to a packed tensor's name: data, scale, global_scale
ACTIVATION_MODES = ("none", "fp4")


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: {name} is {dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}")


def check_options(op: str, format: Format, scale_rule: str | None, rotation: int, activations: str = "none") -> None:
    if scale_rule is not None and scale_rule not in format.scale_rules:
        raise ValueError(f"{op}: scale_rule {scale_rule!r} is unknown; {format} has {', '.join(format.scale_rules)}")
    if rotation not in (0, *ROTATIONS):
        raise ValueError(f"{op}: rotation is {rotation!r}, need 0 or one of {', '.join(map(str, ROTATIONS))}")
    if activations not in ACTIVATION_MODES:
        raise ValueError(f"{op}: activations is {activations!r}, need one of {', '.join(ACTIVATION_MODES)}")


class PackedModule(nn.Module):
    """A module that holds ScaledTensors as buffers: stored as their kernel likes it, saved in LINEAR layouts.

    dtype is that of the activations to expect, by which the kernel is chosen; it follows `.to(dtype)`.
    """

    def __init__(self, format: Format | str, scale_rule: str | None, rotation: int, dtype: torch.dtype | None):
        super().__init__()
        self.format = format_for(type(self).__name__, format)
        check_options(type(self).__name__, self.format, scale_rule, rotation)
        self.scale_rule = scale_rule
        self.rotation = rotation
        self.dtype = dtype or torch.get_default_dtype()
        check_dtype(type(self).__name__, "dtype", self.dtype)
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
        return "fp32" if self.rotation else DTYPE_NAMES.get(self.dtype, "fp32")  # a rotated x is fp32

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
        check_options(name, self.format, facts["scale_rule"], facts["rotation"])
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
