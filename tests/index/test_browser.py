"""Pages in a browser: width, keyboard, accessibility, no script, and the site as files.

They need Chromium: Debian's package `chromium`, or another program of that name.
"""

import shutil
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from example_index import fill
from playwright.sync_api import Browser, Page, sync_playwright

from nibblas.index.api import create_app
from nibblas.index.catalog import Catalog
from nibblas.index.export import export
from nibblas.index.store import Store

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a program called chromium (Debian's package chromium)")

KINDS = {
    "home": "/",
    "search": "/search?q=gemv&language=python",
    "implementation": "/implementations/gemv-fast",
    "claimed": "/implementations/kernelbot-toy-gemv-7",
    "many lines": "/implementations/gemv-b200",
    "hostile": "/implementations/hostile",
    "file": "/implementations/gemv-fast/files/gemv.py",
    "changes": "/implementations/gemv-fast/changes",
    "operations": "/operations",
    "operation": "/operations/toy-gemv",
    "roofline": "/operations/linear",
    "techniques": "/techniques",
    "hardware": "/hardware",
    "device": "/hardware/nvidia-b200",
    "runs": "/runs",
    "compare": "/compare?a=gemv-fast&b=gemv-slow",
    "sources": "/sources",
    "methodology": "/methodology",
    "about": "/about",
    "error": "/nowhere",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    with Store.open(path) as store:
        fill(store)
    return path


@pytest.fixture(scope="module")
def address(index) -> Iterator[str]:
    """Of a server of the index."""
    server = uvicorn.Server(uvicorn.Config(create_app(index), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it answered"
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def site(index, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("site")
    with Catalog(index) as catalog:
        export(catalog, folder / "site")
    return (folder / "site").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser) -> Iterator[Page]:
    with browser.new_context() as context:
        yield context.new_page()


def watched(page: Page) -> list[str]:
    """What the browser complains of from now on."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    # A page that is left before its icon has come aborts that request.
    page.on("requestfailed", lambda request: None if "ERR_ABORTED" in request.failure else found.append(request.url))
    page.on("response", lambda answer: found.append(f"{answer.url}: {answer.status}") if answer.status >= 400 else None)
    return found


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_page_scrolls_sideways_and_none_complains(page, address, width):
    page.set_viewport_size({"width": width, "height": 800})
    complaints = watched(page)
    for name, path in KINDS.items():
        page.goto(address + path)
        beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert beyond <= 0, f"{name} is {beyond} px too wide at {width} px"
        if name != "error":
            assert complaints == [], name


def test_axe_finds_nothing_serious(page, address):
    """In light, then in the dark, where only the colours differ."""
    for name, path in KINDS.items():
        page.emulate_media(color_scheme="light")
        page.goto(address + path)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        page.emulate_media(color_scheme="dark")
        found += page.evaluate("axe.run({runOnly: ['color-contrast'], resultTypes: ['violations']})")["violations"]
        serious = [
            f"{name}: {fault['id']}: {node['html'][:200]}: {node['failureSummary'][:300]}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]
        assert serious == []


def test_dark_and_light_differ(browser, address):
    colours = set()
    for scheme in ("light", "dark"):
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(address)
            colours.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(colours) == 2


def focused(page: Page) -> str:
    return page.evaluate("(document.activeElement.textContent || document.activeElement.name).trim()")


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(page, address):
    page.goto(f"{address}/search")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "q"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.type("gemv_tied")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?q=gemv_tied*")
    assert page.locator(".results > li").count() == 1


def test_every_place_that_scrolls_can_be_reached_by_keyboard(page, address):
    page.set_viewport_size({"width": 320, "height": 800})
    for path in KINDS.values():
        page.goto(address + path)
        hidden = page.evaluate(
            """[...document.querySelectorAll("main *")].filter(
                e => e.scrollWidth > e.clientWidth + 1 && e.tabIndex < 0
                    && ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
            ).map(e => e.outerHTML)"""
        )
        assert hidden == [], path


def test_without_scripts_everything_works(browser, address):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(address)
        page.get_by_label("Words to search for").fill("gemv")
        page.get_by_role("button", name="Search").click()
        page.get_by_role("link", name="gemv_fast").click()
        page.get_by_role("navigation", name="On this page").get_by_role("link", name="Source").click()
        page.get_by_role("link", name="gemv.py", exact=True).last.click()
        page.goto(f"{page.url}#L8")
        assert "triton.jit" in page.locator("#L8").inner_text()
        assert page.locator("#L8").evaluate("line => line.matches(':target')")
        page.goto(f"{address}/operations/toy-gemv")
        page.get_by_text("runs without a rank").first.click()
        assert page.get_by_text("its status is wrong").is_visible()


def test_the_page_says_what_it_is(page, address):
    page.goto(f"{address}/implementations/gemv-fast")
    assert page.title() == "gemv_fast · nibblas index"
    assert page.get_by_role("navigation", name="Breadcrumbs").get_by_role("link").all_inner_texts() == [
        "Index",
        "Operations",
        "toy_gemv",
    ]
    assert page.get_by_role("img", name="20 samples from").count() == 1
    assert page.get_by_role("main").count() == 1


def test_a_hostile_name_is_only_text(page, address):
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    for path in ("/", "/implementations/hostile", "/search?q=<script>alert(1)</script>"):
        page.goto(address + path)
        assert page.evaluate("document.scripts.length") == 0


def test_the_site_works_from_a_folder(page, site):
    complaints = watched(page)
    page.goto(f"{site}/index.html")
    assert page.evaluate("getComputedStyle(document.body).margin") == "0px", "the stylesheet is not there"
    page.get_by_role("link", name="toy_gemv", exact=True).first.click()
    page.get_by_role("link", name="gemv_fast").first.click()
    page.get_by_role("link", name="gemv.py", exact=True).last.click()
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Browse").click()
    assert page.get_by_role("heading", level=1).inner_text() == "All implementations"
    assert complaints == []
