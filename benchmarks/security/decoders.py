"""Every decoder of data that Myriad does not trust, as a function of bytes, for tests and for `fuzz`.

A target decodes an input through public functions, and uses what it returns as its first reader does. It may
raise only the errors that these functions document. `TARGETS` is the table of all of them; ``slow`` ones read
files that hold more than a header, at a few hundred to a few thousand a second.
"""

import gzip
import io
import json
import pickle
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mutations import BYTES, JSON, JSON_LINES, TOML, Codec, dump_json
from myriad.errors import MyriadError, RunFailedError

__all__ = ["TARGETS", "Target", "check"]

_MOST_TEXT = 2**16


@dataclass(frozen=True)
class Target:
    """A decoder, with valid inputs and the errors that it documents."""

    name: str
    decode: Callable[[bytes], object]
    examples: Callable[[], Sequence[bytes]]
    """Function that returns valid inputs, which are then changed."""
    codec: Codec = BYTES
    errors: tuple[type[Exception], ...] = (MyriadError,)
    """What it may raise, each with a text of one line."""
    slow: bool = False
    examples_are_read: bool = True
    """Whether the valid inputs are accepted; a valid proof depends on a nonce of this end."""


def check(target: Target, data: bytes) -> bool:
    """Decode an input, and return whether it was accepted. Any error but the documented ones comes through,
    and so does ``AssertionError`` for a text that is not one line."""
    try:
        target.decode(data)
    except target.errors as error:
        text = str(error)
        assert text and len(text.splitlines()) == 1, f"not one line: {text[:300]!r}"
        assert len(text) <= _MOST_TEXT + 8 * len(data), f"a text of {len(text)} characters"
        return False
    return True


@cache
def _scratch() -> Path:
    """Return a folder in memory that ends with this process."""
    folder = tempfile.TemporaryDirectory(
        prefix="myriad-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[Any] = []


def _at(name: str) -> Path:
    path = _scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(name: str, data: bytes) -> Path:
    path = _at(name)
    path.write_bytes(data)
    return path


# Messages between processes


_KEY = bytes(range(64))


def _frames(data: bytes) -> None:
    """Frames of a peer that has not authenticated, at both ends."""
    from myriad.wire.frame_reader import FrameReader
    from myriad.wire.framing import FrameKind
    from myriad.wire.handshake import (
        ANSWER_BYTES,
        NONCE_BYTES,
        PROOF_BYTES,
        ConnectorHandshake,
        ListenerHandshake,
    )

    frames = FrameReader()
    frames.add(data)
    if data[3:4] == bytes([FrameKind.ANSWER]):
        answer = frames.next_body(FrameKind.ANSWER, ANSWER_BYTES)
        ListenerHandshake("driver", [b"s" * 32]).accept(answer or b"")
        return
    connector = ConnectorHandshake("driver", b"s" * 32)
    if (challenge := frames.next_body(FrameKind.CHALLENGE, NONCE_BYTES)) is not None:
        connector.answer(challenge)
        if (proof := frames.next_body(FrameKind.PROOF, PROOF_BYTES)) is not None:
            connector.finish(proof)


def _frame_examples() -> list[bytes]:
    from myriad.wire.framing import FrameKind, pack_header

    return [pack_header(FrameKind.CHALLENGE, 32) + bytes(32)]


def _driver_messages(data: bytes) -> None:
    """Frames of a peer that has authenticated."""
    from myriad.supervise.authenticated_link import MAX_BYTES
    from myriad.supervise.messages import OBSERVED, ORDERS
    from myriad.wire.frame_codes import DirectionCodes
    from myriad.wire.frame_reader import FrameReader
    from myriad.wire.framing import FrameKind
    from myriad.wire.message_codec import read_message

    frames = FrameReader()
    frames.codes = DirectionCodes(_KEY)
    frames.add(data)
    while (body := frames.next_body(FrameKind.MESSAGE, MAX_BYTES)) is not None:
        read_message(body, (*OBSERVED, *ORDERS))


def _driver_examples() -> list[bytes]:
    from myriad.supervise.messages import Beat, NodeJoined, Start, Stop, Traced
    from myriad.supervise.observations import DeviceTrouble, Digest, LinkStatus, RankExited, RankStatus
    from myriad.wire.message_codec import encode

    seen = RankStatus(1, 77, "S", "step", "reduce", 4, 9, 8, 0.25, 0.5, digests=(Digest(4, 99),))
    ended = RankExited(0, 3, 1, -9, "killed", 12, "a\nb", "/x.log")
    beat = Beat(
        0, 3, 4000, (seen, seen), (LinkStatus("eth1", True, 3, 0),), (DeviceTrouble(1, 5, 3, "user", "Xid"),)
    )
    joined = NodeJoined(1, 3, "::1", 9, 2, 10**12, (1, 2), (ended,), False, "rack2:77")
    traced = Traced(0, 1, ("traces/a",), ("slow",), ())
    messages = [beat, joined, traced, Start(3, 8, (4, 5), "127.0.0.1", 29500), Stop()]
    return [*(_driver_stream([encode(one)]) for one in messages), _driver_stream(map(encode, messages[2:]))]


_WIRE_HEAD = struct.Struct("!2sBBI")


def _driver_stream(values: Any) -> bytes:
    """Return frames with right codes."""
    from myriad.wire.frame_codes import DirectionCodes
    from myriad.wire.framing import FrameKind, pack_header

    codes, stream = DirectionCodes(_KEY), b""
    for value in values:
        body = dump_json(value)
        header = pack_header(FrameKind.MESSAGE, len(body))
        stream += header + body + codes.of_message(header, body)
    return stream


def _load_driver(data: bytes) -> Any:
    values = []
    while data:
        *_, size = _WIRE_HEAD.unpack_from(data)
        values.append(json.loads(data[8 : 8 + size]))
        data = data[8 + size + 32 :]
    return values


def _snapshot_messages(data: bytes, *, has_codes: bool) -> None:
    """Messages between ranks and snapshot servers: local, or between nodes with the code of each frame."""
    from myriad.wire.frame_codes import DirectionCodes
    from myriad.wire.handshake import SessionCodes
    from myriad.wire.socket_channel import SocketChannel

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        channel = SocketChannel(ours)
        channel.max_bytes = 2**20
        channel.set_timeout(5.0)
        if has_codes:  # as after the handshake
            channel._codes = SessionCodes(DirectionCodes(_KEY), DirectionCodes(_KEY))
        while channel.is_open():
            channel.receive()


def _snapshot_authentication(data: bytes) -> None:
    from myriad.wire.framing import FrameKind
    from myriad.wire.socket_channel import SocketChannel

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        channel = SocketChannel(ours)
        if data[3:4] == bytes([FrameKind.ANSWER]):
            channel.accept("snapshot server", [b"s" * 32])
        else:
            channel.connect("snapshot server", b"s" * 32)


def _authentication_examples() -> list[bytes]:
    """Return a challenge without a proof, which is what a peer without the secret can send."""
    from myriad.wire.framing import FrameKind, pack_header

    first = pack_header(FrameKind.CHALLENGE, 32) + bytes(32)
    return [first, first + pack_header(FrameKind.PROOF, 32) + bytes(32)]


def _snapshot_stream(values: Any, *, has_codes: bool) -> bytes:
    """Return messages as a channel sends them: ``[message, hexadecimal payload]`` each."""
    from myriad.wire.frame_codes import DirectionCodes
    from myriad.wire.framing import FrameKind, pack_header

    codes, stream = DirectionCodes(_KEY), b""
    for value, payload in values:
        body, content, kind = dump_json(value), bytes.fromhex(payload), FrameKind.MESSAGE
        if content:
            body, kind = struct.pack("!Q", len(content)) + body, FrameKind.MESSAGE_WITH_PAYLOAD
        header = pack_header(kind, len(body))
        stream += header + body + (codes.of_message(header, body) if has_codes else b"")
        if content:
            stream += pack_header(FrameKind.PAYLOAD, len(content)) + content
            stream += codes.of_payload(content) if has_codes else b""
    return stream


def _load_snapshot(data: bytes, *, has_codes: bool) -> Any:
    values: list[Any] = []
    while data:
        *_, kind, size = _WIRE_HEAD.unpack_from(data)
        body, data = data[8 : 8 + size], data[8 + size + 32 * has_codes :]
        payload = b""
        if kind == 5:
            (count,) = struct.unpack_from("!Q", body)
            body, payload, data = body[8:], data[8 : 8 + count], data[8 + count + 16 * has_codes :]
        values.append([json.loads(body), payload.hex()])
    return values


def _snapshot_target(name: str, *, has_codes: bool) -> Target:
    dump = partial(_snapshot_stream, has_codes=has_codes)
    message, payload = {"op": "put", "rank": 1, "step": 3}, b"payload".hex()
    return Target(
        name,
        partial(_snapshot_messages, has_codes=has_codes),
        lambda: [
            dump([[message, payload]]),
            dump([[{"op": "hello", "names": ["a"]}, ""], [{"op": "list"}, ""]]),
        ],
        Codec(partial(_load_snapshot, has_codes=has_codes), dump, sealed=True),
        (OSError,),
    )


def _doctor_findings(data: bytes) -> None:
    """What the first node sends to the others, behind the same channel as a snapshot server's."""
    from myriad.doctor.pair_tests.pair_findings import read_findings

    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    read_findings(found)


_FINDINGS: dict[str, Any] = {
    "culprits": [{"kind": "node", "nodes": ["a"], "bytes_per_second": 1e9, "tests": 3}],
    "expected": 2.5e9,
    "rounds": 2,
    "tests": 7,
    "complaints": {"b": ["memory bandwidth"]},
    "missing": ["c"],
    "groups": [{"kind": "one switch", "backend": "gloo", "nodes": ["a", "b"], "all_reduce": 1e9}],
}


def _rank_messages(data: bytes) -> None:
    import torch

    from myriad.checkpoint.format.checkpoint_manifest import StoredFile
    from myriad.comm import typed_collectives

    decode = typed_collectives._decode  # behind the collective, which needs other processes
    decode(torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8), dict[str, StoredFile], 3)


def _rank_examples() -> list[bytes]:
    chunk = {"tensor": "w", "offsets": [0], "shape": [2], "start": 0, "head": 0, "bytes": 8, "tail": 0}
    chunk |= {"xxh3_128": "0" * 32, "envelope": "1" * 32}
    return [dump_json([{"__0_0.distcp": {"bytes": 8, "chunks": [chunk], "xxh3_128": None}}])]


# What a page receives


def _span_batch(data: bytes) -> None:
    from myriad.dashboard.collector import BatchDeduplicator
    from myriad.dashboard.store.span_store import SpanStore
    from myriad.telemetry.span_io.span_batch import decode, pool

    batch = decode(data)
    store = SpanStore(4, 100, 2**22)
    kept = store.of_layout(batch)
    store.check(kept)
    BatchDeduplicator().is_new(batch)
    store.add_checked([kept])
    pool([batch, batch])


def _span_examples() -> list[bytes]:
    from myriad.telemetry.span_io.span_batch import Origin, SpanBatch, encode
    from myriad.telemetry.span_io.span_records import RECORD

    records = np.zeros(3, RECORD)
    records["start_ns"], records["duration_ns"] = [10**18, 10**18 + 10, 10**18 + 20], 5
    records["step"], records["name"], records["rank"] = 1, [0, 1, 0], [0, 1, 3]
    batch = SpanBatch(0, 1, ("forward", "reduce"), records, 2, 1e-6, Origin("node-0", 3, 1))
    return [encode(batch), encode(SpanBatch(1, 2, (), np.zeros(0, RECORD)))]


_SPANS = struct.Struct("<4sHHI")


def _load_spans(data: bytes) -> Any:
    _, _, head, _ = _SPANS.unpack_from(data)
    return {
        "head": json.loads(data[_SPANS.size : _SPANS.size + head]),
        "records": list(data[_SPANS.size + head :]),
    }


def _dump_spans(value: Any) -> bytes:
    head, records = dump_json(value["head"]), bytes(one % 256 for one in value["records"])
    return _SPANS.pack(b"MYSP", 1, len(head), len(records)) + head + records


def _span_file(data: bytes) -> None:
    from myriad.telemetry.span_io.span_files import read_span_file

    read_span_file(_write("attempt-1-node-0-1.parquet", data))


def _span_file_examples() -> list[bytes]:
    from myriad.telemetry.span_io.span_batch import decode
    from myriad.telemetry.span_io.span_files import write_span_file

    path = _at("example.parquet")
    write_span_file(path, decode(_span_examples()[0]))
    return [path.read_bytes()]


def _query(data: bytes) -> None:
    from myriad.dashboard.api.query_parameters import as_int, as_range, as_ranks, as_seconds

    query = {"q": data.decode(errors="replace")}
    for read in (
        partial(as_int, default=0, least=-5, most=10**6),
        as_range,
        as_seconds,
        partial(as_ranks, world=64),
    ):
        try:
            read(query, "q")
        except ValueError as error:
            assert "\n" not in str(error), str(error)


def _trace_request(data: bytes) -> None:
    import asyncio

    from starlette.requests import Request

    from myriad.dashboard.api.export_api import trace_endpoint

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    length = [(b"content-length", str(len(data)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": length, "query_string": b""}
    answer = trace_endpoint(lambda ranks, seconds, what: {"files": [], "found": [], "problems": []})
    asyncio.run(answer(Request(scope, receive)))


# Checkpoints


_MANIFEST: dict[str, Any] = {
    "version": 2,
    "step": 20,
    "attempt": 1,
    "time": 1.7e9,
    "progress": {"step": 20},
    "layout": {"dp": 1},
    "data": {"sample": 40},
    "versions": {"torch": "2.0"},
    "tensors": {
        "model.w": {"shape": [2, 3], "dtype": "float32"},
        "progress": {"shape": [4], "dtype": "uint8"},
    },
    "files": {
        ".metadata": {"bytes": 3, "xxh3_128": xxhash.xxh3_128_hexdigest(b"abc")},
        "__0_0.distcp": {
            "bytes": 44,
            "chunks": [
                {
                    "tensor": tensor,
                    "offsets": [0] * len(shape),
                    "shape": shape,
                    "start": start,
                    "head": 4,
                    "bytes": size,
                    "tail": 4,
                    "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(size)),
                    "envelope": xxhash.xxh3_128_hexdigest(bytes(8)),
                }
                for tensor, shape, start, size in (("model.w", [2, 3], 0, 24), ("progress", [4], 32, 4))
            ],
        },
    },
}


def _seal_manifest(value: Any) -> bytes:
    if not isinstance(value, dict):
        return dump_json(value)
    value = {key: one for key, one in value.items() if key != "xxh3_128"}
    own = xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
    return dump_json(value | {"xxh3_128": own})


def _manifest(data: bytes) -> None:
    from myriad.checkpoint.format.checkpoint_manifest import encode_manifest, parse_manifest

    again = encode_manifest(parse_manifest(data))
    assert encode_manifest(parse_manifest(again)) == again


def _stored_checkpoint(data: bytes) -> None:
    """Verify, list and open a checkpoint whose manifest is the input."""
    from myriad.checkpoint.checkpoint_files import load_model
    from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
    from myriad.checkpoint.storage.checkpoint_list import list_checkpoint

    if not (_scratch() / "kept/step-20").is_dir():
        _write("kept/step-20/.metadata", b"abc")
        _write("kept/step-20/__0_0.distcp", bytes(44))
    _write("kept/step-20/manifest.json", data)
    checkpoint = CheckpointFolder(_scratch() / "kept").at_step(20)
    row = list_checkpoint(checkpoint)
    assert row["time"] is None or 0 <= row["time"] < 2**40
    if problems := verify(checkpoint):
        raise RunFailedError(problems[0])
    try:
        load_model(checkpoint.where)
    except RunFailedError as error:
        raise AssertionError("whole, and not loaded") from error


def _signature(data: bytes) -> None:
    from myriad.checkpoint.storage.signature import parse_signature

    parse_signature(data, _signature_key())


@cache
def _signature_key() -> Any:
    from myriad.checkpoint.storage.signature import load_key

    return load_key(_write("signature-secret", b"s" * 40), "--key")


def _signed(value: Any) -> bytes:
    """Sign with the right key, as who has it."""
    if not isinstance(value, dict):
        return dump_json(value)
    signed = {key: one for key, one in value.items() if key != "signature"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
    return dump_json(signed | {"signature": _signature_key().sign(text).hex()})


def _signature_examples() -> list[bytes]:
    key = _signature_key()
    files = {"model.safetensors": {"bytes": 9, "sha256": "0" * 64}, "a/b": {"bytes": 0, "sha256": "1" * 64}}
    signed = {"format": "myriad-signature-1", "algorithm": key.algorithm, "key": key.key_id}
    return [_signed(signed | {"files": files})]


def _key_file(data: bytes) -> None:
    from myriad.checkpoint.storage.signature import load_key

    _ = load_key(_write("key", data), "--key").key_id


_PEM = b"""-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
"""


_METADATA: dict[str, Any] = {
    "tensors": {
        "w": {
            "size": [2, 2],
            "chunks": [{"offsets": [0, 0], "sizes": [1, 2]}, {"offsets": [1, 0], "sizes": [1, 2]}],
        },
        "b": {"size": [3], "chunks": [{"offsets": [0], "sizes": [3]}]},
    },
    "places": [
        {"fqn": "w", "offset": [0, 0], "file": "__0_0.distcp", "at": 0, "length": 0},
        {"fqn": "w", "offset": [1, 0], "file": "__0_0.distcp", "at": 0, "length": 0},
        {"fqn": "b", "offset": [0], "file": "__0_0.distcp", "at": 0, "length": 0},
    ],
}


@cache
def _dcp_archives() -> tuple[bytes, dict[str, Any]]:
    """Return the content of a file of tensors, and the description of its ``.metadata``."""
    import torch

    described, content = json.loads(dump_json(_METADATA)), b""
    for place, tensor in zip(
        described["places"], (torch.ones(1, 2), torch.ones(1, 2), torch.ones(3)), strict=True
    ):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        place |= {"at": len(content), "length": len(stream.getvalue())}
        content += stream.getvalue()
    return content, described


def _pickled_metadata(value: Any) -> bytes:
    """Return ``.metadata`` with these values, also of wrong types."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: Any = value["tensors"]
    if isinstance(tensors, dict):
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(),
                _sequence(one.get("size")),
                [
                    ChunkStorageMetadata(_sequence(part["offsets"]), _sequence(part["sizes"]))
                    for part in one["chunks"]
                ]
                if isinstance(one["chunks"], list)
                else one["chunks"],
            )
            if isinstance(one, dict)
            else one
            for name, one in tensors.items()
        }
    found = Metadata({}, storage_data=None)
    object.__setattr__(found, "state_dict_metadata", tensors)
    object.__setattr__(found, "storage_data", value["places"])
    if isinstance(value["places"], list):
        places = {}
        for at in value["places"]:
            index = MetadataIndex("", None)
            object.__setattr__(index, "fqn", at.get("fqn"))
            object.__setattr__(index, "offset", _sequence(at.get("offset")))
            places[index] = _StorageInfo(at.get("file"), at.get("at"), at.get("length"))
        object.__setattr__(found, "storage_data", places)
    return pickle.dumps(found)


def _sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _dcp_folder(data: bytes) -> None:
    from myriad.checkpoint.foreign.archives import DcpFolder

    if not (_scratch() / "dcp/__0_0.distcp").is_file():
        _write("dcp/__0_0.distcp", _dcp_archives()[0])
    _write("dcp/.metadata", data)
    folder = DcpFolder(_scratch() / "dcp", "CHECKPOINT")
    for name in folder.shapes:
        folder.read(name)


def _load_metadata(data: bytes) -> Any:
    """Return the described values: the mutations of fields begin with them, whatever the bytes."""
    return _dcp_archives()[1]


def _torch_archive(data: bytes) -> None:
    from myriad.checkpoint.foreign.archives import bounded, read_archive

    found = read_archive(_write("archive.pt", data), "CHECKPOINT")
    for name, value in found.items() if isinstance(found, dict) else ():
        bounded(value, str(name), "archive.pt", "CHECKPOINT")


def _torch_examples() -> list[bytes]:
    import torch

    stream = io.BytesIO()
    torch.save({"w": torch.ones(4, 2), "b": torch.zeros(3)}, stream)
    return [stream.getvalue()]


def _megatron_checkpoint(data: bytes) -> None:
    """A namespace of arguments, as a checkpoint holds it; the input is its values."""
    from argparse import Namespace

    import torch

    from myriad.checkpoint.foreign.megatron_checkpoint import open_megatron

    values = json.loads(data)
    assert isinstance(values, dict)
    folder = _at("megatron/mp_rank_00/model_optim_rng.pt")
    torch.save(values | {"args": Namespace(**values["args"]), "model": {}, "checkpoint_version": 3.0}, folder)
    open_megatron(_scratch() / "megatron")


_ROPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": [2],
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 8,
}


def _hugging_face_config(data: bytes) -> None:
    from myriad.checkpoint.foreign.hugging_face import end_of_text
    from myriad.checkpoint.foreign.hugging_face_config import config_of, model_of
    from myriad.system.whole_file import parse_json

    try:
        found = parse_json(data)
    except ValueError:
        return
    if isinstance(found, dict):
        config_of(model_of(found), "float32", 0)
        _write("config/config.json", data)
        end_of_text(_scratch() / "config")


def _hugging_face_folder(data: bytes, name: str) -> None:
    from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights

    folder = f"hf-{name}"
    if not (_scratch() / folder).is_dir():
        _write(f"{folder}/config.json", dump_json(_ROPE))
        _write(f"{folder}/model.safetensors", _safetensors_examples()[0])
    _write(f"{folder}/{name}", data)
    weights = HuggingFaceWeights(_scratch() / folder)
    for one in weights.shapes:
        weights.read(one)


def _safetensors_examples() -> list[bytes]:
    import torch
    from safetensors.torch import save

    from myriad.checkpoint.foreign.hugging_face_config import model_of
    from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings

    shapes = {
        name: shape for one in tensor_mappings(model_of(_ROPE)) for name, shape in one.their_shapes().items()
    }
    return [save({name: torch.ones(shape) for name, shape in shapes.items()}, {"format": "pt"})]


def _load_safetensors(data: bytes) -> Any:
    (size,) = struct.unpack_from("<Q", data)
    return {"head": json.loads(data[8 : 8 + size]), "rest": data[8 + size :].hex()}


def _dump_safetensors(value: Any) -> bytes:
    head = dump_json(value["head"])
    return struct.pack("<Q", len(head)) + head + bytes.fromhex(value["rest"])


def _index_examples() -> list[bytes]:
    names = _load_safetensors(_safetensors_examples()[0])["head"].keys() - {"__metadata__"}
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    return [dump_json(index)]


# Corpora


def _corpus_index(data: bytes) -> None:
    from myriad.data.indexed import IndexedShard

    if not _at("corpus/one.bin").is_file():
        _write("corpus/one.bin", bytes(range(20)))
    _write("corpus/one.idx", data)
    shard = IndexedShard(_scratch() / "corpus/one")
    if shard.check_index() is None:
        for number in range(min(shard.num_documents, 64)):
            shard.document(number)
    else:
        shard.read(0, np.zeros(min(4, shard.num_tokens), np.int32))


def _index(lengths: Sequence[int], starts: Sequence[int], documents: Sequence[int]) -> bytes:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
    arrays = (
        np.array(lengths, "<i4").tobytes()
        + np.array(starts, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    return head + arrays


def _load_index(data: bytes) -> Any:
    _, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", data)
    first, second = 34 + 4 * sequences, 34 + 12 * sequences
    return {
        "head": [version, code, sequences, documents],
        "lengths": np.frombuffer(data[34:first], "<i4").tolist(),
        "starts": np.frombuffer(data[first:second], "<i8").tolist(),
        "documents": np.frombuffer(data[second : second + 8 * documents], "<i8").tolist(),
    }


def _dump_index(value: Any) -> bytes:
    version, code, sequences, documents = value["head"]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, documents)
    arrays = [
        np.array(value[key], kind)
        for key, kind in (("lengths", "<i4"), ("starts", "<i8"), ("documents", "<i8"))
    ]
    return head + b"".join(one.tobytes() for one in arrays)


def _corpus_manifest(data: bytes) -> None:
    from myriad.data.corpus_manifest import parse_manifest

    manifest = parse_manifest(data, "CORPUS")
    assert manifest.num_tokens("train") >= 0 and manifest.num_documents("validation") >= 0


def _corpus_examples() -> list[bytes]:
    file = {"size_bytes": 20, "xxh3_128": "0" * 32}
    shard = {"name": "train-00000", "split": "train", "tokens": 10, "documents": 2}
    content = {
        "format": "myriad-corpus-1",
        "fingerprint": "ab" * 16,
        "vocabulary": 300,
        "end_of_document": 0,
        "shards": [shard],
        "text_bytes": {"train": 40, "validation": 0},
        "skipped": {"null": 1},
        "files": {"train-00000.bin": file, "train-00000.idx": file, "tokenizer.json": file},
        "plan": {"inputs": ["a"]},
    }
    return [_seal_corpus(content)]


def _seal_corpus(content: Any) -> bytes:
    if not isinstance(content, dict):
        return dump_json(content)
    content = {key: value for key, value in content.items() if key != "content_xxh3_128"}
    own = xxhash.xxh3_128_hexdigest(json.dumps(content, indent=1, sort_keys=True).encode())
    return (json.dumps({"content_xxh3_128": own, **content}, indent=1, sort_keys=True) + "\n").encode()


def _block_hashes(data: bytes) -> None:
    from myriad.data.block_hashes import BlockHashes

    hashes = BlockHashes.parse(data)
    for number in range(min(8, len(hashes.hashes))):
        hashes.span(number)
        hashes.is_right(number, b"")


_BLOCKS = struct.Struct("<8sIIQ")


def _seal_blocks(value: Any) -> bytes:
    block, kind, size, *hashes = value
    body = _BLOCKS.pack(b"MYRBLK1\0", block, kind, size) + struct.pack(f"<{len(hashes)}Q", *hashes)
    return body + xxhash.xxh3_128_digest(body)


def _load_blocks(data: bytes) -> Any:
    _, block, kind, size = _BLOCKS.unpack_from(data)
    return [block, kind, size, *np.frombuffer(data[_BLOCKS.size : -16], "<u8").tolist()]


def _tokenizer(data: bytes) -> None:
    from myriad.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(_write("tokenizer.json", data))
    tokenizer.check_complete()
    tokenizer.decode(tokenizer.encode("A text, 12."))
    _ = tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.token_bytes


@cache
def _tokenizer_examples() -> tuple[bytes, ...]:
    from myriad.data.tokenizer import Tokenizer

    text = json.loads(Tokenizer.train(["a text of words, a text of 12"], 262).as_text())
    small = {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "</s>", "special": True, "single_word": False, "lstrip": False}
                         | {"rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"A": 0, "text": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    return dump_json(small), dump_json(text)


def _documents(data: bytes) -> None:
    from myriad.data.text_sources import FileRange, read_documents

    path = _write("documents.jsonl", data)
    for _ in read_documents(FileRange(str(path), "jsonl", 0, len(data)), "text"):
        pass


# Files that a user writes, or takes from elsewhere


def _job(data: bytes) -> None:
    from myriad.config import dump_toml
    from myriad.job import load_job

    found = load_job(str(_write("job.toml", data)))
    if not (_scratch() / "again.toml").exists() or len(data) % 7 == 0:
        assert load_job(str(_write("again.toml", dump_toml(found).encode()))) == found


def _job_examples() -> list[bytes]:
    from myriad.config import dump_toml
    from myriad.job import load_job

    short = b'name = "x"\nmodel = "tiny"\ndata.vocabulary = 512\n[train]\nsteps = 4\nglobal_batch = 8\n'
    short += b"[layout]\ndp = 2\nmicro_batch = 2\n"
    tree = {"name": "y", "model": {"recipe": "tiny", "layers": 4}, "data": {"vocabulary": 512}}
    tree |= {
        "optimizer": {"learning_rate": 1e-3},
        "alerts": {"webhook": {"url": "https://x"}},
        "layout": {"pp": 2, "tp": 2},
    }
    return [short, TOML.dump(tree), dump_toml(load_job("tiny")).encode()]


def _override(data: bytes) -> None:
    from myriad.job import load_job

    text = data.decode(errors="replace")
    load_job("tiny", [line for line in text.split("\n") if line][:4])


def _cluster(data: bytes) -> None:
    from myriad.recipes.cluster import load_cluster

    load_cluster(str(_write("cluster.toml", data)))


def _recipes(kind: Any, *names: str) -> list[bytes]:
    from myriad.recipes import read_recipe

    return [TOML.dump(read_recipe(kind, name, kind)) for name in names]


def _scenario(data: bytes) -> None:
    from myriad.faults.scenario import load_scenario, planned_faults

    scenario = load_scenario(str(_write("scenario.toml", data)))
    planned_faults(scenario, scenario.resolved_job())


def _mix(data: bytes) -> None:
    from myriad.forecasts.fleet.fault_mix import load_mix

    load_mix(str(_write("mix.toml", data))).per_day(8)


def _translated(made: Any) -> None:
    made.lists()
    made.toml("translated")


def _megatron_text(data: bytes) -> None:
    from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments

    _translated(translate_arguments(read_command_line(data.decode(errors="replace"))))


_MEGATRON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 512,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 100,
    "lr": 3e-4,
    "min_lr": 3e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "fp16": True,
    "initial_loss_scale": 65536.0,
    "world_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
    "data_path": [0.3, "a", 0.7, "b"],
    "window_size": [63, 0],
    "recompute_granularity": "selective",
    "train_samples": None,
    "lr_warmup_samples": 0,
    "lr_wsd_decay_iters": None,
    "use_distributed_optimizer": True,
}
_MEGATRON_TEXT = b"""GPT_ARGS=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length $LENGTH
    --max-position-embeddings 128 --bf16 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 100
)
LENGTH=128
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_ARGS[@]} --micro-batch-size 2 --global-batch-size=16 \\
  --tensor-model-parallel-size 2 --window-size '(63, 0)' --data-path 0.3 a 0.7 b --no-bias-gelu-fusion
"""


def _megatron_namespace(data: bytes) -> None:
    from myriad.job.translation.megatron_arguments import translate_arguments

    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        _translated(translate_arguments(values, namespace=True))


_DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_num_steps": 10,
            "total_num_steps": 100,
            "warmup_max_lr": 3e-4,
            "cos_min_ratio": 0.1,
        },
    },
    "activation_checkpointing": {"number_checkpoints": 2},
    "tensor_parallel": {"autotp_size": 2},
    "wandb": {"enabled": False},
}


def _deepspeed(data: bytes) -> None:
    from myriad.job.translation.deepspeed_json import translate_deepspeed
    from myriad.system.whole_file import parse_json

    try:
        found = parse_json(data)
    except ValueError:
        return
    if isinstance(found, dict):
        _translated(translate_deepspeed(found))


# Files of a run and of the doctor, which another machine or version may have written


def _lines(data: bytes) -> None:
    from myriad.run.run_lines import EventLines, StepLines
    from myriad.system.jsonl import late_events

    path = _write("metrics.jsonl", data)
    steps = StepLines(path)
    steps.poll()
    late_events(EventLines(path).poll())


_STEP_LINE = {
    "step": 1,
    "time": 1.7e9,
    "loss": 2.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": 512,
}
_LINES = dump_json(_STEP_LINE) + b"\n" + dump_json(_STEP_LINE | {"step": 2}) + b"\n"
_EVENTS = (
    b'{"time": 1.7e9, "event": "start", "attempt": 1}\n{"time": 1.7e9, "event": "x", "late_seconds": 2}\n'
)


def _driver_address(data: bytes) -> None:
    from myriad.supervise.driver_address import read_address

    _write("run/driver.json", data)
    read_address(_scratch() / "run")


def _baseline(data: bytes) -> None:
    from myriad.doctor.baseline import merge, read_baseline, write_baseline

    found = read_baseline(_write("baseline.json", data))
    write_baseline(_at("again.json"), merge(found, {}))


def _link_evidence(data: bytes) -> None:
    from myriad.telemetry.links.link_evidence import describe_evidence

    describe_evidence(_write("evidence.gz", data))


def _evidence_examples() -> list[bytes]:
    from myriad.telemetry.links.link_ring import FIRST_COLUMNS, LINK_COLUMNS

    fields = ["time", *FIRST_COLUMNS[1:], *(f"eth0.{one}" for one in LINK_COLUMNS)]
    rows = [[0.01 * number, *[100 * number] * (len(fields) - 1)] for number in range(4)]
    return [_packed([{"fields": fields, "epoch_ns": 10**18, "node": 0, "why": "x"}, *rows])]


def _packed(rows: Any) -> bytes:
    return gzip.compress(JSON_LINES.dump(rows), 1, mtime=0)


def _unpacked(data: bytes) -> Any:
    try:
        return JSON_LINES.load(gzip.decompress(data))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from None


def _in_json(value: Any) -> Callable[[], list[bytes]]:
    return lambda: [dump_json(value)]


_VALUE = (MyriadError, ValueError)

TARGETS: tuple[Target, ...] = (
    Target("wire: frames", _frames, _frame_examples, errors=(ValueError,)),
    Target(
        "driver: messages",
        _driver_messages,
        _driver_examples,
        Codec(_load_driver, _driver_stream, sealed=True),
        _VALUE,
    ),
    Target(
        "snapshot server: authentication",
        _snapshot_authentication,
        _authentication_examples,
        errors=(OSError,),
        examples_are_read=False,
    ),
    _snapshot_target("snapshot server: messages", has_codes=False),
    _snapshot_target("snapshot server: messages with codes", has_codes=True),
    Target("doctor: findings", _doctor_findings, _in_json(_FINDINGS), JSON, (OSError,)),
    Target("ranks: messages", _rank_messages, _rank_examples, JSON),
    Target(
        "page: span batch", _span_batch, _span_examples, Codec(_load_spans, _dump_spans, sealed=True), _VALUE
    ),
    Target("page: query", _query, lambda: [b"0-63,70", b"-5", b"1.5", b"10-12"]),
    Target(
        "page: trace request",
        _trace_request,
        _in_json({"ranks": [3, 7], "seconds": 5, "what": "profile"}),
        JSON,
        _VALUE,
    ),
    Target("span file", _span_file, _span_file_examples, errors=(*_VALUE, OSError), slow=True),
    Target(
        "checkpoint: manifest",
        _manifest,
        lambda: [_seal_manifest(_MANIFEST)],
        Codec(json.loads, _seal_manifest, sealed=True),
        (ValueError,),
    ),
    Target(
        "checkpoint: verify, list, load",
        _stored_checkpoint,
        lambda: [_seal_manifest(_MANIFEST)],
        Codec(json.loads, _seal_manifest, sealed=True),
        slow=True,
    ),
    Target(
        "signature",
        _signature,
        _signature_examples,
        Codec(json.loads, _signed, sealed=True),
        (ValueError,),
    ),
    Target("key file", _key_file, lambda: [_PEM, b"s" * 40]),
    Target(
        "DCP: .metadata",
        _dcp_folder,
        lambda: [_pickled_metadata(_dcp_archives()[1])],
        Codec(_load_metadata, _pickled_metadata),
        slow=True,
    ),
    Target("torch.save archive", _torch_archive, _torch_examples, slow=True),
    Target(
        "Hugging Face: config.json", _hugging_face_config, lambda: [dump_json(_ROPE), dump_json(_GPT2)], JSON
    ),
    Target(
        "Hugging Face: safetensors",
        partial(_hugging_face_folder, name="model.safetensors"),
        _safetensors_examples,
        Codec(_load_safetensors, _dump_safetensors, sealed=True),
        slow=True,
    ),
    Target(
        "Hugging Face: index",
        partial(_hugging_face_folder, name="model.safetensors.index.json"),
        _index_examples,
        JSON,
        slow=True,
    ),
    Target(
        "corpus: index",
        _corpus_index,
        lambda: [_index([4, 6], [0, 8], [0, 1, 2])],
        Codec(_load_index, _dump_index),
    ),
    Target(
        "corpus: manifest", _corpus_manifest, _corpus_examples, Codec(json.loads, _seal_corpus, sealed=True)
    ),
    Target(
        "corpus: block hashes",
        _block_hashes,
        lambda: [_seal_blocks([1 << 16, 8, 100000, 1, 2])],
        Codec(_load_blocks, _seal_blocks, sealed=True),
        (ValueError,),
    ),
    Target(
        "corpus: documents", _documents, lambda: [b'{"text": "one"}\n{"text": null, "id": 3}\n'], JSON_LINES
    ),
    Target("tokenizer.json", _tokenizer, _tokenizer_examples, JSON, slow=True),
    Target("job file", _job, _job_examples, TOML, slow=True),
    Target(
        "job overrides",
        _override,
        lambda: [
            b"layout.dp=2\ntrain.steps=4",
            b'model={recipe="tiny", layers=2}',
            b"optimizer.clip_norm=off",
        ],
        slow=True,
    ),
    Target(
        "cluster file",
        _cluster,
        lambda: _recipes("clusters", "one-node-8xa800", "h200-512xh200", "laptop"),
        TOML,
    ),
    Target("fault scenario", _scenario, lambda: _recipes("faults", "abort-rank", "soak"), TOML, slow=True),
    Target("fault mix", _mix, lambda: _recipes("mixes", "llama3", "megascale"), TOML),
    Target("Megatron-LM: command line", _megatron_text, lambda: [_MEGATRON_TEXT], slow=True),
    Target("Megatron-LM: arguments", _megatron_namespace, _in_json(_MEGATRON), JSON, slow=True),
    Target("DeepSpeed: JSON", _deepspeed, _in_json(_DEEPSPEED), JSON, slow=True),
    Target("run: lines", _lines, lambda: [_LINES, _EVENTS], JSON_LINES),
    Target(
        "run: driver.json",
        _driver_address,
        _in_json({"host": "::1", "port": 9, "term": 3, "silent_seconds": 2.0, "alone_seconds": 9}),
        JSON,
        (ValueError, OSError),
    ),
    Target(
        "doctor: baseline",
        _baseline,
        _in_json({"format": 1, "hardware": {"cpu x 64": {"memory": 2.1e11, "bits": "ab"}}}),
        JSON,
    ),
    Target(
        "link counters",
        _link_evidence,
        _evidence_examples,
        Codec(_unpacked, _packed, sealed=True),
        (ValueError, OSError),
    ),
)
