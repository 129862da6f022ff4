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
