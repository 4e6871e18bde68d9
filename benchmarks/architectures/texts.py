"""Architectures that read text: decoders, experts, state spaces and linear attention, encoders, and both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures.batches import padded, tokens
from benchmarks.architectures.vocabulary import Architecture, Kind
from benchmarks.zoo.families import Size

SIZE = Size(hidden=32, inner=64, vocab=128, sequence=16, batch=2)

GROUPED: Mapping[str, Any] = {**SIZE.grouped, "pad_token_id": 0, "max_position_embeddings": 64}
"""Options that decoders of Llama's kind share."""

HEADED: Mapping[str, Any] = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
"""Options of those whose heads are alike."""

LAYERS: Mapping[str, Any] = {
    "hidden_size": SIZE.hidden,
    "intermediate_size": SIZE.inner,
    "num_hidden_layers": SIZE.num_layers,
    "num_attention_heads": SIZE.num_heads,
}
"""Options of those that read no tokens."""

BART: Mapping[str, Any] = {
    "d_model": SIZE.hidden,
    "encoder_layers": SIZE.num_layers,
    "decoder_layers": SIZE.num_layers,
    "encoder_attention_heads": SIZE.num_heads,
    "decoder_attention_heads": SIZE.num_heads,
    "encoder_ffn_dim": SIZE.inner,
    "decoder_ffn_dim": SIZE.inner,
}
"""Options of those whose two halves are set apart."""

_GPT: Mapping[str, Any] = {"n_embd": SIZE.hidden, "n_layer": SIZE.num_layers, "n_head": SIZE.num_heads}
_HEAD: Mapping[str, Any] = {"head_dim": SIZE.hidden // SIZE.num_heads}
_ROUTED: Mapping[str, Any] = {
    **_HEAD,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": SIZE.hidden,
    "output_router_logits": True,
}
_TRANSLATOR: Mapping[str, Any] = {
    "vocab_size": SIZE.vocab,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def _reader(kind: Kind) -> Any:
    def architecture(model: str, **options: Any) -> Architecture:
        return Architecture(kind, model, {**GROUPED, **options}, tokens)

    return architecture


_decoder, _experts, _space = map(_reader, ("decoder", "experts", "state space, linear attention"))


def _encoder(model: str, **options: Any) -> Architecture:
    return Architecture("encoder", model, {**HEADED, **options}, padded)


DECODERS = (
    _decoder("LlamaForCausalLM"),
    _decoder("Qwen3ForCausalLM", **_HEAD),
    _decoder("MistralForCausalLM", sliding_window=8),
    _decoder("Gemma2ForCausalLM", **_HEAD, sliding_window=8),
    _decoder("GPT2LMHeadModel", **_GPT, pad_token_id=None, n_positions=64, loss_type="ForCausalLMLoss"),
    _decoder("OPTForCausalLM", ffn_dim=SIZE.inner, word_embed_proj_dim=SIZE.hidden),
    _decoder("FalconForCausalLM", alibi=True),
    _decoder("BloomForCausalLM", **_GPT),
)

EXPERTS = (
    _experts("MixtralForCausalLM", num_local_experts=4, output_router_logits=True),
    _experts("Qwen3MoeForCausalLM", **_ROUTED),
    _experts(
        "DeepseekV3ForCausalLM",
        num_key_value_heads=SIZE.num_heads,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=SIZE.hidden,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    _experts("GptOssForCausalLM", **_HEAD, num_local_experts=4, sliding_window=8),
)

SPACES = (
    _space("MambaForCausalLM", state_size=8),
    _space("Mamba2ForCausalLM", state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=8),
    _space(
        "JambaForCausalLM",
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    _space(
        "RecurrentGemmaForCausalLM",
        **_HEAD,
        lru_width=SIZE.hidden,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    _space("RwkvForCausalLM", attention_hidden_size=SIZE.hidden, context_length=64),
    _space(
        "Qwen3NextForCausalLM",
        **_ROUTED,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=SIZE.hidden,
        layer_types=["linear_attention", "full_attention"],
    ),
    _space("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
)

ENCODERS = (
    _encoder("BertForMaskedLM"),
    _encoder("RobertaForMaskedLM"),
    _encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type="p2c|c2p"),
    _encoder("ModernBertForMaskedLM", local_attention=8),
    Architecture("encoder", "FNetForMaskedLM", HEADED, tokens),
    _encoder("LongformerForMaskedLM", attention_window=[4, 4]),
)

PAIRS = (
    Architecture(
        "encoder and decoder",
        "T5ForConditionalGeneration",
        {**_TRANSLATOR, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        padded,
    ),
    Architecture("encoder and decoder", "BartForConditionalGeneration", {**_TRANSLATOR, **BART}, padded),
)
