"""Architectures: which public model architectures can be captured, so that the capture trains like the model itself.

Each architecture is built with a small configuration of transformers and random weights, and captured with a loss. The
capture itself compares loss, gradients and buffers with the model's own. A model that is refused counts as not
captured, and its row has the reason.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.report import Row, Target, arguments, finish, say
from ravnest.errors import RavnestError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.partition import max_stages

Tensor = torch.Tensor
Batch = tuple[Any, Tensor]

_CLASSES = 5
_VOCABULARY = 64
_SHARE_CAPTURED = 0.8


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of transformers: the names of its classes, and its inputs."""

    model: str
    """Class in transformers; the name of its configuration begins in the same way."""
    config: str
    settings: Mapping[str, Any]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    evaluated_first: bool = field(default=False)
    """Whether the model is in eval() before the capture, as after `from_pretrained`."""

    def build(self) -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.eval() if self.evaluated_first else model


def captured(architecture: Architecture) -> Captured:
    """The capture of a small model of this architecture, always the same one; CaptureError if it is refused."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = architecture.build()
        batches = [architecture.batch(4), architecture.batch(3)]
        return capture(model, architecture.loss, {}, batches)


def main() -> int:
    given = arguments("architectures", "Which architectures can be captured.")
    rows: list[Row] = []
    for name, architecture in (QUICK if given.quick else ARCHITECTURES).items():
        rows.append(_row(name, architecture))
        say(str(rows[-1]))
    share = sum(row["captured"] is True for row in rows) / len(rows)
    return finish("architectures", given, rows, [Target("share of architectures captured", share, _SHARE_CAPTURED)])


def _row(name: str, architecture: Architecture) -> Row:
    began = time.perf_counter()
    try:
        found = captured(architecture)
    except RavnestError as error:
        return {"case": name, "captured": False, "seconds": time.perf_counter() - began, "reason": str(error)[:200]}
    seconds = time.perf_counter() - began
    operators = len(found.graph.nodes)
    return {
        "case": name,
        "captured": True,
        "seconds": seconds,
        "operators": operators,
        "stages": max_stages(found.graph),
        "reason": "",
    }


def _tokens(size: int) -> Batch:
    tokens = torch.randint(2, _VOCABULARY, (size, 9))
    return {"input_ids": tokens[:, :-1].clone()}, tokens[:, 1:].clone()


def _masked(size: int) -> Batch:
    mask = torch.ones(size, 8, dtype=torch.int64)
    mask[0, 6:] = 0
    tokens = torch.randint(2, _VOCABULARY, (size, 8))
    return {"input_ids": tokens, "attention_mask": mask}, torch.randint(0, _CLASSES, (size,))


def _translated(size: int) -> Batch:
    source, target = torch.randint(2, _VOCABULARY, (size, 8)), torch.randint(2, _VOCABULARY, (size, 7))
    return {"input_ids": source, "decoder_input_ids": target[:, :-1].clone()}, target[:, 1:].clone()


def _images(side: int) -> Callable[[int], Batch]:
    return lambda size: ({"pixel_values": torch.randn(size, 3, side, side)}, torch.randint(0, _CLASSES, (size,)))


def _spectrograms(size: int) -> Batch:
    tokens = torch.randint(2, _VOCABULARY, (size, 7))
    features = {"input_features": torch.randn(size, 8, 40), "decoder_input_ids": tokens[:, :-1].clone()}
    return features, tokens[:, 1:].clone()


def _waves(size: int) -> Batch:
    return {"input_values": torch.randn(size, 400)}, torch.randint(0, _CLASSES, (size,))


def _next_token(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def _class(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


def _pixels(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.mean((2, 3)), targets)


def _pooled(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.last_hidden_state.mean(1)[:, :_CLASSES], targets)


_WORDS = {"vocab_size": _VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_HEADS = {"num_key_value_heads": 1, "head_dim": 8}
_LABELS = {"num_labels": _CLASSES}
_VISION = {**_SMALL, **_LABELS, "image_size": 16, "patch_size": 4}


def _encoder(name: str, **settings: Any) -> Architecture:
    config = {**_WORDS, **_SMALL, **_LABELS, **settings}
    return Architecture(f"{name}ForSequenceClassification", f"{name}Config", config, _masked, _class)


def _decoder(name: str, suffix: str = "ForCausalLM", /, **settings: Any) -> Architecture:
    config = {**_WORDS, **_SMALL, **settings}
    return Architecture(f"{name}{suffix}", f"{name}Config", config, _tokens, _next_token)


def _vision(name: str, side: int = 16, **settings: Any) -> Architecture:
    config = {**_LABELS, **settings}
    return Architecture(f"{name}ForImageClassification", f"{name}Config", config, _images(side), _class)


_T5 = {
    **{"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    **{"decoder_start_token_id": 0, "pad_token_id": 0},
}
_BART = {
    **{"vocab_size": _VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1},
}
_SOUND = {
    **_SMALL,
    **_LABELS,
    **{"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16},
    **{"layerdrop": 0.0, "apply_spec_augment": False, "mask_time_prob": 0.0},
}
_SEGMENTS = {
    **{"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 1, 1]},
    **{"decoder_hidden_size": 8, "drop_path_rate": 0.3},
    **_LABELS,
}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}

ARCHITECTURES: dict[str, Architecture] = {
    "BERT": _encoder("Bert"),
    "BERT from_pretrained": Architecture(
        "BertForSequenceClassification", "BertConfig", {**_WORDS, **_SMALL, **_LABELS}, _masked, _class, True
    ),
    "RoBERTa": _encoder("Roberta", max_position_embeddings=40),
    "XLM-RoBERTa": _encoder("XLMRoberta", max_position_embeddings=40),
    "CamemBERT": _encoder("Camembert", max_position_embeddings=40),
    "DistilBERT": _encoder("DistilBert", dim=16, hidden_dim=32, n_layers=2, n_heads=2),
    "ALBERT": _encoder("Albert", embedding_size=8),
    "ELECTRA": _encoder("Electra", embedding_size=8),
    "MobileBERT": _encoder("MobileBert", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8),
    "ConvBERT": _encoder("ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=1),
    "DeBERTa-v2": _encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "MPNet": _encoder("MPNet"),
    "ModernBERT": _encoder("ModernBert", bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1),
    "GPT-2": _decoder("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "GPT-Neo": _decoder("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=2, window_size=4),
    "GPT-NeoX": _decoder("GPTNeoX"),
    "GPT-J": _decoder("GPTJ", n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32),
    "OPT": _decoder("OPT", ffn_dim=32, word_embed_proj_dim=16),
    "BLOOM": _decoder("Bloom", n_layer=2, n_head=2),
    "Falcon": _decoder("Falcon"),
    "Phi": _decoder("Phi"),
    "Phi-3": _decoder("Phi3", num_key_value_heads=1),
    "StableLM": _decoder("StableLm", num_key_value_heads=1),
    "StarCoder2": _decoder("Starcoder2", num_key_value_heads=1, bos_token_id=1, eos_token_id=1),
    "Llama": _decoder("Llama", num_key_value_heads=1),
    "Mistral": _decoder("Mistral", num_key_value_heads=1, sliding_window=4),
    "Qwen2": _decoder("Qwen2", num_key_value_heads=1),
    "Qwen3": _decoder("Qwen3", **_HEADS),
    "Gemma": _decoder("Gemma", **_HEADS),
    "Gemma 2": _decoder("Gemma2", sliding_window=4, **_HEADS),
    "OLMo": _decoder("Olmo", bos_token_id=1, eos_token_id=1),
    "Mixtral": _decoder("Mixtral", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
    "Mamba": _decoder("Mamba", state_size=4, time_step_rank=2, use_mambapy=False),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config", _T5, _translated, _next_token),
    "mT5": Architecture("MT5ForConditionalGeneration", "MT5Config", _T5, _translated, _next_token),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", _BART, _translated, _next_token),
    "mBART": Architecture("MBartForConditionalGeneration", "MBartConfig", _BART, _translated, _next_token),
    "Marian": Architecture("MarianMTModel", "MarianConfig", _BART, _translated, _next_token),
    "Pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", _BART, _translated, _next_token),
    "ViT": _vision("ViT", **_VISION),
    "DeiT": _vision("DeiT", drop_path_rate=0.1, **_VISION),
    "BEiT": _vision("Beit", drop_path_rate=0.3, **_VISION),
    "Data2Vec vision": _vision("Data2VecVision", drop_path_rate=0.3, **_VISION),
    "DINOv2": _vision("Dinov2", drop_path_rate=0.3, **_VISION),
    "Swin": _vision(
        "Swin", 32, image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    ),
    "Swin v2": _vision("Swinv2", 32, image_size=32, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
    "ConvNeXt": _vision("ConvNext", 32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.3),
    "ConvNeXt v2": _vision("ConvNextV2", 32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.3),
    "ResNet": _vision("ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "RegNet": _vision("RegNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "MobileNet v1": _vision("MobileNetV1", 32, image_size=32, depth_multiplier=0.25),
    "MobileNet v2": _vision("MobileNetV2", 32, image_size=32, depth_multiplier=0.25),
    "MobileViT": _vision(
        "MobileViT", 32, image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8]
    ),
    "LeViT": _vision(
        "Levit", 64, image_size=64, hidden_sizes=[16, 16, 16], num_attention_heads=[1, 1, 1], depths=[1, 1, 1]
    ),
    "PoolFormer": _vision("PoolFormer", 32, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], drop_path_rate=0.3),
    "PVT": _vision(
        "Pvt", 32, image_size=32, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 1, 1]
    ),
    "FocalNet": _vision(
        "FocalNet", 32, image_size=32, embed_dim=8, hidden_sizes=[8, 8], depths=[1, 1], drop_path_rate=0.3
    ),
    "SegFormer": Architecture("SegformerForSemanticSegmentation", "SegformerConfig", _SEGMENTS, _images(32), _pixels),
    "Whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _spectrograms, _next_token),
    "Wav2Vec2": Architecture("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SOUND, _waves, _class),
    "HuBERT": Architecture("HubertForSequenceClassification", "HubertConfig", _SOUND, _waves, _class),
    "WavLM": Architecture("WavLMForSequenceClassification", "WavLMConfig", _SOUND, _waves, _class),
    "CLIP vision": Architecture("CLIPVisionModel", "CLIPVisionConfig", _VISION, _images(16), _pooled),
    "SigLIP vision": Architecture("SiglipVisionModel", "SiglipVisionConfig", _VISION, _images(16), _pooled),
}
"""Architectures by their common names."""

QUICK = {name: ARCHITECTURES[name] for name in ("BERT", "GPT-2", "Llama", "T5", "ViT", "ConvNeXt", "ResNet", "Swin")}

if __name__ == "__main__":
    raise SystemExit(main())
