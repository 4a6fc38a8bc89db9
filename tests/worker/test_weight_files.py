"""Which files of a model hold its weights, and what is missing."""

import json
from pathlib import Path

import pytest

from lockstep.worker.weights.files import check_weights, is_gguf, safetensors_files


def test_an_index_names_the_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert safetensors_files(tmp_path) == ["one.safetensors", "two.safetensors"]
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ValueError, match="lacks two.safetensors, which its index names"):
        check_weights(tmp_path, "auto")
    (tmp_path / "two.safetensors").touch()
    check_weights(tmp_path, "auto")


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*index.json"):
        safetensors_files(tmp_path)


def test_a_directory_without_weights_does_for_dummy_ones_alone(tmp_path: Path) -> None:
    check_weights(tmp_path, "dummy")
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        check_weights(tmp_path, "auto")


@pytest.mark.parametrize(
    ("name", "load_format", "expected"),
    [("m.gguf", "auto", True), ("m.gguf", "gguf", True), ("m", "auto", False)],
)
def test_the_path_says_what_auto_is(name: str, load_format: str, expected: bool) -> None:
    assert is_gguf(Path(name), load_format) is expected


@pytest.mark.parametrize(("name", "load_format"), [("m.gguf", "safetensors"), ("m", "gguf")])
def test_another_format_than_the_path_has_is_refused(name: str, load_format: str) -> None:
    with pytest.raises(ValueError, match=f"load_format {load_format} cannot read {name}"):
        is_gguf(Path(name), load_format)
