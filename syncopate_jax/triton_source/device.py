"""What rewritten kernels call on the device: table entries, waits, signals, copies, addresses.

Imported by rewritten kernels only, so that the package does not need Triton.
"""

# The names of constants are types to Triton, so that annotations cannot be strings.
import triton
import triton.language as tl


@triton.jit
def entry(table_ptr, at, MULTIPLE: tl.constexpr):
    """An entry of this rank's row, known to be a multiple of ``MULTIPLE``."""
    return tl.multiple_of(tl.load(table_ptr + at), MULTIPLE)


@triton.jit
def ahead(ptr):
    """Begins to bring what is there into this multiprocessor's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64, bitcast=True)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


# A wait is one statement, so that Triton pipelines a loop that has one, and costs a comparison
# where its list is empty. One thread polls, the others meet it afterwards.
POLL: tl.constexpr = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 row, slot, wanted, seen;
    .reg .b64 at;
    setp.ge.s32 p, $2, $3;
    @p bra DONE;
    mov.u32 row, %tid.x;
    setp.ne.u32 p, row, 0;
    @p bra MET;
    mov.b32 row, $2;
NEXT:
    mad.wide.s32 at, row, 8, $1;
    ld.global.b32 slot, [at];
    ld.global.b32 wanted, [at + 4];
    mad.wide.s32 at, slot, 4, $4;
AGAIN:
    ld.acquire.sys.global.b32 seen, [at];
    setp.lt.s32 p, seen, wanted;
    @p bra AGAIN;
    add.s32 row, row, 1;
    setp.lt.s32 p, row, $3;
    @p bra NEXT;
MET:
    barrier.sync 0;
    """)
# As above, for one counter whose slot and count are known: no chain of loads before the poll.
POLL_ONE: tl.constexpr = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 seen;
    setp.lt.s32 p, $2, 1;
    @p bra DONE;
    mov.u32 seen, %tid.x;
    setp.ne.u32 p, seen, 0;
    @p bra MET;
AGAIN:
    ld.acquire.sys.global.b32 seen, [$1];
    setp.lt.s32 p, seen, $2;
    @p bra AGAIN;
MET:
    barrier.sync 0;
    """)
FENCE: tl.constexpr = tl.constexpr("fence.proxy.async.global;")
DONE: tl.constexpr = tl.constexpr("""
DONE:
    mov.b32 $0, 0;
}""")


@triton.jit
def wait_rows(rows_ptr, begin, end, counters_ptr, FENCED: tl.constexpr):
    """Returns once every counter of rows (slot, count) has got there: a system-scope acquire.

    ``FENCED``: what was waited for is loaded through tensor descriptors, by the copy unit.
    """
    text: tl.constexpr = POLL + FENCE + DONE if FENCED else POLL + DONE
    given = [rows_ptr.to(tl.int64, bitcast=True), begin, end]
    given += [counters_ptr.to(tl.int64, bitcast=True)]
    tl.inline_asm_elementwise(text, "=r,l,r,r,l", given, tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_count(counter_ptr, count, FENCED: tl.constexpr):
    """As ``wait_rows``, for one counter; a count of 0 is not waited for."""
    text: tl.constexpr = POLL_ONE + FENCE + DONE if FENCED else POLL_ONE + DONE
    given = [counter_ptr.to(tl.int64, bitcast=True), count]
    tl.inline_asm_elementwise(text, "=r,l,r", given, tl.int32, is_pure=False, pack=1)


@triton.jit
def stored():
    """Returns once what this thread had the copy unit store is there for others to see."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
        "=r",
        [],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def signal(counter_ptr):
    """Raises a counter by one, once all threads have stored: a system-scope release."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="sys")


@triton.jit
def wait_all(
    table_ptr,
    counters_ptr,
    point,
    STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    FENCED: tl.constexpr,
):
    """Waits for every (slot, count) of a point."""
    begin = tl.load(table_ptr + STARTS + point)
    end = tl.load(table_ptr + STARTS + point + 1)
    wait_rows(table_ptr + ROWS, begin, end, counters_ptr, FENCED)


@triton.jit
def wait_one(table_ptr, counters_ptr, point, ROWS: tl.constexpr, FENCED: tl.constexpr):
    """Waits for the one (slot, count) of a point; a count of 0 is none."""
    row_ptr = table_ptr + ROWS + 2 * point
    wait_count(counters_ptr + tl.load(row_ptr), tl.load(row_ptr + 1), FENCED)


@triton.jit
def signal_all(
    table_ptr,
    counters_ptr,
    peers_ptr,
    point,
    STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Raises every (rank, slot) of a point; ``counters_ptr`` points to rank 0's where folded."""
    for row in range(tl.load(table_ptr + STARTS + point), tl.load(table_ptr + STARTS + point + 1)):
        rank = tl.load(table_ptr + ROWS + 2 * row)
        slot = tl.load(table_ptr + ROWS + 2 * row + 1)
        signal(at_rank(counters_ptr, peers_ptr, rank, 0, SLOTS, RANKS, FOLDED) + slot)


@triton.jit
def at_rank(
    first_ptr,
    peers_ptr,
    rank,
    NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """The array of a rank: a part of one array where ranks are folded, else at its address."""
    if FOLDED:
        return first_ptr + tl.cast(rank, tl.int64) * SIZE
    else:
        addresses_ptr = peers_ptr.to(tl.pointer_type(tl.int64))  # which JAX holds as two halves
        address = tl.load(addresses_ptr + NUMBER * RANKS + rank)
        # Said of the pointer: what is known of an integer is forgotten when it becomes one.
        return tl.multiple_of(address.to(first_ptr.dtype), 16)


@triton.jit
def pick(is_other, other_ptr, own_ptr):
    """One of two pointers."""
    return tl.where(is_other != 0, other_ptr, own_ptr)


@triton.jit
def apart(ptr, from_ptr, ITEM: tl.constexpr):
    """How many elements of ``ITEM`` bytes lie between two arrays that start at 16 bytes each."""
    between = ptr.to(tl.int64, bitcast=True) - from_ptr.to(tl.int64, bitcast=True)
    return tl.multiple_of(between // ITEM, 16 // ITEM)


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    first,
    stride,
    SRC_PITCH: tl.constexpr,
    DST_PITCH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Pieces ``first``, ``first + stride``, … of ``ROWS`` rows of ``WIDTH`` elements."""
    a_row: tl.constexpr = (WIDTH + PIECE - 1) // PIECE
    for piece in range(first, ROWS * a_row, stride):
        row = piece // a_row
        offsets = (piece - row * a_row) * PIECE + tl.arange(0, PIECE)
        value = tl.load(src_ptr + row * SRC_PITCH + offsets, mask=offsets < WIDTH)
        tl.store(dst_ptr + row * DST_PITCH + offsets, value, mask=offsets < WIDTH)
