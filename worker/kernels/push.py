"""Lines of 16 bytes that carry their own flags, written to a peer's memory and awaited there.

A line is [word, epoch, word, epoch]. A device writes and reads 8 aligned bytes at once, so a word
whose epoch is right is whole: no fence and no barrier, and any bits may be data.
"""

import functools

import triton
import triton.language as tl


@triton.jit
def send_lines(addresses, values, epoch, live):
    """Write ``values`` [n] int64 as lines to ``addresses`` [n] int64 where ``live`` [n]."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, b; setp.ne.b32 p, $4, 0; mov.b64 {a, b}, $2; "
        "@p st.volatile.global.v4.b32 [$1], {a, $3, b, $3}; mov.b32 $0, 0; }",
        "=r,l,l,r,r", [addresses, values, epoch, live.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def await_lines(
    addresses, epoch, live, looks, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """Both words of a line of every source, in order, [n] int32 each, then 1 where it is late.

    Looks until the epochs of all are right, at most ``looks`` times. Lines that are not ``live``
    are zeros and never late. ``ASM`` and ``CONSTRAINTS`` are those of ``waiting``.
    """
    return tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [addresses, epoch, live.to(tl.int32), looks],
        dtype=(tl.int32,) * (2 * WORLD + 1), is_pure=False, pack=1,
    )  # fmt: skip


@functools.cache
def waiting(world: int, source_bytes: int) -> tuple[str, str]:
    """Assembly that waits for the lines of ``world`` sources, ``source_bytes`` apart.

    All are asked for before any is looked at, so that many sources take as long as one.
    """
    count = 2 * world
    late, address, epoch, live, looks = (f"${count + i}" for i in range(5))
    loads = "".join(
        f"ld.volatile.global.v4.b32 {{${2 * source}, f{2 * source}, ${2 * source + 1}, "
        f"f{2 * source + 1}}}, [{address}+{source * source_bytes}]; "
        for source in range(world)
    )
    checks = "".join(f"setp.ne.or.b32 p, f{i}, {epoch}, p; " for i in range(1, count))
    text = (
        f"{{ .reg .pred p, q; .reg .b32 n, f<{count}>; mov.b32 n, {looks}; "
        + "".join(f"mov.b32 ${i}, 0; " for i in range(count))
        + f"setp.ne.b32 p, {live}, 0; @!p bra done; "
        + f"look: {loads}setp.ne.b32 p, f0, {epoch}; {checks}"
        + "sub.s32 n, n, 1; setp.ne.and.b32 q, n, 0, p; @q bra look; "
        + f"done: selp.b32 {late}, 1, 0, p; }}"
    )
    return text, ",".join(["=&r"] * (count + 1) + ["l", "r", "r", "r"])
