"""Memory accesses of the emulator: widths, masks, bounds, atomics, and moves through LDS."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isa.snippets import bits, execute, lanes_of
from tilewright.errors import GateError
from tilewright.isa.emulate_state import PRIVATE, Memory

LANE = np.arange(64, dtype=np.uint32)


def test_buffers_are_bounded_twice():
    """Past the descriptor's size a lane reads 0; within it, but past the tensor, is an error."""
    memory = Memory()
    tensor = torch.arange(8, dtype=torch.int32)
    base = memory.add(tensor)
    describe = {4: base & 0xFFFFFFFF, 5: base >> 32, 6: 0x7FFFFFFE, 7: 0x31027000}
    masked = np.where(np.arange(32) < 8, 4 * np.arange(32), 0x80000000)
    text = "buffer_load_b32 v0, v1, s[4:7], 0 offen"
    wave = execute(text, v={1: masked}, s=describe, memory=memory)
    assert wave.v[0].tolist() == [*range(8), *[0] * 24]
    store = "buffer_store_b16 v2, v1, s[4:7], null offen offset:2"
    execute(store, v={1: masked, 2: 0xFFFF0001}, s=describe, memory=memory)
    assert tensor.tolist() == [n + 0x10000 for n in range(8)]
    with pytest.raises(GateError, match=r"the access begins at its byte 32$"):
        execute(text, v={1: 4 * np.arange(32)}, s=describe, memory=memory)


def test_global_memory_is_bounded_and_masked():
    memory = Memory()
    tensor = torch.arange(40, dtype=torch.float16)[4:36]
    base = memory.add(tensor)
    scalars = {2: base & 0xFFFFFFFF, 3: base >> 32}
    lane = np.arange(32)
    wave = execute("global_load_u16 v0, v1, s[2:3]", v={1: 2 * lane}, s=scalars, memory=memory)
    assert wave.v[0].astype(np.uint16).view(np.float16).tolist() == [*range(4, 36)]
    text = "global_load_d16_hi_b16 v0, v1, s[2:3]"
    wave = execute(text, v={0: 0xABCD, 1: 2 * lane}, s=scalars, memory=memory)
    assert wave.v[0, 0] == 0x4400ABCD
    past = "global_store_b16 v[2:3], v0, off offset:-2"
    where = {2: (base + 2 * lane) & 0xFFFFFFFF, 3: base >> 32, 0: 0}
    execute(past, v=where, memory=memory, active=0xFFFFFFFE)  # lane 0 would write before the tensor
    assert tensor[:31].tolist() == [0.0] * 31
    with pytest.raises(GateError, match="write of 2 bytes at address .* its byte -2"):
        execute(past, v=where, memory=memory)


def test_two_views_of_one_storage_keep_the_gap_between_them():
    memory = Memory()
    whole = torch.arange(16, dtype=torch.int32)
    left, right = memory.add(whole[:4]), memory.add(whole[8:12])
    assert right - left == 32
    lane = np.arange(32)
    scalars = {2: left & 0xFFFFFFFF, 3: left >> 32}
    with pytest.raises(GateError):
        execute(
            "global_load_b32 v0, v1, s[2:3]", v={1: 4 * lane}, s=scalars, memory=memory, active=0x1F
        )
    execute(
        "global_load_b32 v0, v1, s[2:3]", v={1: 4 * lane}, s=scalars, memory=memory, active=0xF0F
    )


def test_lds_in_all_widths():
    lane = np.arange(32)
    text = """
        ds_store_b64 v1, v[2:3]
        ds_load_b32 v4, v1 offset:4
        ds_load_u16_d16_hi v5, v1 offset:2
        ds_load_i8 v6, v1
        ds_load_2addr_b32 v[7:8], v1 offset1:1
    """
    before = {1: 8 * lane, 2: 0xABCD00F0 + lane, 3: 1000 + lane, 5: 0x1111}
    wave = execute(text, v=before)
    assert wave.v[4].tolist() == (1000 + lane).tolist()
    assert wave.v[5, 0] == 0xABCD1111
    assert wave.v[6, 0] == 0xFFFFFFF0
    assert [wave.v[7, 9], wave.v[8, 9]] == [0xABCD00F9, 1009]
    text = "ds_write2st64_b32 v1, v2, v3 offset0:0 offset1:1\nds_read2st64_b32 v[4:5], v1 offset1:1"
    wave = execute(text, v={1: 4 * LANE, 2: LANE, 3: 7}, arch="gfx90a", lds_bytes=512)
    assert [wave.v[4, 63], wave.v[5, 63]] == [63, 7]
    with pytest.raises(GateError, match="LDS address 0x100, of which the kernel has 256 bytes"):
        execute("ds_load_b32 v0, v1", v={1: 256})


def test_lanes_exchange_through_lds_hardware():
    lane = np.arange(32)
    wave = execute("ds_bpermute_b32 v0, v1, v2", v={1: 4 * (31 - lane), 2: lane})
    assert wave.v[0].tolist() == [*range(31, -1, -1)]
    wave = execute("ds_swizzle_b32 v0, v1 offset:0x401f", v={1: lane})  # lane xor 16
    assert wave.v[0].tolist() == (lane ^ 16).tolist()


def test_atomic_sums_of_floats():
    memory = Memory()
    total = torch.tensor([1.5])
    base = memory.add(total)
    scalars = {2: base & 0xFFFFFFFF, 3: base >> 32}
    text = "global_atomic_add_f32 v1, v2, s[2:3]"
    execute(text, v={1: 0, 2: bits(0.25, np.float32)}, s=scalars, memory=memory)
    assert total.item() == 1.5 + 32 * 0.25


SWIZZLES = [
    ("swizzle(SWAP,4)", lambda i: i ^ 4),
    ("swizzle(REVERSE,8)", lambda i: i ^ 7),
    ("swizzle(BROADCAST,8,3)", lambda i: i // 8 * 8 + 3),
    ("swizzle(QUAD_PERM,1,0,3,2)", lambda i: i ^ 1),
    ('swizzle(BITMASK_PERM, "01pip")', lambda i: i & 0b00101 | 0b01000 | (i ^ 2) & 2),
]


@pytest.mark.parametrize(("pattern", "source"), SWIZZLES, ids=[p for p, _ in SWIZZLES])
def test_swizzles_have_names(pattern, source):
    wave = execute(f"ds_swizzle_b32 v0, v1 offset:{pattern}", v={1: np.arange(32)})
    assert wave.v[0].tolist() == [source(i) for i in range(32)]


def test_atomics_take_turns_and_return_what_was_there():
    memory = Memory()
    counter = torch.zeros(1, dtype=torch.int32)
    base = memory.add(counter)
    scalars = {2: base & 0xFFFFFFFF, 3: base >> 32}
    wave = execute(
        "global_atomic_add_u32 v0, v1, v2, s[2:3] glc", v={1: 0, 2: 3}, s=scalars, memory=memory
    )
    assert counter.item() == 96
    assert wave.v[0].tolist() == [3 * n for n in range(32)]
    text = "global_atomic_add v1, v2, s[2:3]"
    execute(text, v={1: 0, 2: 1}, s=scalars, memory=memory, arch="gfx90a", active=1)
    assert counter.item() == 97
    text = "global_atomic_smax v1, v2, s[2:3] offset:0"
    execute(text, v={1: 0, 2: 0xFFFFFFFF}, s=scalars, memory=memory, arch="gfx942", active=1)
    assert counter.item() == 97  # -1 is no larger
    text = "global_atomic_cmpswap_b32 v0, v1, v[2:3], s[2:3] th:TH_ATOMIC_RETURN"
    before = {1: 0, 2: 5, 3: 97}  # the new value, then what is compared
    wave = execute(text, v=before, s=scalars, memory=memory, arch="gfx1201", active=3)
    assert (counter.item(), wave.v[0, :2].tolist()) == (5, [97, 5])


@pytest.mark.parametrize(
    ("arch", "store", "load"),
    [
        ("gfx1151", "scratch_store_b64 off, v[2:3], off offset:8", "scratch_load_b32 v0, v1, off"),
        ("gfx942", "scratch_store_dwordx2 off, v[2:3], off offset:8",
         "scratch_load_dword v0, v1, off"),
        ("gfx90a", "buffer_store_dword v3, off, s[0:3], 0 offset:12",
         "buffer_load_dword v0, v1, s[0:3], 0 offen"),
    ],
    ids=["gfx1151", "gfx942", "gfx90a"],
)  # fmt: skip
def test_scratch_belongs_to_each_lane(arch, store, load):
    lane = np.arange(lanes_of(arch))
    scalars = {0: PRIVATE & 0xFFFFFFFF, 1: PRIVATE >> 32, 2: 0xFFFFFFFF, 3: 0}
    before = {1: 12, 2: 7, 3: 100 + lane}
    wave = execute(f"{store}\n{load}", arch=arch, v=before, s=scalars, scratch_bytes=16)
    assert wave.v[0].tolist() == (100 + lane).tolist()
    with pytest.raises(GateError, match="scratch address 0xd, of which the kernel has 16 bytes"):
        execute(load, arch=arch, v={1: 13}, s=scalars, scratch_bytes=16)
