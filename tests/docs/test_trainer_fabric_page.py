"""The examples of docs/trainer_fabric.md run as they stand, and what it says of Trainer's options is so."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aotdist
from tests.house.tree import ROOT
from tests.pages import python_blocks, run

TRAINER, FABRIC = python_blocks((ROOT / "docs" / "trainer_fabric.md").read_text())
LINES = 'aotdist.compile(model, backend="fx")', 'fabric.setup_module(aotdist.compile(model, backend="fx"))'


@pytest.mark.sweep
@pytest.mark.parametrize("example", [TRAINER, FABRIC], ids=["Trainer", "Fabric"])
def test_examples(example: str, tmp_path: Path) -> None:
    printed = run(example, tmp_path)
    assert [each for each in re.findall(r"  # (.*)$", example, re.MULTILINE) if each not in printed] == []


@pytest.mark.parametrize(
    ("example", "line"), list(zip((TRAINER, FABRIC), LINES, strict=True)), ids=["Trainer", "Fabric"]
)
def test_it_is_one_line(example: str, line: str) -> None:
    assert line in example and example.count("aotdist.") == 1


def rows(*, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of numbers that go up; padded, some end early."""
    made = [(torch.arange(16) + 7 * at) % 64 for at in range(32)]
    if not padded:
        return [{"input_ids": row, "labels": row} for row in made]
    masks = [(torch.arange(16) < 12 + at % 4).long() for at in range(32)]
    return [
        {"input_ids": row, "labels": row.masked_fill(mask == 0, -100), "attention_mask": mask}
        for row, mask in zip(made, masks, strict=True)
    ]


def trainer(folder: Path, *, compiled: bool, settings: Any = None, data: Any = None, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **shape))
    if compiled:
        aotdist.compile(model, backend="fx", settings=settings)
    given = {"max_steps": 3, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2} | options
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", **given
    )
    return Trainer(model, arguments, train_dataset=data or rows(), eval_dataset=data or rows())


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


OPTIONS = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "smoothing": {"label_smoothing_factor": 0.1},
    "noise": {"neftune_noise_alpha": 5.0},
    "bf16": {"bf16": True},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")  # those of other libraries
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_are_those_of_the_script_without_it(options: dict[str, Any], tmp_path: Path) -> None:
    pair = [trainer(tmp_path, compiled=compiled, **options) for compiled in (False, True)]
    for each in pair:
        torch.manual_seed(1)
        each.train()
    assert losses(pair[0]) == losses(pair[1]) and len(losses(pair[0])) == 3
    assert len(pair[1].model.graphs) == 1
    assert pair[0].evaluate()["eval_loss"] == pair[1].evaluate()["eval_loss"]
    assert numpy.array_equal(*(each.predict(rows()).predictions for each in pair))
    assert len(pair[1].model.graphs) == 2


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dynamo_may_capture(options: dict[str, Any], tmp_path: Path) -> None:
    pair = [trainer(tmp_path, compiled=False, **options) for _ in range(2)]
    pair[1].model.compile(backend="aotdist", options={"backend": "fx"})
    for each in pair:
        torch.manual_seed(1)
        each.train()
    assert losses(pair[0]) == losses(pair[1]) and aotdist.dynamo.regions()
    assert numpy.array_equal(*(each.predict(rows()).predictions for each in pair))
    torch._dynamo.reset()


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
def test_a_run_goes_on_from_what_is_saved(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    saves = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", compiled=False, max_steps=4, **saves)
    whole.train()
    trainer(tmp_path / "parts", compiled=True, max_steps=2, **saves).train()
    second = trainer(tmp_path / "parts", compiled=True, max_steps=4, **saves)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    second.save_model(str(tmp_path / "saved"))
    read = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in second.model.state_dict().items())


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
def test_padded_batches(tmp_path: Path) -> None:
    pair = [trainer(tmp_path, compiled=compiled, data=rows(padded=True)) for compiled in (False, True)]
    told = trainer(tmp_path, compiled=True, settings={"is_compiling": True}, data=rows(padded=True))
    for each in (*pair, told):
        each.train()
    assert losses(pair[1]) == losses(pair[0])
    assert losses(told) == pytest.approx(losses(pair[0]), rel=1e-5)


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
def test_generation_is_two_programs_for_all_lengths(tmp_path: Path) -> None:
    settings = {"dynamic": True}
    models = [trainer(tmp_path, compiled=compiled, settings=settings).model for compiled in (False, True)]
    start = torch.arange(6)[None]
    how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    eager, compiled = (m.eval().generate(start, **how) for m in models)
    assert torch.equal(eager, compiled)
    assert len(models[1].graphs) == 2
