"""Where in the user's own code something happens."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

_GENERATED = ("<frozen ", "<eval_with_key>", "<attrs generated", "<__array_function__")


def is_user_file(file: str) -> bool:
    """Say whether a file is neither torch's nor this package's nor generated; what is typed in is a user's."""
    return not file.startswith((*_FOREIGN, *_GENERATED))


def line_of_error(trace: TracebackType | None) -> str:
    """Return the innermost user's line that an error came through, `file:line`; empty where there is none."""
    place = ""
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def line_of_caller() -> str:
    """Return the innermost user's line that is being executed, `file:line`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"


def decides_an_error(frame: FrameType) -> bool:
    """Say whether what a frame is executing only decides whether to raise: `if ...: raise ...`, or an assertion."""
    line = frame.f_lineno
    found: ast.If | ast.Assert | None = None
    for node in _statements(frame.f_code.co_filename):
        last = node.test.end_lineno
        if node.lineno <= line <= (last if last is not None else node.lineno):
            found = node  # statements come in order, so the last one that fits is the innermost
    if isinstance(found, ast.If):
        return not found.orelse and all(isinstance(one, ast.Raise) for one in found.body)
    return found is not None


@lru_cache(maxsize=64)
def _statements(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """Return the branches and assertions of a source file, by line; none where it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def modules_of_error(trace: TracebackType | None, model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules in whose forward an error arose, the innermost first."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    found: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        owner = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in paths and is_user_file(code.co_filename):
            path = paths[id(owner)]
            if path in found:
                found.remove(path)
            found.insert(0, path)
        trace = trace.tb_next
    return tuple(found)
