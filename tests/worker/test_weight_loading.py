"""Loading: a rank reads its slices and no more, and every fault is named."""

import json
import logging
import re
from pathlib import Path

import hf_models
import pytest
import torch
from one_request import OneRank, loaded, new_model, worker_config
from safetensors.torch import load_file, save_file

from lockstep.worker.weights.load import load_weights
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.safetensors import SafetensorsSource

NINE = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_models.save(hf_models.make("llama", **NINE), tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(checkpoint, tmp_path):
    """The checkpoint as one file that a test may damage."""
    tensors = {k: v for f in checkpoint.glob("*.safetensors") for k, v in load_file(f).items()}
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def load_from(path, tp=None, **options):
    return loaded(worker_config(model_config_from(path), path, **options), tp)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_reads_its_own_slice(checkpoint, size):
    config = worker_config(model_config_from(checkpoint), checkpoint)
    total = sum(t.nbytes for f in checkpoint.glob("*.safetensors") for t in load_file(f).values())
    reports = [
        load_weights(new_model(config.model, OneRank(rank, size)), config) for rank in range(size)
    ]
    norms = 4 * 72 * 7  # only these are read by every rank
    assert sum(report.num_bytes for report in reports) == total + norms * (size - 1)


def resident_kib(path):
    """How much of a mapped file this process has touched."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [entry for entry in maps if str(path) in entry.partition("\n")[0]]
    return sum(int(re.search(r"^Rss: +(\d+) kB", entry, re.M)[1]) for entry in ours)


def test_rows_that_are_not_read_stay_on_disk(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2048, 2048)}, path)
    source = SafetensorsSource(tmp_path)
    part = torch.empty(256, 2048).copy_(source.read("weight", 0, 512, 256))
    assert part.all()
    # 2 MiB were asked for, of 16; the kernel maps whole runs of pages around them.
    assert 2048 <= resident_kib(path) <= 6144


def test_padded_heads_are_zero(checkpoint):
    attention = load_from(checkpoint, OneRank(1, 2)).model.layers[0].self_attn
    q, k, v = attention.qkv_proj.weight.split([6 * 8, 2 * 8, 2 * 8])
    assert not q[24:].any() and not k[8:].any() and not v[8:].any()
    assert not attention.o_proj.weight[:, 24:].any()
    assert q[:24].any(dim=1).all() and k[:8].any(dim=1).all()
    assert attention.o_proj.weight[:, :24].any(dim=0).all()


def test_progress_goes_up_to_the_end(checkpoint):
    seen = []
    config = worker_config(model_config_from(checkpoint), checkpoint)
    report = load_weights(new_model(config.model), config, lambda *args: seen.append(args))
    assert seen == [("weights", i, report.num_tensors) for i in range(report.num_tensors + 1)]
    assert report.seconds > 0


def test_missing_tensor_is_named(copy):
    path, tensors = copy
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.up_proj.weight' is missing from /"):
        load_from(path)


def test_wrong_shape_is_named(copy):
    path, tensors = copy
    tensors["model.norm.weight"] = torch.ones(71)
    save_file(tensors, path / "model.safetensors")
    message = r"'model.norm.weight' in .* has shape \(71,\); the model's config asks for \(72,\)"
    with pytest.raises(ValueError, match=message):
        load_from(path)


def test_extra_tensors_are_ignored_and_told(copy, caplog):
    path, tensors = copy
    tensors["model.rotary.inv_freq"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors")
    with caplog.at_level(logging.DEBUG, "lockstep"):
        load_from(path)
    assert "1 tensors that are not used: ['model.rotary.inv_freq']" in caplog.text


def test_damaged_and_absent_files_are_named(copy):
    path, _ = copy
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot read .*model.safetensors"):
        load_from(path)
    file.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.i"):
        load_from(path)
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="cannot read .*model-1.safetensors"):
        load_from(path)


def test_stored_type_becomes_the_type_of_the_parameters(copy):
    path, tensors = copy
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, path / "model.safetensors")
    model = load_from(path)
    norm = model.model.norm.weight
    assert norm.dtype == torch.float32
    assert torch.equal(norm, halves["model.norm.weight"].float())
