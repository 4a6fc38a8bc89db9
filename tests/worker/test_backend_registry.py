"""The registry against the article's table and against the classes that run."""

import pytest

from lockstep.worker.attention.registry import ADAPTERS, BACKENDS, find_backend

# Level by level as the article lists them; those with an adapter say what they can do here.
ARTICLE = {
    "flash_attn_2": "UNIFORM_BATCH",
    "flash_attn_3": "ALWAYS",
    "aiter_flash_attn": "UNIFORM_BATCH",
    "flashmla": "UNIFORM_BATCH",
    "flashinfer_mla": "UNIFORM_BATCH",
    "flashinfer_mla_sparse": "UNIFORM_BATCH",
    "aiter_mla": "UNIFORM_SINGLE_TOKEN_DECODE",
    "cutlass_mla": "UNIFORM_SINGLE_TOKEN_DECODE",
    "mamba": "UNIFORM_SINGLE_TOKEN_DECODE",
}


def test_levels_of_the_article() -> None:
    elsewhere = {info.name: info.support.name for info in BACKENDS if not info.adapter}
    assert elsewhere == ARTICLE
    assert {"triton", "reference", "flashinfer"} == set(ADAPTERS)
    assert "UNIFORM_SINGLE_TOKEN_DECODE" in find_backend("flashinfer").why
    assert all(info.why for info in BACKENDS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_can_do_what_the_registry_says(name: str) -> None:
    info = find_backend(name)
    module, _, class_name = info.adapter.partition(":")
    found = getattr(pytest.importorskip(module), class_name)
    assert (found.name, found.support) == (info.name, info.support)


def test_unknown_names_are_helped() -> None:
    with pytest.raises(ValueError, match="'flashinfr' is not known; did you mean 'flashinfer'"):
        find_backend("flashinfr")
    with pytest.raises(ValueError, match="'x' is not known; known: reference, triton, "):
        find_backend("x")
