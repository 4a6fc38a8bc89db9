"""A model directory without weights, whose tokenizer has one token a byte."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 257
VOCAB = 260
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 256,
    "eos_token_id": END,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are bytes in the order of the byte-level alphabet; <s> 256, </s> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def write_byte_model(directory: Path, **generation: object) -> str:
    """Write config, tokenizer and generation settings, and no weights; returns the path."""
    (directory / "model.safetensors").touch()
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [END]} | generation,
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": "</s>"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return str(directory)
