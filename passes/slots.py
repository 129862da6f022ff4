"""Plan on machines whose devices cannot all compute at once at full speed (`Cluster.slots`).

The more devices of such a machine a plan uses, the slower each is. So a plan is looked for
on the first n devices of every machine, for each n from where sharing begins, at the speed
that n devices have together; the best of these plans is chosen by its price on the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from efftra_fx.cluster import Cluster
from efftra_fx.errors import MemoryPlanError
from efftra_fx.plan import Plan

from .evaluate import Figures
from .planned import Alternative, Planned


@dataclass(frozen=True)
class Part:
    """Some devices of a cluster, as fast as they are when all of them compute; `kept` are their numbers there.

    `share` is the least part of its own speed that one of them has.
    """

    cluster: Cluster
    kept: tuple[int, ...]
    share: float

    def place(self, plan: Plan) -> Plan:
        """The plan on the whole cluster's numbers."""
        stages = (replace(one, devices=tuple(self.kept[device] for device in one.devices)) for one in plan.stages)
        return replace(plan, stages=tuple(stages))


def parts_of(cluster: Cluster, least: int = 1) -> list[Part]:
    """The parts worth a look that have `least` devices or more: the faster devices of each machine first."""
    order = sorted(range(len(cluster.devices)), key=lambda index: (-cluster.devices[index].speed, index))
    rank: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for index in order:
        seen[cluster.devices[index].machine] += 1
        rank[index] = seen[cluster.devices[index].machine]
    found: list[Part] = []
    for most in range(1, max(seen.values()) + 1):
        kept = tuple(index for index in range(len(cluster.devices)) if rank[index] <= most)
        share = min(cluster.slot_share(machine, min(most, count)) for machine, count in seen.items())
        if found and found[-1].share == share == 1.0:
            found.pop()  # nobody is slowed yet: the larger part has all its plans
        working = cluster.working(kept)
        found.append(Part(replace(working, devices=tuple(working.devices[index] for index in kept)), kept, share))
    return [part for part in found if len(part.kept) >= least]


def plan_on_parts(
    cluster: Cluster, least: int, search: Callable[[Cluster, int], Planned], price: Callable[[Plan], Figures]
) -> Planned:
    """The best plan of all parts with `least` devices or more.

    `search` plans on one part, given how many there are; `price` prices a plan on the whole cluster.
    Raise MemoryPlanError when nothing fits on any part.
    """
    parts = parts_of(cluster, least)
    found: list[tuple[Part, Planned]] = []
    misfit: MemoryPlanError | None = None
    for part in parts:
        try:
            found.append((part, search(part.cluster, len(parts))))
        except MemoryPlanError as error:
            misfit = error
    if not found:
        assert misfit is not None
        raise misfit
    placed = [(part.place(planned.plan), part, planned) for part, planned in found]
    priced = [(price(plan), plan, part, planned) for plan, part, planned in placed]
    figures, plan, part, planned = min(priced, key=lambda one: (one[0].step_s, len(one[1].devices)))
    covered = cluster.machines == 1 and cluster.homogeneous and len(found) == len(parts)  # every plan is on a part
    last = found[-1]
    bound = min(one.lower_bound_s for _, one in found) if covered else last[1].lower_bound_s * last[0].share
    bound = min(bound, figures.step_s)
    limits = list(dict.fromkeys(one.limited for _, one in found if one.limited))
    return replace(
        planned,
        plan=replace(plan, predicted_step_s=figures.step_s, lower_bound_s=bound),
        figures=figures,
        lower_bound_s=bound,
        candidates=sum(one.candidates for _, one in found),
        alternatives=merged(plan, priced, price),
        proven=covered and all(one.proven for _, one in found),
        limited="; ".join(limits),
    )


def merged(
    chosen: Plan, priced: list[tuple[Figures, Plan, Part, Planned]], price: Callable[[Plan], Figures]
) -> tuple[Alternative, ...]:
    """The best of each other part, data parallelism on each, and what the largest part lists; the fastest first."""
    found: dict[str, Alternative] = {}
    for _, _, part, planned in reversed(priced):
        last = part is priced[-1][2]
        for other in planned.alternatives:
            label = other.label if last else f"{other.label}, {len(part.kept)} device(s)"
            plan = None if other.plan is None else part.place(other.plan)
            known = plan == chosen or any(one.plan == plan for one in found.values() if plan is not None)
            if not last and (known or other.label != "data parallelism alone"):
                continue
            step_s = other.step_s if plan is None else price(plan).step_s
            found[label] = Alternative(label, step_s, plan and replace(plan, predicted_step_s=step_s))
    for figures, plan, part, _ in priced:
        if plan != chosen and all(one.plan != plan for one in found.values()):
            label = f"the best on {len(part.kept)} device(s)"
            found[label] = Alternative(label, figures.step_s, replace(plan, predicted_step_s=figures.step_s))
    return tuple(sorted(found.values(), key=lambda one: (one.step_s, one.label)))


def about_slots(plan: Plan, cluster: Cluster) -> list[str]:
    """What a plan's reader must know of machines whose devices share slots."""
    given = Counter(device.machine for device in cluster.devices)
    used = Counter(cluster.devices[device].machine for device in plan.devices)
    lines = []
    for machine, count in sorted(given.items()):
        if cluster.slot_share(machine, count) < 1.0:
            slots = cluster.slots[machine]
            works = used[machine]
            share = cluster.slot_share(machine, works)
            speed = "each at full speed" if share == 1.0 else f"each at {share:.0%} of its speed"
            lines.append(
                f"machine {machine} computes on {slots:g} of its {count} devices at once at full speed;"
                f" {works} {'is' if works == 1 else 'are'} used, {speed}"
            )
    return lines
