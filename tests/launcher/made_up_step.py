"""A decode step that never ran: names as on an H200, times made up so that sums are easy.

Two layers at batch 1. Each operation takes 10 us and begins when the one before ends, but the
products, which begin 4 us before that and end 10 us after it.
"""

from lockstep.worker.profiling.operation import Operation

_LAYER = (
    "_add_rms_norm_kernel",
    "_one_row_kernel",
    "_decode_attention_kernel",
    "_one_row_kernel",
    "_add_rms_norm_kernel",
    "_one_row_kernel",
    "_one_row_kernel",
)
_GATHER = (
    "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long>"
    "(at::cuda::detail::TensorInfo<c10::BFloat16>, int)"
)
_LOGITS = "void gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, float, (bool)1>(T9)"
_COPY = "Memcpy DtoH (Device -> Pinned)"
NAMES = (
    "_decode_inputs_kernel", _GATHER, "_rms_norm_kernel", *_LAYER[1:], *_LAYER,
    "_add_rms_norm_kernel", _LOGITS, "_split_best_kernel", "_finish_kernel", _COPY,
)  # fmt: skip
GRAPHS, COPY = 7, 8  # what was submitted together
EARLY_US, EACH_US = 4.0, 10.0


def made_up_step() -> list[Operation]:
    return [_operation(index, name) for index, name in enumerate(NAMES)]


def _operation(index: int, name: str) -> Operation:
    early = EARLY_US if name == "_one_row_kernel" else 0.0
    submission = COPY if name == _COPY else GRAPHS
    return Operation(name, EACH_US * index - early, EACH_US + early, submission)
