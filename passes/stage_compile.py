"""Run a stage's graphs through `torch.compile`, in place of the generated functions.

Each graph of a stage is compiled once for each number of rows that its parts have, when it runs first.
It is flat and specialised already, so nothing breaks it apart and nothing makes it compile again.
Weight gradients come as tensors of their own and are added afterwards.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from efftra_fx import private
from efftra_fx.emit import Emitted
from efftra_fx.errors import EmitError

from .differentiate import Differentiated, Part


def check_backend(backend: str, device: str) -> None:
    """Raise EmitError where a backend of `torch.compile` is not known, or cannot work on this machine."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise EmitError(
            f"compile_stages names no backend of torch.compile: {backend!r}; they are {', '.join(known)}, and "
            "compile_stages=True takes inductor"
        )
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if backend == "inductor" and device == "cpu" and shutil.which(compiler.split()[0]) is None:
        raise EmitError(
            f"compile_stages=True needs a C++ compiler on CPUs, but '{compiler}' was not found; install one, name it "
            "in the environment variable CXX, or give compile_stages='aot_eager', which generates no code"
        )


def compile_parts(parts: Differentiated, backend: str) -> Differentiated:
    """Return the same functions, compiled."""
    compiled: dict[str, Any] = {
        field.name: CompiledPart(**{f.name: getattr(part, f.name) for f in fields(Part)}, backend=backend)
        for field in fields(parts)
        if isinstance(part := getattr(parts, field.name), Part)
    }
    return replace(parts, **compiled)


@dataclass(frozen=True, eq=False)
class CompiledPart(Part):
    """A part whose functions call one compiled graph."""

    backend: str = "inductor"

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The graph, compiled when it is first called."""
        if not any(node.op == "call_function" for node in self.graph.graph.nodes):
            return self.graph
        call: Callable[..., Any] = torch.compile(self.graph, backend=self.backend, fullgraph=True, dynamic=False)
        return call

    def _emit(
        self, name: str, into: tuple[int, ...] | None = None, overwrite: bool = False, tells: bool = False
    ) -> Emitted:
        return _Call(self, name, into, overwrite, tells)


class _Call:
    """Call a compiled part as its generated function is called."""

    def __init__(self, part: CompiledPart, name: str, into: Sequence[int] | None, overwrite: bool, tells: bool) -> None:
        self.part, self.into, self.overwrite, self.tells = part, into, overwrite, tells
        self.source = f"# {name}: compiled by {part.backend}\n{part.graph.code}"

    def __call__(self, *arguments: Any) -> Any:
        part = self.part
        count = len(part.takes)
        operands = [value for group in arguments[:count] for value in group]
        for group, consumed in zip(arguments[:count], part.consumes, strict=False):
            if consumed:
                group.clear()
        with torch.no_grad():
            try:
                results = list(part.compiled(*operands))
            except private.compilation_error() as error:
                reason = str(error).strip().splitlines()[0]
                raise EmitError(
                    f"'{part.name}' of a stage cannot be compiled by '{part.backend}': {reason}; give another backend "
                    "as compile_stages=, or leave it out"
                ) from error
            self._add(results, arguments[count:])
        values = iter(results)
        groups = [list(islice(values, size)) for size in part.gives]
        return groups[0] if len(groups) == 1 else groups

    def _add(self, results: list[Any], rest: Sequence[Any]) -> None:
        """Add the weight gradients into the tensors that were given for them, and put these in their places."""
        if self.into is None:
            return
        for position, (index, held) in enumerate(zip(self.into, rest[0], strict=True)):
            if self.overwrite:
                held.copy_(results[index])
            else:
                held.add_(results[index])
            results[index] = held
            if self.tells:
                rest[1](position)


__all__ = ["CompiledPart", "check_backend", "compile_parts"]
