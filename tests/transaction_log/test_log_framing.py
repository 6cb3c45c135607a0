"""The framing gives back every frame that the bytes still hold, and says what is missing."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_logsync.transaction_log import (
    BLOCK_SIZE,
    FILE_HEADER,
    Damage,
    Frame,
    FrameWriter,
    HeaderState,
    check_header,
    read_frames,
)

CHUNK_HEADER = 7


def write(payloads: list[bytes]) -> bytes:
    stream = io.BytesIO()
    writer = FrameWriter(stream)
    for payload in payloads:
        writer.write(payload)
    assert writer.offset == len(stream.getvalue())
    return stream.getvalue()


def read(data: bytes, start: int = 0) -> tuple[list[Frame], list[Damage]]:
    items = list(read_frames(io.BytesIO(data), start=start))
    frames = [item for item in items if isinstance(item, Frame)]
    return frames, [item for item in items if isinstance(item, Damage)]


def payloads_of(data: bytes) -> list[bytes]:
    return [frame.payload for frame in read(data)[0]]


def text(index: int, size: int) -> bytes:
    """A payload that no other index has."""
    return (b"%08d|" % index * (size // 9 + 1))[:size]


def chunk(kind: int, data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), len(data), kind) + data


def many_blocks(count: int = 300) -> list[bytes]:
    return [text(index, 100 + index * 37 % 3000) for index in range(count)]


def blocks_of(frames: list[Frame], total: int) -> list[range]:
    """For each frame the blocks that it touches."""
    ends = [frame.offset for frame in frames[1:]] + [total]
    return [
        range(frame.offset // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1)
        for frame, end in zip(frames, ends, strict=True)
    ]


def test_one_full_chunk_has_the_documented_bytes() -> None:
    """A small frame is header, CRC-32 of type and data, length, type 1, data."""
    assert write([b"abc"]) == b":W&B\xe1\xbe\x00" + chunk(1, b"abc")


@pytest.mark.parametrize("leftover", range(20))
def test_round_trip_when_a_block_has_few_bytes_left(leftover: int) -> None:
    """Any number of bytes left in a block, and any frame after that, survives the round trip."""
    first = BLOCK_SIZE - len(FILE_HEADER) - CHUNK_HEADER - leftover
    for size in (0, 1, 6, 7, 8, BLOCK_SIZE, 3 * BLOCK_SIZE):
        payloads = [text(1, first), text(2, size), b"end"]
        data = write(payloads)
        frames, damage = read(data)
        assert [frame.payload for frame in frames] == payloads
        assert damage == []
        assert read(data[: frames[2].offset]) == (frames[:2], [])


def test_a_frame_that_does_not_fit_is_cut_at_the_block_border() -> None:
    """First, middle and last chunks fill the blocks; under seven bytes are padded with zeros."""
    data = write([text(1, BLOCK_SIZE - 7 - 7 - 3), text(2, 2 * BLOCK_SIZE)])
    assert data[BLOCK_SIZE - 3 : BLOCK_SIZE] == bytes(3)
    kinds = [data[block * BLOCK_SIZE + 6] for block in (1, 2, 3)]
    assert kinds == [2, 3, 4]


@given(st.lists(st.integers(0, 2 * BLOCK_SIZE + 50), max_size=12))
def test_round_trip_at_any_sizes(sizes: list[int]) -> None:
    """What is written comes back, in order and without damage."""
    payloads = [text(index, size) for index, size in enumerate(sizes)]
    data = write(payloads)
    assert payloads_of(data) == payloads
    assert read(data)[1] == []


def check_cut(data: bytes, frames: list[Frame], ends: list[int], cut: int) -> None:
    got, damage = read(data[:cut])
    whole = [frame for frame, end in zip(frames, ends, strict=True) if end <= cut]
    assert got == whole
    reached = max([len(FILE_HEADER), *(end for end in ends if end <= cut)])
    padding = BLOCK_SIZE - reached % BLOCK_SIZE
    if cut <= reached or (padding < CHUNK_HEADER and cut <= reached + padding):
        assert damage == []
    else:
        (torn,) = damage
        assert torn.tail
        assert torn.offset + torn.length == cut
        assert torn.offset - reached in (0, padding)


def test_cut_at_every_byte() -> None:
    """Whole frames before the cut come out once; the rest is one torn tail, or no damage."""
    frames, _ = read(data := write([text(index, index * 11) for index in range(20)]))
    ends = [frame.offset + CHUNK_HEADER + len(frame.payload) for frame in frames]
    for cut in range(len(data) + 1):
        check_cut(data, frames, ends, cut)


def test_cut_at_every_byte_around_every_border() -> None:
    """The same holds for frames over several blocks, where records or blocks begin or end."""
    payloads = [text(1, BLOCK_SIZE - 7 - 7 - 4), text(2, 70_000), text(3, 20), text(4, 30_000)]
    frames, _ = read(data := write(payloads))
    ends = [len(write(payloads[: index + 1])) for index in range(len(payloads))]
    starts = [frame.offset for frame in frames]
    for border in {*starts, *ends, *range(0, len(data), BLOCK_SIZE)}:
        for cut in range(max(0, border - 12), min(len(data), border + 12) + 1):
            check_cut(data, frames, ends, cut)


MANY = many_blocks()
MANY_DATA = write(MANY)
MANY_FRAMES = read(MANY_DATA)[0]
MANY_BLOCKS = blocks_of(MANY_FRAMES, len(MANY_DATA))


def check_account(got: list[Frame], damage: list[Damage]) -> None:
    """Frames come out in order, once, as written; every lost one lies in a reported stretch."""
    assert [frame for frame in MANY_FRAMES if frame in set(got)] == got
    for lost in set(MANY_FRAMES) - set(got):
        assert any(item.offset <= lost.offset < item.offset + item.length for item in damage)
    for frame in got:
        assert not any(item.offset <= frame.offset < item.offset + item.length for item in damage)


@given(st.integers(7, len(MANY_DATA) - 1), st.binary(min_size=1, max_size=5000))
def test_noise_costs_only_frames_of_the_touched_blocks(at: int, noise: bytes) -> None:
    """Bytes overwritten anywhere lose at most the frames of the blocks they touch."""
    noise = noise[: len(MANY_DATA) - at]
    touched = {at // BLOCK_SIZE, (at + len(noise) - 1) // BLOCK_SIZE}
    got, damage = read(MANY_DATA[:at] + noise + MANY_DATA[at + len(noise) :])
    check_account(got, damage)
    for frame, blocks in zip(MANY_FRAMES, MANY_BLOCKS, strict=True):
        assert frame in got or touched & set(blocks)


@settings(max_examples=300)
@given(st.integers(7, len(MANY_DATA) - 4), st.binary(min_size=4, max_size=4))
@example(MANY_FRAMES[40].offset + 4, b"\xff\xff\x01\x00")
@example(MANY_FRAMES[40].offset + 4, b"\x00\x00\x01\x00")
@example(MANY_FRAMES[40].offset, bytes(4))
def test_four_bad_bytes_cost_two_frames_at_most(at: int, noise: bytes) -> None:
    """Also a bad length or type loses only the frames whose bytes were hit."""
    got, damage = read(MANY_DATA[:at] + noise + MANY_DATA[at + 4 :])
    check_account(got, damage)
    assert len(got) >= len(MANY_FRAMES) - 2
    assert not any(item.tail for item in damage if item.offset + item.length < len(MANY_DATA))


def test_a_chunk_inside_a_damaged_frame_is_not_a_frame() -> None:
    """A payload may hold a log itself: the damaged frame's length is believed before a search."""
    data = write([b"one", b"bad" + chunk(1, b"inner"), b"two"])
    frames, damage = read(data.replace(b"bad", b"BAD"))
    assert [frame.payload for frame in frames] == [b"one", b"two"]
    assert len(damage) == 1


@given(st.data())
def test_bytes_removed_or_inserted_never_invent_a_frame(data: st.DataObject) -> None:
    """Whatever is cut out or put in, only frames that were written come out, each once."""
    begin = data.draw(st.integers(7, len(MANY_DATA)))
    end = data.draw(st.integers(begin, len(MANY_DATA)))
    noise = data.draw(st.binary(max_size=200))
    got, _ = read(MANY_DATA[:begin] + noise + MANY_DATA[end:])
    assert len({frame.payload for frame in got}) == len(got)
    assert {frame.payload for frame in got} <= set(MANY)


@given(st.binary(max_size=3000))
def test_noise_alone_gives_no_frame_and_no_exception(noise: bytes) -> None:
    """Reading never raises, whatever the bytes are."""
    frames, damage = read(FILE_HEADER + noise)
    assert frames == []
    assert bool(damage) == bool(noise)


@pytest.mark.parametrize("zeros", [1, 6, 7, 100, BLOCK_SIZE, 3 * BLOCK_SIZE + 17])
def test_zeros_after_the_last_frame_are_a_torn_tail(zeros: int) -> None:
    """A tail of zeros, as file systems leave after a crash, is a torn tail of that length."""
    data = write([b"one", b"two"])
    frames, damage = read(data + bytes(zeros))
    assert [frame.payload for frame in frames] == [b"one", b"two"]
    (torn,) = damage
    assert (torn.offset, torn.length, torn.tail) == (len(data), zeros, True)


@pytest.mark.parametrize("zeros", [8, 3000, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("size", [500, 40_000])
def test_a_frame_that_fades_into_zeros_is_a_torn_tail(zeros: int, size: int) -> None:
    """A frame whose end never reached the disk before the file's length did is a torn tail."""
    head = write([b"one"])
    data = write([b"one", text(1, size)])[:-200]
    frames, damage = read(data + bytes(zeros))
    assert [frame.payload for frame in frames] == [b"one"]
    (torn,) = damage
    assert (torn.offset, torn.tail) == (len(head), True)
    assert torn.offset + torn.length == len(data) + zeros


def test_zeros_in_the_middle_are_not_a_torn_tail() -> None:
    """A zeroed block with good frames after it is damage, and the frames after it come out."""
    data = MANY_DATA[:BLOCK_SIZE] + bytes(BLOCK_SIZE) + MANY_DATA[2 * BLOCK_SIZE :]
    got, damage = read(data)
    check_account(got, damage)
    assert [item.tail for item in damage] == [False]
    assert MANY_FRAMES[-1] in got


def test_zeros_in_the_middle_do_not_make_the_end_a_torn_tail() -> None:
    """Zeros early in a file say nothing about a corrupt, orphan or torn chunk at its end."""
    data = MANY_DATA[:BLOCK_SIZE] + bytes(BLOCK_SIZE) + MANY_DATA[2 * BLOCK_SIZE :]
    for end, tail in ((data[:-1] + b"X", False), (data + chunk(4, b"l"), False)):
        assert [item.tail for item in read(end)[1]] == [False, tail]
    last = read(data + chunk(2, b"f"))[1][-1]
    assert (last.offset, last.reason) == (len(data), "the file ends inside a record")


def test_damage_is_told_where_it_lies() -> None:
    """Frames and damage come in the order of the file, so that a reader can stop anywhere."""
    data = bytearray(MANY_DATA)
    for frame in MANY_FRAMES[10:250:40]:
        data[frame.offset + CHUNK_HEADER] ^= 0xFF
    items = list(read_frames(io.BytesIO(bytes(data))))
    offsets = [item.offset for item in items]
    assert offsets == sorted(offsets)
    assert sum(isinstance(item, Damage) for item in items) == 6


def test_a_bad_last_frame_is_not_a_torn_tail() -> None:
    """A whole last frame with a bad checksum is corrupt: waiting will not mend it."""
    data = write([b"one", b"two"])
    (bad,) = read(data[:-1] + b"X")[1]
    assert (bad.tail, bad.reason) == (False, "checksum mismatch")


def test_corrupt_and_torn_are_told_apart_in_one_file() -> None:
    """A file may be corrupt in the middle and torn at its end: two stretches."""
    data = write([b"one", b"two", b"three"])
    frames, damage = read(data.replace(b"two", b"TWO")[:-1])
    assert [frame.payload for frame in frames] == [b"one"]
    assert [item.tail for item in damage] == [False, True]
    assert damage[0].offset + damage[0].length == damage[1].offset


@pytest.mark.parametrize(
    ("chunks", "survivors", "reasons"),
    [
        ([(3, b"m"), (1, b"ok")], [b"ok"], ["a record without a beginning"]),
        ([(4, b"l"), (1, b"ok")], [b"ok"], ["a record without a beginning"]),
        ([(2, b"f"), (1, b"ok")], [b"ok"], ["a record without an end"]),
        ([(2, b"f"), (2, b"o"), (4, b"k")], [b"ok"], ["a record without an end"]),
        ([(1, b"ok"), (2, b"f"), (3, b"m")], [b"ok"], ["the file ends inside a record"]),
    ],
)
def test_chunks_out_of_order_are_damage(
    chunks: list[tuple[int, bytes]], survivors: list[bytes], reasons: list[str]
) -> None:
    """Orphan middle and last chunks and records without an end are reported, never joined."""
    data = FILE_HEADER + b"".join(chunk(kind, part) for kind, part in chunks)
    frames, damage = read(data)
    assert [frame.payload for frame in frames] == survivors
    assert [item.reason for item in damage] == reasons


@pytest.mark.parametrize("block", range(1, len(MANY_DATA) // BLOCK_SIZE + 1))
def test_reading_from_a_block_border(block: int) -> None:
    """From a later block on come exactly the frames that begin there, and no damage."""
    start = block * BLOCK_SIZE
    expected = [frame for frame in MANY_FRAMES if frame.offset >= start]
    assert read(MANY_DATA, start) == (expected, [])


def test_reading_from_elsewhere_is_refused() -> None:
    """A start that is no block border is an error of the caller."""
    with pytest.raises(ValueError, match="multiple of 32768"):
        list(read_frames(io.BytesIO(MANY_DATA), start=100))


def test_only_a_few_blocks_are_in_memory() -> None:
    """The reader asks the stream for one block at a time."""

    class Counting(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert size >= 0
            self.largest = max(self.largest, size)
            return super().read(size)

    stream = Counting(MANY_DATA)
    assert sum(1 for _ in read_frames(stream)) == len(MANY)
    assert stream.largest <= BLOCK_SIZE


def test_a_stream_that_gives_less_than_asked_is_read_to_its_end() -> None:
    """Short reads of an unbuffered stream are not taken for the end of the file."""

    class Dribbling(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 1000))

    assert list(read_frames(Dribbling(MANY_DATA))) == MANY_FRAMES


@pytest.mark.parametrize(
    ("head", "state", "reason"),
    [
        (b"", HeaderState.EMPTY, "empty"),
        (b":W&", HeaderState.EMPTY, "header incomplete"),
        (b":W&B\xe1\xbe\x00", HeaderState.EMPTY, "header only"),
        (b":W&B\xe1\xbe\x00\x01", HeaderState.OK, ""),
        (
            b":W&B\xe1\xbe\x07\x01",
            HeaderState.FOREIGN,
            "not a W&B log (header of version 7, which is not known)",
        ),
        (b":W&B\xe1\xbf\x00\x01", HeaderState.FOREIGN, "not a W&B log (header 3a 57 26 42 e1 bf"),
        (b"step:1 - x", HeaderState.FOREIGN, "not a W&B log (header 73 74 65 70 3a 31 20"),
        (b"s", HeaderState.FOREIGN, "not a W&B log (header 73 = b's')"),
        (bytes(8), HeaderState.FOREIGN, "not a W&B log (header is all zeros)"),
    ],
)
def test_header_verdicts(head: bytes, state: HeaderState, reason: str) -> None:
    """Nothing yet, fine, and foreign are three verdicts; a foreign header is shown."""
    verdict = check_header(head)
    assert verdict.state is state
    assert verdict.reason.startswith(reason)
    assert bool(verdict.reason) == bool(reason)
