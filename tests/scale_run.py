"""Everything that is to be seen on N GPUs of one host, in one command of less than ten minutes.

    python tests/scale_run.py --out build/scale
    python tests/scale_run.py --ranks 4 --device cpu --out build/scale    # a rehearsal
    python tests/scale_run.py --only "8B TP1xDP1" ranks --out build/rest  # what was cut

Parts run one after the other in order of importance, each with a limit of its own and all within
``--budget-s``: what is slow is cut and loses itself only. After each part the folder has all so
far: scale.json, scale.log (all output) and scale.md (the tables, which are also printed last).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from scale_parts import Part, cpu_parts, gpu_parts
from scale_tables import Done, tables

from lockstep.launcher.bench_decode.numbers import DecodeReport

ROOT = Path(__file__).parents[1]
# From SIGTERM on, in which a command ends its engine.
GRACE_S = 15.0
LEAST_S = 20.0
SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    # NVLink multicast can take down GPUs of a host that others share.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Where a host's memory grows as it is used, Ray would end ranks for using nearly all of it.
    "RAY_memory_monitor_refresh_ms": "0",
}


def main() -> int:
    args = _parse()
    ends = time.monotonic() + args.budget_s
    parts = gpu_parts if args.device == "cuda" else cpu_parts
    args.out.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []
    for part in parts(args.ranks or _num_gpus()):
        if args.only and part.name not in args.only:
            continue
        left = ends - time.monotonic() - GRACE_S
        if left < LEAST_S:
            done.append(Done(part, None, 0.0, ""))
            continue
        done.append(run(part, min(part.limit_s, left), args.ranks))
        write(args.out, done)
        _say(f"{part.name}: exit code {done[-1].code} after {done[-1].seconds:.0f} s")
    write(args.out, done)
    sys.stdout.write("\n".join(tables(done)) + "\n")
    return 1 if any(each.code != 0 for each in done) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=0, help="default: a GPU each")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="leave out others")
    parser.add_argument("--budget-s", type=float, default=580.0)
    return parser.parse_args()


def run(part: Part, limit_s: float, num_ranks: int) -> Done:
    """Wait for it as long as allowed. Nothing of it is left then."""
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        argv = [*part.argv, "--json", str(report)] if part.decode else part.argv
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *argv], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, env=_environment(num_ranks), start_new_session=True,
            )  # fmt: skip
            code = _ended(process, limit_s)
        text = output.read_text(errors="replace")
        found = (
            msgspec.json.decode(report.read_bytes(), type=DecodeReport) if _whole(report) else None
        )
    return Done(part, code, time.monotonic() - began, text, found)


def _whole(report: Path) -> bool:
    return report.exists() and report.stat().st_size > 0


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its exit code, or None if it had to be ended."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return None


def _environment(num_ranks: int) -> dict[str, str]:
    paths = [str(ROOT / "deploy" / "package"), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LOCKSTEP_TEST_RANKS": str(num_ranks or _num_gpus()),
    }
    return os.environ | SETTINGS | own


def write(folder: Path, done: Sequence[Done]) -> None:
    """All so far."""
    told = [
        {
            "part": each.part.name, "argv": each.part.argv, "code": each.code,
            "seconds": each.seconds, "report": msgspec.to_builtins(each.report),
        }
        for each in done
    ]  # fmt: skip
    (folder / "scale.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "scale.md").write_text("\n".join(tables(done)) + "\n")
    log = "".join(
        f"=== {each.part.name}: {' '.join(each.part.argv)}\n{each.output}" for each in done
    )
    (folder / "scale.log").write_text(log)


def _num_gpus() -> int:
    """Asked without a context on any of them."""
    import torch

    return torch.cuda.device_count()


def _say(text: str) -> None:
    sys.stderr.write(f"scale: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
