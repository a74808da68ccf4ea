"""``extproc serve``: the router process, from its command line to its last stream."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop

from extproc.engine.prober import Prober
from extproc.engine.scraper import Scraper
from extproc.envoyconf import ConfigError
from extproc.errors import ListenError, TracingError
from extproc.fleet.config import RouterConfig
from extproc.fleet.dns import Resolver, expand
from extproc.fleet.watch import Watcher
from extproc.live.live import Live
from extproc.live.page import DEFAULT_ADDRESS, Page
from extproc.live.recorder import Recorder
from extproc.live.serving import routes
from extproc.loop import Loop
from extproc.observe import events, tracing
from extproc.observe.engines import EngineObserver
from extproc.observe.exporter import Exporter
from extproc.observe.logs import LEVELS, configure
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.server import Server
from extproc.state import StateFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few options: the rest is in the Envoy YAML."""
    parser.add_argument(
        "--envoy-config",
        required=True,
        type=Path,
        metavar="FILE",
        help="the Envoy bootstrap (YAML or JSON), or a filesystem xDS file; followed while running",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="ADDRESS",
        help="host:port, [v6]:port or unix:PATH for Envoy's ext_proc cluster (default %(default)s)",
    )
    parser.add_argument("--metrics", metavar="ADDRESS", help="host:port for Prometheus, e.g. 127.0.0.1:9090")
    parser.add_argument(
        "--page",
        nargs="?",
        const=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="a web page that shows what goes on, read-only; host:port (without one: %(const)s)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="keep what was learned of the workers' caches here, over restarts of the router",
    )
    parser.add_argument(
        "--tracing",
        action="store_true",
        help="a span for each request, to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="default %(default)s")
    parser.add_argument(
        "--drain-s",
        type=float,
        default=20.0,
        metavar="S",
        help="after SIGTERM, how long running streams may take to end (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. 2: the configuration or an address is unusable."""
    configure(args.log_level)
    try:
        return uvloop.run(_serve(args), loop_factory=Loop)
    except (ConfigError, ListenError, TracingError) as error:
        print(f"extproc serve: {error}", file=sys.stderr)
        return 2


async def _serve(args: argparse.Namespace) -> int:
    log = structlog.get_logger("extproc")
    observer = Observer()
    traced = tracing.start(args.tracing)
    if traced is not None:
        observer.add(traced.spans, traced.spans.wanted_headers)

    def take(config: RouterConfig) -> None:
        router.apply(config)
        scraper.reconcile()
        prober.reconcile()
        observer.tell(events.Reloaded(config.source, config.warnings))

    def reload(config: RouterConfig) -> None:
        pending.add(task := asyncio.ensure_future(resolver.use(config)))
        task.add_done_callback(pending.discard)
        task.add_done_callback(report)

    def report(task: asyncio.Future[None]) -> None:
        # Nobody awaits these tasks before the end, and one that fails must not do so in silence.
        if not task.cancelled() and (error := task.exception()) is not None:
            observer.tell(events.Fault(error))

    pending: set[asyncio.Future[None]] = set()
    watcher = Watcher(args.envoy_config, reload, lambda error: observer.tell(events.ReloadRefused(error)))
    resolver = Resolver(take, lambda name, why: observer.tell(events.Unresolved(name, why)))
    config = watcher.start()
    router = Router(expand(config, {}), observer, origin=secrets.randbits(48))
    engines = EngineObserver(observer.registry)
    observer.add(engines)
    scraper = Scraper(router, engines)
    prober = Prober(router, engines)
    await resolver.use(config)
    state = StateFile(args.state, router, observer.tell) if args.state else None
    if state is not None:
        state.restore()
    observer.watch(lambda: router.pools)
    engines.watch(lambda: scraper.targets)
    server = Server(router, observer)
    observer.metrics.watch_config(lambda: watcher.refused)
    observer.metrics.watch_streams(lambda: server.open_streams)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    following = [asyncio.create_task(part.run()) for part in (watcher, resolver, scraper, prober)]
    if state is not None:
        following.append(asyncio.create_task(state.keep()))
    exporter = page = None
    if args.metrics or args.page:
        recorder = Recorder(time.monotonic())
        observer.add(recorder)
        live = Live(
            recorder,
            lambda: router.pools,
            lambda: scraper.targets,
            lambda: router.config.source,
            lambda: watcher.refused,
        )
        following.append(asyncio.create_task(live.run()))
        if args.metrics:
            exporter = Exporter(observer.registry, router, routes(live))
        if args.page:
            page = Page(routes(live, guard=lambda handler: handler))  # it has a guard of its own
    for task in following:
        task.add_done_callback(report)
    try:
        if exporter is not None:
            await exporter.start(args.metrics)
        page_url = f"http://{await page.start(args.page)}/" if page is not None else None
        address = await server.start(args.listen)
        log.info(
            "serving",
            listen=address,
            metrics=args.metrics,
            page=page_url,
            pools={name: len(pool.workers) for name, pool in router.pools.items()},
        )
        await stop.wait()
        log.info("draining", in_flight=sum(pool.tickets for pool in router.pools.values()))
        await server.drain(args.drain_s)
        if state is not None:
            state.save()
        log.info("stopped")
    finally:
        for task in following:
            task.cancel()
        for listener in (exporter, page):
            if listener is not None:
                await listener.stop()
        if traced is not None:
            await traced.stop()
    return 0
