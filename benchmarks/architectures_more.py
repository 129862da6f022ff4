"""More tiny models of the architectures in transformers: the later decoders, mixtures, hybrids, detectors, speech."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from architectures import (
    LENGTH,
    ROWS,
    SEQ2SEQ,
    WORDS,
    Architecture,
    Made,
    bert_like,
    decoder,
    images,
    llama_like,
    padded,
    sequences,
    unmasked,
    vit_like,
    word_ids,
)

_EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",
}


def _speech(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        common = {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_stride": [4, 2],
            "conv_kernel": [8, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
            "pad_token_id": 0,
            "ctc_loss_reduction": "mean",
        }
        made = getattr(hf, model)(getattr(hf, config)(**{**common, **options}))
        return made, {"input_values": torch.randn(ROWS, 400), "labels": word_ids(length=4)}

    return make


def _layoutlm() -> Made:
    made = hf.LayoutLMForTokenClassification(
        hf.LayoutLMConfig(vocab_size=WORDS, num_labels=3, max_2d_position_embeddings=64, **bert_like())
    )
    words = word_ids()
    mask, _ = padded(words)
    boxes = torch.randint(0, 30, (ROWS, LENGTH, 4)).cumsum(-1).clamp(max=60)
    labels = torch.randint(0, 3, (ROWS, LENGTH)).masked_fill(mask == 0, -100)
    return made, {"input_ids": words, "bbox": boxes, "attention_mask": mask, "labels": labels}


def _big_bird_sparse() -> Made:
    options = bert_like(attention_type="block_sparse", block_size=2, num_random_blocks=1)
    words = word_ids(length=16)
    return hf.BigBirdForMaskedLM(hf.BigBirdConfig(vocab_size=WORDS, **options)), {"input_ids": words, "labels": words}


def _beit() -> Made:
    made = hf.BeitForImageClassification(
        hf.BeitConfig(num_labels=3, drop_path_rate=0.0, use_relative_position_bias=True, **vit_like())
    )
    return made, {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 3, (ROWS,))}


def _dpt() -> Made:
    config = hf.DPTConfig(
        num_labels=3,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        semantic_classifier_dropout=0.0,
        use_batch_norm_in_fusion_residual=False,
        **{**vit_like(), "num_hidden_layers": 4},
    )
    labels = torch.randint(0, 3, (ROWS, 32, 32))
    return hf.DPTForSemanticSegmentation(config), {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": labels}


def _clipseg() -> Made:
    text = {k: v for k, v in bert_like().items() if "dropout" not in k} | {"vocab_size": WORDS, "eos_token_id": 2}
    vision = vit_like() | {"projection_dim": 16}
    config = hf.CLIPSegConfig(
        text_config=text,
        vision_config=vision,
        projection_dim=16,
        extract_layers=[0, 1, 2],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
        decoder_attention_dropout=0.0,
    )
    words = word_ids()
    words[:, -1] = 2
    inputs = {"input_ids": words, "pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.rand(ROWS, 32, 32)}
    return hf.CLIPSegForImageSegmentation(config), inputs


def _vilt() -> Made:
    config = hf.ViltConfig(vocab_size=WORDS, num_labels=3, num_images=1, **{**bert_like(), **vit_like()})
    inputs = {
        "input_ids": word_ids(),
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "pixel_mask": torch.ones(ROWS, 32, 32, dtype=torch.long),
        "labels": torch.rand(ROWS, 3),
    }
    return hf.ViltForQuestionAnswering(config), inputs


def _blip() -> Made:
    text = bert_like(vocab_size=WORDS, encoder_hidden_size=32, bos_token_id=1, sep_token_id=2, eos_token_id=2)
    config = hf.BlipConfig(text_config=text, vision_config=vit_like(), projection_dim=16)
    words = word_ids()
    return hf.BlipForConditionalGeneration(config), {
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "input_ids": words,
        "labels": words,
    }


def _siglip() -> Made:
    text = {k: v for k, v in bert_like().items() if "dropout" not in k} | {"vocab_size": WORDS, "projection_size": 32}
    vision = {k: v for k, v in vit_like().items() if "dropout" not in k}
    config = hf.SiglipConfig(text_config=text, vision_config=vision)
    inputs = {"input_ids": word_ids(), "pixel_values": torch.randn(ROWS, 3, 32, 32), "return_loss": True}
    return hf.SiglipModel(config), inputs


def _timesformer() -> Made:
    made = hf.TimesformerForVideoClassification(hf.TimesformerConfig(num_labels=3, num_frames=2, **vit_like()))
    return made, {"pixel_values": torch.randn(ROWS, 2, 3, 32, 32), "labels": torch.randint(0, 3, (ROWS,))}


def _videomae() -> Made:
    made = hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(num_labels=3, num_frames=2, **vit_like()))
    return made, {"pixel_values": torch.randn(ROWS, 2, 3, 32, 32), "labels": torch.randint(0, 3, (ROWS,))}


def _audio_spectrogram() -> Made:
    sizes = {k: v for k, v in vit_like().items() if k != "image_size"}
    config = hf.ASTConfig(num_labels=3, max_length=32, num_mel_bins=16, time_stride=4, frequency_stride=4, **sizes)
    return hf.ASTForAudioClassification(config), {
        "input_values": torch.randn(ROWS, 32, 16),
        "labels": torch.randint(0, 3, (ROWS,)),
    }


def _patchtst() -> Made:
    config = hf.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=3,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        attention_dropout=0.0,
        ff_dropout=0.0,
        head_dropout=0.0,
        norm_type="layernorm",
        loss="mse",
    )
    inputs = {"past_values": torch.randn(ROWS, 16, 2), "future_values": torch.randn(ROWS, 3, 2)}
    return hf.PatchTSTForPrediction(config), inputs


def _time_series() -> Made:
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=3,
        context_length=6,
        lags_sequence=[1, 2],
        num_time_features=2,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    inputs = {
        "past_values": torch.rand(ROWS, 8),
        "past_time_features": torch.rand(ROWS, 8, 2),
        "past_observed_mask": torch.ones(ROWS, 8),
        "future_values": torch.rand(ROWS, 3),
        "future_time_features": torch.rand(ROWS, 3, 2),
    }
    return hf.TimeSeriesTransformerForPrediction(config), inputs


def _speech_to_text() -> Made:
    options = {**SEQ2SEQ}
    options.pop("max_position_embeddings")
    options.pop("forced_eos_token_id")
    config = hf.Speech2TextConfig(
        vocab_size=WORDS,
        input_feat_per_channel=8,
        num_conv_layers=2,
        conv_channels=16,
        conv_kernel_sizes=[3, 3],
        max_source_positions=32,
        max_target_positions=16,
        pad_token_id=0,
        **options,
    )
    features = {"input_features": torch.randn(ROWS, 24, 8), "labels": word_ids()}
    return hf.Speech2TextForConditionalGeneration(config), features


def _perceiver() -> Made:
    config = hf.PerceiverConfig(
        num_latents=4,
        d_latents=16,
        d_model=32,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        attention_probs_dropout_prob=0.0,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        num_labels=3,
        qk_channels=16,
        v_channels=16,
    )
    made = hf.PerceiverForSequenceClassification(config)
    return made, {"inputs": word_ids(), "labels": torch.randint(0, 3, (ROWS,))}


def _fsmt_like(model: str, config: str, **options: Any) -> Callable[[], Made]:
    return sequences(model, config, **{**SEQ2SEQ, **options})


_DECODERS: dict[str, Callable[[], Made]] = {
    "phi3": decoder(
        "Phi3ForCausalLM", "Phi3Config", **llama_like(resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    ),
    "gemma2": decoder("Gemma2ForCausalLM", "Gemma2Config", **llama_like(head_dim=8, sliding_window=4)),
    "gemma3": decoder("Gemma3ForCausalLM", "Gemma3TextConfig", **llama_like(head_dim=8, sliding_window=4)),
    "cohere": decoder("CohereForCausalLM", "CohereConfig", **llama_like()),
    "starcoder2": decoder(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        **llama_like(residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
    ),
    "stablelm": decoder("StableLmForCausalLM", "StableLmConfig", **llama_like(hidden_dropout=0.0)),
    "nemotron": decoder("NemotronForCausalLM", "NemotronConfig", **llama_like(hidden_dropout=0.0)),
    "granite": decoder("GraniteForCausalLM", "GraniteConfig", **llama_like()),
    "olmo": decoder("OlmoForCausalLM", "OlmoConfig", **llama_like()),
    "olmo2": decoder("Olmo2ForCausalLM", "Olmo2Config", **llama_like()),
    "glm": decoder("GlmForCausalLM", "GlmConfig", **llama_like(head_dim=8)),
    "qwen3": decoder("Qwen3ForCausalLM", "Qwen3Config", **llama_like(head_dim=8)),
    "smollm3": decoder("SmolLM3ForCausalLM", "SmolLM3Config", **llama_like()),
    "diffllama": decoder("DiffLlamaForCausalLM", "DiffLlamaConfig", **llama_like()),
    "helium": decoder("HeliumForCausalLM", "HeliumConfig", **llama_like(head_dim=8)),
    "persimmon": decoder(
        "PersimmonForCausalLM", "PersimmonConfig", **llama_like(num_key_value_heads=4, hidden_dropout=0.0)
    ),
    "gpt_neo": decoder(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gptj": decoder(
        "GPTJForCausalLM",
        "GPTJConfig",
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "codegen": decoder(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "gpt_bigcode": decoder(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "mpt": decoder("MptForCausalLM", "MptConfig", d_model=32, n_heads=4, n_layers=3, max_seq_len=32),
    "biogpt": decoder("BioGptForCausalLM", "BioGptConfig", **bert_like()),
    "ctrl": decoder(
        "CTRLLMHeadModel",
        "CTRLConfig",
        n_embd=32,
        dff=48,
        n_layer=3,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
    "modernbert_decoder": decoder(
        "ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", **llama_like(local_attention=4)
    ),
    "glm4": decoder("Glm4ForCausalLM", "Glm4Config", **llama_like(head_dim=8)),
    "cohere2": decoder("Cohere2ForCausalLM", "Cohere2Config", **llama_like(sliding_window=4)),
    "olmo3": decoder("Olmo3ForCausalLM", "Olmo3Config", **llama_like(sliding_window=4)),
    "exaone4": decoder("Exaone4ForCausalLM", "Exaone4Config", **llama_like(sliding_window=4)),
    "apertus": decoder("ApertusForCausalLM", "ApertusConfig", **llama_like()),
    "bitnet": decoder("BitNetForCausalLM", "BitNetConfig", **llama_like()),
    "lfm2": decoder("Lfm2ForCausalLM", "Lfm2Config", **llama_like(layer_types=["conv", "full_attention", "conv"])),
    "hunyuan": decoder("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", **llama_like(head_dim=8)),
    "ernie4_5": decoder("Ernie4_5ForCausalLM", "Ernie4_5Config", **llama_like(head_dim=8)),
    "seed_oss": decoder(
        "SeedOssForCausalLM", "SeedOssConfig", **llama_like(head_dim=8, attention_dropout=0.0, residual_dropout=0.0)
    ),
    "arcee": decoder("ArceeForCausalLM", "ArceeConfig", **llama_like()),
}

_MIXTURES: dict[str, Callable[[], Made]] = {
    "qwen2_moe": decoder(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **llama_like(**_EXPERTS, shared_expert_intermediate_size=24, output_router_logits=True),
    ),
    "qwen3_moe": decoder(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **llama_like(**_EXPERTS, head_dim=8, output_router_logits=True)
    ),
    "olmoe": decoder("OlmoeForCausalLM", "OlmoeConfig", **llama_like(**_EXPERTS)),
    "granitemoe": decoder(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        **llama_like(num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"),
    ),
    "deepseek_v3": decoder(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **llama_like(
            num_key_value_heads=4,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            experts_implementation="eager",
        ),
    ),
    "switch_transformers": sequences(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=2,
        expert_capacity=64,
        num_heads=4,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
    ),
    "jamba": decoder(
        "JambaForCausalLM",
        "JambaConfig",
        **llama_like(
            num_hidden_layers=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
            use_cache=False,
            experts_implementation="eager",
        ),
    ),
    "gpt_oss": decoder(
        "GptOssForCausalLM",
        "GptOssConfig",
        **llama_like(
            head_dim=8,
            num_local_experts=3,
            num_experts_per_tok=2,
            sliding_window=4,
            experts_implementation="eager",
        ),
    ),
    "phimoe": decoder(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        **llama_like(
            num_local_experts=3,
            num_experts_per_tok=2,
            router_jitter_noise=0.0,
            input_jitter_noise=0.0,
            experts_implementation="eager",
        ),
    ),
}

_RECURRENT: dict[str, Callable[[], Made]] = {
    "mamba2": unmasked(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
        use_cache=False,
    ),
    "falcon_mamba": unmasked(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        use_cache=False,
    ),
    "bamba": decoder(
        "BambaForCausalLM",
        "BambaConfig",
        **llama_like(
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=4,
            mamba_n_groups=1,
            mamba_chunk_size=4,
            use_cache=False,
        ),
    ),
    "zamba2": decoder(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        **llama_like(
            num_hidden_layers=2,
            num_key_value_heads=4,
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
            mamba_d_state=4,
            mamba_ngroups=1,
            n_mamba_heads=8,
            mamba_headdim=8,
            chunk_size=4,
            use_cache=False,
            use_mamba_kernels=False,
        ),
    ),
    "recurrent_gemma": unmasked(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        **llama_like(lru_width=32, attention_window_size=4, conv1d_width=4, num_key_value_heads=1, use_cache=False),
    ),
}

_ENCODERS: dict[str, Callable[[], Made]] = {
    "mpnet": decoder("MPNetForMaskedLM", "MPNetConfig", **bert_like(pad_token_id=1)),
    "modernbert": decoder("ModernBertForMaskedLM", "ModernBertConfig", **llama_like(local_attention=4)),
    "squeezebert": decoder("SqueezeBertForMaskedLM", "SqueezeBertConfig", **bert_like(embedding_size=32)),
    "mobilebert": decoder(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        **bert_like(embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, num_feedforward_networks=1),
    ),
    "data2vec_text": decoder("Data2VecTextForMaskedLM", "Data2VecTextConfig", **bert_like(pad_token_id=1)),
    "megatron_bert": decoder("MegatronBertForMaskedLM", "MegatronBertConfig", **bert_like()),
    "roformer": decoder("RoFormerForMaskedLM", "RoFormerConfig", **bert_like(embedding_size=32)),
    "convbert": decoder("ConvBertForMaskedLM", "ConvBertConfig", **bert_like(embedding_size=32)),
    "ibert": decoder("IBertForMaskedLM", "IBertConfig", **bert_like(pad_token_id=1)),
    "fnet": unmasked(
        "FNetForMaskedLM",
        "FNetConfig",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
    ),
    "nystromformer": unmasked(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        **bert_like(num_landmarks=4, segment_means_seq_len=8, conv_kernel_size=3),
    ),
    "funnel": decoder(
        "FunnelForMaskedLM",
        "FunnelConfig",
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    ),
    "reformer": unmasked(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        is_decoder=True,
        hidden_size=32,
        feed_forward_size=48,
        num_attention_heads=4,
        attention_head_size=8,
        attn_layers=["local", "local"],
        local_attn_chunk_length=4,
        axial_pos_embds=False,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    ),
    "big_bird": decoder(
        "BigBirdForMaskedLM", "BigBirdConfig", **bert_like(attention_type="original_full", block_size=4)
    ),
    "big_bird_sparse": _big_bird_sparse,
    "layoutlm": _layoutlm,
    "perceiver": _perceiver,
    "xlm": unmasked(
        "XLMWithLMHeadModel",
        "XLMConfig",
        emb_dim=32,
        n_layers=3,
        n_heads=4,
        n_langs=1,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=32,
    ),
    "esm": decoder("EsmForMaskedLM", "EsmConfig", mask_token_id=3, position_embedding_type="rotary", **bert_like()),
    "rembert": decoder(
        "RemBertForMaskedLM",
        "RemBertConfig",
        input_embedding_size=16,
        output_embedding_size=16,
        **bert_like(classifier_dropout_prob=0.0),
    ),
    "xmod": decoder(
        "XmodForMaskedLM", "XmodConfig", languages=["en_XX", "de_DE"], default_language="en_XX", **bert_like()
    ),
    "yoso": unmasked("YosoForMaskedLM", "YosoConfig", use_expectation=True, **bert_like()),
}

_PAIRS: dict[str, Callable[[], Made]] = {
    "pegasus": _fsmt_like("PegasusForConditionalGeneration", "PegasusConfig"),
    "mbart": _fsmt_like("MBartForConditionalGeneration", "MBartConfig"),
    "m2m_100": _fsmt_like("M2M100ForConditionalGeneration", "M2M100Config"),
    "blenderbot": _fsmt_like("BlenderbotForConditionalGeneration", "BlenderbotConfig"),
    "plbart": _fsmt_like("PLBartForConditionalGeneration", "PLBartConfig"),
    "led": _fsmt_like(
        "LEDForConditionalGeneration",
        "LEDConfig",
        attention_window=4,
        max_encoder_position_embeddings=40,
        max_decoder_position_embeddings=40,
    ),
    "bigbird_pegasus": _fsmt_like(
        "BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", attention_type="original_full"
    ),
    "longt5": sequences(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        local_radius=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "prophetnet": unmasked(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "speech_to_text": _speech_to_text,
    "time_series_transformer": _time_series,
    "umt5": sequences(
        "UMT5ForConditionalGeneration",
        "UMT5Config",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
}

_IMAGES: dict[str, Callable[[], Made]] = {
    "beit": _beit,
    "data2vec_vision": images(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", drop_path_rate=0.0, **vit_like()
    ),
    "dinov2": images(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        **{k: v for k, v in vit_like().items() if k != "intermediate_size"},
    ),
    "regnet": images(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    "levit": images(
        "LevitForImageClassification",
        "LevitConfig",
        size=64,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        drop_path_rate=0,
        mlp_ratio=[2, 2, 2],
        attention_ratio=[2, 2, 2],
    ),
    "poolformer": images(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.0,
        size=64,
    ),
    "mobilevit": images(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[4, 8, 8, 16, 16, 16, 16],
        num_attention_heads=2,
        mlp_ratio=2.0,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        image_size=64,
        size=64,
    ),
    "mobilenet_v2": images(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25, classifier_dropout_prob=0.0
    ),
    "efficientnet": images(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        width_coefficient=0.25,
        depth_coefficient=0.2,
        hidden_dim=320,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
    ),
    "swinv2": images(
        "Swinv2ForImageClassification",
        "Swinv2Config",
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
    "convnextv2": images(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.0,
    ),
    "focalnet": images(
        "FocalNetForImageClassification",
        "FocalNetConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
    ),
    "pvt_v2": images(
        "PvtV2ForImageClassification",
        "PvtV2Config",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
        drop_path_rate=0.0,
        size=64,
    ),
    "hiera": images(
        "HieraForImageClassification",
        "HieraConfig",
        image_size=[64, 64],
        embed_dim=8,
        depths=[1, 1, 1],
        num_heads=[1, 2, 2],
        drop_path_rate=0.0,
        mlp_ratio=2.0,
        num_query_pool=2,
        masked_unit_size=[4, 4],
        size=64,
    ),
    "dpt": _dpt,
    "clipseg": _clipseg,
    "vilt": _vilt,
    "blip": _blip,
    "siglip": _siglip,
    "timesformer": _timesformer,
    "videomae": _videomae,
    "pvt": images(
        "PvtForImageClassification",
        "PvtConfig",
        image_size=32,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 16],
        num_attention_heads=[1, 2, 2, 2],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    "mobilenet_v1": images(
        "MobileNetV1ForImageClassification",
        "MobileNetV1Config",
        image_size=32,
        depth_multiplier=0.25,
        classifier_dropout_prob=0.0,
    ),
    "bit": images(
        "BitForImageClassification", "BitConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2
    ),
    "vit_msn": images("ViTMSNForImageClassification", "ViTMSNConfig", **vit_like()),
    "dinov2_registers": images(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        **{k: v for k, v in vit_like().items() if k != "intermediate_size"},
    ),
    "swiftformer": images(
        "SwiftFormerForImageClassification",
        "SwiftFormerConfig",
        size=64,
        image_size=64,
        depths=[1, 1, 1, 1],
        embed_dims=[8, 8, 16, 16],
        drop_path_rate=0.0,
    ),
}

_SPEECH: dict[str, Callable[[], Made]] = {
    "hubert": _speech("HubertForCTC", "HubertConfig"),
    "sew": _speech("SEWForCTC", "SEWConfig", squeeze_factor=2),
    "unispeech": _speech("UniSpeechForCTC", "UniSpeechConfig"),
    "wavlm": _speech("WavLMForCTC", "WavLMConfig"),
    "data2vec_audio": _speech("Data2VecAudioForCTC", "Data2VecAudioConfig", conv_pos_kernel_size=3),
    "wav2vec2_conformer": _speech("Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", conformer_conv_dropout=0.0),
    "audio_spectrogram": _audio_spectrogram,
    "patchtst": _patchtst,
    "unispeech_sat": _speech("UniSpeechSatForCTC", "UniSpeechSatConfig"),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    name: Architecture(name, make)
    for name, make in {**_DECODERS, **_MIXTURES, **_RECURRENT, **_ENCODERS, **_PAIRS, **_IMAGES, **_SPEECH}.items()
}
