"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Tests start processes beside gRPC servers of their own. With fork support on, gRPC revives its threads in
# the child between fork and exec, where their descriptors are closed already; now and then one hangs there.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A busy machine must not fail a property: examples have no deadline, slow generation is no error.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
