"""The driver's messages at 12,288 ranks: msgspec beside the standard library's parser.

    python benchmarks/supervise/message_codec.py

A heartbeat of each of 1,536 nodes, eight ranks each: what the driver decodes each second, and what an agent
encodes. "used": `myriad.wire.message_codec`. "json and convert": `json`, then msgspec's conversion, the way
of texts that msgspec does not parse. Processor time, the best of ``--times``; results are compared.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from myriad.supervise.messages import OBSERVED, Beat
from myriad.supervise.observations import LinkStatus, RankStatus
from myriad.wire.message_codec import decode, encode, read_message, write_message

NODES, RANKS = 1536, 8


READERS: dict[str, Callable[[bytes], Any]] = {
    "used": lambda text: read_message(text, OBSERVED),
    "json and convert": lambda text: decode(json.loads(text), OBSERVED),
}
WRITERS: dict[str, Callable[[Any], bytes]] = {
    "used": write_message,
    "json and convert": lambda message: json.dumps(encode(message)).encode(),
}


def beat(node: int) -> Beat:
    first = node * RANKS
    rows = (
        RankStatus(first + k, 20_000 + k, "R", "step", "reduce", 1234, 987_654, 987_653, 0.0123, 7.12, 5.12)
        for k in range(RANKS)
    )
    links = tuple(LinkStatus(f"mlx5_{k}:1", True, 1, 0) for k in range(RANKS))
    return Beat(node, 3, 29500, tuple(rows), links, (), 1_795_476_472.316698)


def best(act: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    beats = [beat(node) for node in range(NODES)]
    texts = [write_message(one) for one in beats]
    print(f"{len(texts[0])} bytes a beat\n")
    print(f"| codec | decode {NODES:,} beats, ms | encode one, us |\n|---|---|---|")
    for name, read in READERS.items():
        write = WRITERS[name]
        assert [read(text) for text in map(write, beats)] == beats, name
        decoding = best(partial(_each, read, texts), given.times)
        encoding = best(partial(_each, write, beats), given.times)
        print(f"| {name} | {1e3 * decoding:.0f} | {1e6 * encoding / NODES:.1f} |")


def _each(act: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        act(value)


if __name__ == "__main__":
    main()
