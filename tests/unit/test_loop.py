"""The event loop: what it changes for gRPC, and that it changes nothing else."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from extproc.loop import Loop


async def failed(error: Exception) -> object:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return await future


def test_a_batch_of_grpc_that_fails_has_a_result() -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(failed(grpc.aio.InternalError("execute_batch"))) is None


@pytest.mark.parametrize("error", [ValueError("x"), grpc.aio.UsageError("x"), grpc.aio.AbortError("x")])
def test_other_failures_stay_failures(error: Exception) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner, pytest.raises(type(error)):
        runner.run(failed(error))
