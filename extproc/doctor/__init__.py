"""``extproc doctor``: what is wrong with a fleet, and the line that puts it right.

Facts are gathered first (`setup` from the Envoy YAML, `gather` over HTTP) and judged afterwards: `checks` is
a table of small pure functions over a `fleet.Fleet`. Nothing here is used while serving.
"""
