"""The system's Chromium, which finds nothing but this machine, and the runs that it looks at."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from played_runs import Watch, chromium, hung_run, play_hang, slow_run

from myriad.dashboard.request_guard import cookie_name

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CLUSTER = "megascale-12288xa100"
ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright (pip install 'myriad-train[dev]')"
    )
    if (path := chromium()) is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as engine:
        yield engine.chromium.launch(executable_path=path, args=["--no-sandbox", ONLY_HERE])


@pytest.fixture
def tab(browser: "Browser") -> Iterator[Callable[..., "Page"]]:
    """Opens pages. Nothing may be said on their consoles, and no other host asked, but what a test allows."""
    contexts, said = [], []

    def open_(watch: Watch, view: str, *allowed: str, **options: Any) -> "Page":
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 720}, "color_scheme": "light"} | options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)

        def say(text: str) -> None:
            if not any(part in text for part in allowed):
                said.append(text)

        page.on("console", lambda message: message.type == "error" and say(told(message)))
        page.on("pageerror", lambda error: say(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((watch.address, "data:")) or say(request.url)
        )
        # A test of its own enters by the address with the token, which loads the page twice.
        name = cookie_name(urlsplit(watch.address).netloc)
        context.add_cookies(
            [{"name": name, "value": watch.token, "url": watch.address, "sameSite": "Strict"}]
        )
        page.goto(f"{watch.address}/#/{view}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not said


def told(message: "ConsoleMessage") -> str:
    return f"{message.text} {message.location.get('url', '')}"


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    watch = Watch(slow_run(tmp_path_factory.mktemp("slow") / "slow host"), ("--cluster", CLUSTER)).start()
    yield watch
    watch.stop()


@pytest.fixture(scope="session")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    watch = Watch(hung_run(tmp_path_factory.mktemp("hung") / "hung")).start()
    play_hang(watch)
    yield watch
    watch.stop()
