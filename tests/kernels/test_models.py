"""Real models train through the emitter's kernels as they do in eager, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import aotdist
from tests.kernels.reference import Emissions
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import Net, eager_step, line, seeded, shard_blocks, tokens

FAMILIES = ("llama", "gpt2", "vit")


def family(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of transformers, and what one step of it takes."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.randint(0, 96, (2, 16))
    match name:
        case "llama":
            config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **small)
            return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
        case "gpt2":
            config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32)
            return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": ids, "labels": ids}
        case _:
            config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **small)
            model = transformers.ViTForImageClassification(config).eval()
            return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}


def assert_gradients_are_eager_s(
    model: nn.Module, batch: dict[str, torch.Tensor], rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """Those of a step, and its loss."""
    expected = model(**batch).loss
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    loss = aotdist.compile(model, backend="triton")(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=atol)
    for path, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[path], rtol=rtol, atol=atol, msg=path)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_eager_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_gradients_are_eager_s(*family(name))
    forward = emissions.made[0]
    library = {str(node.target) for node in forward.reasons}
    assert library <= {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.convolution.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    }


def test_explain_shows_kernels_and_what_is_left_to_the_library() -> None:
    model, batch = family("llama")
    aotdist.compile(model, backend="triton")(**batch).loss.backward()
    text = str(model.explain())
    assert "kernels, which move" in text
    assert "library calls: 15 aten.mm (no rule)" in text


def test_steps_follow_eager_s() -> None:
    losses = []
    for compiled in (False, True):
        model, batch = family("llama")
        step = aotdist.compile(model, backend="triton") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            loss = step(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: shard_blocks(Net(), line(2)),
    "bf16": lambda: shard_blocks(Net(), line(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def sharded_case(which: str) -> None:
    eager, compiled = seeded(SHARDED[which]), seeded(SHARDED[which])
    step = aotdist.compile(compiled, backend="triton", settings={"emulate_casts": True})
    for number in range(2):
        expected = eager_step(eager, tokens(number))
        loss = step(tokens(number))
        loss.backward()
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if which == "bf16" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(loss, expected, **tolerance)
        for (path, p), q in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), path
            if p.grad is not None:
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), **tolerance, msg=path)
    assert "collectives" in str(compiled.explain()) or "all_gather" in str(compiled.explain())


@pytest.mark.ranks
@pytest.mark.parametrize("which", SHARDED)
def test_fsdp2_on_two_ranks(which: str, world2: World) -> None:
    world2.run(sharded_case, which)
