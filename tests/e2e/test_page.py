"""The page in a real browser: with real traffic through Envoy, and with 128 workers."""

from __future__ import annotations

import itertools
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from browser import complaints, launched
from large_fleet import LARGE, LargeFleet
from playwright.sync_api import Browser, Error, Page, expect
from traffic import COMPLETIONS, prompt

from extproc.demo import envoy_setup
from extproc.demo.process import free_ports
from extproc.demo.stack import HOST, Stack, StackConfig
from extproc.routing.demand import digest

pytestmark = pytest.mark.e2e

WORKERS, PROMPTS = 3, 6
TENANT = "tenant-marker"
MARKUP = "<img src=x onerror='window.broken=1'>"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def stack(chromium: Browser) -> Iterator[Stack]:
    (port,) = free_ports(1)
    config = StackConfig(
        workers=WORKERS,
        worker_arguments=("--speedup", "20"),
        router_arguments=("--page", f"{HOST}:{port}"),
        edit=edit,
    )
    with Stack(config) as running:
        running.page_url = f"http://{HOST}:{port}/"  # type: ignore[attr-defined]
        yield running


@pytest.fixture(scope="module")
def fleet(chromium: Browser) -> Iterator[LargeFleet]:
    with LargeFleet() as running:
        yield running


def edit(bootstrap: envoy_setup.Json) -> None:
    """Tenants are known, and clients may name their requests as they like."""
    pool = envoy_setup.pool_clusters(bootstrap)[0]["metadata"]["filter_metadata"]
    pool[envoy_setup.POOL_METADATA] |= {"tenant_header": "x-tenant", "scrape_interval_s": 0.5}
    for chain in bootstrap["static_resources"]["listeners"][0]["filter_chains"]:
        chain["filters"][0]["typed_config"]["preserve_external_request_id"] = True


def ask(stack: Stack, index: int, request_id: str = "", max_tokens: int = 20) -> None:
    """One completion, whole. Prompts of the same index begin alike."""
    body = json.dumps({"prompt": prompt(index), "max_tokens": max_tokens}).encode()
    headers = {
        "content-type": "application/json",
        "x-tenant": TENANT,
        "x-request-id": request_id or f"r-{index}",
    }
    request = urllib.request.Request(stack.url + COMPLETIONS, body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each in a context of its own; none may have had anything to complain of."""
    opened: list[tuple[Page, list[str]]] = []

    def open_it(url: str, viewport: Any = WIDE, **context: Any) -> Page:
        page = chromium.new_context(viewport=viewport, **context).new_page()
        page.set_default_timeout(20_000)
        opened.append((page, complaints(page)))
        page.goto(url)
        expect(page.locator("#panel")).to_be_visible(timeout=20_000)
        return page

    expect.set_options(timeout=20_000)
    yield open_it
    for page, found in opened:
        page.context.close()
        assert found == []


def fits(page: Page) -> bool:
    """Whether the page needs no scrolling sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@contextmanager
def traffic(stack: Stack) -> Iterator[None]:
    """Requests, one after the other, each time with the next prompt."""
    over = threading.Event()

    def send() -> None:
        for number in itertools.count():
            if over.is_set():
                break
            ask(stack, number % PROMPTS)

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        try:
            yield
        finally:
            over.set()
        sending.result()


def test_what_goes_on_is_seen_while_it_goes_on(stack, open_page):
    page = open_page(stack.page_url)
    cached, _, requests, *_ = page.locator("#tiles .tile").all()
    expect(requests.locator(".big")).to_have_text("0/s")
    expect(page.get_by_text("No decisions yet.")).to_be_visible()
    expect(page.get_by_text("no alarms")).to_be_visible()
    rows = page.locator("#workers tbody tr")
    expect(rows).to_have_count(WORKERS)

    with traffic(stack):
        for _ in range(3):  # values change, and again, and again
            expect(requests.locator(".big")).not_to_have_text(requests.locator(".big").inner_text())
        expect(cached.locator(".big")).to_have_text(re.compile(r"^[5-9]\d\.\d%$"))
        expect(cached).to_contain_text(re.compile(r"engines count \d+\.\d%"))
        expect(page.locator("#why")).to_contain_text("affinity")
        expect(page.locator("#prefixes .segments")).to_have_count(PROMPTS)
        expect(page.locator("#decisions")).to_contain_text(re.compile(r"200, [\d.]+ m?s"))
        expect(page.locator("#tenants")).to_contain_text(digest(TENANT))

    # Affinity: every prompt has one worker, and its colour.
    color = "node => getComputedStyle(node).backgroundColor"
    badges = {badge.inner_text(): badge.evaluate(color) for badge in rows.locator(".badge").all()}
    assert len(set(badges.values())) == WORKERS
    for bar in page.locator("#prefixes .segments").all():
        segments = bar.locator("i")
        assert segments.count() == 1
        assert badges[segments.inner_text()] == segments.evaluate(color)


def test_nothing_that_clients_send_becomes_markup_or_is_told(stack, open_page):
    ask(stack, 0, MARKUP)
    page = open_page(stack.page_url)
    page.locator("#filter").fill("onerror")
    row = page.locator("#decisions tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator(".id")).to_have_text(MARKUP)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.broken") is None
    page.locator("#filter").fill("nobody-sent-this")
    expect(page.get_by_text("None fits.")).to_be_visible()

    texts = [page.content()]
    for path in ("status", "history"):
        with urllib.request.urlopen(stack.page_url + path, timeout=10) as response:
            texts.append(response.read().decode())
    assert digest(TENANT) in texts[1]
    for text in texts:
        assert TENANT not in text
        assert "in section" not in text  # of the prompts


def test_the_browser_lets_no_text_become_markup_or_code(stack, chromium):
    page = chromium.new_page()
    page.goto(stack.page_url)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>text</b>'")
    page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: '/status'}))")
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          try { script.textContent = "window.broken = 1"; } catch { return; }
          document.body.append(script);
        }"""
    )
    assert page.evaluate("window.broken") is None
    assert page.evaluate("document.querySelector('img').naturalWidth") == 0
    page.close()


def test_keys_and_crosshair(fleet, open_page):
    page = open_page(fleet.url + "#small")
    tabs = page.get_by_role("tab")
    expect(page.get_by_role("tab", selected=True)).to_contain_text("small")
    tabs.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", selected=True)).to_contain_text("large")
    assert page.evaluate("document.activeElement.textContent").startswith("large")
    assert page.url.endswith("#large")

    chart = page.get_by_role("slider").first
    when = page.locator(".chart time").first
    expect(when).to_have_text("now")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(when).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d: estimated [\d.]+%$"))
    assert page.locator(".chart time").nth(1).inner_text() == when.inner_text()  # all of them, together
    page.keyboard.press("Escape")
    expect(when).to_have_text("now")
    page.locator(".plot").nth(1).hover(position={"x": 120, "y": 60})
    expect(when).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))

    page.locator("#heat").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#heat-read")).to_have_text(
        re.compile(r"^worker 2, 10\.1\.0\.2, \d\d:\d\d:\d\d: in flight")
    )

    page.keyboard.press("p")
    expect(page.locator("#paused")).to_contain_text("Paused at")
    before = page.locator("#decisions").inner_text()
    page.wait_for_timeout(2500)
    assert page.locator("#decisions").inner_text() == before
    page.keyboard.press("p")
    expect(page.locator("#paused")).to_be_hidden()
    expect(page.locator("#decisions")).not_to_have_text(before)

    page.keyboard.press("/")
    page.keyboard.type("p cold")  # letters in the field are no commands
    expect(page.locator("#paused")).to_be_hidden()
    expect(page.locator("#decisions-count")).to_have_text(re.compile(r"^\d+ of the last \d+$"))
    page.keyboard.press("Escape")
    expect(page.locator("#decisions-count")).to_have_text("")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("single-letter keys").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    page.wait_for_timeout(200)
    expect(page.locator("#paused")).to_be_hidden()


def test_128_workers(fleet, open_page):
    page = open_page(fleet.url, color_scheme="light")
    tiles = page.locator("#grid button")
    expect(tiles).to_have_count(LARGE)
    expect(tiles.nth(41)).to_contain_text("✕")
    expect(page.locator("#alarms")).to_contain_text(fleet.dead.address)
    assert fits(page)
    assert least_contrast(page) >= 4.5
    page.emulate_media(color_scheme="dark")
    assert least_contrast(page) >= 4.5

    tiles.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    row = page.locator("#workers tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("10.1.0.2")
    page.get_by_text("Table", exact=True).click()
    expect(row).to_have_count(LARGE)
    page.get_by_role("button", name="In flight").press("Enter")
    expect(page.locator("#workers th[aria-sort=descending]")).to_have_text("In flight, │ mean")
    # In one go: rows move while they are looked at.
    loads = page.evaluate(
        "[...document.querySelectorAll('#workers .load b')].map((b) => Number(b.textContent))"
    )
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > 0
    assert least_contrast(page) >= 4.5
    page.emulate_media(color_scheme="light")
    assert least_contrast(page) >= 4.5

    page.set_viewport_size(NARROW)
    page.wait_for_timeout(300)
    assert fits(page)


def test_a_phone_sees_it_all(stack, open_page):
    page = open_page(stack.page_url, NARROW)
    assert fits(page)
    expect(page.locator("#workers tbody tr")).to_have_count(WORKERS)
    for part in ("#tiles", "#charts", "#workers", "#prefixes", "#decisions", "#heat"):
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= NARROW["width"]
    page.get_by_text("What the words mean").click()
    expect(page.get_by_text("No worker holds more of the prompt.")).to_be_visible()
    assert fits(page)


def test_the_theme_is_remembered(stack, open_page):
    page = open_page(stack.page_url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Theme").click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert page.evaluate(ground) == light


def test_a_router_that_goes_and_comes_back(stack, chromium):
    page = chromium.new_page()
    found = complaints(page)
    page.goto(stack.page_url)
    expect(page.locator("#link")).to_have_text("live", timeout=20_000)
    stack.router.kill()
    stale = page.locator("#stale")
    expect(stale).to_contain_text(re.compile(r"No answer from the router for \d+ s"), timeout=20_000)
    assert page.evaluate("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"
    expect(page.locator("#workers tbody tr")).to_have_count(WORKERS)
    stack.router.start()
    stack.router.wait_ready()
    expect(stale).to_be_hidden(timeout=20_000)
    expect(page.locator("#link")).to_have_text("live")
    ask(stack, 1)
    expect(page.locator("#decisions tbody tr")).to_have_count(1, timeout=20_000)
    assert all("ERR_CONNECTION" in text or "ERR_EMPTY" in text for text in found), found
    page.close()


def least_contrast(page: Page) -> float:
    """Of all text that is seen, by WCAG 2's formula, on the nearest ground that isn't transparent."""
    return float(page.evaluate(_LEAST_CONTRAST))


_LEAST_CONTRAST = """() => {
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  const pixel = (color) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const linear = (byte) => (byte <= 10 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  let least = 21;
  for (const node of document.querySelectorAll("body *")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
    if (!node.checkVisibility() || node.closest(".hidden, script, option")) continue;
    const style = getComputedStyle(node);
    const text = luminance(pixel(node instanceof SVGElement ? style.fill : style.color));
    let ground = null;
    for (let at = node; at && !ground; at = at.parentElement) {
      const found = pixel(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) ground = luminance(found);
    }
    const [low, high] = [text, ground].sort((a, b) => a - b);
    least = Math.min(least, (high + 0.05) / (low + 0.05));
  }
  return least;
}"""


def test_the_measure_of_contrast_knows_bad_from_good(chromium):
    page = chromium.new_page()
    page.set_content("<body style='background:#fff'><p style='color:#777'>text</p></body>")
    assert 4.4 < least_contrast(page) < 4.5
    page.set_content("<body style='background:#fff'><p style='color:#000'>text</p></body>")
    assert least_contrast(page) == 21
    page.close()
