"""The ``extproc`` command; wiring only. Each command is a module with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from extproc import __version__

#: Command -> its module and help. Modules are imported when their command runs, so that `serve` needs
#: no more than `pip install .` gives.
COMMANDS = {
    "serve": ("extproc.serve", "run the router: an Envoy ext_proc server"),
    "doctor": ("extproc.doctor.command", "what is wrong with a fleet, and the line that puts it right"),
    "health": ("extproc.health", "ask a running router whether it serves"),
    "top": ("extproc.live.top", "a running router, live: load, hit rates, hot prefixes, decisions"),
    "explain": ("extproc.explain", "what would become of a request, and why"),
    "lint": ("extproc.lint.command", "which prompts break their own caching, where, and at what cost"),
    "demo": ("extproc.demo.demo", "real Envoy, the router and emulated workers: see the difference"),
    "traffic": ("extproc.demo.traffic", "agents' traffic for a stack that runs already"),
    "drill": ("extproc.demo.drill", "break emulated workers under load: what do clients notice?"),
    "worker": ("extproc.emulator.worker", "run one emulated vLLM worker"),
    "simulate": ("extproc.sim.simulate", "what would routing do for my traffic? in virtual time"),
    "bench": ("extproc.bench.command", "measure the router's own cost"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="extproc", description="Prefix-cache-aware routing of LLM requests for Envoy."
    )
    parser.add_argument("--version", action="version", version=f"extproc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if error.name and error.name.startswith("extproc"):
                    raise
                print(
                    f"extproc {name} needs the package {error.name}:"
                    " pip install 'envoy-prefix-router[local]'",
                    file=sys.stderr,
                )
                return 2
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
