"""Decoders of messages between processes, and of what a page receives."""

import json
import socket
import struct
from functools import cache, partial
from typing import Any

import numpy as np

from decoder_target import VALUE_ERRORS, Target, as_json, scratch_file, write_scratch
from mutations import JSON, Codec, dump_json

__all__ = ["MESSAGE_TARGETS"]


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

    read_span_file(write_scratch("attempt-1-node-0-1.parquet", data))


def _span_file_examples() -> list[bytes]:
    from myriad.telemetry.span_io.span_batch import decode
    from myriad.telemetry.span_io.span_files import write_span_file

    path = scratch_file("example.parquet")
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
    from starlette.requests import Request

    from myriad.dashboard.api.export_api import trace_endpoint

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    length = [(b"content-length", str(len(data)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": length, "query_string": b""}
    answer = trace_endpoint(lambda ranks, seconds, what: {"files": [], "found": [], "problems": []})
    _event_loop().run_until_complete(answer(Request(scope, receive)))


@cache
def _event_loop() -> Any:
    """Return a loop for all inputs: to make one takes longer than to decode."""
    import asyncio

    return asyncio.new_event_loop()


MESSAGE_TARGETS: tuple[Target, ...] = (
    Target("wire: frames", _frames, _frame_examples, errors=(ValueError,)),
    Target(
        "driver: messages",
        _driver_messages,
        _driver_examples,
        Codec(_load_driver, _driver_stream, sealed=True),
        VALUE_ERRORS,
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
    Target("doctor: findings", _doctor_findings, as_json(_FINDINGS), JSON, (OSError,)),
    Target("ranks: messages", _rank_messages, _rank_examples, JSON),
    Target(
        "page: span batch",
        _span_batch,
        _span_examples,
        Codec(_load_spans, _dump_spans, sealed=True),
        VALUE_ERRORS,
    ),
    Target("page: query", _query, lambda: [b"0-63,70", b"-5", b"1.5", b"10-12"]),
    Target(
        "page: trace request",
        _trace_request,
        as_json({"ranks": [3, 7], "seconds": 5, "what": "profile"}),
        JSON,
        VALUE_ERRORS,
    ),
    Target("span file", _span_file, _span_file_examples, errors=(*VALUE_ERRORS, OSError), slow=True),
)
