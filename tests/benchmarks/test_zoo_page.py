"""The bookkeeping of `make zoo`: entries outlive their file, and a page says what failed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.architectures.page import page
from benchmarks.architectures.record import Entries
from benchmarks.architectures.vocabulary import Found, Half

TIMES: dict[str, Any] = {"first": 2.5, "seconds": (0.5, 0.5), "eager_seconds": (1.0, 0.5)}
SAME = Half(num_graphs=1)
OTHER = Half(differs=1e-6, where="loss, step 1", is_programs=True, num_graphs=2, breaks=("a branch",) * 2)
REFUSED = Half(failure="UnsupportedProgram: no; fix: <this>", is_ours=True)
ENTRIES = (
    Entries()
    .with_found("LlamaForCausalLM", "aotdist.compile", Found(SAME, None, REFUSED, SAME, **TIMES))
    .with_found("LlamaForCausalLM", "backend aotdist", Found(OTHER, None, SAME, **TIMES))
    .with_found("LlamaForCausalLM", "aot_eager", Found(Half(failure="RuntimeError: no")))
    .with_found("BertForMaskedLM", "aotdist.compile", Found(REFUSED, SAME, **TIMES))
)


def test_entries_outlive_their_file(tmp_path: Path) -> None:
    ENTRIES.save(tmp_path)
    assert Entries.load(tmp_path) == ENTRIES
    assert Entries.load(tmp_path / "nowhere") == Entries()


def test_an_entry_is_found_anew() -> None:
    again = ENTRIES.with_found("BertForMaskedLM", "aotdist.compile", Found(SAME))
    assert len(again.entries) == len(ENTRIES.entries)
    assert again.at("BertForMaskedLM", "aotdist.compile") == Found(SAME)


def test_the_page_shows_bits_times_and_reasons() -> None:
    text = page(ENTRIES)
    llama = "| decoder | LlamaForCausalLM | same | 1 | 2.0 s | 0.75 "
    dynamo = (
        "| 1e-06: `loss, step 1`, the program's own | 2, 2 breaks | 2.0 s | 0.75 | **fails** | - | - | - |"
    )
    assert llama + dynamo in text
    assert "| encoder | BertForMaskedLM | told: same | 1 | 2.0 s | 0.75 | not run |" in text
    assert "| LlamaForCausalLM | told: same | 1 | same | 1 |" in text
    assert r"- BertForMaskedLM: `aotdist.compile`, training: UnsupportedProgram: no; fix: \<this\>" in text
    assert "- LlamaForCausalLM: a branch (2)" in text


def test_generation_without_a_cache_is_said_to_be_that() -> None:
    uncached = dataclasses.replace(SAME, with_cache=False)
    found = Found(SAME, None, REFUSED, uncached, **TIMES)
    text = page(Entries().with_found("LlamaForCausalLM", "aotdist.compile", found))
    assert "| LlamaForCausalLM | told, no cache: same | 1 |" in text
