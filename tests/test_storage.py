"""Files: nothing lost, nothing half written, nothing damaged read as data."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nibblas import layouts, storage
from nibblas.formats import MXFP4, NVFP4
from nibblas.layouts import LAYOUTS, LINEAR, TiledLayout
from nibblas.storage import StorageError, load, read_header, save
from nibblas.tensor import ScaledTensor

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def random_tensor(format, *shape, seed=0, layout=LINEAR, data_layout=LINEAR, **more):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)

    *batch, N, K = shape
    plain = ScaledTensor(draw(*batch, N, K // 2), draw(*batch, N, K // format.block_size), format, **more)
    return plain.with_layout(layout, data_layout)


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def assert_same(a, b):
    if isinstance(a, ScaledTensor):
        assert storage.facts(a) == storage.facts(b)
        a, b = storage.parts("x", a), storage.parts("x", b)
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    else:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(storage.as_bytes(a), storage.as_bytes(b))


@pytest.mark.parametrize("data_layout", ["LINEAR", "SHUFFLED_16x16", "ROWS_16x4"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if isinstance(LAYOUTS[name], TiledLayout)])
@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
def test_every_fact_survives(tmp_path, format, layout, data_layout):
    tensor = random_tensor(format, 3, 33, 96, layout=LAYOUTS[layout], data_layout=LAYOUTS[data_layout], rotation=32)
    save(tmp_path / "a", {"layer.weight": tensor})
    assert_same(load(tmp_path / "a")["layer.weight"], tensor)


def many():
    """Tensors of every dtype, shape and kind that a file may hold."""
    bytes_ = torch.arange(48, dtype=torch.uint8)
    one = random_tensor(NVFP4, 8, 64, global_scale=torch.tensor(2.0**-9), scale_rule="four_over_six")
    experts = random_tensor(NVFP4, 5, 8, 64, global_scale=torch.tensor([1.0, 2, 3, 4, 5]), seed=1)
    plain = {
        f"plain.{name}": bytes_.clone().view(dtype).reshape(2, -1)
        for name, dtype in ((name, stored.torch) for name, stored in storage.DTYPES.items())
        if dtype not in (None, torch.bool)
    }
    return {
        "z.weight": one,
        "a.experts": experts,
        "m": random_tensor(MXFP4, 4, 32, seed=2),
        "vector": ScaledTensor(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), MXFP4),
        "empty": random_tensor(NVFP4, 0, 16),
        **plain,
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }


def test_save_of_load_is_byte_identical(tmp_path):
    tensors = many()
    save(tmp_path / "a", tensors, {"format": "pt", "b": "2", "a": "ü"})
    again = load(tmp_path / "a")
    assert again.keys() == tensors.keys()
    for name in tensors:
        assert_same(again[name], tensors[name])
    save(tmp_path / "b", dict(reversed(again.items())), {"a": "ü", "b": "2", "format": "pt"})
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert read_header(tmp_path / "a").metadata["a"] == "ü"


def test_other_readers_see_plain_tensors_aligned(tmp_path):
    tensors = many()
    save(tmp_path / "a", tensors)
    header = read_header(tmp_path / "a")
    assert header.data_start % 8 == 0
    for entry in header.entries.values():
        assert entry.start % max(storage.DTYPES[entry.dtype].bits // 8, 1) == 0, entry
    with safe_open(tmp_path / "a", "pt") as file:
        assert_same(file.get_tensor("z.weight"), tensors["z.weight"].data)
        assert_same(file.get_tensor("z.weight.scale"), tensors["z.weight"].scale)
        assert file.get_tensor("z.weight.global_scale").item() == 2.0**-9
        assert_same(file.get_tensor("plain.F4"), tensors["plain.F4"])


def test_views_and_sliced_float4_are_saved(tmp_path):
    wide = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    save(
        tmp_path / "a",
        {"f4": wide.view(torch.float4_e2m1fn_x2)[:, :4], "e8m0": wide.view(torch.float8_e8m0fnu)[1:, ::2]},
    )
    got = load(tmp_path / "a")
    assert torch.equal(got["f4"].view(torch.uint8), wide[:, :4])
    assert torch.equal(got["e8m0"].view(torch.uint8), wide[1:, ::2])


def test_read_takes_rows(tmp_path):
    tensors = {"w": torch.arange(60.0).reshape(3, 4, 5), "s": torch.tensor(7.0), "e": torch.zeros(2, 0)}
    save(tmp_path / "a", tensors)
    header = read_header(tmp_path / "a")
    assert torch.equal(header.read("w"), tensors["w"])
    assert torch.equal(header.read("w", 5, 9), tensors["w"].reshape(12, 5)[5:9])
    assert header.read("w", 3, 3).shape == (0, 5)
    assert header.read("s") == 7
    assert header.read("e").shape == (2, 0)
    assert header.read("e", 0, 1).shape == (1, 0)
    os.truncate(tmp_path / "a", (tmp_path / "a").stat().st_size - 8)
    with pytest.raises(StorageError, match="the file ended inside w"):
        header.read("w")


def test_header_represents_f4_and_e8m0(tmp_path):
    header = {
        "w": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
        "s": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [8, 11]},
        "i": {"dtype": "I8", "shape": [1], "data_offsets": [11, 12]},
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [12, 15]},
    }
    got = read_header(
        raw_file(tmp_path / "a", header, bytes([0x52, 0xE1, 7, 8, 9, 10, 11, 12, 126, 127, 128, 255]) + bytes(3))
    )
    assert (got.entries["w"].shape, got.entries["w"].nbytes) == ((2, 8), 8)
    packed = got.read("w").view(torch.uint8)
    assert packed.shape == (2, 4)
    assert packed[0, :2].tolist() == [0x52, 0xE1]
    assert got.read("s").dtype == torch.float8_e8m0fnu
    assert got.read("s").float().tolist() == [0.5, 1.0, 2.0]
    assert got.read("i").tolist() == [-1]
    with pytest.raises(StorageError, match="F6_E2M3, which torch doesn't have"):
        got.read("f6")
    header = {"w": {"dtype": "F4", "shape": [2, 7], "data_offsets": [0, 7]}}
    with pytest.raises(StorageError, match=r"w is F4 of shape \[2, 7\], need an even last dimension"):
        read_header(raw_file(tmp_path / "b", header, bytes(7)))


def item(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":', "not a valid safetensors header"),
        (b'{"a":1}', "not a valid safetensors header"),
        (b'{"a":{"dtype":"U8","shape":[4]}}', "data_offsets"),
        (b'{"a":%b,"a":%b}' % ((json.dumps(item()).encode(),) * 2), "a name occurs twice"),
        ({"a": item("U4")}, "unknown dtype 'U4'"),
        ({"a": item(shape=(-4,))}, "not negative"),
        ({"a": item(shape=(True, 4))}, "not negative"),
        ({"a": item(offsets=(0, 4, 8))}, "need integers"),
        ({"a": item(shape=(5,))}, "which is 5 bytes, and has 4"),
        ({"a": item("F32")}, "which is 16 bytes, and has 4"),
        ({"a": item(), "b": item(offsets=(3, 7))}, "b at bytes 3..7 overlaps"),
        ({"a": item(), "b": item(offsets=(0, 4))}, "b at bytes 0..4 overlaps"),
        ({"a": item(), "b": item(offsets=(5, 9))}, "b at bytes 5..9 leaves a gap"),
        ({"a": item(), "b": item(offsets=(4, 8))}, "truncated: it is .* tells of"),
        ({}, "too long: it is"),
        ({"a": item(), "__metadata__": {"x": 1}}, "not a table of strings"),
        ({"a": item(), "__metadata__": []}, "not a valid safetensors header"),
        (b"[" * 100_000, "not a safetensors file"),
        (b'{"a":' + b"[" * 100_000, "not a valid safetensors header"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, header, message):
    with pytest.raises(StorageError, match=message) as error:
        read_header(raw_file(tmp_path / "bad.safetensors", header, bytes(4)))
    assert "bad.safetensors" in str(error.value)


def test_files_that_are_not_safetensors(tmp_path):
    path = tmp_path / "a"
    for content in (b"", b"GGUF", b"GGUF\x03\0\0\0\0\0\0", bytes(8), (2).to_bytes(8, "little")):
        path.write_bytes(content)
        with pytest.raises(StorageError, match="not a safetensors file"):
            read_header(path)
    with pytest.raises(StorageError, match="a header of 100000001 bytes"):
        read_header(raw_file(path, {}, length=100_000_001))
    with pytest.raises(StorageError, match="truncated in its header, which is 3 bytes of a file of 10"):
        read_header(raw_file(path, {}, length=3))
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none")


def test_every_truncation_is_noticed(tmp_path):
    save(tmp_path / "a", {"w": random_tensor(NVFP4, 2, 16)})
    content = (tmp_path / "a").read_bytes()
    for size in range(len(content)):
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(StorageError):
            load(tmp_path / "b")


def edited(tmp_path, change):
    """A file of one ScaledTensor w whose parsed nibblas metadata went through `change`."""
    save(tmp_path / "a", {"w": random_tensor(NVFP4, 2, 16, global_scale=torch.tensor(1.0))})
    header = read_header(tmp_path / "a")
    facts = json.loads(header.metadata["nibblas"])
    change(facts)
    dropped = facts.pop("drop", ())
    stored = {name: header.read(name) for name in header.entries if name not in dropped}
    save_file(stored, tmp_path / "b", {"nibblas": json.dumps(facts)})
    return tmp_path / "b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(version=2), "version 2, this nibblas reads 1"),
        (lambda f: f.pop("version"), "metadata is not understood"),
        (lambda f: f.pop("tensors"), "metadata is not understood"),
        (lambda f: f.update(tensors=[]), "metadata is not understood"),
        (lambda f: f["tensors"].update(w=1), "metadata is not understood"),
        (lambda f: f.update(drop=["w.scale"]), r"w lacks w\.scale$"),
        (lambda f: f.update(drop=["w", "w.global_scale"]), r"w lacks w, w\.global_scale$"),
        (lambda f: f["tensors"]["w"].update(format="int4"), "w can't be read: format 'int4' is unknown"),
        (lambda f: f["tensors"]["w"].update(layout="SPIRAL"), "w can't be read: layout 'SPIRAL' is unknown"),
        (lambda f: f["tensors"]["w"].update(format="mxfp4"), "w can't be read: ScaledTensor: K = 16"),
        (lambda f: f["tensors"]["w"].update(layout="BLOCKED_128x4"), "w can't be read: ScaledTensor: scale has shape"),
        (lambda f: f["tensors"]["w"].pop("rotation"), "w can't be read: 'rotation'"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path, change, message):
    assert load(edited(tmp_path, lambda facts: None)).keys() == {"w"}
    with pytest.raises(StorageError, match=message):
        load(edited(tmp_path, change))


def test_a_foreign_file_says_what_to_use(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "a")
    with pytest.raises(StorageError, match=r"no nibblas metadata.*safetensors\.torch\.load_file.*nibblas inspect"):
        load(tmp_path / "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_global_scale_must_be_finite(tmp_path, value):
    with pytest.raises(StorageError, match="w has a global_scale that is not finite"):
        save(tmp_path / "a", {"w": random_tensor(NVFP4, 2, 16, global_scale=torch.tensor(value))})
    assert not any(tmp_path.iterdir())
    save(tmp_path / "a", {"w": random_tensor(NVFP4, 2, 16, global_scale=torch.tensor(1.0))})
    content = (tmp_path / "a").read_bytes()
    value = torch.tensor(value).numpy().tobytes()
    start = read_header(tmp_path / "a").data_start
    (tmp_path / "a").write_bytes(content[:start] + value + content[start + 4 :])
    with pytest.raises(StorageError, match="w has a global_scale that is not finite"):
        load(tmp_path / "a")


def test_save_refuses_what_it_cannot_store(tmp_path):
    w = random_tensor(NVFP4, 2, 16)
    with pytest.raises(StorageError, match=r"two tensors would be stored as w\.scale"):
        save(tmp_path / "a", {"w": w, "w.scale": torch.zeros(1)})
    with pytest.raises(TypeError, match="w is a list, need a Tensor or a ScaledTensor"):
        save(tmp_path / "a", {"w": [1.0]})
    with pytest.raises(TypeError, match=r"save: path is a dict, need a path \(the tensors come second\)"):
        save({"w": w}, tmp_path / "a")
    with pytest.raises(TypeError, match="save: tensors is a ScaledTensor, need a dict of tensors by name"):
        save(tmp_path / "a", w)
    with pytest.raises(StorageError, match="complex128"):
        save(tmp_path / "a", {"w": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(StorageError, match="sparse"):
        save(tmp_path / "a", {"w": torch.zeros(2, 2).to_sparse()})
    for metadata in ({"nibblas": "x"}, {"x": 1}):
        with pytest.raises(StorageError, match="metadata needs strings"):
            save(tmp_path / "a", {"w": w}, metadata)
    assert not any(tmp_path.iterdir())


def test_paths_and_names_that_are_none(tmp_path, monkeypatch):
    w = torch.ones(2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="names need to be strings, got 1, None"):
        save("x", {1: w, "a": w, None: w})
    for folder in (".", tmp_path, ""):
        with pytest.raises(StorageError, match="is a folder, need a file's name"):
            save(folder, {"w": w})
    with pytest.raises(StorageError, match=r"absent/x\.safetensors: there is no folder absent"):
        save("absent/x.safetensors", {"w": w})
    assert not list(tmp_path.iterdir())
    os.mkfifo("pipe")
    with pytest.raises(StorageError, match="pipe is a device, pipe or socket, need a regular file"):
        save("pipe", {"w": w})
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("device", ["abacus", pytest.param("cuda", marks=no_gpu), pytest.param("cuda:7", marks=no_gpu)])
def test_load_names_a_device_that_is_not_there(tmp_path, device):
    save(tmp_path / "x", {"w": torch.ones(2)})
    with pytest.raises(StorageError, match=f"load: there is no device '{device}' here"):
        load(tmp_path / "x", device=device)
    assert load(tmp_path / "x", device=torch.device("cpu"))["w"].tolist() == [1, 1]


def test_the_meta_device_has_nothing_to_save_or_load(tmp_path):
    w = random_tensor(NVFP4, 2, 16, global_scale=torch.tensor(1.0))
    empty = {"w": w.to("meta"), "x": torch.ones(2), "y": torch.ones(2, device="meta")}
    with pytest.raises(StorageError, match=r"^save: w, w\.scale, w\.global_scale, y on the meta device"):
        save(tmp_path / "a", empty)
    assert not any(tmp_path.iterdir())
    save(tmp_path / "a", {"w": w})
    with pytest.raises(StorageError, match=r"can't read .*a to device 'meta'"):
        load(tmp_path / "a", "meta")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    save(tmp_path / "a", {"w": torch.zeros(4)})
    before = (tmp_path / "a").read_bytes()
    written = []

    def fails_on_the_second(tensor):
        if written:
            raise OSError(28, "No space left on device")
        written.append(tensor)
        return tensor.view(torch.uint8)

    monkeypatch.setattr(storage, "as_bytes", fails_on_the_second)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "a", {"w": torch.ones(4), "x": torch.ones(4)})
    assert len(written) == 1
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_can_be_saved_over_itself(tmp_path):
    save(tmp_path / "a", many())
    before = (tmp_path / "a").read_bytes()
    save(tmp_path / "a", load(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == before


def test_every_layout_has_a_name_that_finds_it():
    for layout in vars(layouts).values():
        if isinstance(layout, layouts.TiledLayout):
            assert layouts.as_layout(layout.name) is layout
