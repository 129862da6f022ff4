"""The small models of `width_models` by name, each with its input, target and loss."""

from __future__ import annotations

import torch
from torch import nn
from width_models import (
    HEADS,
    LENGTH,
    ROWS,
    SIZE,
    WIDTH,
    WORDS,
    Habit,
    TiedHead,
    alibi,
    bagged,
    bilinear,
    careful_loss,
    class_loss,
    convolution,
    crossed,
    depthwise,
    divergence_loss,
    einsum_attention,
    experts,
    filtered,
    four,
    fused,
    gated_loop,
    geglu,
    highway,
    images,
    linear,
    linear_attention,
    loop,
    lora,
    lstm,
    maps,
    mixer,
    mlp,
    multihead,
    multihead_weights,
    normed_heads,
    of,
    on,
    over_time,
    padded_words,
    parallel,
    partition_loss,
    picked,
    plain_head,
    retention,
    rotary,
    shuffled,
    sliding,
    sorted_values,
    spectrum,
    squeezed,
    stacked_experts,
    state_space,
    swiglu,
    transposed_convolution,
    unfolded,
    upscaled,
    values,
    weight_norm,
    windows,
    words,
)

HABITS: dict[str, Habit] = {
    **{
        f"qkv by {kind}": on(fused(kind))
        for kind in ("chunk", "split", "unbind", "heads first", "three last", "slices")
    },
    "qkv by index": on(fused("index")),
    "rotary, one head of keys": on(
        of(rotary, lambda: {"q": linear(), "k": linear(WIDTH, SIZE), "v": linear(WIDTH, SIZE), "out": linear()})
    ),
    "alibi": on(of(alibi, four)),
    "sliding window": on(of(sliding, four)),
    **{f"einsum attention {spelling}": on(einsum_attention(spelling)) for spelling in range(3)},
    "windows with a table": on(
        of(windows, lambda: {"qkv": linear(WIDTH, 3 * WIDTH), "out": linear(), "table": torch.randn(49, HEADS) * 0.1}),
        maps,
        class_loss,
    ),
    "cross attention": on(of(crossed, lambda: {**four(), "encode": linear(), "norm": nn.LayerNorm(WIDTH)})),
    "linear attention": on(of(linear_attention, four)),
    "norms of heads": on(of(normed_heads, lambda: {**four(), "nq": nn.RMSNorm(SIZE), "nk": nn.LayerNorm(SIZE)})),
    "retention": on(of(retention, lambda: {**four(), "gate": linear(), "norm": nn.GroupNorm(HEADS, WIDTH)})),
    "multihead": on(
        of(
            multihead,
            lambda: {"attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "norm": nn.LayerNorm(WIDTH)},
        )
    ),
    "multihead with weights": on(
        of(multihead_weights, lambda: {"attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)})
    ),
    "swiglu": on(of(swiglu, lambda: {"both": linear(WIDTH, 70), "down": linear(35, WIDTH), "norm": nn.RMSNorm(WIDTH)})),
    "geglu": on(of(geglu, lambda: {"both": linear(WIDTH, 70), "down": linear(35, WIDTH)})),
    "parallel attention": on(of(parallel, lambda: {**four(), **mlp(), "norm": nn.LayerNorm(WIDTH)})),
    "experts": on(
        of(
            experts,
            lambda: {
                "gate": linear(WIDTH, 4),
                "rises": nn.ModuleList(linear(WIDTH, 20) for _ in range(4)),
                "falls": nn.ModuleList(linear(20, WIDTH) for _ in range(4)),
            },
        )
    ),
    "stacked experts": on(
        of(
            stacked_experts,
            lambda: {
                "gate": linear(WIDTH, 4),
                "rise": torch.randn(4, WIDTH, 20) * 0.2,
                "fall": torch.randn(4, 20, WIDTH) * 0.2,
            },
        )
    ),
    "lora": on(
        of(lora, lambda: {"base": linear().requires_grad_(False), "a": linear(WIDTH, 4), "b": linear(4, WIDTH)})
    ),
    "mixer": on(
        of(
            mixer,
            lambda: {
                "tokens1": linear(LENGTH, 20),
                "tokens2": linear(20, LENGTH),
                "channels1": linear(WIDTH, 50),
                "channels2": linear(50, WIDTH),
                "norm1": nn.LayerNorm(WIDTH),
                "norm2": nn.LayerNorm(WIDTH),
            },
        )
    ),
    "highway": on(
        of(
            highway,
            lambda: {name: nn.ModuleList(linear() for _ in range(2)) for name in ("layers", "gates")},
        )
    ),
    "sort, topk, cumsum": on(
        of(sorted_values, lambda: {"up": linear(WIDTH, 2 * WIDTH), "down": linear(3 * WIDTH, WIDTH)})
    ),
    "gather and scatter": on(of(picked, lambda: {"up": linear(WIDTH, 2 * WIDTH), "down": linear(2 * WIDTH, WIDTH)})),
    "fourier": on(of(spectrum, lambda: {"inner": linear(), "norm": nn.LayerNorm(WIDTH)})),
    "global filter": on(of(filtered, lambda: {"inner": linear(), "filter": torch.randn(LENGTH // 2 + 1, WIDTH, 2)})),
    "loop": on(of(loop, lambda: {"inner": linear(), "again": linear(bias=False)})),
    "gated loop": on(of(gated_loop, lambda: {"inner": linear(WIDTH, 96), "again": linear(WIDTH, 96)})),
    "lstm": on(of(lstm, lambda: {"inner": linear(), "lstm": nn.LSTM(WIDTH, WIDTH, batch_first=True)})),
    "convolution over time": on(
        of(
            over_time,
            lambda: {
                "wide": nn.Conv1d(WIDTH, 2 * WIDTH, 1),
                "depth": nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
                "norm": nn.GroupNorm(4, WIDTH),
                "point": nn.Conv1d(WIDTH, WIDTH, 1),
            },
        )
    ),
    "selective scan": on(
        of(
            state_space,
            lambda: {
                "both": linear(WIDTH, 2 * WIDTH),
                "depth": nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH),
                "step": linear(),
                "bc": linear(WIDTH, 8),
                "rate": torch.rand(WIDTH, 4),
                "out": linear(),
            },
        )
    ),
    "bilinear": on(
        of(bilinear, lambda: {"a": linear(WIDTH, 10), "b": linear(WIDTH, 8), "form": nn.Bilinear(10, 8, WIDTH)})
    ),
    "weight norm": on(of(plain_head, lambda: {"up": weight_norm(outputs=50), "down": weight_norm(inputs=50)})),
    "spectral norm": on(
        of(plain_head, lambda: {"up": nn.utils.parametrizations.spectral_norm(linear(WIDTH, 50)), "down": linear(50)})
    ),
    "careful cross entropy": on(of(plain_head, mlp), values, careful_loss),
    "logsumexp": on(of(plain_head, mlp), values, partition_loss),
    "divergence": on(of(plain_head, mlp), values, divergence_loss),
    "bag of words": on(
        of(bagged, lambda: {"bag": nn.EmbeddingBag(WORDS, WIDTH, mode="sum"), "up": linear()}),
        lambda: (torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS,))),
        class_loss,
    ),
    "padded words": on(
        of(
            padded_words,
            lambda: {
                "words": nn.Embedding(WORDS, WIDTH, padding_idx=3),
                "kinds": nn.Embedding(3, WIDTH),
                "places": nn.Embedding(9, WIDTH),
                "up": linear(),
            },
        ),
        words,
    ),
    "tied head": on(lambda: TiedHead(False), words),
    "tied and transposed": on(lambda: TiedHead(True), words, careful_loss),
    "squeeze and excite": on(
        of(
            squeezed,
            lambda: {
                "rise": convolution(3, 20, 3),
                "shrink": linear(20, 5),
                "grow": linear(5, 20),
                "fall": convolution(20, WIDTH),
            },
        ),
        images,
        class_loss,
    ),
    **{
        f"depthwise, {name}": on(
            of(
                depthwise,
                lambda norm=norm: {  # type: ignore[misc]
                    "rise": convolution(3, 20),
                    "depth": convolution(20, 20, 3, groups=20),
                    "norm": norm(),
                    "fall": convolution(20, WIDTH),
                },
            ),
            images,
            class_loss,
        )
        for name, norm in {
            "instances": lambda: nn.InstanceNorm2d(20, affine=True),
            "groups": lambda: nn.GroupNorm(5, 20),
            "batch": lambda: nn.BatchNorm2d(20),
        }.items()
    },
    "groups and shuffle": on(
        of(shuffled, lambda: {"first": convolution(WIDTH, 32, 3, 4), "second": convolution(32, WIDTH, 1, 8)}),
        maps,
        class_loss,
    ),
    "pixel shuffle": on(
        of(
            upscaled,
            lambda: {"rise": convolution(WIDTH, 24, 3), "mix": convolution(6, 6, 3), "norm": nn.GroupNorm(2, 6)},
        ),
        maps,
        class_loss,
    ),
    "transposed convolution": on(
        of(
            transposed_convolution,
            lambda: {
                "down": nn.Conv2d(WIDTH, 10, 2, 2),
                "up": nn.ConvTranspose2d(10, WIDTH, 2, 2),
                "norm": nn.GroupNorm(3, WIDTH),
            },
        ),
        maps,
        class_loss,
    ),
    "unfold and fold": on(
        of(unfolded, lambda: {"rise": convolution(WIDTH, 6), "mix": linear(24, 24)}), maps, class_loss
    ),
}
