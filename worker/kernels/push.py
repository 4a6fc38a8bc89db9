"""Lines of 16 bytes that carry their own flags, written to a peer's memory and awaited there.

A line is [word, epoch, word, epoch]. A device writes and reads 8 aligned bytes at once, so a word
whose epoch is right is whole: no fence and no barrier, and any bits may be data.
"""

import functools

import triton
import triton.language as tl

# A thread of 1024 has 64 registers; each word takes one for itself and one for its epoch.
_WORDS_AT_ONCE = 16


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
    addresses, epoch, live, looks, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
    AT_ONCE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Both words of a line of every source, in order, [n] int32 each, then 1 where they are late.

    Looks until the epochs of all are right, at most ``looks`` times. Lines that are not ``live``
    are zeros, and late only if one of the same thread is. ``ASM``, ``CONSTRAINTS`` and ``AT_ONCE``
    are those of ``waiting``.
    """
    return tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [addresses, epoch, live.to(tl.int32), looks],
        dtype=(tl.int32,) * (2 * WORLD + 1), is_pure=False, pack=AT_ONCE,
    )  # fmt: skip


@functools.cache
def waiting(world: int, source_bytes: int, lines: int) -> tuple[str, str, int]:
    """Assembly that waits for the lines of ``world`` sources, ``source_bytes`` apart.

    All are asked for before any is looked at, so that many sources take as long as one. So do the
    ``lines`` that a thread has, a power of two; (assembly, constraints, how many of them at once).
    """
    at_once = max(1, min(lines, _WORDS_AT_ONCE // (2 * world)))
    # Both words of all sources, late, address, epoch, live, looks: of each a register a line.
    operands = 2 * world + 5
    registers = [[f"${i * at_once + j}" for i in range(operands)] for j in range(at_once)]
    each = [_waiting_line(j, world, source_bytes, own) for j, own in enumerate(registers)]
    begins, loads, checks, ends = ("".join(parts) for parts in zip(*each, strict=True))
    text = (
        f"{{ .reg .pred p, q; .reg .b32 n; mov.b32 n, {registers[0][-1]}; {begins}"
        f"look: setp.ne.b32 p, n, n; {loads}{checks}"
        f"sub.s32 n, n, 1; setp.ne.and.b32 q, n, 0, p; @q bra look; {ends}}}"
    )
    inputs = ["l", "r", "r", "r"]
    constraints = ["=&r"] * (operands - len(inputs)) + inputs
    return text, ",".join(kind for kind in constraints for _ in range(at_once)), at_once


def _waiting_line(
    line: int, world: int, source_bytes: int, registers: list[str]
) -> tuple[str, str, str, str]:
    """What there is to do for a line of each source: at first, to ask, to look, at last."""
    *words, late, address, epoch, live, _ = registers
    flags = [f"f{line}_{i}" for i in range(2 * world)]
    begin = f".reg .pred l{line}; .reg .b32 {', '.join(flags)}; setp.ne.b32 l{line}, {live}, 0; "
    begin += "".join(f"mov.b32 {word}, 0; " for word in words)
    loads = "".join(
        f"@l{line} ld.volatile.global.v4.b32 {{{words[i]}, {flags[i]}, {words[i + 1]}, "
        f"{flags[i + 1]}}}, [{address}+{i // 2 * source_bytes}]; "
        for i in range(0, 2 * world, 2)
    )
    checks = "".join(f"@l{line} setp.ne.or.b32 p, {flag}, {epoch}, p; " for flag in flags)
    return begin, loads, checks, f"selp.b32 {late}, 1, 0, p; "
