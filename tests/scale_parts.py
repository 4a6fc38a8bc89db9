"""What a scale run consists of: commands in order of importance, each with its limit of time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODELS = Path("tests", "data", "models")
LAYOUT_TESTS = ("tests/worker/test_gpu_layouts.py", "tests/launcher/test_killed_rank.py")
LOCKSTEP = ("-P", "-m", "lockstep")
LONG_S = 600.0


@dataclass(frozen=True)
class Part:
    """``argv`` of Python, run in the repository's root; what it has not done in time is left out.

    With ``decode`` the command is ``lockstep bench decode``, which is told where to report.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    decode: bool = False


@dataclass(frozen=True)
class Bench:
    """A model to decode with: its batches, for a GPU each, and flags that all its layouts have."""

    name: str
    model: Path
    batches: tuple[int, ...]
    flags: tuple[str, ...] = ()

    def part(self, limit_s: float, *, tp: int = 1, dp: int = 1, more: str = "") -> Part:
        """A replica's batches are those of its GPUs where replicas are compared."""
        flags = ("--load-format", "dummy", "-tp", str(tp), "-dp", str(dp), *self.flags)
        argv = (*LOCKSTEP, "bench", "decode", "--model", str(self.model), *flags)
        batches = ("--batch", *map(str, self.batches))
        name = f"{self.name} TP{tp}xDP{dp}"
        return Part(name, (*argv, *batches, *more.split()), limit_s, decode=True)


def gpu_parts(num_gpus: int) -> Iterator[Part]:
    """Tests of layouts, sums, two models over all GPUs, throughput, then all tests of ranks."""
    yield Part("layouts", (*_pytest("multigpu"), *LAYOUT_TESTS), 230)
    yield Part("sums", ("tests/bench_all_reduce.py", "--ranks", str(num_gpus)), 70)
    small, large = MODELS / "llama-3.1-8b", MODELS / "llama-3.1-70b"
    batches = (1, 8, 32, 128)
    yield Bench("8B", small, batches, ("--repetitions", "3")).part(120, tp=num_gpus)
    few = f"--no-gate --repetitions 2 --cudagraph-capture-sizes {' '.join(map(str, batches))}"
    yield Bench("70B", large, batches).part(150, tp=num_gpus, more=few)
    for tp, dp in replicas(num_gpus):
        yield _throughput("8B", small, (32, 128), 80, tp, dp)
    others = ("tests", *(f"--ignore={path}" for path in LAYOUT_TESTS))
    yield Part("ranks", (*_pytest("multigpu"), *others), LONG_S)


def cpu_parts(num_ranks: int) -> Iterator[Part]:
    """The same with a tiny model and gloo, to see that it all runs: no number means anything."""
    yield Part("layouts", (*_pytest("not gpu"), "tests/worker/test_layouts.py"), LONG_S)
    sums = ("tests/bench_all_reduce.py", "--ranks", str(num_ranks), "--device", "cpu")
    yield Part("sums", (*sums, "--hidden", "2048"), LONG_S)
    flags = "--device cpu --input-len 4 --short-len 2 --long-len 8 --max-model-len 128"
    tiny = MODELS / "eight-heads"
    room = ("--kv-cache-memory-bytes", "8000000", *flags.split())
    yield Bench("tiny", tiny, (1, 2), room).part(LONG_S, tp=num_ranks, more="--repetitions 1")
    for tp, dp in replicas(num_ranks):
        yield _throughput("tiny", tiny, (2,), LONG_S, tp, dp, room)


def replicas(num_gpus: int) -> list[tuple[int, int]]:
    """(TP, DP) whose throughput is compared: one GPU, replicas of one, from four on also of two."""
    return [(1, 1), (1, num_gpus), *([(2, num_gpus // 2)] if num_gpus > 2 else [])]


def _throughput(
    name: str, model: Path, batches: tuple[int, ...], limit_s: float, tp: int, dp: int,
    flags: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """As many requests a GPU in every layout."""
    of_a_replica = tuple(tp * batch for batch in batches)
    sizes = " ".join(map(str, of_a_replica))
    more = f"--no-gate --repetitions 2 --cudagraph-capture-sizes {sizes}"
    return Bench(name, model, of_a_replica, flags).part(limit_s, tp=tp, dp=dp, more=more)


def _pytest(marks: str) -> tuple[str, ...]:
    # A run that is cut short has told of each test that it ended.
    return ("-P", "-m", "pytest", "-v", "-rfE", "-m", marks)
