"""Tiny models of the architectures in transformers, each with a batch of labelled examples.

Every entry gives a model from its configuration (nothing is downloaded), dropout off, and
the keyword arguments of a forward that computes the model's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

ROWS, LENGTH, WORDS = 6, 8, 33

Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """A named architecture; `make` builds the model and its example batch."""

    name: str
    make: Callable[[], Made]


def _ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(4, WORDS, (rows, length))


def _padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return an attention mask with uneven lengths, and labels that ignore the padding."""
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    mask[4, -1:] = 0
    return mask, ids.masked_fill(mask == 0, -100)


def _decoder(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = _ids()
        mask, labels = _padded(ids)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def _unmasked(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = _ids()
        return getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options)), {"input_ids": ids, "labels": ids}

    return make


def _llama_like(**more: Any) -> dict[str, Any]:
    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**common, **more}


def _bert_like(**more: Any) -> dict[str, Any]:
    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    return {**common, **more}


def _sequences(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = _ids()
        mask, labels = _padded(ids)
        options.setdefault("pad_token_id", 0)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def _classes(model: str, config: str, rows: int = ROWS, labels: int = 3, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = _ids()
        mask, _ = _padded(ids)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, num_labels=labels, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, labels, (rows,))}

    return make


def _images(model: str, config: str, size: int = 32, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(hf, model)(getattr(hf, config)(num_labels=3, **options))
        return made, {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 3, (ROWS,))}

    return make


def _vit_like() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _segformer() -> Made:
    config = hf.SegformerConfig(
        num_labels=3,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 4],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model = hf.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(0, 3, (ROWS, 64, 64))}


def _clip() -> Made:
    text = {k: v for k, v in _bert_like().items() if k != "pad_token_id"} | {"vocab_size": WORDS, "projection_dim": 16}
    text |= {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = _vit_like() | {"attention_dropout": 0.0, "projection_dim": 16}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = _ids()
    ids[:, -1] = 2
    inputs = {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 32, 32), "return_loss": True}
    return hf.CLIPModel(config), inputs


def _whisper() -> Made:
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = hf.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(ROWS, 8, 24), "labels": _ids()}


def _wav2vec2() -> Made:
    config = hf.Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=[16, 16],
        conv_stride=[4, 2],
        conv_kernel=[8, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        pad_token_id=0,
        ctc_loss_reduction="mean",
    )
    labels = _ids(length=4)
    return hf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(ROWS, 400), "labels": labels}


_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    name: Architecture(name, make)
    for name, make in {
        "gpt2": _decoder(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "llama": _decoder("LlamaForCausalLM", "LlamaConfig", **_llama_like()),
        "mistral": _decoder("MistralForCausalLM", "MistralConfig", **_llama_like(sliding_window=4)),
        "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", **_llama_like()),
        "mixtral": _decoder(
            "MixtralForCausalLM",
            "MixtralConfig",
            **_llama_like(
                num_local_experts=3,
                num_experts_per_tok=2,
                output_router_logits=True,
                sliding_window=None,
                experts_implementation="eager",
            ),
        ),
        "gemma": _decoder("GemmaForCausalLM", "GemmaConfig", **_llama_like(head_dim=8)),
        "phi": _decoder(
            "PhiForCausalLM",
            "PhiConfig",
            **_llama_like(num_key_value_heads=4, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
        ),
        "opt": _decoder(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "bloom": _decoder(
            "BloomForCausalLM",
            "BloomConfig",
            hidden_size=32,
            n_layer=3,
            n_head=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "gpt_neox": _decoder(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "falcon": _decoder(
            "FalconForCausalLM",
            "FalconConfig",
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "t5": _sequences(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        "bart": _sequences("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ),
        "marian": _sequences(
            "MarianMTModel", "MarianConfig", **{**_SEQ2SEQ, "decoder_vocab_size": WORDS, "forced_eos_token_id": None}
        ),
        "bert": _decoder("BertForMaskedLM", "BertConfig", **_bert_like()),
        "roberta": _decoder("RobertaForMaskedLM", "RobertaConfig", **_bert_like(pad_token_id=1)),
        "distilbert": _decoder(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            dim=32,
            hidden_dim=48,
            n_layers=3,
            n_heads=4,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        "deberta": _decoder(
            "DebertaForMaskedLM",
            "DebertaConfig",
            **_bert_like(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
        ),
        "deberta_v2": _decoder(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **_bert_like(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
        ),
        "electra": _classes("ElectraForSequenceClassification", "ElectraConfig", **_bert_like(embedding_size=16)),
        "albert": _decoder("AlbertForMaskedLM", "AlbertConfig", **_bert_like(embedding_size=16)),
        "xlnet": _unmasked("XLNetLMHeadModel", "XLNetConfig", d_model=32, n_layer=3, n_head=4, d_inner=48, dropout=0.0),
        "longformer": _unmasked(
            "LongformerForMaskedLM", "LongformerConfig", **_bert_like(attention_window=4, pad_token_id=1)
        ),
        "vit": _images("ViTForImageClassification", "ViTConfig", **_vit_like()),
        "deit": _images("DeiTForImageClassification", "DeiTConfig", **_vit_like()),
        "swin": _images(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            drop_path_rate=0.0,
        ),
        "convnext": _images(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            drop_path_rate=0.0,
        ),
        "resnet": _images(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
        ),
        "segformer": _segformer,
        "clip": _clip,
        "whisper": _whisper,
        "wav2vec2": _wav2vec2,
        "mamba": _unmasked(
            "MambaForCausalLM", "MambaConfig", hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False
        ),
        "rwkv": _unmasked(
            "RwkvForCausalLM",
            "RwkvConfig",
            hidden_size=32,
            attention_hidden_size=32,
            num_hidden_layers=3,
            context_length=16,
            use_cache=False,
        ),
    }.items()
}


def build(name: str) -> Made:
    """Return an architecture's model in training mode (batch norms fixed) and float64, and its batch."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make()
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model, wide
