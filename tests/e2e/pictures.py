"""Pictures of the page for the docs: ``make pictures``.

Real Envoy, the router, six emulated workers, traffic of three tenants' agents that swells and ebbs; one
worker dies and comes back. Writes page-light.png and page-dark.png.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import aiohttp
from browser import launched

from extproc.demo import envoy_setup
from extproc.demo.loadgen import Result, ask
from extproc.demo.personas import make_persona, make_turn
from extproc.demo.process import free_ports
from extproc.demo.stack import HOST, Stack, StackConfig

WORKERS, AGENTS, STREAMS = 6, 22, 30
TENANTS = ("blue", "green", "red")
WIDTH, HEIGHT = 1280, 1500


def settings(bootstrap: envoy_setup.Json) -> None:
    """The pool knows tenants and the engines soon."""
    pool = envoy_setup.pool_clusters(bootstrap)[0]["metadata"]["filter_metadata"]
    pool[envoy_setup.POOL_METADATA] |= {"tenant_header": "x-tenant", "scrape_interval_s": 2}


async def traffic(url: str, began_s: float, seconds: float, ends: threading.Event) -> None:
    """Closed loops, twice more and fewer of them awake; one request in twenty is like no other."""
    tokens = (8_000, 24_000)
    agents = [make_persona(index, 1, "emulated", tokens) for index in range(AGENTS)]
    new = itertools.count(AGENTS)

    async def stream(number: int) -> None:
        random = Random(number)
        headers = {"x-tenant": TENANTS[number % len(TENANTS)]}
        async with aiohttp.ClientSession(headers=headers) as session:
            while not ends.is_set():
                swell = 0.6 - 0.4 * math.cos(4 * math.pi * (time.monotonic() - began_s) / seconds)
                await asyncio.sleep(random.expovariate(1 / (0.4 + 4 * max(0.0, 1 - swell))))
                choice = min(int(random.paretovariate(0.9)) - 1, 6) * len(TENANTS) + number % len(TENANTS)
                agent = agents[choice % AGENTS]
                if random.random() < 0.05:
                    agent = make_persona(next(new), 1, "emulated", tokens)
                await ask(session, url, agent.body(make_turn(random)), Result(0, 0, 0.0))

    await asyncio.gather(*(stream(number) for number in range(STREAMS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    args = parser.parse_args()
    seconds = args.minutes * 60
    (port,) = free_ports(1)
    arguments = ("--page", f"{HOST}:{port}")
    with Stack(StackConfig(workers=WORKERS, router_arguments=arguments, edit=settings)) as stack:
        ends = threading.Event()
        began_s = time.monotonic()
        load = threading.Thread(
            target=lambda: asyncio.run(traffic(stack.url, began_s, seconds, ends)), daemon=True
        )
        load.start()
        time.sleep(seconds * 0.3)
        stack.workers[2].kill()
        time.sleep(15)
        stack.workers[2].start()
        time.sleep(max(0.0, began_s + seconds - time.monotonic()))
        with launched() as chromium:
            for theme in ("light", "dark"):
                page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
                page.goto(f"http://{HOST}:{port}/")
                page.locator("#panel").wait_for()
                page.wait_for_timeout(2500)
                path = args.folder / f"page-{theme}.png"
                page.screenshot(path=path)
                if pngquant := shutil.which("pngquant"):  # a third of the size
                    subprocess.run([pngquant, "--force", "--ext", ".png", path], check=True)
                print(path, f"{path.stat().st_size / 1000:.0f} kB")
        ends.set()
        load.join(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
