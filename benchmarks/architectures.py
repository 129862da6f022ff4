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


def word_ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(4, WORDS, (rows, length))


def padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return an attention mask with uneven lengths, and labels that ignore the padding."""
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    mask[4, -1:] = 0
    return mask, ids.masked_fill(mask == 0, -100)


def decoder(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = word_ids()
        mask, labels = padded(ids)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def unmasked(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = word_ids()
        return getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options)), {"input_ids": ids, "labels": ids}

    return make


def llama_like(**more: Any) -> dict[str, Any]:
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


def bert_like(**more: Any) -> dict[str, Any]:
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


def sequences(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = word_ids()
        mask, labels = padded(ids)
        options.setdefault("pad_token_id", 0)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def classes(model: str, config: str, rows: int = ROWS, labels: int = 3, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = word_ids()
        mask, _ = padded(ids)
        made = getattr(hf, model)(getattr(hf, config)(vocab_size=WORDS, num_labels=labels, **options))
        return made, {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, labels, (rows,))}

    return make


def images(model: str, config: str, size: int = 32, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(hf, model)(getattr(hf, config)(num_labels=3, **options))
        return made, {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 3, (ROWS,))}

    return make


def vit_like() -> dict[str, Any]:
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
    text = {k: v for k, v in bert_like().items() if k != "pad_token_id"} | {"vocab_size": WORDS, "projection_dim": 16}
    text |= {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = vit_like() | {"attention_dropout": 0.0, "projection_dim": 16}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = word_ids()
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
    return model, {"input_features": torch.randn(ROWS, 8, 24), "labels": word_ids()}


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
    labels = word_ids(length=4)
    return hf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(ROWS, 400), "labels": labels}


SEQ2SEQ = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
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
        "gpt2": decoder(
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
        "llama": decoder("LlamaForCausalLM", "LlamaConfig", **llama_like()),
        "mistral": decoder("MistralForCausalLM", "MistralConfig", **llama_like(sliding_window=4)),
        "qwen2": decoder("Qwen2ForCausalLM", "Qwen2Config", **llama_like()),
        "mixtral": decoder(
            "MixtralForCausalLM",
            "MixtralConfig",
            **llama_like(
                num_local_experts=3,
                num_experts_per_tok=2,
                output_router_logits=True,
                sliding_window=None,
                experts_implementation="eager",
            ),
        ),
        "gemma": decoder("GemmaForCausalLM", "GemmaConfig", **llama_like(head_dim=8)),
        "phi": decoder(
            "PhiForCausalLM",
            "PhiConfig",
            **llama_like(num_key_value_heads=4, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
        ),
        "opt": decoder(
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
        "bloom": decoder(
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
        "gpt_neox": decoder(
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
        "falcon": decoder(
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
        "t5": sequences(
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
        "bart": sequences("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ),
        "marian": sequences(
            "MarianMTModel", "MarianConfig", **{**SEQ2SEQ, "decoder_vocab_size": WORDS, "forced_eos_token_id": None}
        ),
        "bert": decoder("BertForMaskedLM", "BertConfig", **bert_like()),
        "roberta": decoder("RobertaForMaskedLM", "RobertaConfig", **bert_like(pad_token_id=1)),
        "distilbert": decoder(
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
        "deberta": decoder(
            "DebertaForMaskedLM",
            "DebertaConfig",
            **bert_like(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
        ),
        "deberta_v2": decoder(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **bert_like(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
        ),
        "electra": classes("ElectraForSequenceClassification", "ElectraConfig", **bert_like(embedding_size=16)),
        "albert": decoder("AlbertForMaskedLM", "AlbertConfig", **bert_like(embedding_size=16)),
        "xlnet": unmasked("XLNetLMHeadModel", "XLNetConfig", d_model=32, n_layer=3, n_head=4, d_inner=48, dropout=0.0),
        "longformer": unmasked(
            "LongformerForMaskedLM", "LongformerConfig", **bert_like(attention_window=4, pad_token_id=1)
        ),
        "vit": images("ViTForImageClassification", "ViTConfig", **vit_like()),
        "deit": images("DeiTForImageClassification", "DeiTConfig", **vit_like()),
        "swin": images(
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
        "convnext": images(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            drop_path_rate=0.0,
        ),
        "resnet": images(
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
        "mamba": unmasked(
            "MambaForCausalLM", "MambaConfig", hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False
        ),
        "rwkv": unmasked(
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
    """Return the model of an architecture of this file, and its batch."""
    return made(ARCHITECTURES[name])


def made(architecture: Architecture) -> Made:
    """Return an architecture's model in training mode (batch norms fixed, no dropout) and float64, and its batch."""
    torch.manual_seed(0)
    model, inputs = architecture.make()
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # some write theirs into the model, whatever the configuration says
    return model, wide
