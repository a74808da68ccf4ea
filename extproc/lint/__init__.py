"""Prefix hygiene: which prompts break their own caching, where, at what cost, and what to do.

The principle. A prompt is looked at beside the earlier one that it shares most with. Where the two part, and
equal text follows behind a difference, that text is prefilled again only because of what stands before it:
a cache that goes by prefixes can't see it. So each difference costs the equal text behind it, as far as no
other earlier prompt brings it into the cache, and what the difference looks like (a time, an id, tools in
another order) names the fix. Prompts that differ for good, or at their end, cost nothing by that count.

    log ─▶ text ─▶ memory ─▶ alignment ─▶ differences ─▶ judgement ─▶ findings ─▶ report

=====================  =========================================================================
`extproc.lint.log`          lines of a file → request bodies
`extproc.lint.text`         a canonical prompt → chunks; where a byte stands
`extproc.lint.memory`       the prompts seen so far, bounded; which of them is nearest to a new one
`extproc.lint.alignment`    two prompts → what they share, in order
`extproc.lint.differences`  an alignment → differences, each with the equal text behind it
`extproc.lint.kinds`        what a difference is, and what to do about it
`extproc.lint.findings`     differences of many requests → findings, with costs
`extproc.lint.judgement`    which differences are faults
`extproc.lint.linter`       a request's way through all of it
`extproc.lint.costs`        tokens lost in a log → tokens and milliseconds a day
`extproc.lint.report`       findings for people and as JSON
`extproc.lint.server`       what a running router's cache picture shows of it
=====================  =========================================================================
"""
