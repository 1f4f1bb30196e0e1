"""What `inspect_file` says of checkpoints that others wrote, and of what is wrong with them."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblas import storage
from nibblas.checkpoint import inspect
from nibblas.checkpoint.inspect import Count, inspect_file
from nibblas.formats import E4M3, E8M0, MXFP4, NVFP4, unpack
from nibblas.layouts import LAYOUTS, BLOCKED_128x4, TiledLayout
from nibblas.storage import StorageError
from nibblas.tensor import ScaledTensor

CKPTS = Path(__file__).parent / "ckpts"
GENERATOR = torch.Generator().manual_seed(0)


def codes(*shape):
    return torch.randint(0, 256, shape, generator=GENERATOR, dtype=torch.uint8)


def e4m3(*shape):
    return torch.randint(1, 0x7F, shape, generator=GENERATOR, dtype=torch.uint8).view(torch.float8_e4m3fn)


def e8m0(*shape):
    return torch.randint(100, 130, shape, generator=GENERATOR, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def f32(*values):
    return torch.tensor(values) if len(values) > 1 else torch.tensor(values[0])


def inspected(folder, tensors, config=None, metadata=None, name="model.safetensors"):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / name, metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return inspect_file(folder)


def histogram(packed):
    return tuple(torch.bincount(unpack(packed.view(torch.uint8)).flatten(), minlength=16).tolist())


def check_statistics(statistics, code, scale):
    """Against the definition, from plain scale bytes."""
    values = code.decode(scale.contiguous().view(torch.uint8)).flatten()
    finite = values[~values.isnan()].sort().values
    assert statistics.code == code.name
    assert statistics.count == values.numel()
    assert (statistics.min, statistics.max) == (finite[0].item(), finite[-1].item())
    assert statistics.median == finite[(len(finite) - 1) // 2].item()
    assert statistics.zeros == (values == 0).sum()
    assert statistics.nans == values.isnan().sum()
    assert statistics.negatives == (values < 0).sum()
    assert statistics.saturated == (values == code.max).sum()


# folder, layout, format, scale layout, convention, static activation scale, endings of codes, scale, global scale
GOLDEN = [
    ("modelopt_dense_NVFP4_DEFAULT_CFG", "modelopt", "nvfp4", "LINEAR", "multiplier", True),
    ("modelopt_dense_W4A16_NVFP4_CFG", "modelopt", "nvfp4", "LINEAR", "multiplier", False),
    ("modelopt_moe_NVFP4_DEFAULT_CFG", "modelopt", "nvfp4", "LINEAR", "multiplier", True),
    ("llmc_dense_NVFP4", "compressed-tensors", "nvfp4", "LINEAR", "divisor", True),
    ("llmc_dense_MXFP4", "compressed-tensors", "mxfp4", "LINEAR", None, False),
    ("torchao_dense_NVFP4WeightOnly", "torchao", "nvfp4", "BLOCKED_128x4", "multiplier", False),
]
ENDINGS = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "torchao": ("_weight_qdata", "_weight_scale", "_weight_per_tensor_scale", ""),
}


@pytest.mark.parametrize(("folder", "layout", "format", "scale_layout", "convention", "static"), GOLDEN)
def test_checkpoints_of_exporters(folder, layout, format, scale_layout, convention, static):
    report = inspect_file(CKPTS / folder)
    stored = load_file(CKPTS / folder / "model.safetensors")
    data, scale, global_scale, activation_scale = ENDINGS[layout]
    expected = {name for name, tensor in stored.items() if name.endswith(f".{data}") and tensor.dtype == torch.uint8}
    assert {tensor.name for tensor in report.tensors} == expected
    assert len(expected) == (16 if "moe" in folder else 7)
    code = NVFP4.scale_code if format == "nvfp4" else MXFP4.scale_code
    for tensor in report.tensors:
        stem = tensor.name.removesuffix(data)
        packed = stored[tensor.name]
        N, K = packed.shape[0], 2 * packed.shape[1]
        assert (tensor.layout, tensor.format, tensor.scale_layout) == (layout, format, scale_layout)
        assert (tensor.shape, tensor.block_size) == ((N, K), 16 if format == "nvfp4" else 32)
        assert tensor.codes == histogram(packed)
        scales = stored[stem + scale]
        if scale_layout == "BLOCKED_128x4":
            rows, cols = BLOCKED_128x4.shape(N, K // 16)
            scales = BLOCKED_128x4.from_(scales.view(torch.uint8).reshape(rows, cols), N, K // 16)
        check_statistics(tensor.scale, code, scales)
        assert tensor.convention == convention
        if convention == "divisor":
            assert tensor.global_scale == (1 / stored[stem + global_scale].item(),)
        elif convention:
            assert tensor.global_scale == (stored[stem + global_scale].item(),)
        assert (tensor.activation_scale is not None) == static
        if static:
            assert tensor.activation_scale == (stored[stem + activation_scale].item(),)
        assert tensor.warnings == ()
    rest = [tensor for tensor in stored.values() if tensor.dtype == torch.bfloat16]
    assert report.others == {"BF16": Count(len(rest), sum(tensor.nbytes for tensor in rest))}
    assert report.files == ("model.safetensors",)
    # torchao scales each tensor by itself; the other two share among what is fused.
    assert len(report.warnings) == (2 if layout == "torchao" else 0)
    assert all("unequal global scales in 1 of 1 groups" in text for text in report.warnings)


def test_a_divisor_is_reported_as_the_multiplier_it_is():
    modelopt = inspect_file(CKPTS / "modelopt_dense_NVFP4_DEFAULT_CFG").tensors
    compressed = inspect_file(CKPTS / "llmc_dense_NVFP4").tensors
    stems = {tensor.name.removesuffix("_packed"): tensor for tensor in compressed}
    for tensor in modelopt:
        # The same source; one of the two rounds its divisor to bf16.
        assert tensor.global_scale[0] == pytest.approx(stems[tensor.name].global_scale[0], rel=2**-8)


@pytest.mark.parametrize("chunk", [1, 100, 4096])
def test_reading_in_pieces_changes_nothing(monkeypatch, chunk):
    whole = {name: inspect_file(CKPTS / name) for name, *_ in GOLDEN}
    largest = 0
    read = storage.Header.read_bytes

    def measured(self, name, start=0, end=None):
        nonlocal largest
        data = read(self, name, start, end)
        largest = max(largest, len(data))
        return data

    monkeypatch.setattr(storage.Header, "read_bytes", measured)
    monkeypatch.setattr(inspect, "CHUNK_BYTES", chunk)
    for name, report in whole.items():
        assert inspect_file(CKPTS / name) == report
    # A row of tiles of the scales, or one row of codes, is the least that is read.
    assert largest <= max(chunk, 128 * 8)


def test_gpt_oss(tmp_path):
    E, N, K = 2, 24, 96
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": codes(E, N, K // 32, 16),
        "model.layers.0.mlp.experts.gate_up_proj_scales": e8m0(E, N, K // 32).view(torch.uint8),
        "model.layers.0.mlp.experts.gate_up_proj_bias": torch.zeros(E, N, dtype=torch.bfloat16),
        "block.1.mlp.mlp2_weight.blocks": codes(E, N, K // 32, 16),
        "block.1.mlp.mlp2_weight.scales": e8m0(E, N, K // 32).view(torch.uint8),
    }
    report = inspected(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert len(report.tensors) == 2
    for tensor in report.tensors:
        assert (tensor.layout, tensor.format, tensor.shape, tensor.block_size) == ("gpt-oss", "mxfp4", (E, N, K), 32)
        assert tensor.codes == histogram(tensors[tensor.name])
        check_statistics(tensor.scale, E8M0, tensors[tensor.name.replace("blocks", "scales")])
        assert tensor.global_scale is None
    assert report.others == {"BF16": Count(1, E * N * 2)}
    assert report.all_warnings == []


N, K = 32, 192
HAND_MADE = {
    "deepseek": (
        {"w": codes(N, K // 2).view(torch.int8), "s": e8m0(N, K // 32)},
        {"w": "ffn.experts.0.w1.weight", "s": "ffn.experts.0.w1.scale"},
        ("deepseek", "mxfp4", (N, K), "LINEAR", None),
    ),
    "mlx mxfp4": (
        {"w": codes(N, K // 2).view(torch.uint32), "s": e8m0(N, K // 32).view(torch.uint8)},
        {"w": "q.weight", "s": "q.scales"},
        ("mlx", "mxfp4", (N, K), "LINEAR", None),
    ),
    "mlx nvfp4": (
        {"w": codes(N, K // 2).view(torch.uint32), "s": e4m3(N, K // 16).view(torch.uint8)},
        {"w": "q.weight", "s": "q.scales"},
        ("mlx", "nvfp4", (N, K), "LINEAR", None),
    ),
    "quark nvfp4": (
        {"w": codes(N, K // 2), "s": e4m3(N, K // 16), "g": f32(0.01), "a": f32(0.5)},
        {"w": "q.weight", "s": "q.weight_scale", "g": "q.weight_scale_2", "a": "q.input_scale_2"},
        ("quark", "nvfp4", (N, K), "LINEAR", "multiplier"),
    ),
    "modelopt experts": (
        {"w": codes(3, K // 2, N), "s": e4m3(3, K // 16, N), "g": f32(0.01), "a": f32(0.5)},
        {
            "w": "experts.gate_up_proj",
            "s": "experts.gate_up_proj_weight_scale",
            "g": "experts.gate_up_proj_weight_scale_2",
            "a": "experts.gate_up_proj_input_scale",
        },
        ("modelopt", "nvfp4", (3, N, K), "LINEAR", "multiplier"),
    ),
    "modelopt W4A8": (
        {"w": codes(N, K // 2), "s": e4m3(N, K // 32), "g": f32(0.01)},
        {"w": "q.weight", "s": "q.weight_scale", "g": "q.weight_scale_2"},
        ("modelopt", "e4m3 scales, block_size 32", (N, K), "LINEAR", "multiplier"),
    ),
    "compressed-tensors experts": (
        {"w": codes(3, N, K // 2), "s": e4m3(3, N, K // 16), "g": f32(128.0, 256.0, 512.0)},
        {"w": "q.weight_packed", "s": "q.weight_scale", "g": "q.weight_global_scale"},
        ("compressed-tensors", "nvfp4", (3, N, K), "LINEAR", "divisor"),
    ),
    "torchao mx": (
        {"w": codes(N, K // 2), "s": e8m0(32, 16 * 2)},
        {"w": "q._weight_qdata", "s": "q._weight_scale"},
        ("torchao", "mxfp4", (N, K), "BLOCKED_128x4", None),
    ),
    "torchao experts": (
        {"w": codes(2, 200, K // 2), "s": e4m3(2, 64, 48), "g": f32(0.5, 0.25).reshape(2, 1, 1)},
        {"w": "q._weight_qdata", "s": "q._weight_scale", "g": "q._weight_per_tensor_scale"},
        ("torchao", "nvfp4", (2, 200, K), "BLOCKED_128x4", "multiplier"),
    ),
    "float4": (
        {"w": codes(N, K // 2).view(torch.float4_e2m1fn_x2), "s": e4m3(N, K // 16), "g": f32(0.01)},
        {"w": "q.weight", "s": "q.weight_scale", "g": "q.weight_scale_2"},
        ("modelopt", "nvfp4", (N, K), "LINEAR", "multiplier"),
    ),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_hand_made_layouts(tmp_path, case):
    tensors, names, expected = HAND_MADE[case]
    report = inspected(tmp_path, {names[key]: tensor for key, tensor in tensors.items()})
    assert report.all_warnings == []
    (tensor,) = report.tensors
    got = (tensor.layout, tensor.format, tensor.shape, tensor.scale_layout, tensor.convention)
    assert got == expected
    assert tensor.transposed == (case == "modelopt experts")
    assert tensor.codes == histogram(tensors["w"])
    assert sum(tensor.codes) == math.prod(tensor.shape)
    assert tensor.scale.count == math.prod(tensor.shape) // tensor.block_size
    if tensor.scale_layout == "LINEAR":
        check_statistics(tensor.scale, E4M3 if tensor.block_size == 16 or "W4A8" in case else E8M0, tensors["s"])
    if "g" in tensors:
        stored = tensors["g"].flatten().tolist()
        assert tensor.global_scale == tuple(1 / x if tensor.convention == "divisor" else x for x in stored)
    assert (tensor.activation_scale == (0.5,)) == ("a" in tensors)
    assert report.others == {}


def modelopt(stem="q", N=N, K=K, scale=None, global_scale=0.01):
    return {
        f"{stem}.weight": codes(N, K // 2),
        f"{stem}.weight_scale": e4m3(N, K // 16) if scale is None else scale,
        f"{stem}.weight_scale_2": f32(global_scale),
    }


def test_the_same_names_by_marker(tmp_path):
    """ModelOpt, Quark and Comfy give a weight's parts the same names; (128, 12) may be LINEAR or BLOCKED_128x4."""
    tensors = modelopt(N=128)
    (tensor,) = inspected(tmp_path, tensors).tensors
    assert (tensor.layout, tensor.scale_layout, tensor.nibbles) == ("modelopt", "LINEAR", "low first")
    (tensor,) = inspected(tmp_path, tensors, {"quant_method": "quark"}).tensors
    assert (tensor.layout, tensor.scale_layout) == ("quark", "LINEAR")

    comfy = ("comfy", "BLOCKED_128x4", "high first", ())
    marker = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    report = inspected(tmp_path, {**tensors, "q.comfy_quant": marker}, {})
    (tensor,) = report.tensors
    assert (tensor.layout, tensor.scale_layout, tensor.nibbles, tensor.warnings) == comfy
    (tensor,) = inspected(tmp_path, tensors, metadata={"_quantization_metadata": "{}"}).tensors
    assert (tensor.layout, tensor.scale_layout, tensor.nibbles, tensor.warnings) == comfy
    (tensor,) = inspected(tmp_path, modelopt("double_blocks.0.img_attn.qkv", N=128)).tensors
    assert (tensor.layout, tensor.scale_layout, tensor.nibbles) == comfy[:3]
    assert "no marker double_blocks.0.img_attn.qkv.comfy_quant" in tensor.warnings[0]


def test_what_is_not_fp4_is_left_alone(tmp_path):
    tensors = {
        "fp8.weight": torch.zeros(4, 32).to(torch.float8_e4m3fn),
        "fp8.weight_scale": f32(1.0),
        "mxfp8.weight": torch.zeros(4, 32).to(torch.float8_e4m3fn),
        "mxfp8.weight_scale": codes(4, 1),
        "block8.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn),
        "block8.scale": e8m0(1, 1),
        "awq.weight": codes(4, 64),
        "awq.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16),
        "bnb.weight": codes(64, 1),
        "bnb.weight.absmax": torch.ones(2),
        "int8.weight": codes(4, 32).view(torch.int8),
        "int8.scale": torch.ones(4),
        "mlx4.weight": codes(4, 32).view(torch.uint32),
        "mlx4.scales": torch.ones(4, 2, dtype=torch.bfloat16),
        "gptq.qweight": torch.ones(4, 4, dtype=torch.int32),
        "int4.weight_packed": torch.ones(4, 4, dtype=torch.int32),
        "int4.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16),
        "sparse_blocks": codes(7, 5),
        "table": codes(8, 8),
    }
    report = inspected(tmp_path, tensors)
    assert report.tensors == ()
    assert report.all_warnings == []
    assert sum(count.tensors for count in report.others.values()) == len(tensors)
    assert report.others["I32"] == Count(2, 128)


def warned(folder, tensors, *args, **kwargs):
    return inspected(folder, tensors, *args, **kwargs).all_warnings


def scales_with(value, count=1):
    scale = e4m3(N, K // 16).view(torch.uint8)
    scale.view(-1)[:count] = value
    return scale.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"q.weight_scale": scales_with(0x7F, 3)}, "q.weight: 3 of 384 scales are NaN"),
        ({"q.weight_scale": scales_with(0xFF)}, "q.weight: 1 of 384 scales are NaN"),
        ({"q.weight_scale": scales_with(0xB8, 2)}, "q.weight: 2 of 384 scales are negative"),
        ({"q.weight_scale": scales_with(0, 384)}, "q.weight: all scales are zero"),
        ({"q.weight": torch.full((N, K // 2), 0x80, dtype=torch.uint8)}, "q.weight: all codes are zero"),
        ({"q.weight_scale": None, "q.weight_scale_2": None}, "q.weight: its scale q.weight_scale is missing"),
        ({"q.weight_scale_2": None}, "q.weight: its global scale q.weight_scale_2 is missing or no float"),
        ({"q.weight_scale_2": codes(1)}, "q.weight: its global scale q.weight_scale_2 is missing or no float"),
        ({"q.weight_scale_2": f32(math.nan)}, "q.weight: global scale is nan, need positive and finite"),
        ({"q.weight_scale_2": f32(math.inf)}, "q.weight: global scale is inf, need positive and finite"),
        ({"q.weight_scale_2": f32(0.0)}, "q.weight: global scale is 0, need positive and finite"),
        ({"q.weight_scale_2": f32(-1.0)}, "q.weight: global scale is -1, need positive and finite"),
        (
            {"q.weight_scale_2": f32(3584.0)},
            "q.weight: global scale 3584 (as a multiplier) lies outside 9.31323e-10..1024",
        ),
        ({"q.weight_scale_2": f32(1.0, 2.0)}, "q.weight: 2 global scales for 1 matrix"),
        ({"q.input_scale": f32(0.0)}, "q.weight: activation scale is 0, need positive and finite"),
        (
            {"q.weight_scale": e4m3(N, K // 16 - 1)},
            "q.weight: scale of shape (32, 11) (F8_E4M3) does not fit logical shape (32, 192)",
        ),
        ({"q.weight": None, "q.weight_scale_2": None}, "q.weight_scale has no weight beside it"),
    ],
)
def test_warnings(tmp_path, change, warning):
    assert warned(tmp_path, modelopt()) == []
    tensors = {name: tensor for name, tensor in (modelopt() | change).items() if tensor is not None}
    assert warned(tmp_path, tensors) == [warning]


def test_a_divisor_below_one(tmp_path):
    tensors = {"q.weight_packed": codes(N, K // 2), "q.weight_scale": e4m3(N, K // 16)}
    divisor = {**tensors, "q.weight_global_scale": torch.tensor([3584.0])}
    report = inspected(tmp_path, divisor)
    assert report.all_warnings == []
    assert report.tensors[0].global_scale == (1 / 3584,)
    (text,) = warned(tmp_path, {**tensors, "q.weight_global_scale": torch.tensor([1 / 3584])})
    assert text == "q.weight_packed: global scale 0.000279018 is a divisor here, yet below 1: it may be a multiplier"


def test_k_that_is_not_whole_blocks(tmp_path):
    assert warned(tmp_path, {"q.weight_packed": codes(4, 20), "q.weight_scale": codes(4, 2)}) == [
        "q.weight_packed: K = 40 is not a multiple of block_size 32"
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("K", [64, 192])
def test_a_one_dimensional_scale_is_taken_as_blocked(tmp_path, dtype, K):
    """Some ModelOpt exports hold a scale that is blocked already, as one dimension of bytes.

    With K = 64 an e8m0 scale would have the same size; the global scale says that it is none.
    """
    scale = e4m3(N, K // 16).view(torch.uint8)
    stored = BLOCKED_128x4.to(scale).flatten()
    assert stored.numel() > scale.numel()
    report = inspected(tmp_path, modelopt(K=K, scale=stored.view(dtype)))
    (tensor,) = report.tensors
    assert (tensor.format, tensor.scale_layout) == ("nvfp4", "BLOCKED_128x4")
    check_statistics(tensor.scale, E4M3, scale)
    assert tensor.warnings == (
        "q.weight_scale is one-dimensional: its layout, BLOCKED_128x4, is inferred from its size",
    )


def test_unequal_global_scales_of_fused_layers(tmp_path):
    tensors = {}
    for layer, factor in enumerate((1.0, 2.0, 1.5)):
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            stem = f"layers.{layer}.self_attn.{name}"
            tensors |= modelopt(stem, N=4, K=32, global_scale=0.01 * (factor if i == 2 else 1))
        for name in ("gate_proj", "up_proj"):
            tensors |= modelopt(f"layers.{layer}.mlp.{name}", N=4, K=32)
    assert warned(tmp_path, tensors) == [
        "q_proj/k_proj/v_proj have unequal global scales in 2 of 3 groups, by up to 2 (layers.1.self_attn); "
        "fused products of other libraries need one, those of nibblas don't"
    ]


def test_experts_that_were_never_calibrated(tmp_path):
    tensors = {}
    for expert in range(6):
        tensors |= modelopt(f"experts.{expert}.down_proj", N=4, K=32)
        if expert < 2:
            tensors[f"experts.{expert}.down_proj.input_scale"] = f32(0.1)
    assert warned(tmp_path, tensors) == [
        "4 of 6 modelopt weights lack an activation scale: experts.2.down_proj.weight, experts.3.down_proj.weight, "
        "experts.4.down_proj.weight, ..."
    ]


def test_config_that_says_something_else(tmp_path):
    assert warned(tmp_path, modelopt(), {"quant_method": "modelopt"}) == []
    assert warned(tmp_path, modelopt(), {"quant_method": "compressed-tensors"}) == [
        "config.json says quant_method 'compressed-tensors', but tensors are stored as modelopt"
    ]
    (tmp_path / "config.json").unlink()
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    assert inspect_file(tmp_path).quant_method == "modelopt"


def test_parts_in_other_shards(tmp_path):
    tensors = modelopt()
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"{i}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    save_file(modelopt("old"), tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    report = inspect_file(tmp_path)
    assert report.files == ("0.safetensors", "1.safetensors", "2.safetensors")
    assert [(tensor.name, tensor.file, tensor.warnings) for tensor in report.tensors] == [
        ("q.weight", "0.safetensors", ())
    ]
    (tmp_path / "2.safetensors").unlink()
    assert inspect_file(tmp_path).all_warnings == [
        "shards that the index names are missing: 2.safetensors",
        "q.weight: its global scale q.weight_scale_2 is missing or no float",
    ]


@pytest.mark.parametrize("data_layout", ["LINEAR", "SHUFFLED_16x16", "ROWS_16x4"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if isinstance(LAYOUTS[name], TiledLayout)])
def test_nibblas_files_in_any_layout(tmp_path, layout, data_layout):
    plain = ScaledTensor(
        codes(2, 33, 48),
        e4m3(2, 33, 6).view(torch.uint8),
        NVFP4,
        f32(0.5, 0.25),
        scale_rule="search",
    )
    tensor = plain.with_layout(LAYOUTS[layout], LAYOUTS[data_layout])
    storage.save(tmp_path / "a", {"w": tensor, "v": torch.zeros(3)})
    report = inspect_file(tmp_path / "a")
    (found,) = report.tensors
    assert (found.layout, found.format, found.shape) == ("nibblas", "nvfp4", (2, 33, 96))
    assert (found.scale_layout, found.data_layout) == (layout, data_layout)
    assert found.codes == histogram(plain.data)
    check_statistics(found.scale, E4M3, plain.scale)
    assert (found.global_scale, found.convention) == ((0.5, 0.25), "multiplier")
    assert report.others == {"F32": Count(1, 12)}
    assert report.all_warnings == []


@pytest.mark.parametrize(
    ("lost", "warning"),
    [
        ("w", "b: w is in the metadata, but its codes are missing"),
        ("w.scale", "w: its scale w.scale is missing"),
        ("w.global_scale", "w: its global scale w.global_scale is missing or no float"),
    ],
)
def test_nibblas_files_that_lack_a_part(tmp_path, lost, warning):
    storage.save(tmp_path / "a", {"w": ScaledTensor(codes(4, 8), e4m3(4, 1).view(torch.uint8), NVFP4, f32(1.0))})
    header = storage.read_header(tmp_path / "a")
    save_file({name: header.read(name) for name in header.entries if name != lost}, tmp_path / "b", header.metadata)
    assert warning in inspect_file(tmp_path / "b").all_warnings


def test_nibblas_metadata_that_is_not_understood(tmp_path):
    metadata = {"version": 1, "tensors": {"w": {"format": "int3"}}}
    save_file({"w": codes(4, 8), "w.scale": codes(4, 1)}, tmp_path / "a", {"nibblas": json.dumps(metadata)})
    with pytest.raises(StorageError, match="metadata of w is not understood: format 'int3' is unknown"):
        inspect_file(tmp_path / "a")


def test_empty_and_one_dimensional_tensors(tmp_path):
    tensors = {
        "empty": ScaledTensor(codes(0, 8), codes(0, 1), NVFP4),
        "vector": ScaledTensor(codes(16), codes(1), MXFP4),
    }
    storage.save(tmp_path / "a", tensors)
    found = {tensor.name: tensor for tensor in inspect_file(tmp_path / "a").tensors}
    assert (found["empty"].scale.count, found["empty"].scale.min, sum(found["empty"].codes)) == (0, None, 0)
    assert found["empty"].warnings == ()
    assert found["vector"].shape == (32,)
    assert found["vector"].scale.count == 1


@pytest.mark.parametrize("naming", [*inspect.NAMINGS, inspect.NIBBLAS], ids=lambda naming: naming.layout + naming.data)
def test_no_shape_or_dtype_is_too_odd(tmp_path, naming):
    """Parts of every size and kind under the names that count: a report, whatever it says."""
    shapes = [(), (0,), (3,), (32,), (2, 0), (4, 16), (2, 4, 16), (2, 4, 1, 16), (1, 2, 2, 2, 16)]
    dtypes = ["U8", "I8", "U32", "F4", "F8_E4M3", "F8_E8M0", "BF16"]
    drawn = torch.Generator().manual_seed(0)

    def entry(position):
        shape = shapes[torch.randint(len(shapes), (), generator=drawn)]
        dtype = dtypes[torch.randint(len(dtypes), (), generator=drawn)]
        if (dtype == "F4" and not shape) or shape[-1:] == (3,):
            dtype = "U8"
        end = position + math.prod(shape) * storage.DTYPES[dtype].bits // 8
        return {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}, end

    facts = dict(format="nvfp4", layout="LINEAR", data_layout="LINEAR", matrix=None, global_scale=True)
    metadata = {"version": 1, "tensors": {"a": facts} if naming is inspect.NIBBLAS else {}}
    seen = set()
    for _ in range(300):
        header, position = {"__metadata__": {"nibblas": json.dumps(metadata)}}, 0
        for ending in (naming.data, naming.scale, naming.global_scale, naming.activation_scale):
            if ending is not None and (ending == naming.data or torch.rand((), generator=drawn) < 0.9):
                header["a" + ending], position = entry(position)
        text = json.dumps(header).encode()
        (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(position))
        report = inspect_file(tmp_path / "a")
        report.to_json()
        seen |= {tensor.layout for tensor in report.tensors}
    assert naming.layout in seen


def test_json(tmp_path):
    report = inspected(tmp_path, modelopt(global_scale=math.nan) | {"q.input_scale": f32(-math.inf)})
    content = json.loads(report.to_json())
    assert content["tensors"][0]["global_scale"] == ["nan"]
    assert content["tensors"][0]["activation_scale"] == ["-inf"]
    assert content["tensors"][0]["shape"] == [N, K]
    assert content["tensors"][0]["codes"] == list(report.tensors[0].codes)
    assert content["tensors"][0]["scale"]["count"] == N * K // 16
    report = inspect_file(CKPTS / "llmc_dense_NVFP4")
    assert json.loads(report.to_json())["others"]["BF16"] == {"tensors": 7, "nbytes": 33216}


def test_errors(tmp_path):
    with pytest.raises(StorageError, match="no safetensors file in it"):
        inspect_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        inspect_file(tmp_path / "none")
    (tmp_path / "a.safetensors").write_bytes(b"GGUF and more")
    with pytest.raises(StorageError, match="not a safetensors file"):
        inspect_file(tmp_path)
    inspected(tmp_path, {"x": f32(1.0)}, name="a.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StorageError, match=r"config\.json: not valid JSON"):
        inspect_file(tmp_path)
