"""A timeline shows in a trace viewer what ran when."""

from __future__ import annotations

import json
from collections.abc import Callable

from hypothesis import given, settings
from strategies_programs import Case, cases
from test_lower import chain
from test_simulate import fixed, run

from efftra_fx.cluster import Link
from efftra_fx.program import Forward, Load
from efftra_fx.runtime.timeline import Span, Timeline, trace_json


def test_a_step_lasts_to_its_last_end_and_a_rank_is_busy_while_it_computes() -> None:
    spans = (
        Span(0, 0, Load(0, 0, 0, 1), 0.0, 0.5),
        Span(0, 1, Forward(0, 0), 0.5, 2.0),
        Span(1, 0, Forward(1, 0), 2.0, 4.0),
    )
    timeline = Timeline(spans, "measured")
    assert (timeline.step_s, timeline.busy_s(0), timeline.busy_s(1)) == (4.0, 2.0, 2.0)
    assert Timeline((), "measured").step_s == 0.0


def test_a_trace_prints_as_ever(golden: Callable[[str, str], None]) -> None:
    timeline = run(chain(2, micro_batches=1), fixed(1.0, 2.0), lambda a, b: Link(1e3, 1e-3))
    trace = json.loads(trace_json(timeline))
    lines = "\n".join(json.dumps(event) for event in trace["traceEvents"])
    golden("trace_two_ranks.txt", f"{trace['otherData']['source']} {trace['displayTimeUnit']}\n{lines}\n")


@settings(max_examples=50)
@given(cases(3, 6))
def test_every_span_is_an_event_and_every_message_an_arrow(case: Case) -> None:
    timeline = run(case, fixed(1.0, 2.0), lambda a, b: Link(1e3, 1e-3))
    events = json.loads(trace_json(timeline))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(timeline.spans)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends) and len(starts) * 2 == sum(event["ph"] in "sf" for event in events)
    for name, start in starts.items():
        assert start["ts"] < ends[name]["ts"] and start["pid"] != ends[name]["pid"]
