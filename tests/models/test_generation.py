"""`model.generate()` of compiled models of transformers: with the caches that these make, token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import aotdist

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OF_T5: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
OF_GPT2: dict[str, Any] = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values that grow": ("Llama", SIZES),
    "a sliding window": ("Mistral", {**SIZES, "sliding_window": 8}),
    "every other layer with a window": ("Gemma2", {**SIZES, "sliding_window": 8, "head_dim": 8}),
    "encoder and decoder": ("T5", OF_T5),
    "positions in a table": ("GPT2", OF_GPT2),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}
CHOSEN: dict[tuple[str, str], str | None] = {
    ("keys and values that grow", "drawn"): "right",
    ("keys and values that grow", "beams"): "left",
    ("a sliding window", "greedy"): None,
    ("every other layer with a window", "static cache"): "left",
    ("encoder and decoder", "greedy"): "right",
    ("positions in a table", "greedy"): "left",
}
"""Which cells are no sweep, and where the prompts are padded in them."""
CELLS = [
    pytest.param(model, way, marks=() if (model, way) in CHOSEN else pytest.mark.sweep)
    for model in MODELS
    for way in WAYS
]
PADDED_CELLS = [
    pytest.param(model, way, side, marks=() if CHOSEN.get((model, way), 0) == side else pytest.mark.sweep)
    for model in MODELS
    for way in WAYS
    for side in (None, "left", "right")
]


def made(name: str) -> PreTrainedModel:
    family, options = MODELS[name]
    config: Any = getattr(transformers, f"{family}Config")(**options, eos_token_id=None, pad_token_id=0)
    head = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, family + head)(config).eval()
    model.generation_config.disable_compile = True  # transformers would compile a static cache's by itself
    return model


def tokens(model: Any, padding: str | None = None, **how: Any) -> torch.Tensor:
    prompt = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    if padding is not None:
        mask[0, slice(3) if padding == "left" else slice(-3, None)] = 0
    torch.manual_seed(1)
    return model.generate(prompt * mask, attention_mask=mask, max_new_tokens=7, **how)


@pytest.mark.filterwarnings("ignore:aotdist.*was compiled")
@pytest.mark.parametrize(("name", "way"), CELLS)
def test_tokens_are_eagers(name: str, way: str) -> None:
    model = made(name)
    compiled = aotdist.compile(copy.deepcopy(model), backend="fx")
    assert torch.equal(tokens(compiled, **WAYS[way]), tokens(model, **WAYS[way]))


@pytest.mark.parametrize(("name", "way", "padding"), PADDED_CELLS)
def test_all_lengths_are_a_few_programs(name: str, way: str, padding: str | None) -> None:
    """That of the prompt, that of tokens after it; one more where a window fills."""
    model = made(name)
    compiled = aotdist.compile(copy.deepcopy(model), backend="fx", settings={"dynamic": True})
    for _ in range(2):
        assert torch.equal(tokens(compiled, padding, **WAYS[way]), tokens(model, padding, **WAYS[way]))
    assert len(compiled.graphs) <= 3
