"""ScaledTensor: a block-scaled FP4 tensor as a plain container."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nibblas.formats import ROTATIONS, Format, as_format
from nibblas.layouts import (
    LINEAR,
    BLOCKED_128x4,
    FragmentCodes,
    FragmentScales,
    Layout,
    TiledLayout,
    as_layout,
    from_contest_view,
)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledTensor:
    """Packed codes and block scales of a tensor of logical shape (..., N, K).

    Storage is bytes throughout; torch's shell dtypes are views of it (`from_parts`, `data_as_float4`,
    `scale_as_float8`). The object holds no hidden state, is not a torch.Tensor and can't enter autograd.

    Parameters
    ----------
    data : (..., N, K/2) uint8. Two codes a byte, even k in the low nibble, stored in `data_layout`.
    scale : (..., *layout.shape(N, K/block_size)) uint8. Scale codes of `format`, stored in `layout`.
    format : NVFP4 or MXFP4.
    global_scale : fp32, () for the whole tensor or one value a matrix (shape[:-2]); None means exactly 1.
    layout, data_layout : how the last two dimensions of scale and data lie in memory.
    scale_rule : the rule the scales were made by, where known.
    rotation : size of the block Hadamard rotation along K that the values went through, of ROTATIONS; 0 for none.
    matrix : (N, K) where data_layout pads them; read off data otherwise.

    Raises
    ------
    TypeError for wrong types, ValueError for shapes, layouts, facts or devices that don't fit together.
    """

    data: Tensor
    scale: Tensor
    format: Format
    global_scale: Tensor | None = None
    layout: Layout = field(default_factory=lambda: LINEAR)  # torch.compile of torch 2.11 takes no default of our types
    data_layout: Layout = field(default_factory=lambda: LINEAR)
    scale_rule: str | None = None
    rotation: int = 0
    matrix: tuple[int, int] | None = None

    def __post_init__(self):
        op = "ScaledTensor"
        for name in ("data", "scale", "global_scale"):
            part = getattr(self, name)
            if not isinstance(part, Tensor) and (part is not None or name != "global_scale"):
                raise TypeError(f"{op}: {name} is a {type(part).__name__}, need a Tensor")
        if not isinstance(self.format, Format):
            raise TypeError(f"{op}: format is {self.format!r}, need a Format (from_parts takes names)")
        if self.data.dtype != torch.uint8 or self.scale.dtype != torch.uint8:
            raise TypeError(
                f"{op}: data is {self.data.dtype} and scale is {self.scale.dtype}, need torch.uint8 storage "
                "(ScaledTensor.from_parts takes float4, float8 and int8 tensors)"
            )
        if self.data.ndim < 1:
            raise ValueError(f"{op}: data has no dimension, need (..., K/2)")
        self.format.check_K(op, self.K)
        _check_layouts(op, self.format, self.layout, self.data_layout)
        if self.scale_rule is not None and self.scale_rule not in self.format.scale_rules:
            rules = ", ".join(self.format.scale_rules)
            raise ValueError(f"{op}: scale_rule {self.scale_rule!r} is unknown; {self.format} has {rules}")
        if self.rotation and (self.rotation not in ROTATIONS or self.K % self.rotation):
            sizes = ", ".join(map(str, ROTATIONS))
            raise ValueError(
                f"{op}: rotation {self.rotation!r} of K = {self.K}, need 0 or a divisor of K among {sizes}"
            )
        blocks = self.K // self.format.block_size
        if self.data.ndim == 1:
            if self.layout != LINEAR or self.data_layout != LINEAR or self.matrix is not None:
                raise ValueError(
                    f"{op}: a tensor of one dimension has LINEAR layouts only and no matrix, got {self.layout}, "
                    f"{self.data_layout}, {self.matrix}"
                )
            need = (blocks,)
        else:
            need = (*self.data.shape[:-2], *self.layout.shape(self.shape[-2], blocks))
            packed = self.data_layout.shape(self.shape[-2], self.K // 2)
            if self.data.shape[-2:] != packed:
                raise ValueError(
                    f"{op}: data of shape {tuple(self.data.shape)} can't hold the codes of "
                    f"({self.shape[-2]}, {self.K}) in {self.data_layout}, need {packed}"
                )
        if self.scale.shape != need:
            raise ValueError(
                f"{op}: scale has shape {tuple(self.scale.shape)}; {self.format} data of logical shape "
                f"{tuple(self.shape)} in layout {self.layout} needs {tuple(need)}"
            )
        if self.global_scale is not None:
            if not self.format.has_global_scale:
                raise ValueError(f"{op}: {self.format} has no global_scale, got one of {self.global_scale.shape}")
            if self.global_scale.dtype != torch.float32:
                raise TypeError(f"{op}: global_scale is {self.global_scale.dtype}, need torch.float32")
            if self.global_scale.shape not in (torch.Size(()), self.data.shape[:-2]):
                raise ValueError(
                    f"{op}: global_scale has shape {tuple(self.global_scale.shape)}, need () or "
                    f"{tuple(self.data.shape[:-2])}"
                )
        devices = {t.device for t in (self.data, self.scale, self.global_scale) if t is not None}
        if len(devices) > 1:
            raise ValueError(f"{op}: parts are on different devices: {', '.join(sorted(map(str, devices)))}")

    @classmethod
    def from_parts(
        cls,
        data: Tensor,
        scale: Tensor,
        format: Format | str,
        global_scale: Tensor | float | None = None,
        *,
        layout: Layout | str = LINEAR,
        data_layout: Layout | str = LINEAR,
        **facts,
    ) -> "ScaledTensor":
        """A ScaledTensor from what other libraries hold, without copying data or scale.

        data may be uint8, int8 or float4_e2m1fn_x2; scale uint8 or the format's float8 dtype. A global_scale of one
        element may have any shape and be a float; it multiplies (take the reciprocal of one that divides).
        """
        format = as_format(format)
        if not isinstance(data, Tensor) or data.dtype not in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
            got = getattr(data, "dtype", type(data).__name__)
            raise TypeError(f"from_parts: data is {got}, need uint8, int8 or float4_e2m1fn_x2 (two codes a byte)")
        if not isinstance(scale, Tensor) or scale.dtype not in (torch.uint8, format.scale_code.dtype):
            got = getattr(scale, "dtype", type(scale).__name__)
            raise TypeError(f"from_parts: scale is {got}, {format} needs uint8 or {format.scale_code.dtype}")
        if global_scale is not None:
            global_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=data.device)
            if global_scale.numel() == 1:
                global_scale = global_scale.reshape(())
        return cls(
            data.view(torch.uint8),
            scale.view(torch.uint8),
            format,
            global_scale,
            as_layout(layout),
            as_layout(data_layout),
            **facts,
        )

    @classmethod
    def from_batch_last(cls, data: Tensor, scale: Tensor, format: Format | str) -> "ScaledTensor":
        """A ScaledTensor (L, rows, K) of a batch whose shape has L last, as CUTLASS and KernelBot's problems have it.

        data is (rows, K/2, L); scale is (rows, K/block_size, L), or BLOCKED_128x4 in its six-dimensional view
        (32, 4, rest_m, 4, rest_k, L) (docs/formats.md, "The contest's view"). Types as in `from_parts`. Nothing is
        copied, but for a six-dimensional scale that does not lie in memory as that view does.
        """
        for name, part in (("data", data), ("scale", scale)):
            if not isinstance(part, Tensor):
                raise TypeError(f"from_batch_last: {name} is a {type(part).__name__}, need a Tensor")
        if data.ndim != 3 or scale.ndim not in (3, 6):
            raise ValueError(
                f"from_batch_last: data has shape {tuple(data.shape)} and scale {tuple(scale.shape)}, "
                "need (rows, K/2, L) and (rows, K/block_size, L) or (32, 4, rest_m, 4, rest_k, L)"
            )
        blocked = scale.ndim == 6
        scale = from_contest_view(scale) if blocked else scale.permute(2, 0, 1)
        return cls.from_parts(data.permute(2, 0, 1), scale, format, layout=BLOCKED_128x4 if blocked else LINEAR)

    @property
    def K(self) -> int:
        """Elements along the contraction."""
        return self.data.shape[-1] * 2 if self.matrix is None else self.matrix[1]

    @property
    def shape(self) -> torch.Size:
        """The logical shape (..., N, K)."""
        if self.matrix is None:
            return torch.Size((*self.data.shape[:-1], self.K))
        return torch.Size((*self.data.shape[:-2], *self.matrix))

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data, scale and global_scale."""
        return sum(t.nbytes for t in (self.data, self.scale, self.global_scale) if t is not None)

    @property
    def data_as_float4(self) -> Tensor:
        """data as torch.float4_e2m1fn_x2, a view."""
        return self.data.view(torch.float4_e2m1fn_x2)

    @property
    def scale_as_float8(self) -> Tensor:
        """scale as torch.float8_e4m3fn or float8_e8m0fnu, a view."""
        return self.scale.view(self.format.scale_code.dtype)

    @property
    def linear_data(self) -> Tensor:
        """Packed codes row after row: (..., N, K/2) uint8, whatever data_layout is."""
        if self.data_layout == LINEAR:
            return self.data
        return self.data_layout.from_(self.data, self.shape[-2], self.K // 2)

    @property
    def linear_scale(self) -> Tensor:
        """Scale codes row after row: (..., N, K/block_size) uint8, whatever layout is."""
        if self.layout == LINEAR:
            return self.scale
        return self.layout.from_(self.scale, self.shape[-2], self.K // self.format.block_size)

    def with_layout(
        self, layout: Layout | str | None = None, data_layout: Layout | str | None = None
    ) -> "ScaledTensor":
        """The same tensor stored in other layouts (None leaves one as it is); itself if nothing changes."""
        layout = self.layout if layout is None else as_layout(layout)
        data_layout = self.data_layout if data_layout is None else as_layout(data_layout)
        if (layout, data_layout) == (self.layout, self.data_layout):
            return self
        _check_layouts("with_layout", self.format, layout, data_layout)
        data, scale, codes = self.data, self.scale, self.linear_data
        recoded = codes
        if layout != self.layout:
            recoded, linear_scale = layout.canonical(codes, self.linear_scale)
            scale = layout.to(linear_scale)
        if data_layout != self.data_layout or recoded is not codes:
            data = data_layout.to(recoded)
        return replace(
            self,
            data=data,
            scale=scale,
            layout=layout,
            data_layout=data_layout,
            matrix=None if data_layout == LINEAR else (self.shape[-2], self.K),
        )

    def slice(self, dim: int, start: int, end: int) -> "ScaledTensor":
        """Logical elements start..end of one dimension, in the same layouts; copies what it must.

        Along K both ends must lie on a block. A rotated tensor is cut along K only on multiples of the rotation.
        """
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"slice: dim {dim} is out of range for a tensor of {self.ndim} dimensions")
        dim %= self.ndim
        start, end, _ = slice(start, end).indices(self.shape[dim])
        length = max(end - start, 0)
        data, scale, global_scale = self.linear_data, self.linear_scale, self.global_scale
        if dim == self.ndim - 1:
            unit = max(self.format.block_size, self.rotation)
            if start % unit or (start + length) % unit:
                raise ValueError(
                    f"slice: K range {start}:{start + length} must lie on multiples of {unit} "
                    f"({self.format}, rotation {self.rotation})"
                )
            data = data.narrow(-1, start // 2, length // 2)
            scale = scale.narrow(-1, start // self.format.block_size, length // self.format.block_size)
        else:
            data, scale = data.narrow(dim, start, length), scale.narrow(dim, start, length)
            if global_scale is not None and dim < global_scale.ndim:
                global_scale = global_scale.narrow(dim, start, length)
        plain = replace(
            self, data=data, scale=scale, global_scale=global_scale, layout=LINEAR, data_layout=LINEAR, matrix=None
        )
        return plain.with_layout(self.layout, self.data_layout)

    def __getitem__(self, index: int) -> "ScaledTensor":
        """One entry of the first batch dimension, a view: (L, ..., N, K) -> (..., N, K); `slice` takes ranges."""
        if self.ndim < 3:
            raise TypeError(f"ScaledTensor of shape {tuple(self.shape)} has no batch dimension to index; use slice")
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(f"ScaledTensor: index is {index!r}, need an int; use slice for ranges") from None
        one = self.global_scale is None or self.global_scale.ndim == 0
        global_scale = self.global_scale if one else self.global_scale[index]  # type: ignore[index]
        return self._with_parts(self.data[index], self.scale[index], global_scale)

    def _with_parts(self, data: Tensor, scale: Tensor, global_scale: Tensor | None) -> "ScaledTensor":
        """The same facts of views of the parts; unchecked, as the checks would cost more than a small product."""
        t = object.__new__(type(self))
        t.__dict__.update(self.__dict__, data=data, scale=scale, global_scale=global_scale)
        return t

    def take_rows(self, index: Tensor) -> "ScaledTensor":
        """Rows in any order, any number of times: (..., N, K) and (R,) integers -> (..., R, K), in LINEAR layouts."""
        if self.ndim < 2 or index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"take_rows: index is {index.dtype} {tuple(index.shape)} for {self}, "
                "need int32 or int64 (R,) for a tensor with rows"
            )
        data, scale = self.linear_data[..., index, :], self.linear_scale[..., index, :]
        return replace(self, data=data, scale=scale, layout=LINEAR, data_layout=LINEAR, matrix=None)

    def flatten_rows(self) -> "ScaledTensor":
        """All leading dimensions as one: (..., N, K) -> (rows, K), in LINEAR layouts; needs one global_scale."""
        if self.global_scale is not None and self.global_scale.ndim:
            raise ValueError(f"flatten_rows: {self} has one global_scale a matrix, need one for all rows")
        data, scale = self.linear_data, self.linear_scale
        return replace(
            self,
            data=data.reshape(-1, data.shape[-1]) if data.shape[-1] else data.new_empty(data.shape[:-1].numel(), 0),
            scale=scale.reshape(-1, scale.shape[-1])
            if scale.shape[-1]
            else scale.new_empty(scale.shape[:-1].numel(), 0),
            layout=LINEAR,
            data_layout=LINEAR,
            matrix=None,
        )

    def to(self, device: torch.device | str) -> "ScaledTensor":
        """A copy on another device; itself if it is there already."""
        data, scale = self.data.to(device), self.scale.to(device)
        if data is self.data:
            return self
        moved = None if self.global_scale is None else self.global_scale.to(device)
        return replace(self, data=data, scale=scale, global_scale=moved)

    def contiguous(self) -> "ScaledTensor":
        """The same tensor with contiguous parts."""
        global_scale = None if self.global_scale is None else self.global_scale.contiguous()
        return replace(self, data=self.data.contiguous(), scale=self.scale.contiguous(), global_scale=global_scale)

    def __repr__(self) -> str:
        parts = [f"{self.format}", f"shape={tuple(self.shape)}", f"layout={self.layout}"]
        if self.data_layout != LINEAR:
            parts.append(f"data_layout={self.data_layout}")
        if self.global_scale is not None:
            parts.append(f"global_scale={_one_number(self.global_scale)}")
        parts += [f"scale_rule={self.scale_rule!r}"] if self.scale_rule else []
        parts += [f"rotation={self.rotation}"] if self.rotation else []
        parts += [f"device={self.device}"] if self.device.type != "cpu" else []
        return f"ScaledTensor({', '.join(parts)})"


def _check_layouts(op: str, format: Format, layout: Layout, data_layout: Layout) -> None:
    if not isinstance(layout, Layout) or not isinstance(data_layout, Layout):
        raise TypeError(f"{op}: layouts are {layout!r}, {data_layout!r}, need Layouts (from_parts takes names)")
    if isinstance(layout, FragmentCodes) or isinstance(data_layout, FragmentScales):
        raise ValueError(f"{op}: {layout} can't hold scales, or {data_layout} codes")
    for fragments in (layout, data_layout):
        if not isinstance(fragments, TiledLayout) and fragments.format != format:
            raise ValueError(f"{op}: {fragments} is of {fragments.format}, the tensor is {format}")


def _one_number(global_scale: Tensor) -> str:
    if global_scale.ndim:
        return "(one a matrix)"
    try:
        return f"{global_scale.item():.6g}"
    except RuntimeError:  # on meta, or while something traces
        return "(no value)"


def stack(tensors: Iterable[ScaledTensor]) -> ScaledTensor:
    """Matrices of one format, shape and layout as one tensor with a new first dimension, each with its global_scale.

    [(N, K), ...] G of them -> (G, N, K). Raises TypeError, ValueError for what doesn't fit together.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("stack: the list is empty, need at least one ScaledTensor")
    for t in tensors:
        if not isinstance(t, ScaledTensor):
            raise TypeError(f"stack: the list has a {type(t).__name__}, need ScaledTensors")
    first = tensors[0]
    if first.ndim < 2:
        raise ValueError(f"stack: the list has tensors of shape {tuple(first.shape)}, need (..., N, K)")

    def facts(t: ScaledTensor) -> tuple:
        return t.format, tuple(t.shape), t.layout, t.data_layout, t.rotation, t.global_scale is None, t.device

    for t in tensors:
        if facts(t) != facts(first):
            raise ValueError(f"stack: {t} does not fit {first}; format, shape, layouts, rotation and device must agree")
    global_scale = None
    if first.global_scale is not None:
        global_scale = torch.stack([t.global_scale.expand(t.data.shape[:-2]) for t in tensors])  # type: ignore[union-attr]
    rules = {t.scale_rule for t in tensors}
    return replace(
        first,
        data=torch.stack([t.data for t in tensors]),
        scale=torch.stack([t.scale for t in tensors]),
        global_scale=global_scale,
        scale_rule=rules.pop() if len(rules) == 1 else None,
    )
