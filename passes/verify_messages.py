"""Every message is one that the wiring asks for, and its other end says the same, in the same order."""

from __future__ import annotations

from collections.abc import Mapping

from efftra_fx.errors import (
    DtypeError,
    MessageError,
    MessageOrderError,
    PeerError,
    RowsError,
    ShapeError,
    UnmatchedReceiveError,
    UnmatchedSendError,
    VerifyError,
)
from efftra_fx.program import RankProgram, Recv, Send, match_messages
from efftra_fx.program_text import print_instruction

from .expected import Expected, place


def verify_messages(programs: Mapping[int, RankProgram], expected: Expected) -> None:
    """Raise the MessageError that fits the first message which is wrong, missing, or out of order."""
    found_sends: dict[int, set[Send]] = {rank: set() for rank in programs}
    found_receives: dict[int, set[Recv]] = {rank: set() for rank in programs}
    for rank in sorted(programs):
        for index, instruction in enumerate(programs[rank].instructions):
            match instruction:
                case Send():
                    _check_message(rank, index, instruction, expected.sends[rank], found_sends[rank])
                    found_sends[rank].add(instruction)
                case Recv():
                    _check_message(rank, index, instruction, expected.receives[rank], found_receives[rank])
                    found_receives[rank].add(instruction)
                case _:
                    pass
    for rank in sorted(programs):
        _check_all_there(rank, expected, found_sends, found_receives)
    _check_order(programs)


def _check_message(
    rank: int,
    index: int,
    message: Send | Recv,
    expected: frozenset[Send] | frozenset[Recv],
    found: set[Send] | set[Recv],
) -> None:
    if message in expected and message not in found:
        return
    where = place(rank, index, message)
    if message in found:
        kind = UnmatchedSendError if isinstance(message, Send) else UnmatchedReceiveError
        other = "receive" if isinstance(message, Send) else "send"
        raise kind(f"{where} is there for the second time and has no {other} any more; drop it")
    like = [
        one
        for one in sorted(expected, key=print_instruction)
        if (one.value, one.micro_batch, one.gradient) == (message.value, message.micro_batch, message.gradient)
    ]
    if not like:
        raise MessageError(f"{where} is not asked for by the wiring: nothing of this name goes this way; drop it")
    nearest = max(like, key=lambda one: _agreement(one, message))
    raise _difference(where, message, nearest)


def _agreement(one: Send | Recv, other: Send | Recv) -> int:
    same_rows = (one.start, one.stop) == (other.start, other.stop)
    return 2 * same_rows + 2 * (one.peer == other.peer) + (one.dtype == other.dtype) + (one.shape == other.shape)


def _difference(where: str, message: Send | Recv, nearest: Send | Recv) -> VerifyError:
    if message.peer != nearest.peer:
        return PeerError(f"{where} has peer {message.peer}, expected {nearest.peer}")
    if (message.start, message.stop) != (nearest.start, nearest.stop):
        return RowsError(
            f"{where} holds rows [{message.start}:{message.stop}], expected [{nearest.start}:{nearest.stop}]"
        )
    if message.dtype != nearest.dtype:
        return DtypeError(f"{where} has dtype {message.dtype}, expected {nearest.dtype}")
    return ShapeError(f"{where} has shape {list(message.shape)}, expected {list(nearest.shape)}")


def _check_all_there(
    rank: int,
    expected: Expected,
    found_sends: Mapping[int, set[Send]],
    found_receives: Mapping[int, set[Recv]],
) -> None:
    for send in sorted(expected.sends[rank] - found_sends[rank], key=print_instruction):
        text, other = print_instruction(send), _other_end(rank, send)
        if other in found_receives[send.peer]:
            raise UnmatchedReceiveError(
                f"rank {send.peer} has a receive ({print_instruction(other)}) but rank {rank} lacks the send ({text})"
            )
        raise MessageError(f"rank {rank} lacks {text}, and rank {send.peer} lacks its receive")
    for receive in sorted(expected.receives[rank] - found_receives[rank], key=print_instruction):
        text, other = print_instruction(receive), _other_end(rank, receive)
        raise UnmatchedSendError(
            f"rank {receive.peer} has a send ({print_instruction(other)}) but rank {rank} lacks the receive ({text})"
        )


def _other_end(rank: int, message: Send | Recv) -> Send | Recv:
    kind = Recv if isinstance(message, Send) else Send
    return kind(
        message.value,
        message.micro_batch,
        message.start,
        message.stop,
        rank,
        message.dtype,
        message.shape,
        message.gradient,
    )


def _check_order(programs: Mapping[int, RankProgram]) -> None:
    for (rank, index), (peer, peer_index) in sorted(match_messages(programs).items()):
        here, there = programs[rank].instructions[index], programs[peer].instructions[peer_index]
        assert isinstance(here, Send | Recv)
        if there != _other_end(rank, here):
            raise MessageOrderError(
                f"{place(rank, index, here)} meets {place(peer, peer_index, there)}: "
                f"between two ranks, messages must be received in the order in which they are sent"
            )
