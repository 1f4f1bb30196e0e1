"""Messages between processes, and tensors in shared memory."""

import json
import os
import pickle
import socket
import struct
import sys
import threading
import types
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from nibblas.arena.wire import (
    Channel,
    ProtocolError,
    Room,
    UnsendableError,
    bytes_at,
    checked,
    copy_of,
    describe,
    map_fd,
    pack,
    same_bytes,
    storage_bytes,
    unpack,
    write_tensors,
)


def frame(message: object) -> bytes:
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(content)) + content


@contextmanager
def other_end(answer):
    """A Channel whose other end answers each request with the bytes that answer(request) gives."""
    ours, theirs = socket.socketpair()

    def serve():
        with theirs:
            for request, _ in Channel(theirs).requests():
                theirs.sendall(answer(request))
                if request["do"] == "leave":
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    channel = Channel(ours, max_bytes=1 << 16)
    yield channel
    channel.close()
    thread.join(5)


def test_a_reply_answers_its_request():
    with other_end(lambda r: frame({"nonce": r["nonce"], "twice": 2 * r["n"]})) as channel:
        assert [channel.ask("double", 5, n=n)["twice"] for n in (1, 2)] == [2, 4]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda r: frame({"nonce": "0" * 32}), "does not answer"),
        (lambda r: frame({"good": True}), "does not answer"),
        (lambda r: frame([1]), "no JSON object"),
        (lambda r: frame(b"\xff"), "not JSON"),
        (lambda r: frame(b"[" * 60_000), "not JSON"),
        (lambda r: frame(b" " * 70_000), "70000 bytes"),
        (lambda r: pickle.dumps(r), "bytes, 65536 are allowed"),
    ],
)
def test_a_reply_that_breaks_the_protocol_is_an_error(answer, what):
    with other_end(answer) as channel, pytest.raises(ProtocolError, match=what):
        channel.ask("x", 5)


def test_a_second_reply_is_an_error_at_the_next_request():
    def answer(request):
        return 2 * frame({"nonce": request["nonce"]})

    with other_end(answer) as channel:
        channel.ask("x", 5)
        with pytest.raises(ProtocolError, match="nobody asked for"):
            channel.ask("x", 5)


def test_silence_is_a_timeout_and_a_cut_message_an_end():
    with other_end(lambda r: b"") as channel, pytest.raises(TimeoutError):
        channel.ask("x", 0.2)
    with other_end(lambda r: frame({"nonce": r["nonce"]})[:-1]) as channel, pytest.raises(EOFError):
        channel.ask("leave", 5)


def test_what_is_looked_at_while_waiting_may_end_the_wait():
    def look():
        raise InterruptedError("enough")

    with other_end(lambda r: b"") as channel, pytest.raises(InterruptedError, match="enough"):
        channel.ask("x", 5, look=look)


# --- rooms ---------------------------------------------------------------------------------------------------------


def test_a_room_can_be_neither_resized_nor_written_by_those_who_may_not():
    room = Room(4096, writable=False)
    room.memory[:3] = b"abc"
    with pytest.raises(PermissionError):
        os.ftruncate(room.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(room.fd, 8192)
    with pytest.raises(PermissionError):
        os.pwrite(room.fd, b"x", 0)
    with pytest.raises(PermissionError):
        map_fd(os.dup(room.fd), write=True)
    copy = map_fd(os.dup(room.fd))
    copy[:3] = b"xyz"  # stays in this mapping
    assert room.memory[:3] == b"abc"
    del copy
    room.close()


def test_a_writable_room_is_shared():
    room = Room(16, writable=True)
    theirs = map_fd(os.dup(room.fd), write=True)
    theirs[:2] = b"hi"
    assert room.memory[:2] == b"hi"
    del theirs
    room.close()


# --- data ----------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    width: int
    weight: torch.Tensor


def through_memory(data):
    parcel = pack(data)
    room = Room(parcel.nbytes, writable=False)
    told = json.loads(json.dumps(parcel.write(room.memory)))
    memory = map_fd(os.dup(room.fd))
    storages = []
    for offset, nbytes, kind in told["storages"]:
        assert kind == "cpu"
        assert offset % 256 == 0
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        storage_bytes(storage).copy_(bytes_at(memory, offset, nbytes))
        storages.append(storage)
    result = unpack(memory[: told["skeleton"]], storages)
    del memory
    room.close()
    return result, len(storages)


def test_data_keeps_layout_aliases_and_everything_that_is_no_tensor():
    base = torch.randn(4, 6)
    batch_last = torch.randn(2, 3, 4).permute(1, 2, 0)
    parameter = torch.nn.Parameter(torch.randn(3))
    data = {
        "views": (base, base[1:, ::2], base),
        "rest": [batch_last, parameter, torch.empty(0, 5), torch.tensor(2.5)],
        "codes": torch.randint(256, (8,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "plain": (1, "two", 3.0, None, True, torch.float16),
        "object": Settings(8, torch.arange(3)),
    }
    found, storages = through_memory(data)
    assert storages == 8
    whole, part, again = found["views"]
    assert whole is again
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert (part.stride(), part.storage_offset()) == ((6, 2), 6)
    assert torch.equal(part, base[1:, ::2])
    assert found["rest"][0].stride() == batch_last.stride()
    assert torch.equal(found["rest"][0], batch_last)
    assert type(found["rest"][1]) is torch.nn.Parameter
    assert found["rest"][1].requires_grad
    assert found["rest"][2].shape == (0, 5)
    assert found["rest"][3].item() == 2.5
    assert found["codes"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(found["codes"].view(torch.uint8), data["codes"].view(torch.uint8))
    assert torch.equal(found["complex"], data["complex"])
    assert found["plain"] == data["plain"]
    assert found["object"].width == 8
    assert torch.equal(found["object"].weight, torch.arange(3))


def test_a_copy_has_storages_of_its_own():
    a = torch.zeros(3)
    copy = copy_of(pack((a, a)))
    copy[0].add_(1)
    assert copy[1].tolist() == [1, 1, 1]
    assert a.tolist() == [0, 0, 0]


def test_same_bytes():
    a = torch.tensor([[0.0, float("nan")], [1.0, 2.0]])
    assert same_bytes(a, a.T.contiguous().T)
    assert same_bytes(a[:0], a[2:])
    assert same_bytes(torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j))
    for other in (a.T, -a, a[0], a.flatten(), a.view(torch.int32), torch.where(a == 0, -0.0, a)):
        assert not same_bytes(a, other)


def test_data_of_the_reference_module_and_odd_tensors_are_refused(monkeypatch):
    module = types.ModuleType("reference")
    exec("class Cache:\n    pass\ndef build(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "reference", module)
    for value in (module.Cache(), module.Cache, module.build):
        with pytest.raises(UnsendableError, match=r"of reference\.py, which is kept from submissions"):
            pack([value])
    for value in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(UnsendableError, match="a tensor with layout"):
            pack(value)
    with pytest.raises(UnsendableError, match="can't be handed to another process"):
        pack(threading.Lock())


# --- outputs -------------------------------------------------------------------------------------------------------


def returned(output):
    description, tensors = describe(output)
    found = checked(json.loads(json.dumps(description)), "cpu")
    room = Room(found.nbytes, writable=True)
    write_tensors(tensors, found.offsets, room.memory)
    result = checked(json.loads(json.dumps(found.to_json()))).build(room.memory, torch.device("cpu"))
    room.close()
    return result


def test_an_output_arrives_as_it_was():
    a = torch.randn(3, 4).t()
    codes = torch.randint(256, (2, 8), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    grads = torch.randn(2, requires_grad=True) * 2
    output = (a, [codes, {"x": torch.tensor(True)}], None, 1, float("inf"), "word", grads, torch.empty(0, 3))
    found = returned(output)
    assert torch.equal(found[0], a)
    assert torch.equal(found[1][0].view(torch.uint8), codes.view(torch.uint8))
    assert found[1][1]["x"].item() is True
    assert found[2:6] == (None, 1, float("inf"), "word")
    assert torch.equal(found[6], grads.detach())
    assert found[7].shape == (0, 3)


def test_a_named_tuple_of_torch_is_a_tuple():
    result = returned(torch.geqrf(torch.randn(3, 3)))
    assert type(result) is tuple
    assert [t.shape for t in result] == [(3, 3), (3,)]


def test_notes_on_a_tensor_are_no_fault():
    """As torch.compile leaves them."""
    tensor = torch.arange(3.0)
    tensor._dynamo_propagated_dynamic_indices = {0}
    assert torch.equal(returned(tensor), torch.arange(3.0))


class Lazy(torch.Tensor):
    pass


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.item = lambda: 1.0  # type: ignore[method-assign]
    return tensor


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (torch.zeros(2).as_subclass(Lazy), "Lazy"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        ([torch.zeros(1), iter(())], "list_iterator|tuple_iterator"),
        (torch.eye(2).to_sparse(), "sparse"),
        (with_attribute(), r"in place of torch's: \['item'\]"),
        (torch.empty(2, device="meta"), "on meta, need cpu"),
        ([[[[[[[[[[1]]]]]]]]]], "8 levels"),
        ([0] * 5000, "4096 values"),
    ],
)
def test_what_may_not_be_returned_is_told_in_words(output, what):
    description, _ = describe(output)
    with pytest.raises(UnsendableError, match=what):
        checked(json.loads(json.dumps(description)), "cpu")


FACT = {"dtype": "float32", "shape": [2], "device": "cpu", "layout": "torch.strided", "replaced": []}


@pytest.mark.parametrize(
    "description",
    [
        None,
        {},
        {"tree": {"tensor": 0}, "tensors": []},
        {"tree": {"tensor": True}, "tensors": [FACT, FACT]},
        {"tree": {"list": [{"tensor": 0}, {"tensor": 0}]}, "tensors": [FACT]},
        {"tree": {"value": 1}, "tensors": [FACT]},
        {"tree": {"tensor": 0}, "tensors": [{**FACT, "shape": [-1]}]},
        {"tree": {"tensor": 0}, "tensors": [{**FACT, "shape": [2**40, 2**40]}]},
        {"tree": {"tensor": 0}, "tensors": [{**FACT, "shape": [2.0]}]},
        {"tree": {"tensor": 0}, "tensors": [{**FACT, "dtype": "nn"}]},
        {"tree": {"tensor": 0}, "tensors": [{**FACT, "dtype": ["float32"]}]},
        {"tree": {"value": [1]}, "tensors": []},
        {"tree": {"float": "x"}, "tensors": []},
        {"tree": {"code": "1"}, "tensors": []},
        {"tree": {"value": 1, "tensor": 0}, "tensors": [FACT]},
        {"tree": "tensor", "tensors": []},
    ],
)
def test_a_forged_description_breaks_the_protocol(description):
    with pytest.raises(ProtocolError):
        checked(description, "cpu")
