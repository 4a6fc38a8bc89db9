"""Imports point left only, and what must do without torch does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("comm", "parallel", "worker", "launcher")
FILES = sorted(path for folder in ORDER for path in (ROOT / folder).rglob("*.py"))

# What the scheduler process loads: it starts without torch.
WITHOUT_TORCH = (
    "lockstep.comm.messages",
    "lockstep.comm.codec",
    "lockstep.comm.ring",
    "lockstep.comm.channel",
    "lockstep.parallel.mesh",
    "lockstep.parallel.agreement",
    "lockstep.parallel.collective_agreement",
    "lockstep.worker.config",
    "lockstep.worker.graphs.mode",
    "lockstep.worker.graphs.grid",
    "lockstep.worker.graphs.dispatch",
    "lockstep.worker.graphs.manifest",
    "lockstep.worker.graphs.padding",
    "lockstep.worker.graphs.fallback",
    "lockstep.worker.graphs.fit",
    "lockstep.worker.attention.registry",
    "lockstep.worker.models.floor",
    "lockstep.worker.schedule.block_pool",
    "lockstep.worker.schedule.scheduler",
    "lockstep.worker.schedule.driver",
    "lockstep.launcher.scheduler_host",
    "lockstep.launcher.grammars",
    "lockstep.worker.grammars.compiler",
    "lockstep.worker.schedule.driver",
)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any depth in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
    return names


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_left(path: Path) -> None:
    own = ORDER.index(path.relative_to(ROOT).parts[0])
    for name in imported(path):
        package, _, rest = name.partition(".")
        assert package not in ORDER, f"{name}: import it as lockstep.{name}"
        folder = rest.partition(".")[0]
        if package == "lockstep" and folder in ORDER:
            assert ORDER.index(folder) <= own, f"{name} lies to the right"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_ray_and_torch_distributed_stay_in_their_folders(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    names = imported(path)
    if folder != "launcher":
        assert not {name for name in names if name.split(".")[0] == "ray"}
    if folder not in ("comm", "parallel"):
        assert not {name for name in names if name.startswith("torch.distributed")}


def attributes_in(path: Path) -> set[str]:
    """Every dotted name in a file, and the last part of each."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in tree if isinstance(node, ast.Attribute)]
    return {ast.unparse(node) for node in found} | {node.attr for node in found}


def test_graphs_are_captured_in_one_place() -> None:
    """A second way to capture would have to register, compare and check all over again.

    Those of the race are timed and dropped before anything is served.
    """
    torchs = {"CUDAGraph", "capture_begin", "torch.cuda.graph", "make_graphed_callables"}
    found = {name_of(path): attributes_in(path) for path in FILES}
    assert {name for name, used in found.items() if torchs & used} == {"worker/graphs/cuda.py"}
    opened = {name for name, used in found.items() if "self._backend.session" in used}
    assert opened == {"worker/graphs/runner.py", "worker/sums/times.py"}


def test_the_scheduler_loads_without_torch() -> None:
    loads = "\n".join(f"import {name}" for name in WITHOUT_TORCH)
    check = "import sys; found = {'torch', 'ray'} & set(sys.modules); assert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", f"{loads}\n{check}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_package_is_links_to_the_folders() -> None:
    package = ROOT / "deploy" / "package" / "lockstep"
    for folder in ORDER:
        assert (package / folder).is_symlink()
        assert (package / folder).resolve() == ROOT / folder


def test_test_files_have_unique_names_and_no_packages() -> None:
    files = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert "__init__.py" not in files
    # pytest itself tells conftest files of different folders apart.
    twice = {name for name in files if files.count(name) > 1} - {"conftest.py"}
    assert not twice
