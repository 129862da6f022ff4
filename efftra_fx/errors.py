"""Every exception that efftra_fx raises on purpose.

Each message names the thing, what was expected, what was found and what to do.
"""

from __future__ import annotations


class EfftraError(Exception):
    """Root of every error of the package; catch it to catch them all."""


class ClusterError(EfftraError):
    """Raise when a description of devices and links cannot be meant."""


class CostError(EfftraError):
    """Raise when a cost table or a published profile is not usable."""


class PlanError(EfftraError):
    """Raise when a plan, or a part of it that was fixed, cannot be had."""


class MemoryPlanError(PlanError):
    """Raise when no plan fits the devices' memory, or a given one does not."""


class PlacementError(PlanError):
    """Raise when tensor groups of given widths do not fit inside machines."""


class CaptureError(EfftraError):
    """Raise when a model cannot be captured as a graph that equals it."""


class BatchError(EfftraError):
    """Raise when the batch cannot be cut without changing the result."""


class LossError(EfftraError):
    """Raise when the loss is missing or cannot be joined from micro-batches."""


class InputError(EfftraError):
    """Raise when a step is given something other than what was compiled for."""


class DifferentiateError(EfftraError):
    """Raise when a graph cannot be differentiated ahead of time."""


class EmitError(EfftraError):
    """Raise when a graph cannot be turned into flat code."""


class ProgramError(EfftraError):
    """Raise when a text is not a rank program."""


class VerifyError(EfftraError):
    """Raise when a plan or a set of programs is not sound (one subclass a kind)."""


class CoverageError(VerifyError):
    """Raise when a block is in no stage, or in two."""


class EdgeError(VerifyError):
    """Raise when a value would be consumed no later than the stage that produces it."""


class WiringError(VerifyError):
    """Raise when a wiring names a thing twice, or a stage that is not there."""


class DeviceError(VerifyError):
    """Raise when a device serves two stages, or is not in the cluster."""


class OwnerError(VerifyError):
    """Raise when a parameter belongs to no stage."""


class HeaderError(VerifyError):
    """Raise when programs disagree about the step: rows, micro-batches, ranks, replicas, plan."""


class LoadError(VerifyError):
    """Raise when a cell loads other rows than it should, never, or twice."""


class CellError(VerifyError):
    """Raise when a forward or backward is missing, doubled, or of no cell of this rank."""


class OrderError(VerifyError):
    """Raise when an instruction stands before something that it needs."""


class MessageError(VerifyError):
    """Raise when a message is sent or received that nobody needs, or when a needed one is neither."""


class UnmatchedSendError(MessageError):
    """Raise when a send has no receive."""


class UnmatchedReceiveError(MessageError):
    """Raise when a receive has no send."""


class PeerError(MessageError):
    """Raise when a message goes to, or is awaited from, the wrong rank."""


class DtypeError(MessageError):
    """Raise when a message has the wrong dtype."""


class ShapeError(MessageError):
    """Raise when a message has the wrong shape."""


class RowsError(MessageError):
    """Raise when a message holds the wrong rows."""


class MessageOrderError(MessageError):
    """Raise when one rank sends in another order than its peer receives."""


class ReduceError(VerifyError):
    """Raise when a gradient is not reduced exactly once, over its whole group, after its last contribution."""


class ReduceOrderError(VerifyError):
    """Raise when members of a group meet its collectives in different orders."""


class JoinError(VerifyError):
    """Raise when the loss is not joined between the last forward and the first backward."""


class LossReductionError(VerifyError):
    """Raise when the ranks do not all learn the loss, once, after it is computed."""


class UpdateError(VerifyError):
    """Raise when a program does not end with its only update."""


class DeadlockError(VerifyError):
    """Raise when ranks would wait for each other forever."""


class DeviceMemoryError(VerifyError):
    """Raise when a program needs more memory than its device has."""


class TransportError(EfftraError):
    """Raise when ranks cannot talk to each other."""


class TransportTimeout(TransportError):
    """Raise when a wait has passed its time limit."""


class RankFailed(TransportError):
    """Raise on every rank when one of them has failed; carries its message."""


class LaunchError(EfftraError):
    """Raise when the launched ranks are not those of the cluster."""


class CheckpointError(EfftraError):
    """Raise when a state dict does not fit the model."""
