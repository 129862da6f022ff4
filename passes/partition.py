"""Choose the plan: stages, replicas, devices, micro-batches and schedule for a chain on a cluster.

Small problems are searched whole, and the answer is proven. Larger ones go through
the dynamic program (the shapes worth a look under each placement), refinement (every
neighbour replayed) and a last comparison of the best few by `evaluate`; what cannot be
proven comes with a lower bound. The plain plans (one device, data parallelism alone, GPipe
with one stage a device) are always among the candidates.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.errors import MemoryPlanError, PlanError
from efftra_fx.plan import SCHEDULES, Plan
from efftra_fx.units import size_text

from .bound import lower_bound, tight_bound
from .candidates import Found, Request, Search, Setting
from .evaluate import Figures, evaluate
from .exhaust import MOST_PLANS, exhaust, plans_to_try
from .neighbours import Shape, shape_of, to_batch
from .placement import layouts
from .planned import Alternative, Planned
from .refine import found_shape, priced, refine
from .rules import Rules
from .scan import RATIOS, scan
from .slots import plan_on_parts
from .table import Layout, Table
from .wide import wide_scan

NARROW = 32  # devices in a line up to which the dynamic program tells positions apart
SMALL = 8  # devices in a line up to which more starts are refined
MANY = 64  # devices in a cluster from which on the search is coarser
MOST_LAYERS = 9  # stages that the dynamic program goes up to; the refinement may split further
POSITIONS = 24  # cut positions that it looks at
SHORT = 48  # blocks up to which it looks at all of them
MOST_MICRO_BATCHES = 512
MOST_ALTERNATIVES = 10
CLOSE_SEED = 1.07  # times the best: placements that are worked out
MOST_TRIED = 1  # so many other numbers of micro-batches are refined although they look no better at first
MOST_STARTS = 16  # plans of the dynamic program that are refined, under one placement


def partition(
    chain: Chain,
    cluster: Cluster,
    rows: int,
    *,
    stages: int | None = None,
    replicas: tuple[int, ...] | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    in_flight: int | None = None,
    tensor: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    overlap: bool = True,
    whole_rows: bool = True,
    forwarded_skips: bool = False,
    undivided_alone: bool = False,
    limit_s: float = 60.0,
) -> Planned:
    """Choose the plan for a global batch of `rows`; what is given is kept, the rest is searched.

    `undivided_alone`: a plan of one stage may take the batch whole, whatever `micro_batches`.
    `limit_s` stops the search; the result says so. Raise PlanError when a given part
    cannot be had, MemoryPlanError when nothing fits.
    """
    request = Request(rows, stages, replicas, micro_batches, schedule, in_flight, tensor, undivided_alone, limit_s)
    check_request(chain, cluster, request)
    rules = Rules(overlap, whole_rows, forwarded_skips, optimizer_bytes_per_parameter_byte)
    if not cluster.crowded:
        return partition_alike(chain, cluster.working(()), rules, request)
    return plan_on_parts(
        cluster,
        devices_needed(request),
        lambda part, parts: partition_alike(chain, part, rules, replace(request, limit_s=limit_s / parts)),
        lambda plan: evaluate(plan, chain, cluster, rows, rules),
    )


def devices_needed(request: Request) -> int:
    """The fewest devices that the fixed parts of a plan ask for."""
    stages = len(request.replicas) if request.replicas else request.stages or 1
    return max(sum(request.replicas or ()), stages) * (request.tensor or 1)


def partition_alike(chain: Chain, cluster: Cluster, rules: Rules, request: Request) -> Planned:
    """Choose the plan where a device is as fast whatever the others do (no `Cluster.slots`)."""
    search = Search(chain, cluster, rules, request, Table(chain, cluster, rules, request.tensor))
    search.floor_s = lower_bound(search)
    proven = False
    micros = every_micro(request.rows, request.micro_batches)
    everything = [setting for micro in micros for setting in orders_of(request, micro)]
    lines = layouts(cluster, search.table)
    plain = offer_plain(search, lines[0])
    if plans_to_try(search, everything) <= MOST_PLANS and rows_searched_whole(request):
        search.exact = True
        exhaust(search, everything)
        proven = not search.limited
    else:
        look_around(search, lines)
    found, plan, figures = choose(search)
    bound = figures.step_s if proven else tight_bound(search, min(figures.step_s, search.floor_s), figures.step_s)
    plan = replace(plan, lower_bound_s=bound)
    others = alternatives(search, plain, found)
    return Planned(plan, figures, bound, search.candidates, others, proven, search.limited)


def check_request(chain: Chain, cluster: Cluster, request: Request) -> None:
    """Raise PlanError when a fixed part cannot be had."""
    blocks, devices, rows = len(chain.blocks), len(cluster.devices), request.rows
    stages, replicas = request.stages, request.replicas
    if rows < 1:
        raise PlanError(f"rows must be 1 or more, got {rows}")
    if replicas is not None:
        if not replicas or min(replicas) < 1:
            raise PlanError(f"replicas must be 1 or more for each stage, got {replicas}")
        if stages is not None and stages != len(replicas):
            raise PlanError(f"stages={stages} but replicas={replicas} is for {len(replicas)} stages")
        needed = sum(replicas) * (request.tensor or 1)
        if needed > devices:
            raise PlanError(f"replicas={replicas} need {needed} devices, the cluster has {devices}")
        stages = len(replicas)
    if stages is not None and stages < 1:
        raise PlanError(f"stages must be 1 or more, got {stages}")
    if stages is not None and stages > devices:
        raise PlanError(f"stages={stages} needs as many devices, the cluster has {devices}")
    if stages is not None and stages > blocks:
        raise PlanError(f"stages={stages} but {chain.name} has {blocks} blocks; ask for at most {blocks}")
    if request.micro_batches is not None and not 1 <= request.micro_batches <= rows:
        raise PlanError(f"micro_batches={request.micro_batches} but the batch has {rows} rows; ask for 1 to {rows}")
    if request.schedule is not None and request.schedule not in SCHEDULES:
        raise PlanError(f"schedule must be one of {', '.join(SCHEDULES)}, got {request.schedule!r}")
    if request.in_flight not in (None, 1, 2):
        raise PlanError(f"in_flight must be 1 or 2, got {request.in_flight}")
    if request.tensor is not None and request.tensor > devices:
        raise PlanError(f"tensor={request.tensor} needs as many devices, the cluster has {devices}")


def orders_of(request: Request, micro_batches: int) -> tuple[Setting, ...]:
    """The schedules to try with so many micro-batches."""
    found = []
    if request.schedule in (None, "1f1b"):
        found += [Setting(micro_batches, "1f1b", n) for n in (1, 2) if request.in_flight in (None, n)]
    if request.schedule in (None, "gpipe"):
        found.append(Setting(micro_batches, "gpipe"))
    return tuple(found)


def every_micro(rows: int, fixed: int | None) -> list[int]:
    """Numbers of micro-batches for a search of everything."""
    return [fixed] if fixed else list(range(1, rows + 1)) if rows <= 16 else some_micro(rows, None)


def rows_searched_whole(request: Request) -> bool:
    """Whether `every_micro` leaves no number out."""
    return request.micro_batches is not None or request.rows <= 16


def some_micro(rows: int, fixed: int | None) -> list[int]:
    """Numbers of micro-batches worth a try: powers of two and halfway between."""
    if fixed:
        return [fixed]
    powers = [1 << power for power in range(MOST_MICRO_BATCHES.bit_length())]
    wanted = sorted({1, *powers, *(3 * power for power in powers)})
    return [micro for micro in wanted if micro <= min(rows, MOST_MICRO_BATCHES)]


def offer_plain(search: Search, line: Layout) -> list[tuple[str, Shape, Setting]]:
    """Offer the plain plans that the request allows; give all of them back for the comparison."""
    request, table = search.request, search.table
    widths = [index for index, way in enumerate(table.ways) if way.tensor == 1 and not way.recompute]
    if not widths:
        return []
    way, blocks, devices = widths[0], table.blocks, line.size
    micro = request.micro_batches or max(1, min(request.rows, 4 * devices))
    alone = 1 if request.micro_batches is None or request.undivided_alone else request.micro_batches
    order = request.schedule or "1f1b"  # of one stage, where it says only how many forwards may be kept
    plain: list[tuple[str, Shape, Setting]] = [
        ("data parallelism alone", ((0, blocks), (devices,), (way,), 0), Setting(alone, order)),
        ("one device", ((0, blocks), (1,), (way,), 0), Setting(alone, order)),
    ]
    depth = min(blocks, devices)
    if depth > 1:
        cuts = balanced_cuts(search, depth)
        shape = (cuts, (1,) * depth, (way,) * depth, 0)
        plain.append(("GPipe, one stage a device", shape, Setting(micro, "gpipe")))
    for _, shape, setting in (*plain, *one_wide_stage(search, line, Setting(alone, order))):
        if allowed(request, shape, setting):
            search.offer(line, setting.micro_batches, (setting,), to_batch([shape]))
    return plain


def one_wide_stage(search: Search, line: Layout, setting: Setting) -> list[tuple[str, Shape, Setting]]:
    """Data parallelism of tensor groups, for each width: what few micro-batches are best at."""
    ways = [(index, way.tensor) for index, way in enumerate(search.table.ways) if way.tensor > 1 and not way.recompute]
    return [
        (f"{width} wide", ((0, search.table.blocks), (line.size // width * width,), (index,), 0), setting)
        for index, width in ways
        if width <= line.size
    ]


def allowed(request: Request, shape: Shape, setting: Setting) -> bool:
    """Whether a plain plan keeps to what is fixed."""
    _, counts, _, _ = shape
    return (
        request.stages in (None, len(counts))
        and request.replicas in (None, counts)
        and request.schedule in (None, setting.schedule)
        and (request.tensor or 1) == 1
    )


def balanced_cuts(search: Search, depth: int, shares: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Cut the chain into stages of equal time for their devices; each at least one block."""
    table = search.table
    total = table.forward_row[0, 0] + table.backward_row[0, 0] + table.forward_fixed[0, 0] + table.backward_fixed[0, 0]
    ends = np.cumsum(shares or (1,) * depth)
    cuts = [0]
    for index in range(1, depth):
        aim = total[-1] * ends[index - 1] / ends[-1]
        at = int(np.searchsorted(total, aim))
        if at > 0 and abs(total[at - 1] - aim) <= abs(total[min(at, table.blocks)] - aim):
            at -= 1
        cuts.append(max(cuts[-1] + 1, min(at, table.blocks - (depth - index))))
    return (*cuts, table.blocks)


Seed = tuple[float, int, int, Layout, list[Shape]]  # step, placement, micro-batches, layout, shapes


def look_around(search: Search, lines: list[Layout]) -> None:
    """Seeds under every placement, each refined a little, then the best of them in earnest; long lines first."""
    usable_lines = list(enumerate(usable(search, lines)))
    left = 2 if len(search.cluster.devices) > MANY else 3  # placements to work out
    for short in (False, True):
        seeds: list[Seed] = []
        for index, layout in usable_lines:
            if narrow(search, layout) is short and not search.enough():
                seeds += explore(search, index, layout)
        left -= polish(search, sorted(seeds, key=lambda one: one[:3])[: left if short else left - 1])


def explore(search: Search, index: int, layout: Layout) -> list[Seed]:
    """Seeds under one placement with one or two numbers of micro-batches, the best refined a little."""
    micros = some_micro(search.request.rows, search.request.micro_batches)
    many, few = len(search.cluster.devices) > MANY, layout.size <= SMALL
    last = len(micros) // 2 if many and narrow(search, layout) else -1
    found: list[Seed] = []
    for micro in sorted({micros[len(micros) // 2], micros[last]}):
        starts = seeds_under(search, layout, micro)
        if starts:
            values = priced(search, layout, micro, orders_of(search.request, micro), to_batch(starts), 2.0, MOST_STARTS)
            order = np.argsort(values, kind="stable")
            best = [starts[at] for at in order.tolist() if np.isfinite(values[at])]
            if best and values[order[0]] <= 1.5 * search.least_s:
                found.append((float(values[order[0]]), index, micro, layout, best))
    refined: list[Seed] = []
    for _, _, micro, _, best in sorted(found, key=lambda one: one[:3])[: 1 if many else 2]:
        orders = orders_of(search.request, micro)
        front = refine(search, layout, micro, orders, best[: MOST_STARTS if few else 6], 3, 1 if many else 2)
        if front:
            shapes = [shape for _, shape in front]
            refined.append((front[0][0], index, micro, layout, shapes + best[: 12 if few else 4]))
    return refined


def usable(search: Search, lines: list[Layout]) -> list[Layout]:
    """The placements that a request leaves: with replicas fixed, only one copy of the line."""
    if search.request.replicas is None:
        return lines
    return [line for line in lines if line.copies == 1 and line.size >= sum(search.request.replicas)]


def seeds_under(search: Search, layout: Layout, micro: int) -> list[Shape]:
    """Shapes worth a look under one placement."""
    request, table = search.request, search.table
    if request.replicas is not None:
        counts = tuple(one * (request.tensor or 1) for one in request.replicas)
        depth = len(counts)
        cuts = {balanced_cuts(search, depth, counts), balanced_cuts(search, depth)}
        skips = {0, layout.size - sum(counts)}
        return [
            (cut, counts, (way,) * depth, skip)
            for cut in sorted(cuts)
            for way in range(len(table.ways))
            for skip in sorted(skips)
            if all(count % table.ways[way].tensor == 0 for count in counts)
        ]
    found: list[Shape] = []
    deepest = min(layout.size, table.blocks)
    for depth in [request.stages] if request.stages else sorted({deepest, -(-deepest // 2), -(-deepest // 4)}):
        if layout.limited or request.stages:
            found += even_shapes(search, layout, depth)
    if narrow(search, layout):
        most = min(max(POSITIONS, POSITIONS * 16 // layout.size), 3 * POSITIONS)
        if table.blocks <= SHORT and layout.size <= 16:
            most = table.blocks + 1
        layers = request.stages or min(layout.size, table.blocks, MOST_LAYERS)
        for batch in scan(search, layout, micro, most, layers, len(RATIOS)):
            found += [shape_of(batch, at) for at in range(len(batch))]
    else:
        found += wide_scan(search, layout, micro)
    if request.stages is not None:
        found = [shape for shape in found if len(shape[1]) == request.stages]
    return list(dict.fromkeys(found))


def narrow(search: Search, layout: Layout) -> bool:
    """Whether the dynamic program tells the positions of a line apart: shorter ones only on larger clusters."""
    devices = len(search.cluster.devices)
    return layout.size <= (NARROW if devices <= NARROW else NARROW // 2 if devices <= MANY else NARROW // 4)


def even_shapes(search: Search, layout: Layout, depth: int) -> list[Shape]:
    """So many stages of equal work, devices shared evenly."""
    found = []
    for way, kind in enumerate(search.table.ways):
        units = layout.size // kind.tensor
        if depth <= min(units, search.table.blocks):
            shares = tuple((units // depth + (index < units % depth)) * kind.tensor for index in range(depth))
            found.append((balanced_cuts(search, depth, shares), shares, (way,) * depth, 0))
    return found


def polish(search: Search, seeds: list[Seed]) -> int:
    """Refine seeds until nothing helps, with other numbers of micro-batches too; give back how many were."""
    done = 0
    many, micros = len(search.cluster.devices) > MANY, some_micro(search.request.rows, search.request.micro_batches)
    for value, _, micro, layout, starts in seeds:
        if search.enough() or value > CLOSE_SEED * search.least_s:
            break
        done += 1
        tried = {micro}
        beam = 2 if many else 4
        front = refine(search, layout, micro, orders_of(search.request, micro), starts, beam, 12)
        while len(micros) > 1 and front:
            values = {}
            shapes = [shape for _, shape in front]
            for other in micros:
                if other not in tried:
                    settings = orders_of(search.request, other)
                    values[other] = float(search.estimate(layout, other, settings, to_batch(shapes), 1.5).min())
            other = min(values, key=lambda one: (values[one], one), default=0)
            if not other or (values[other] >= front[0][0] and len(tried) > MOST_TRIED):
                break
            tried.add(other)
            front = refine(search, layout, other, orders_of(search.request, other), shapes, 3, 8)
    return done


def choose(search: Search) -> tuple[Found, Plan, Figures]:
    """The best of the kept plans by `evaluate`; raise MemoryPlanError when there are none."""
    kept = sorted(search.best.values(), key=lambda found: found.key)
    pending = sorted(search.pending, key=lambda found: found.key)
    if not kept and not pending:
        raise misfit(search)
    best: tuple[tuple[object, ...], Found, Plan, Figures] | None = None
    few = 8 if search.table.blocks <= 400 and len(search.cluster.devices) <= MANY else 3
    for found in [*kept[:few], *pending]:
        if best is not None and found.step_s >= best[3].step_s * 1.02 and not search.exact:
            break
        if best is not None and search.exact and found.step_s >= best[3].step_s:
            continue
        plan, figures = search.judge(found)
        key = (figures.step_s, *found.key[1:])
        if not misses(search, plan, figures) and (best is None or key < best[0]):
            best = key, found, plan, figures
    if best is None:
        raise misfit(search)
    return best[1:]


def misses(search: Search, plan: Plan, figures: Figures) -> bool:
    """Whether some device is too small."""
    return shortage(plan, search.cluster, figures) is not None


def misfit(search: Search) -> PlanError:
    """The error when nothing fits, naming the closest plan and what is missing."""
    if search.closest is None:
        raise PlanError(
            f"{search.chain.name}: no plan has a cost for every block on these kinds of device"
            f" ({', '.join(sorted({kind for kind, _ in search.table.classes}))}); add options or devices"
        )
    plan, figures = search.judge(search.closest[1])
    short = shortage(plan, search.cluster, figures)
    words = short[1] if short else f"{size_text(search.closest[0])} are missing"
    return MemoryPlanError(
        f"no plan fits the memory of the devices; the closest has replicas"
        f" {tuple(stage.replicas for stage in plan.stages)} and {plan.micro_batches} micro-batches: {words}"
    )


def shortage(plan: Plan, cluster: Cluster, figures: Figures) -> tuple[float, str] | None:
    """How many bytes are missing on the fullest device, in words; `None` when the plan fits."""
    worst: tuple[float, str] | None = None
    for index, (stage, needed) in enumerate(zip(plan.stages, figures.memory_bytes, strict=True)):
        for device in stage.devices:
            limit = cluster.devices[device].memory_bytes
            if limit is not None and needed > limit and (worst is None or needed - limit > worst[0]):
                words = (
                    f"stage {index} needs {size_text(needed)} but device {device} has {size_text(limit)}"
                    f" ({size_text(needed - limit)} are missing); add devices, memory or micro-batches"
                )
                worst = needed - limit, words
    return worst


def alternatives(search: Search, plain: list[tuple[str, Shape, Setting]], chosen: Found) -> tuple[Alternative, ...]:
    """The plain plans and the best of each other kind, from the fastest to the slowest."""
    line = layouts(search.cluster, search.table)[0]
    found: dict[str, Alternative] = {}
    for label, shape, setting in plain:
        step_s, fits = search.price_one(line, setting, to_batch([shape]))
        plan = search.plan(Found(step_s, line, setting, *shape))
        found[label] = Alternative(label, step_s, replace(plan, predicted_step_s=step_s) if fits else None)
    for other in sorted(search.best.values(), key=lambda one: one.key):
        label = describe(other)
        if found_shape(other) == found_shape(chosen) and other.setting == chosen.setting:
            continue
        if label not in found and len(found) < MOST_ALTERNATIVES:
            plan = replace(search.plan(other), predicted_step_s=other.step_s)
            found[label] = Alternative(label, other.step_s, plan)
    return tuple(sorted(found.values(), key=lambda one: (one.step_s, one.label)))


def describe(found: Found) -> str:
    """A short name of a kind of plan."""
    stages, setting = len(found.counts), found.setting
    if stages == 1:
        return f"1 stage, {found.layout.label}"
    order = "gpipe" if setting.schedule == "gpipe" else "1f1b" + (" deep" if setting.in_flight == 2 else "")
    return f"{stages} stages, {order}, {found.layout.label}"
