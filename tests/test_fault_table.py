"""docs/faults.md names a test that exists for every fault, or says why there is none."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (\d+) \| (.*) \|$", TEXT, re.MULTILINE))
NUMBERS = {
    *range(1, 8), *range(9, 12), *range(13, 18), *range(19, 29), 30, *range(32, 43),
    *range(44, 49), *range(50, 55), *range(56, 67), *range(68, 75),
    *range(76, 79), *range(80, 87), *range(88, 92), *range(93, 100), *range(101, 109),
    *range(110, 114),
}  # fmt: skip
MARKS = {"multigpu": " (gpus)", "gpu": " (gpu)"}


def label_of(file: str, name: str) -> str:
    """What the table must write behind a test: on what it needs to run."""
    [path] = TESTS.rglob(file)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    module = [ast.unparse(node) for node in body if "pytestmark" in ast.unparse(node)[:10]]
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{file}::{name} is no test"
    marks = " ".join(module + [ast.unparse(mark) for mark in found[0].decorator_list])
    return next((label for mark, label in MARKS.items() if re.search(rf"\b{mark}\b", marks)), "")


def test_every_number_has_one_row() -> None:
    assert len(re.findall(r"^\| \d", TEXT, re.MULTILINE)) == len(ROWS)
    assert set(map(int, ROWS)) == NUMBERS


@pytest.mark.parametrize("number", ROWS)
def test_a_row_names_tests_that_exist(number: str) -> None:
    named = re.findall(r"(test_\w+\.py)::(\w+)( \(gpus?\))?", ROWS[number])
    assert named or "not covered, because" in ROWS[number]
    for file, name, label in named:
        assert label == label_of(file, name), f"{file}::{name}"
