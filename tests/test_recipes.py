"""Models and losses as people write them for kinds of tasks, each against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from habits import ROWS, WIDTH, Habit, features
from torch import Tensor, nn

WORDS, STEPS, TAGS = 11, 5, 4


class Tagger(nn.Module):
    """A recurrent net under a chain of tags (Lafferty, McCallum, Pereira 2001); gives the loss of masked sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.score = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, TAGS)
        self.first, self.follows = nn.Parameter(torch.randn(TAGS)), nn.Parameter(torch.randn(TAGS, TAGS))

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(self.rnn(self.embed(words).transpose(0, 1))[0])
        path = self.first[tags[:, 0]] + scores[0].gather(1, tags[:, :1])[:, 0]
        everything = self.first + scores[0]
        for step in range(1, words.shape[1]):
            inside, tag = mask[:, step], tags[:, step : step + 1]
            path = path + inside * (self.follows[tags[:, step - 1], tag[:, 0]] + scores[step].gather(1, tag)[:, 0])
            longer = torch.logsumexp(everything[:, :, None] + self.follows + scores[step][:, None], 1)
            everything = torch.where(inside[:, None] > 0, longer, everything)
        loss: Tensor = (torch.logsumexp(everything, 1) - path).mean()
        return loss


class Translator(nn.Module):
    """An encoder, and a decoder that attends to it word by word, led by the right words or by its own."""

    def __init__(self, led: bool) -> None:
        super().__init__()
        self.led, self.embed = led, nn.Embedding(WORDS, WIDTH)
        self.encoder, self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, wanted: Tensor) -> Tensor:
        encoded, last = self.encoder(self.embed(source))
        state, word, scores = last[0], wanted[:, 0], []
        for step in range(wanted.shape[1]):
            weights = (encoded @ state[:, :, None]).softmax(1)
            state = self.cell(torch.cat([self.embed(word), (weights * encoded).sum(1)], 1), state)
            scores.append(self.out(state))
            word = wanted[:, step] if self.led else scores[-1].argmax(-1)
        return torch.stack(scores, 1)


class Flow(nn.Module):
    """Affine couplings; gives the values and the logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logarithm = x.new_zeros(x.shape[0])
        for net in self.nets:
            kept, moved = x.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            logarithm = logarithm + scale.tanh().sum(1)
            x = torch.cat([moved * scale.tanh().exp() + shift, kept], 1)
        return x, logarithm


class Pair(nn.Module):
    """Two nets for two views of the same rows, and a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.heat = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH), nn.Parameter(torch.tensor(1.5))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(one), self.b(other), self.heat.exp()


def contrast(output: Any) -> Tensor:
    scores = output[2] * F.normalize(output[0], dim=1) @ F.normalize(output[1], dim=1).T
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def redundancy(output: Any) -> Tensor:
    one, other = ((v - v.mean(0)) / v.std(0) for v in output[:2])
    loss: Tensor = (one.T @ other / len(one) * output[2] - torch.eye(WIDTH, dtype=one.dtype)).square().sum()
    return loss


def risk(output: Any, times: Tensor) -> Tensor:
    """Return the partial likelihood of Cox (1972): each row against those that are still at risk."""
    hazard = output[0].sum(1)[times.argsort()] * output[2] + output[1].mean()
    loss: Tensor = (torch.logcumsumexp(hazard.flip(0), 0).flip(0) - hazard).mean()
    return loss


def words(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, *shape))


def by_word(output: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), wanted.flatten(), ignore_index=1)


def translation(led: bool) -> Habit:
    wanted = words(3)
    return Habit(Translator(led).double(), (words(STEPS), wanted), wanted, by_word)


def views(loss: Callable[..., Tensor], target: Tensor | None = None) -> Habit:
    return Habit(Pair().double(), (features(), features()), target, loss)


RECIPES: Mapping[str, Callable[[], Habit]] = {
    "a chain of tags": lambda: Habit(
        Tagger().double(),
        (
            words(STEPS),
            words(STEPS) % TAGS,
            (torch.arange(STEPS) < torch.tensor([[5], [3], [1], [4], [2], [5], [2]])) * 1.0,
        ),
    ),
    "a decoder that is led": lambda: translation(True),
    "a decoder that leads itself": lambda: translation(False),
    "a flow": lambda: Habit(Flow().double(), (features(),), None, lambda o: (o[0].square().sum(1) / 2 - o[1]).mean()),
    "contrast with a learnt temperature": lambda: views(contrast),
    "redundancy of two views": lambda: views(redundancy),
    "hazards": lambda: views(risk, torch.rand(ROWS)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    assert_matches(RECIPES[name](), (((1, 1), 3), ((2, 1), 2)))
