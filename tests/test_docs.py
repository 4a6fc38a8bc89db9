"""What the documentation names is there."""

import re
from pathlib import Path

import pytest

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.config import LaunchConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("comm", "parallel", "worker", "launcher", "tests", "deploy", "docs", ".ci")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    known = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    for name in re.findall(r"[\w./-]+\.(?:py|md|sh|toml|txt|json)\b", page.read_text()):
        if name.partition("/")[0] in FOLDERS:
            assert (ROOT / name).exists(), name
        elif name.endswith(".py"):
            assert name in known, name


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]+)", page.read_text(), re.MULTILINE):
        assert target in targets, target


def test_every_setting_explains_itself() -> None:
    silent = [
        field
        for field, hint in LaunchConfig.__annotations__.items()
        if not any(getattr(extra, "description", None) for extra in hint.__metadata__)
    ]
    assert not silent
    assert not set(SamplingParams.__struct_fields__) & set(LaunchConfig.__struct_fields__) - {
        "seed"
    }
