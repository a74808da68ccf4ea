"""Reading engines: what vLLM and SGLang tell of themselves at ``/metrics``.

Slow truth beside the router's own accounts. A gauge is seconds old when it arrives, so nothing here is ever
taken for a queue; a cache's size and a restart can't be seen in any other way.
"""
