"""Compiles a Triton kernel for Hopper, which takes no GPU but a process that does not interpret."""

from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction


def compile_for_hopper(
    kernel: JITFunction, types: Mapping[str, str], fixed: Mapping[str, object], **options: int
) -> CompiledKernel:
    """``types`` of arguments that are no pointers to aligned bfloat16; values of constants."""
    names = kernel.arg_names
    kinds = {n: "constexpr" if n in fixed else types.get(n, "*bf16") for n in names}
    pointers = [(at,) for at, name in enumerate(names) if kinds[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={pointer: [["tt.divisibility", 16]] for pointer in pointers},
    )
    return triton.compile(source, GPUTarget("cuda", 90, 32), options)
