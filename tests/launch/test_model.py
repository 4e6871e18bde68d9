"""The decoder computes what its parts are named after."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from aotdist.launch.config import ModelOptions
from aotdist.launch.model import RMSNorm, Rope, build_decoder, num_parameters, rotate

SMALL = ModelOptions(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=64)
SEQ_LEN = 16


def build(**changes):
    return build_decoder(dataclasses.replace(SMALL, **changes), seq_len=SEQ_LEN, seed=0)


@pytest.fixture
def tokens():
    return torch.randint(256, (3, SEQ_LEN))


def test_rms_norm_is_torchs():
    x = torch.randn(2, 5, 32)
    norm = RMSNorm(32, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))


def test_rms_norm_takes_its_mean_in_fp32():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its square is not a finite fp16
    out = RMSNorm(4096, eps=1e-5).half()(x)
    torch.testing.assert_close(out, torch.ones_like(x))


def test_scores_of_rotated_vectors_depend_on_their_distance_only():
    rope = Rope(head_dim=8, seq_len=SEQ_LEN, theta=10_000.0)(SEQ_LEN)
    q, k = torch.randn(8), torch.randn(8)
    at = [rotate(v.expand(1, 1, SEQ_LEN, 8), rope)[0, 0] for v in (q, k)]
    scores = at[0] @ at[1].T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_rotation_is_rounded_to_the_dtype_of_its_input_only_at_the_end():
    rope = Rope(head_dim=8, seq_len=SEQ_LEN, theta=10_000.0)(SEQ_LEN)
    x = torch.randn(1, 1, SEQ_LEN, 8).bfloat16()
    assert torch.equal(rotate(x, rope), rotate(x.float(), rope).bfloat16())


def test_later_bytes_do_not_change_earlier_logits(tokens):
    model = build()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.equal(model(tokens)[:, 9:], model(changed)[:, 9:])


def test_grouped_queries_equal_repeated_key_and_value_heads(tokens):
    grouped, full = build(num_kv_heads=2), build(num_kv_heads=4)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith(("key.weight", "value.weight"))]:
        heads = state[name].unflatten(0, (2, SMALL.head_dim))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_a_tied_head_is_the_embedding():
    tied, untied = build(tie_head=True), build(tie_head=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert num_parameters(untied) - num_parameters(tied) == 256 * SMALL.dim


def test_the_loss_is_the_cross_entropy_of_the_logits(tokens):
    model, targets = build(), tokens.roll(-1, dims=1)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert torch.equal(model(tokens, targets), expected)


def test_an_untrained_model_is_about_as_good_as_guessing(tokens):
    loss = build()(tokens, tokens.roll(-1, dims=1)).item()
    assert abs(loss - torch.tensor(256.0).log().item()) < 0.7


def test_initial_parameters_follow_the_seed():
    one, same, other = (build_decoder(SMALL, seq_len=SEQ_LEN, seed=seed) for seed in (1, 1, 2))
    for parameter, again in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(parameter, again)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_the_inner_width_follows_the_model_width():
    assert ModelOptions(dim=128).swiglu_dim == 352
    assert ModelOptions(dim=128, hidden_dim=500).swiglu_dim == 500
