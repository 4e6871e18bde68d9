"""Bytes drawn from a model."""

import torch

from aotdist.launch import loop
from aotdist.launch.config import ModelOptions, ParallelOptions, RunOptions
from aotdist.launch.loop import draw_byte, write_sample
from aotdist.launch.model import build_decoder
from aotdist.launch.parallel import Place, join


class Echo(torch.nn.Module):
    """Knows that a byte is followed by the next one, and notes which shapes it was called with."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def forward(self, tokens):
        self.shapes.add(tuple(tokens.shape))
        return 1000.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256)


def write(model, **options):
    world = join(ParallelOptions(device="cpu"), Place())
    return write_sample(model, world, RunOptions(**options), seq_len=8)


def test_the_likeliest_bytes_continue_the_prompt_beyond_the_window(monkeypatch):
    monkeypatch.setattr(loop, "PROMPT", "abc")
    model = Echo()
    text = write(model, sample_bytes=12)
    assert text == "abcdefghijklmno"
    assert model.shapes == {(1, 8)}


def test_a_prompt_longer_than_the_window_is_kept(monkeypatch):
    monkeypatch.setattr(loop, "PROMPT", "0123456789a")
    text = write(Echo(), sample_bytes=2)
    assert text == "0123456789abc"


def test_the_same_seed_writes_the_same():
    model = build_decoder(ModelOptions(dim=16, num_layers=1), seq_len=8, seed=0)
    texts = [write(model, seed=seed, sample_bytes=20) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_what_is_likely_is_drawn_and_not_that_alone():
    generator = torch.Generator().manual_seed(0)
    one_byte = torch.full((256,), -100.0).scatter(0, torch.tensor([65]), 0.0)
    assert {draw_byte(one_byte, generator) for _ in range(50)} == {65}
    assert len({draw_byte(torch.zeros(256), generator) for _ in range(50)}) > 10
