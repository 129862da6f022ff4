"""The public verifier: of a compiled model, of a plan alone, of programs, or of a dump's text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from efftra_fx.cluster import Cluster
from efftra_fx.errors import ProgramError
from efftra_fx.passes.verify import verify_plan, verify_programs
from efftra_fx.plan import Plan
from efftra_fx.program import RankProgram, Wiring
from efftra_fx.program_text import parse_programs


def verify(
    what: Any, *, wiring: Wiring | None = None, plan: Plan | None = None, cluster: Cluster | None = None
) -> None:
    """Prove that what is given is sound; return nothing, or raise the VerifyError of the kind that was found.

    `what` may be a compiled model, a `Plan` (then `cluster` may be given), rank programs by rank (with their
    `wiring`), the text of a dump's `programs.txt`, or the path of such a file.
    """
    if isinstance(what, Plan):
        verify_plan(what, what.blocks, cluster)
    elif isinstance(what, (str, Path)):
        verify_programs(*parse_programs(_text(what)), plan)
    elif isinstance(what, Mapping):
        if wiring is None:
            raise ProgramError("programs can be verified only with their wiring; give wiring=")
        programs: dict[int, RankProgram] = dict(what)
        verify_programs(programs, wiring, plan)
    elif not all(hasattr(what, name) for name in ("plan", "programs", "wiring", "cluster")):
        raise ProgramError(
            "verify takes a compiled model, a Plan, programs by rank, or a dump's text or file, "
            f"got {type(what).__name__}"
        )
    else:
        verify_plan(what.plan, what.plan.blocks, what.cluster)
        verify_programs(what.programs, what.wiring, what.plan)


def _text(what: str | Path) -> str:
    if isinstance(what, Path) or "\n" not in what:
        try:
            return Path(what).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ProgramError(f"{what}: cannot read the programs: {error}") from error
    return what
