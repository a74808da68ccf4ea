"""Scrapes of a real router while requests run: ``extproc bench scrape``, small."""

from __future__ import annotations

from extproc.bench.scrape import bench_scrape, report_scrape


def test_a_scrape_brings_the_whole_page_whatever_runs() -> None:
    costs = bench_scrape(workers=6, requests=150, scrapes=4)
    rest, held, hurried = costs
    assert rest.requests_per_s == held.requests_per_s == 0
    assert hurried.requests_per_s > 0
    # Rows for each worker and each pool, and as many under load as at rest but for what it brings: reasons.
    assert 6 * 20 < rest.rows <= held.rows <= hurried.rows < rest.rows + 10
    assert all(cost.sent_bytes < cost.page_bytes / 4 for cost in costs)
    assert len(report_scrape(costs).splitlines()) == 4
