"""Programs and their wiring as stable text that parses back to equal data.

One instruction a line; a whole set prints together with its wiring, so that the
text alone can be verified. Reading is strict: what is not understood is an error
that names the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar, assert_never

from efftra_fx.errors import ProgramError
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    Load,
    Message,
    Parameter,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Value,
    Wiring,
)


def print_instruction(instruction: Instruction) -> str:
    """Return the instruction as one short line that `parse_instruction` reads back."""
    match instruction:
        case Load(stage, micro_batch, start, stop):
            return f"load s{stage} m{micro_batch} [{start}:{stop}]"
        case Forward(stage, micro_batch):
            return f"forward s{stage} m{micro_batch}"
        case Backward(stage, micro_batch):
            return f"backward s{stage} m{micro_batch}"
        case BackwardInput(stage, micro_batch):
            return f"backward_input s{stage} m{micro_batch}"
        case BackwardWeight(stage, micro_batches):
            return f"backward_weight s{stage} {' '.join(f'm{k}' for k in micro_batches)}"
        case Send():
            return f"send {_message_text(instruction, '->')}"
        case Recv():
            return f"recv {_message_text(instruction, '<-')}"
        case AllReduce(parameters, ranks):
            return f"all_reduce {list(ranks)} {', '.join(_quote(name) for name in parameters)}"
        case Join(stage, ranks):
            return f"join s{stage} {list(ranks)}"
        case ReduceLoss(ranks):
            return f"reduce_loss {list(ranks)}"
        case Update():
            return "update"
        case _:
            assert_never(instruction)


def parse_instruction(text: str) -> Instruction:
    """Read one line; raise ProgramError with the line if it is not an instruction."""
    line = _Line(text)
    word = line.word()
    instruction: Instruction
    match word:
        case "load":
            instruction = Load(line.tagged("s"), line.tagged("m"), *line.rows())
        case "forward":
            instruction = Forward(line.tagged("s"), line.tagged("m"))
        case "backward":
            instruction = Backward(line.tagged("s"), line.tagged("m"))
        case "backward_input":
            instruction = BackwardInput(line.tagged("s"), line.tagged("m"))
        case "backward_weight":
            instruction = BackwardWeight(line.tagged("s"), tuple(line.until_end(lambda: line.tagged("m"))))
        case "send":
            instruction = Send(*line.message("->"))
        case "recv":
            instruction = Recv(*line.message("<-"))
        case "all_reduce":
            ranks = line.integers()
            instruction = AllReduce(line.names(), ranks)
        case "join":
            instruction = Join(line.tagged("s"), line.integers())
        case "reduce_loss":
            instruction = ReduceLoss(line.integers())
        case "update":
            instruction = Update()
        case _:
            raise ProgramError(f"{text.strip()!r} starts with {word!r}, which is not an instruction")
    line.end()
    return instruction


def print_program(program: RankProgram) -> str:
    """Return the program as text: a head line, then one indented line an instruction."""
    stage = "none" if program.stage is None else str(program.stage)
    head = (
        f"program rank={program.rank} stage={stage} replica={program.replica} "
        + (f"tensor={program.tensor} width={program.width} " if program.width > 1 else "")
        + ("synced " if program.synced else "")
        + f"rows={program.rows} micro_batches={program.micro_batches}"
    )
    return "\n".join([head, *(f"  {print_instruction(i)}" for i in program.instructions)]) + "\n"


def parse_program(text: str) -> RankProgram:
    """Read what `print_program` wrote; raise ProgramError naming the line that is wrong."""
    programs = _parse_bodies(enumerate(text.splitlines(), 1))
    if len(programs) != 1:
        raise ProgramError(f"expected the text of one program, found {len(programs)}")
    return programs[0]


def print_wiring(wiring: Wiring) -> str:
    """Return the wiring as text, one value or parameter a line."""
    lines = [
        f"wiring stages={wiring.stages} backward={_flags(wiring.backward)} "
        f"joined={_flag(wiring.joined)} loss={_flag(wiring.loss)}"
        + (f" synced={list(wiring.synced)}" if wiring.synced else "")
    ]
    for value in wiring.values:
        lines.append(
            f"  value {_quote(value.name)} {_quote(value.dtype)}{list(value.shape)} {value.kind} dim={value.dim} "
            f"producer={value.producer} consumers={list(value.consumers)} gradients={_flags(value.gradients)}"
        )
    for parameter in wiring.parameters:
        lines.append(
            f"  parameter {_quote(parameter.name)} {_quote(parameter.dtype)}{list(parameter.shape)} "
            f"stages={list(parameter.stages)} trainable={_flag(parameter.trainable)}"
            + (" partial" if parameter.partial else "")
        )
    return "\n".join(lines) + "\n"


def print_programs(programs: Mapping[int, RankProgram], wiring: Wiring) -> str:
    """Return the wiring and all programs, by rank, as one text."""
    return print_wiring(wiring) + "".join(print_program(programs[rank]) for rank in sorted(programs))


def parse_programs(text: str) -> tuple[dict[int, RankProgram], Wiring]:
    """Read what `print_programs` wrote; text after `#` at the start of a line is skipped.

    Raises ProgramError naming the line that is wrong, or the rank that is there twice.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if _is_content(line)]
    heads = [at for at, (_, line) in enumerate(lines) if line.startswith("program ")]
    first = heads[0] if heads else len(lines)
    wiring = _parse_wiring(lines[:first])
    programs: dict[int, RankProgram] = {}
    for program in _parse_bodies(lines[first:]):
        if program.rank in programs:
            raise ProgramError(f"rank {program.rank} has two programs in one text, expected one")
        programs[program.rank] = program
    return programs, wiring


_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*", re.ASCII)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_.]*|-?[0-9]+|->|<-|[\[\]:,=])', re.ASCII)


def _quote(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)


def _flag(flag: bool) -> str:
    return "yes" if flag else "no"


def _flags(flags: Iterable[bool]) -> str:
    return f"[{', '.join(_flag(flag) for flag in flags)}]"


def _message_text(message: Message, arrow: str) -> str:
    text = (
        f"{_quote(message.value)} m{message.micro_batch} [{message.start}:{message.stop}] {arrow} {message.peer} "
        f"{_quote(message.dtype)}{list(message.shape)}"
    )
    return f"{text} gradient" if message.gradient else text


_Item = TypeVar("_Item")
MOST_DIGITS = 18


class _Line:
    """A cursor over the tokens of one line."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.tokens: list[str] = []
        self.at = 0
        position = 0
        while position < len(self.text):
            found = _TOKEN.match(self.text, position)
            if found is None:
                raise ProgramError(f"cannot read {self.text[position:]!r} in {self.text!r}")
            self.tokens.append(found[1])
            position = found.end()

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else "end of line"

    def word(self) -> str:
        word = self.peek()
        if self.at == len(self.tokens):
            raise ProgramError(f"{self.text!r} ends too early")
        self.at += 1
        return word

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            if self.peek() != token:
                raise ProgramError(f"expected {token!r} but found {self.peek()!r} in {self.text!r}")
            self.at += 1

    def integer(self) -> int:
        word = self.word()
        if not re.fullmatch(r"-?[0-9]+", word):
            raise ProgramError(f"expected a number but found {word!r} in {self.text!r}")
        return self.number(word)

    def tagged(self, tag: str) -> int:
        word = self.word()
        if not re.fullmatch(rf"{tag}[0-9]+", word):
            raise ProgramError(f"expected {tag} and a number but found {word!r} in {self.text!r}")
        return self.number(word[len(tag) :])

    def number(self, word: str) -> int:
        if len(word) > MOST_DIGITS:
            raise ProgramError(f"a number of {len(word)} digits cannot be meant, found in {self.text[:60]!r}")
        return int(word)

    def name(self) -> str:
        word = self.word()
        if word.startswith('"'):
            try:
                return str(json.loads(word))
            except json.JSONDecodeError as error:
                raise ProgramError(f"cannot read the name {word} in {self.text!r}: {error}") from error
        if not _PLAIN_NAME.fullmatch(word):
            raise ProgramError(f"expected a name but found {word!r} in {self.text!r}")
        return word

    def flag(self) -> bool:
        word = self.word()
        if word not in ("yes", "no"):
            raise ProgramError(f"expected yes or no but found {word!r} in {self.text!r}")
        return word == "yes"

    def sequence(self, item: Callable[[], _Item]) -> tuple[_Item, ...]:
        self.expect("[")
        items: list[_Item] = []
        while self.peek() != "]":
            if items:
                self.expect(",")
            items.append(item())
        self.expect("]")
        return tuple(items)

    def integers(self) -> tuple[int, ...]:
        return self.sequence(self.integer)

    def flags(self) -> tuple[bool, ...]:
        return self.sequence(self.flag)

    def until_end(self, item: Callable[[], _Item]) -> list[_Item]:
        items: list[_Item] = []
        while self.at < len(self.tokens):
            items.append(item())
        return items

    def names(self) -> tuple[str, ...]:
        names = [self.name()]
        while self.peek() == ",":
            self.expect(",")
            names.append(self.name())
        return tuple(names)

    def field(self, name: str) -> None:
        self.expect(name, "=")

    def rows(self) -> tuple[int, int]:
        self.expect("[")
        start = self.integer()
        self.expect(":")
        stop = self.integer()
        self.expect("]")
        return start, stop

    def message(self, arrow: str) -> tuple[str, int, int, int, int, str, tuple[int, ...], bool]:
        value, micro_batch = self.name(), self.tagged("m")
        start, stop = self.rows()
        self.expect(arrow)
        peer, dtype, shape = self.integer(), self.name(), self.integers()
        gradient = self.peek() == "gradient"
        if gradient:
            self.expect("gradient")
        return value, micro_batch, start, stop, peer, dtype, shape, gradient

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise ProgramError(f"found {self.peek()!r} after the end of {self.text!r}")


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse_bodies(lines: Iterable[tuple[int, str]]) -> list[RankProgram]:
    heads: list[RankProgram] = []
    bodies: list[list[Instruction]] = []
    for number, text in lines:
        if not _is_content(text):
            continue
        try:
            if text.startswith("program "):
                heads.append(_parse_head(text))
                bodies.append([])
            elif not heads:
                raise ProgramError(f"expected a line that starts with 'program' but found {text!r}")
            else:
                bodies[-1].append(parse_instruction(text))
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from error
    return [replace(head, instructions=tuple(body)) for head, body in zip(heads, bodies, strict=True)]


def _parse_head(text: str) -> RankProgram:
    line = _Line(text)
    line.expect("program")
    line.field("rank")
    rank = line.integer()
    line.field("stage")
    stage = None
    if line.peek() == "none":
        line.expect("none")
    else:
        stage = line.integer()
    line.field("replica")
    replica = line.integer()
    tensor, width = 0, 1
    if line.peek() == "tensor":
        line.field("tensor")
        tensor = line.integer()
        line.field("width")
        width = line.integer()
    synced = line.peek() == "synced"
    if synced:
        line.expect("synced")
    line.field("rows")
    rows = line.integer()
    line.field("micro_batches")
    micro_batches = line.integer()
    line.end()
    return RankProgram(rank, rows, micro_batches, stage, replica, (), tensor, width, synced)


def _parse_wiring(lines: list[tuple[int, str]]) -> Wiring:
    if not lines or not lines[0][1].startswith("wiring "):
        found = lines[0][1] if lines else "nothing"
        raise ProgramError(f"expected a line that starts with 'wiring' but found {found!r}")
    values: list[Value] = []
    parameters: list[Parameter] = []
    wiring = None
    for number, text in lines:
        try:
            line = _Line(text)
            match line.word():
                case "wiring" if wiring is None:
                    wiring = _parse_wiring_head(line)
                case "value":
                    values.append(_parse_value(line))
                case "parameter":
                    parameters.append(_parse_parameter(line))
                case word:
                    raise ProgramError(f"expected a value or parameter but found {word!r}")
            line.end()
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from error
    assert wiring is not None
    return replace(wiring, values=tuple(values), parameters=tuple(parameters))


def _parse_wiring_head(line: _Line) -> Wiring:
    line.field("stages")
    stages = line.integer()
    line.field("backward")
    backward = line.flags()
    line.field("joined")
    joined = line.flag()
    line.field("loss")
    loss = line.flag()
    synced: tuple[int, ...] = ()
    if line.peek() == "synced":
        line.field("synced")
        synced = line.integers()
    return Wiring(stages, (), (), backward, joined, loss, synced)


def _parse_value(line: _Line) -> Value:
    name, dtype, shape, kind = line.name(), line.name(), line.integers(), line.word()
    line.field("dim")
    dim = line.integer()
    line.field("producer")
    producer = line.integer()
    line.field("consumers")
    consumers = line.integers()
    line.field("gradients")
    return Value(name, dtype, shape, kind, dim, producer, consumers, line.flags())


def _parse_parameter(line: _Line) -> Parameter:
    name, dtype, shape = line.name(), line.name(), line.integers()
    line.field("stages")
    stages = line.integers()
    line.field("trainable")
    trainable = line.flag()
    partial = line.peek() == "partial"
    if partial:
        line.expect("partial")
    return Parameter(name, dtype, shape, stages, trainable, partial)
