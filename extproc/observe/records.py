"""What happens, as structured log records: each decision at debug, each kind of anomaly at info or above.

Anomalies come in storms, so one record a minute speaks for all of its kind, and says how many they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from extproc.observe import events
from extproc.observe.logs import Seldom


class Records:
    """Writes events to the log."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("extproc")
        self._seldom = Seldom()

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {
            events.Decided: self._decided,
            events.Unrouted: self._unrouted,
            events.Refused: self._refused,
            events.PromptUnreadable: self._unreadable,
            events.Displaced: self._displaced,
            events.HealthChanged: self._health_changed,
            events.Ended: self._ended,
            events.RouteSettingIgnored: self._setting_ignored,
            events.Fault: self._fault,
            events.Reloaded: self._reloaded,
            events.ReloadRefused: self._reload_refused,
            events.Unresolved: self._unresolved,
        }

    def _decided(self, event: events.Decided) -> None:
        decision = event.decision
        if decision.overflow and (held := self._seldom(("overflow", decision.pool))):
            self._log.warning("every worker is at max_inflight", pool=decision.pool, decisions=held)
        self._log.debug(
            "decided",
            request_id=event.facts.request_id,
            pool=decision.pool,
            policy=decision.policy,
            worker=decision.worker.address,
            fallbacks=[worker.address for worker in decision.order[1:]],
            reason=decision.reason,
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=decision.cached_tokens,
            predicted_ttft_ms=round(decision.predicted_ttft_s * 1000, 1),
        )

    def _unrouted(self, event: events.Unrouted) -> None:
        if held := self._seldom((event.reason, event.detail)):
            self._log.warning(
                "request left to Envoy", reason=event.reason, detail=event.detail, requests=held
            )

    def _refused(self, event: events.Refused) -> None:
        shed, demand, decision = event.shed, event.demand, event.decision
        record = {
            "request_id": event.facts.request_id,
            "pool": event.pool,
            "reason": shed.reason,
            "status": shed.status,
            "retry_after_s": shed.retry_after_s,
            "tenant": demand.tenant or None if demand else None,
            "priority": demand.priority if demand else None,
            "predicted_ttft_ms": round(decision.predicted_ttft_s * 1000, 1) if decision else None,
        }
        self._log.debug("refused", **record)
        if held := self._seldom(("shed", event.pool, shed.reason, demand.tenant if demand else "")):
            self._log.warning("requests are refused", **record, requests=held)

    def _unreadable(self, event: events.PromptUnreadable) -> None:
        if held := self._seldom((event.pool, event.reason)):
            self._log.info(
                "no prompt to route by; going by load",
                pool=event.pool,
                reason=event.reason.value,
                request_id=event.facts.request_id,
                requests=held,
            )

    def _displaced(self, event: events.Displaced) -> None:
        decision = event.decision
        if held := self._seldom(("moved", decision.worker.address)):
            self._log.info(
                "a pick was not used",
                request_id=event.facts.request_id,
                pool=decision.pool,
                picked=decision.worker.address,
                used=event.upstream or None,
                attempts=event.attempts,
                status=event.status,
                requests=held,
            )

    def _health_changed(self, event: events.HealthChanged) -> None:
        change = event.change
        self._log.info(
            "a worker's health changed",
            pool=event.pool,
            worker=event.worker,
            state=change.after.value,
            before=change.before.value,
            cause=change.cause.value if change.cause else None,
            for_s=round(change.for_s, 1) or None,
        )

    def _ended(self, event: events.Ended) -> None:
        decision = event.decision
        self._log.debug(
            "ended",
            request_id=event.facts.request_id,
            pool=decision.pool,
            picked=decision.worker.address,
            worker=event.worker or None,
            status=event.status or None,
            attempts=event.attempts or None,
            headers_ms=None if event.headers_s is None else round(event.headers_s * 1000, 1),
            duration_ms=round(event.duration_s * 1000, 1),
            predicted_ttft_ms=round(decision.predicted_ttft_s * 1000, 1),
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=decision.cached_tokens,
        )

    def _setting_ignored(self, event: events.RouteSettingIgnored) -> None:
        if self._seldom(("route", event.problem)):
            self._log.warning("route setting ignored", problem=event.problem)

    def _fault(self, event: events.Fault) -> None:
        if held := self._seldom(("error", type(event.error))):
            self._log.error("internal error", exc_info=event.error, errors=held)

    def _reloaded(self, event: events.Reloaded) -> None:
        self._log.info("configuration in force", source=event.source)
        for warning in event.warnings:
            self._log.warning("configuration", warning=warning)

    def _reload_refused(self, event: events.ReloadRefused) -> None:
        self._log.error(
            "new configuration refused, the old one stays in force", problems=str(event.error).splitlines()
        )

    def _unresolved(self, event: events.Unresolved) -> None:
        self._log.warning("a worker's name can't be resolved", name=event.name, why=event.why)
