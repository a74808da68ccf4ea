"""``extproc health``: ask a running router whether it serves (grpc.health.v1), for container probes."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to ask, and for how long."""
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="ADDRESS", help="default %(default)s")
    parser.add_argument("--timeout-s", type=float, default=2.0, metavar="S", help="default %(default)s")


def run(args: argparse.Namespace) -> int:
    """0 when it serves, 1 when it doesn't or can't be reached."""
    with grpc.insecure_channel(args.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=args.timeout_s)
        except grpc.RpcError as error:
            print(f"{args.target}: {error.code().name}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    print(f"{args.target}: {status}")
    return 0 if status == "SERVING" else 1
