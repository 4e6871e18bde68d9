"""Architectures that see, hear, or do several things at once, and one that reads numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures.batches import (
    CLASSES,
    PATCH,
    PLACEHOLDER,
    SIDE,
    boxed,
    classified,
    paired,
    seen,
    seen_in_pieces,
    segmented,
    series,
    spectra,
    spoken,
    waves,
)
from benchmarks.architectures.texts import BART, GROUPED, HEADED, LAYERS, SIZE
from benchmarks.architectures.vocabulary import Architecture, Inputs

_EYE: Mapping[str, Any] = {**LAYERS, "image_size": SIDE, "patch_size": PATCH}
_RESNET: Mapping[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
}


def _eye(model: str, inputs: Inputs = classified, **options: Any) -> Architecture:
    return Architecture("vision", model, {"image_size": SIDE, "num_labels": CLASSES, **options}, inputs)


VISION = (
    _eye("ViTForImageClassification", **_EYE),
    _eye(
        "SwinForImageClassification",
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _eye("ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _eye("ResNetForImageClassification", **_RESNET),
    _eye(
        "SegformerForSemanticSegmentation",
        segmented,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    _eye(
        "DetrForObjectDetection",
        boxed,
        **BART,
        num_queries=4,
        backbone_config={"model_type": "resnet", **_RESNET, "out_features": ["stage2"]},
    ),
)

AUDIO = (
    Architecture(
        "audio",
        "Wav2Vec2ForCTC",
        {
            **LAYERS,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_length": 2,
        },
        waves,
    ),
    Architecture(
        "audio",
        "WhisperForConditionalGeneration",
        {
            **BART,
            "vocab_size": SIZE.vocab,
            "num_mel_bins": PATCH,
            "max_source_positions": SIDE,
            "max_target_positions": SIDE,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "begin_suppress_tokens": None,
        },
        spoken,
    ),
    Architecture(
        "audio",
        "ASTForAudioClassification",
        {
            **LAYERS,
            "num_mel_bins": PATCH,
            "max_length": SIDE,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "num_labels": CLASSES,
        },
        spectra,
    ),
)

_THREE_AXES: Mapping[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2]}

SEVERAL = (
    Architecture(
        "several senses",
        "CLIPModel",
        {"text_config": dict(HEADED), "vision_config": dict(_EYE), "projection_dim": 16},
        paired,
    ),
    Architecture(
        "several senses",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **_EYE},
            "image_token_index": PLACEHOLDER,
        },
        seen,
    ),
    Architecture(
        "several senses",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **GROUPED,
                "rope_parameters": _THREE_AXES,
            },
            "vision_config": {
                "depth": SIZE.num_layers,
                "embed_dim": SIZE.hidden,
                "hidden_size": SIZE.hidden,
                "num_heads": SIZE.num_heads,
                "mlp_ratio": 2,
                "patch_size": PATCH,
            },
            "image_token_id": PLACEHOLDER,
            "vision_start_token_id": 1,
            "video_token_id": 2,
        },
        seen_in_pieces,
    ),
)

OTHERS = (
    Architecture(
        "other",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": SIDE,
            "prediction_length": PATCH,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": SIZE.hidden,
            "ffn_dim": SIZE.inner,
            "num_hidden_layers": SIZE.num_layers,
            "num_attention_heads": SIZE.num_heads,
        },
        series,
    ),
)
