"""The command line of ``extproc doctor``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from extproc.doctor.check import run as judge
from extproc.doctor.checks import CHECKS
from extproc.doctor.gather import Wanted, gather, own_addresses
from extproc.doctor.manifests import read
from extproc.doctor.report import as_json, show
from extproc.envoyconf import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A YAML, and whom to ask."""
    parser.add_argument(
        "--envoy-config",
        required=True,
        type=Path,
        metavar="FILE",
        help="the file that Envoy and the router read: a bootstrap (YAML or JSON), or filesystem xDS",
    )
    parser.add_argument("--server", default="", metavar="URL", help="a running router's --metrics address")
    parser.add_argument("--envoy-admin", default="", metavar="URL", help="Envoy's admin address")
    parser.add_argument("--no-workers", action="store_true", help="ask no worker")
    parser.add_argument(
        "--timeout-s", type=float, default=5.0, metavar="S", help="for each answer (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """0: nothing wrong. 1: there are findings. 2: the YAML can't be used."""
    wanted = Wanted(
        workers=not args.no_workers,
        server=args.server,
        envoy_admin=args.envoy_admin,
        timeout_s=args.timeout_s,
        own_addresses=own_addresses(),
    )
    try:
        source = read(args.envoy_config)
    except ConfigError as error:
        print(f"extproc doctor: {error}", file=sys.stderr)
        return 2
    fleet = asyncio.run(gather(source, wanted))
    verdict = judge(CHECKS, fleet)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(verdict, fleet))).decode())
    else:
        print(show(verdict, fleet))
    return 1 if verdict.findings else 0
