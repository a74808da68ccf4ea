"""The table of all checks, in the order in which equally bad findings are told."""

from __future__ import annotations

from extproc.doctor import (
    checks_cluster,
    checks_engine,
    checks_envoy,
    checks_filter,
    checks_route,
    checks_router,
)

CHECKS = (
    *checks_filter.CHECKS,
    *checks_route.CHECKS,
    *checks_cluster.CHECKS,
    *checks_engine.CHECKS,
    *checks_router.CHECKS,
    *checks_envoy.CHECKS,
)
