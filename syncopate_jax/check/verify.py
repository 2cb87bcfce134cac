"""Verification of plans: a plan in which nothing is found cannot hang, race or lose data.

In turn: indices; boxes, regions and collectives; deadlock; then, on atoms, races, availability
and values. A stage is left out when the one before found faults that would make it meaningless.
Signals are not looked at: those of a plan's operations are derived from its dependencies, one
raised by each completion, so they balance by construction; schedules are checked for it on their
own. That tiles run at all is the schedule's to show, too: they are taken to finish eventually.
"""

from __future__ import annotations

from syncopate_jax.check.bounds import check_boxes, check_indices
from syncopate_jax.check.collectives import (
    Instances,
    check_collectives,
    find_instances,
    find_transfers,
)
from syncopate_jax.check.flow import find_flow
from syncopate_jax.check.order import check_order, happens_before
from syncopate_jax.check.races import check_races
from syncopate_jax.check.reach import Reach
from syncopate_jax.check.regions import check_regions
from syncopate_jax.check.report import Report
from syncopate_jax.check.sources import check_sources
from syncopate_jax.check.values import check_values
from syncopate_jax.errors import Finding, PlanError, UnsupportedError
from syncopate_jax.ir.arguments import instance
from syncopate_jax.ir.plan import Plan

UNREADABLE = ("unsorted", "bad-index", "bad-group", "no-such-op", "not-an-end")
"""Findings after which a plan's operations cannot be looked up."""


def verify(plan: Plan) -> tuple[Finding, ...]:
    """Every fault found in ``plan``; an empty tuple means that it is proven sound.

    The plan cannot deadlock; no order that it allows changes a result; every goal is met, by
    deliveries that are each made once. Faults beyond 100 of one kind are counted, not listed.

    Raises InputError for what is no plan.
    """
    instance("verify", "plan", plan, Plan)
    report = Report(plan)
    instances = find_malformed(plan, report)
    if all(finding.code not in UNREADABLE for finding in report.findings):
        check_order(plan, instances, report)
    if not report.findings:
        _verify_data(plan, instances, report)
    return tuple(report.findings)


def check(plan: Plan) -> None:
    """Raises PlanError with every finding unless ``plan`` verifies."""
    findings = verify(plan)
    if findings:
        raise PlanError(plan.name, findings)


def find_malformed(plan: Plan, report: Report) -> list[Instances]:
    """Reports indices, boxes, regions and collectives that make no sense by themselves.

    Returns the plan's collectives, none if indices are wrong.
    """
    check_indices(plan, report)
    if report.findings:
        return []
    instances = find_instances(plan, report)
    check_boxes(plan, report)
    check_regions(plan, report)
    check_collectives(plan, instances, report)
    return instances


def _verify_data(plan: Plan, instances: list[Instances], report: Report) -> None:
    transfers = find_transfers(plan, instances)
    order = happens_before(plan, instances, transfers)
    try:
        flow = find_flow(plan, transfers, order)
    except UnsupportedError as error:
        report.add("too-fine", -1, -1, f"not proven: {error}")
        return
    reach = Reach(order)
    collective = plan.columns.kind != 0
    check_races(flow, order, reach, collective, report)
    check_sources(flow, order, reach, collective, report)
    check_values(plan, instances, flow, report)
