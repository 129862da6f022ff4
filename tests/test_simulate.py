"""The simulator agrees with what can be worked out by hand, and always ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_programs import Case, cases, clusters
from test_lower import chain

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Exchanged
from efftra_fx.errors import DeadlockError
from efftra_fx.memory import Memory
from efftra_fx.passes.verify import verify_programs
from efftra_fx.program import AllReduce, Forward, Parameter, Recv, Send, Update, Wiring
from efftra_fx.runtime.simulate import Durations, all_reduce_s, simulate
from efftra_fx.runtime.timeline import Timeline, trace_json


def free(a: int, b: int) -> Link:
    return Link(1e15, 0.0)


def fixed(forward_s: float, backward_s: float) -> Durations:
    return Durations(lambda stage, rows: forward_s, lambda stage, rows: backward_s)


def run(case: Case, durations: Durations, link: Callable[[int, int], Link] = free, overlap: bool = False) -> Timeline:
    return simulate(case.lower(), case.wiring, durations, link, overlap_reduce=overlap)


def test_two_stages_and_two_micro_batches_as_drawn_by_hand() -> None:
    timeline = run(chain(2, micro_batches=2), fixed(1.0, 2.0))
    spans = {(s.rank, str(s.instruction)[:8]): (s.start_s, s.end_s) for s in timeline.spans}
    assert timeline.step_s == pytest.approx(9.0)
    assert spans[0, "Forward("] == pytest.approx((1.0, 2.0))  # the later of the two
    assert spans[1, "Backward"] == pytest.approx((5.0, 7.0))
    assert spans[0, "Backward"] == pytest.approx((7.0, 9.0))
    assert [timeline.busy_s(rank) for rank in (0, 1)] == pytest.approx([6.0, 6.0])


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.sampled_from((("1f1b", 1), ("1f1b", 2), ("gpipe", 1))),
)
def test_equal_stages_take_the_time_of_the_formula(
    stages: int, micro_batches: int, forward_s: float, backward_s: float, kind: tuple[str, int]
) -> None:
    case = chain(stages, 1, micro_batches, *kind)
    both = forward_s + backward_s
    # step = Σ f + (m − 1) · max(f + b) + Σ b
    formula = stages * forward_s + (micro_batches - 1) * both + stages * backward_s
    assert run(case, fixed(forward_s, backward_s)).step_s == pytest.approx(formula)


@given(st.integers(1, 4), st.integers(2, 3), st.integers(1, 8), st.integers(0, 3))
def test_the_all_reduce_of_a_late_stage_hides_behind_the_backward_of_earlier_ones(
    stages: int, replicas: int, micro_batches: int, size: int
) -> None:
    case = chain(stages, replicas, micro_batches)
    parameters = tuple(replace(p, shape=(10**size,)) for p in case.wiring.parameters)
    case = replace(case, wiring=replace(case.wiring, parameters=parameters), bucket_bytes=10**9)
    slow = Link(1e3, 0.0)

    def link(a: int, b: int) -> Link:
        return slow if a // replicas == b // replicas else free(a, b)

    reduce_s = all_reduce_s(4 * 10**size, tuple(range(replicas)), link)
    last = max(stages * 2.0, max((stage + 1) * 2.0 + reduce_s for stage in range(stages)))
    step_s = run(case, fixed(1.0, 2.0), link).step_s - all_reduce_s(8, tuple(range(stages * replicas)), link)
    assert step_s == pytest.approx(stages + (micro_batches - 1) * 3.0 + last)


def test_a_message_takes_its_link_and_waits_for_the_one_before_it() -> None:
    case = chain(2, micro_batches=2, schedule="gpipe")  # parts of 32 bytes
    timeline = run(case, fixed(1.0, 2.0), lambda a, b: Link(16.0, 0.5))  # 2 s on the wire, and half a second more
    sends = [(s.start_s, s.end_s) for s in timeline.spans if s.rank == 0 and isinstance(s.instruction, Send)]
    receives = [(s.start_s, s.end_s) for s in timeline.spans if s.rank == 1 and isinstance(s.instruction, Recv)]
    forwards = [(s.start_s, s.end_s) for s in timeline.spans if s.rank == 1 and isinstance(s.instruction, Forward)]
    assert sends == [(1.0, 3.0), (2.0, 5.0)]
    assert receives == [(0.0, 3.5), (0.0, 5.5)]
    assert forwards == [(3.5, 4.5), (5.5, 6.5)]


def test_a_receive_posted_early_hides_the_transfer() -> None:
    case = chain(2, micro_batches=8, schedule="gpipe")
    slow = run(case, fixed(1.0, 1.0), lambda a, b: Link(64.0, 0.0)).step_s  # half a second for each part
    loss_s = all_reduce_s(8, (0, 1), lambda a, b: Link(64.0, 0.0))
    assert slow == pytest.approx(run(case, fixed(1.0, 1.0)).step_s + 2 * 0.5 + loss_s)


def test_a_ring_sends_an_nth_of_the_bytes_so_many_times_over_its_slowest_link() -> None:
    def link(a: int, b: int) -> Link:
        return Link(1.0 if {a, b} == {2, 5} else 100.0, 0.25)

    assert all_reduce_s(300, (1,), link) == 0.0
    assert all_reduce_s(300, (0, 1, 2), link) == pytest.approx(4 * (1.0 + 0.25))
    assert all_reduce_s(300, (1, 2, 5), link) == pytest.approx(4 * (100.0 + 0.25))


def test_buckets_may_start_while_the_last_backward_is_still_running() -> None:
    parameters = tuple(Parameter(f"w{k}", "float32", (250,), (0,), True) for k in range(4))
    case = chain(1, 2, 1)
    case = replace(case, wiring=Wiring(1, (), parameters, (True,), False, loss=False), bucket_bytes=1)
    link = Link(1000.0, 0.0)  # a second for each bucket over two ranks
    assert run(case, fixed(1.0, 8.0), lambda a, b: link).step_s == pytest.approx(9.0 + 4.0)
    timeline = run(case, fixed(1.0, 8.0), lambda a, b: link, overlap=True)
    starts = [s.start_s for s in timeline.spans if s.rank == 0 and isinstance(s.instruction, AllReduce)]
    assert starts == pytest.approx([3.0, 5.0, 7.0, 9.0])
    assert timeline.step_s == pytest.approx(10.0)


def test_a_faster_device_is_faster() -> None:
    durations = replace(fixed(1.0, 2.0), speed=(2.0,))
    assert run(chain(1, 1, 4), durations).step_s == pytest.approx(6.0)


def test_weight_gradients_computed_together_cost_what_they_cost_for_all_their_rows() -> None:
    durations = Durations(lambda stage, rows: 1.0, lambda stage, rows: 10.0 + rows, input_share=0.25)
    case = replace(chain(1, 1, 4), defer_weights=2)  # micro-batches of 2 rows
    assert run(case, durations).step_s == pytest.approx(4 * 1.0 + 4 * 0.25 * 12.0 + 2 * 0.75 * 14.0)


def test_one_forward_one_backward_keeps_less_in_memory_than_gpipe() -> None:
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        case = chain(2, 1, 8, schedule)
        memory = Memory((None, None), (0, 0), lambda stage, rows: 1000 * rows)
        timeline = simulate(case.lower(), case.wiring, fixed(1.0, 2.0), free, memory)
        peaks[schedule] = [timeline.peak_bytes[rank] // 1000 for rank in (0, 1)]
    assert peaks == {"1f1b": [4, 2], "gpipe": [16, 16]}


def test_programs_that_wait_for_each_other_are_an_error() -> None:
    case = chain(2)
    programs = case.lower()
    line = programs[0].instructions
    late = tuple(sorted(line, key=lambda one: isinstance(one, Send) and one.micro_batch == 1))
    programs[0] = replace(programs[0], instructions=late)
    with pytest.raises(DeadlockError, match=r"do not end, waiting are rank 0 at \d+ \(.*\); rank 1 at \d+"):
        simulate(programs, case.wiring, fixed(1.0, 2.0), free)


@settings(max_examples=300)
@given(st.data())
def test_verified_programs_end_and_every_span_stands_behind_what_it_needs(data: st.DataObject) -> None:
    case = data.draw(cases())
    cluster: Cluster = data.draw(clusters(case.ranks))
    programs = case.lower()
    verify_programs(programs, case.wiring, case.plan)
    durations = Durations(
        lambda stage, rows: 0.1 * (stage + 1) + rows,
        lambda stage, rows: 0.2 * (stage + 1) + 2 * rows,
        speed=tuple(device.speed for device in cluster.devices),
    )
    memory = Memory((None,) * case.ranks, (7,) * case.wiring.stages, lambda stage, rows: rows)
    timeline = simulate(programs, case.wiring, durations, cluster.link, memory, data.draw(st.booleans()))
    assert [(s.rank, s.index) for s in timeline.spans] == [
        (rank, index) for rank in sorted(programs) for index in range(len(programs[rank].instructions))
    ]
    assert all(0 <= span.start_s <= span.end_s <= timeline.step_s for span in timeline.spans)
    updates = [span for span in timeline.spans if isinstance(span.instruction, Update)]
    for rank, update in zip(sorted(programs), updates, strict=True):
        mine = [span for span in timeline.spans if span.rank == rank]
        assert max(span.end_s for span in mine) == update.end_s
        assert timeline.busy_s(rank) <= update.end_s + 1e-9
        assert timeline.peak_bytes[rank] >= (7 if programs[rank].stage is not None else 0)


# tensor groups


def wide_chain(micro_batches: int = 2) -> Case:
    """A stage of two ranks that compute together, and one of one rank."""
    case = chain(2, micro_batches=micro_batches)
    first, second = case.plan.stages
    stages = (replace(first, devices=(0, 1), tensor=2), replace(second, devices=(2,)))
    return replace(case, plan=replace(case.plan, stages=stages), ranks=3)


def twice(stage: int, rows: int, backward: bool) -> tuple[Exchanged, ...]:
    """A sum in the middle of a wide stage's computation, and a gather at its end."""
    return (Exchanged(0.5, "sum", 100), Exchanged(1.0, "gather", 100)) if stage == 0 else ()


def link(a: int, b: int) -> Link:
    return Link(1e3, 0.1)


EXCHANGED_S = 1.5 * 2 * (100 / 2 / 1e3 + 0.1)


def test_members_in_step_take_as_long_as_if_their_exchanges_were_computed() -> None:
    apart = replace(fixed(1.0, 2.0), exchanges=twice)
    within = Durations(
        lambda stage, rows: 1.0 + (EXCHANGED_S if stage == 0 else 0.0),
        lambda stage, rows: 2.0 + (EXCHANGED_S if stage == 0 else 0.0),
    )
    one, other = run(wide_chain(), apart, link), run(wide_chain(), within, link)
    for mine, theirs in zip(one.spans, other.spans, strict=True):
        assert (mine.start_s, mine.end_s) == pytest.approx((theirs.start_s, theirs.end_s))
    assert all(one.waiting_s(rank) == pytest.approx(0.0) for rank in range(3))
    assert one.busy_s(0) == pytest.approx(2 * 3.0) and other.busy_s(0) == pytest.approx(2 * (3.0 + 2 * EXCHANGED_S))


def test_a_fast_member_waits_for_a_slow_one_at_every_exchange() -> None:
    durations = replace(fixed(1.0, 2.0), exchanges=twice, speed=(1.0, 0.5, 1.0))
    timeline = run(wide_chain(1), durations, link)
    forward = [one for one in timeline.exchanges if one.rank == 0][:2]
    assert [one.kind for one in forward] == ["sum", "gather"]
    summed_s = EXCHANGED_S * 2 / 3
    times = [second for one in forward for second in (one.arrive_s, one.start_s)]
    assert times == pytest.approx([0.5, 1.0, 1.0 + summed_s + 0.5, 1.0 + summed_s + 1.0])
    assert timeline.waiting_s(0) == pytest.approx(1.0 + 2.0) and timeline.waiting_s(1) == pytest.approx(0.0)
    assert timeline.busy_s(1) == pytest.approx(2 * timeline.busy_s(0))


def test_exchanges_and_waits_have_a_lane_of_their_own() -> None:
    durations = replace(fixed(1.0, 2.0), exchanges=twice, speed=(1.0, 0.5, 1.0))
    events = json.loads(trace_json(run(wide_chain(1), durations, link)))["traceEvents"]
    names = [(e["pid"], e["name"]) for e in events if e.get("cat") == "exchange"]
    assert names.count((0, "wait to sum")) == names.count((0, "sum")) == 2
    assert (1, "wait to sum") not in names and not any(rank == 2 for rank, _ in names)
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert lanes[-1] == "exchange"


def test_a_member_that_leaves_a_computation_out_is_named() -> None:
    case = wide_chain(1)
    programs = dict(case.lower())
    short = tuple(one for one in programs[1].instructions if not isinstance(one, Forward))
    programs[1] = replace(programs[1], instructions=short)
    durations = replace(fixed(1.0, 2.0), exchanges=twice)
    with pytest.raises(DeadlockError, match="rank 0 at"):
        simulate(programs, case.wiring, durations, link)
