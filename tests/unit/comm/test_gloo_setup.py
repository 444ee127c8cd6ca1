"""If ranks did not read the addresses they need, they would ask the store again and again, or hang."""

import math
import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.gloo_setup import MESH_RANKS, GlooStore, connecting, partners
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.errors import RunFailedError

SIZES = st.integers(1, 20_000)


class Counting(dist.Store):
    """Keeps everything; counts requests; nothing ever comes later."""

    def __init__(self):
        super().__init__()
        self.values, self.requests = {}, []

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self.requests.append(list(keys))
        if not self.check(keys):
            raise dist.DistStoreError("wait timeout")
        return [self.values[key] for key in keys]

    def get(self, key):
        return self.multi_get([key])[0]

    def wait(self, keys, timeout=None):
        self.multi_get(keys)


@given(SIZES, st.data())
def test_neighbours_on_rings_trees_and_in_barriers_are_partners(size, data):
    index = data.draw(st.integers(0, size - 1))
    found = partners(index, size)
    assert list(found) == sorted(set(found)) and all(0 <= member < size for member in found)
    for bit in range(math.ceil(math.log2(size)) if size > 1 else 0):
        step = 1 << bit
        expected = {
            (index + step) % size,
            (index - step) % size,
            index ^ step if index ^ step < size else index,
        }
        assert expected - {index} <= set(found)
    assert len(found) <= max(MESH_RANKS, 3 * math.log2(size) + 3)


@given(SIZES, st.data())
def test_partners_are_partners_of_each_other(size, data):
    index = data.draw(st.integers(0, size - 1))
    assert all(index in partners(member, size) for member in partners(index, size))


def joined(size: int, index: int, absent: tuple[int, ...] = ()) -> tuple[GlooStore, Counting]:
    inner = Counting()
    store = GlooStore(inner)
    store.set_timeout(timedelta(seconds=3))
    for member in range(size):
        if member not in absent:
            inner.values[f"dp//cpu//{member}"] = f"address {member}".encode()
    with store.making_group("group dp", range(100, 100 + size), index):
        store.set(f"dp//cpu//{index}", f"address {index}".encode())
    return store, inner


@pytest.mark.parametrize("size", [2, MESH_RANKS, MESH_RANKS + 1, 1000])
def test_the_first_address_asked_for_brings_all_that_will_be_needed(size):
    store, inner = joined(size, 1)
    for member in partners(1, size):
        store.wait([f"dp//cpu//{member}"], timedelta(seconds=1))
        assert store.get(f"dp//cpu//{member}") == f"address {member}".encode()
    assert len(inner.requests) == 1


def test_any_other_member_can_still_be_asked_for():
    store, inner = joined(1000, 0)
    assert store.get("dp//cpu//3") == b"address 3" and len(inner.requests) == 1


def test_who_waits_in_vain_learns_which_ranks_did_not_come():
    store, _ = joined(5, 1, absent=(2, 4))
    with pytest.raises(RunFailedError, match=r"^rank 101 waited 3 s for ranks 102, 104 to join group dp$"):
        store.get("dp//cpu//0")


def test_keys_of_no_group_are_read_as_ever():
    store, inner = joined(2, 0)
    inner.values["other/0"] = b"x"
    assert store.get("other/0") == b"x"
    with pytest.raises(dist.DistStoreError):
        store.wait(["other/1"], timedelta(seconds=1))


def test_how_gloo_connects_is_set_for_one_group_only(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "user")
    with connecting(lazily=True):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "user"


DEGREES = st.integers(1, 4)


@given(DEGREES, DEGREES, DEGREES, st.sampled_from(["dp", "pp", "tp"]), st.data())
def test_rows_to_split_the_world_into_hold_each_rank_once(dp, pp, tp, axis, data):
    layout = Layout(dp=dp, pp=pp, tp=tp)
    rank = data.draw(st.integers(0, layout.world - 1))
    rows = RankGrid(layout, rank).rows(axis)
    assert sorted(rank for row in rows for rank in row) == list(range(layout.world))
    assert list(RankGrid(layout, rank).peers(axis)) in rows
