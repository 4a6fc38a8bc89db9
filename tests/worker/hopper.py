"""Compiles a kernel for Hopper, which takes no GPU but a process that does not interpret."""

import re
import subprocess
import tempfile
from collections.abc import Mapping

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction


def compile_for_hopper(
    kernel: JITFunction, types: Mapping[str, str], fixed: Mapping[str, object], **options: int
) -> CompiledKernel:
    """``types`` of arguments that are no pointers to aligned bfloat16; values of constants."""
    names = kernel.arg_names
    kinds = {n: "constexpr" if n in fixed else types.get(n, "*bf16") for n in names}
    pointers = [(at,) for at, name in enumerate(names) if kinds[name].startswith("*")]
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={pointer: [["tt.divisibility", 16]] for pointer in pointers},
    )
    return triton.compile(source, GPUTarget("cuda", 90, 32), options)


def tiles_type(*shape: int) -> str:
    """Of a tensor descriptor of bfloat16 tiles, as Gluon's kernels take them."""
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    return f"tensordesc<bf16{list(shape)},{layout!r}>"


def stack_bytes(compiled: CompiledKernel) -> int:
    """What a thread keeps in memory because its registers are too few."""
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", _usage(compiled))))


def registers(compiled: CompiledKernel) -> int:
    """Of a thread."""
    return max(map(int, re.findall(r"REG:(\d+)", _usage(compiled))))


def _usage(compiled: CompiledKernel) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
