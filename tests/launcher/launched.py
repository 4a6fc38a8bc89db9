"""A command under test with all processes that come of it, whatever becomes of their parents."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from inline_engine import start_inline_engine

from lockstep.launcher.cli import guarded
from lockstep.launcher.front_end import StartEngine

NONCE = "LAUNCHED_TEST"
CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101,
  "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "torch_dtype": "float32", "eos_token_id": 2
}"""
PROMPT = (
    '{"prompt_token_ids": [%d, 6, 7], "ignore_eos": true, "max_tokens": %d, "temperature": 0}\n'
)


def generate_arguments(folder: Path, *, max_tokens: int, tp: int = 2) -> list[str]:
    """``generate`` of two requests by a tiny model with seeded random weights, into a file."""
    (folder / "config.json").write_text(CONFIG)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(PROMPT % (first, max_tokens) for first in (5, 9)))
    return [
        "generate", "--model", str(folder), "--load-format", "dummy", "--device", "cpu",
        "-tp", str(tp), "--prompts-file", str(prompts), "--output", str(folder / "out.jsonl"),
        "--kv-cache-memory-bytes", "4000000",
    ]  # fmt: skip


def answers(folder: Path) -> list[list[int]]:
    """Tokens of the two requests."""
    lines = (folder / "out.jsonl").read_text().splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


def tokens_of_one_rank_alone(folder: Path, max_tokens: int = 8) -> list[list[int]]:
    """What every way to start must give."""
    run_here(generate_arguments(folder, max_tokens=max_tokens, tp=1), start_inline_engine)
    return answers(folder)


def run_here(arguments: list[str], start_engine: StartEngine) -> None:
    """The command in this process, which keeps its own handler of SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert guarded(arguments, start_engine) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)


class Launched:
    """A started command. Its processes are found by a word in the environment they started with."""

    def __init__(self, command: list[str], folder: Path, **env: str) -> None:
        self.folder = folder
        self._word = f"{NONCE}={os.getpid()}-{folder}"
        self._stderr = folder / "stderr"
        name, _, value = self._word.partition("=")
        with open(self._stderr, "wb") as stderr, open(folder / "stdout", "wb") as stdout:
            self.root = subprocess.Popen(
                command, env=os.environ | env | {name: value}, stdin=subprocess.DEVNULL,
                stdout=stdout, stderr=stderr, start_new_session=True,
            )  # fmt: skip

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def processes(self) -> dict[int, tuple[str, dict[str, str]]]:
        """Of each living process its command line and its first environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    environment = (entry / "environ").read_bytes().decode().split("\0")
                    if self._word in environment:
                        line = (entry / "cmdline").read_text().replace("\0", " ")
                        pairs = dict(each.split("=", 1) for each in environment if "=" in each)
                        found[int(entry.name)] = (line, pairs)
        return found

    def find(self, word: str, **environment: str) -> int:
        """The one process with ``word`` in its command line and these variables."""
        (pid,) = [
            pid
            for pid, (line, pairs) in self.processes().items()
            if word in line and environment.items() <= pairs.items()
        ]
        return pid

    def await_text(self, text: str, timeout_s: float = 180) -> None:
        """Wait until standard error holds ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.stderr:
            assert self.root.poll() is None and time.monotonic() < deadline, self.stderr
            time.sleep(0.05)

    def await_path(self, path: Path, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            assert self.root.poll() is None and time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def ended(self, timeout_s: float = 90) -> int:
        """Exit code of the command, once no process of it is left; fails after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.processes() and time.monotonic() < deadline:
            self.root.poll()
            time.sleep(0.05)
        left = [line for line, _ in self.processes().values()]
        assert left == [], f"still there after {timeout_s} s: {left}\n{self.stderr}"
        return self.root.wait()

    def clean_up(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.root.wait()
