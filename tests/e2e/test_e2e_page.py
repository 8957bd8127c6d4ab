"""The gateway's page in a headless browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.launcher.stack import LocalStack

# Not on a machine for GPU tests.
playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODEL = str(Path(__file__).resolve().parents[2] / "demo" / "model")
# A browser of a test looks up nothing on the network.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(
        MODEL,
        num_workers=2,
        served_model_name="demo",
        http_listen="127.0.0.1:0",
        settings={"QUIRE_WORKER_KV_CACHE_MEMORY": "16MiB"},
        restart=True,
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(stack: LocalStack, browser: Any) -> Iterator[Any]:
    """The page in the dark. A script's error fails the test."""
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://{stack.http_addresses[0]}/")
    yield page
    context.close()
    assert errors == []


def test_a_chat_is_streamed_and_stopped_by_the_keyboard(page: Any) -> None:
    prompt = page.get_by_label("Message")
    expect(prompt).to_be_focused()
    page.keyboard.type("Return the")
    page.keyboard.press("Enter")
    expect(page.locator("#log small").last).to_contain_text("tokens/s")
    page.get_by_label("Complete a text").check()
    page.get_by_label("Max tokens").fill("900")
    for _ in range(20):
        # A text may end by itself before the key is pressed.
        prompt.fill("Return the number of")
        prompt.press("Enter")
        expect(page.locator("#log article").last.locator("p")).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        if page.locator("#log small").last.inner_text() == "Stopped.":
            break
    else:
        pytest.fail("no text was stopped")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#log article")).to_have_count(0)


def test_an_error_is_shown_and_the_next_message_works(page: Any) -> None:
    page.get_by_label("Temperature").evaluate("input => input.value = -1")
    page.get_by_label("Message").fill("x")
    page.get_by_label("Message").press("Enter")
    page.get_by_label("Temperature").evaluate("input => input.value = 0")
    page.get_by_label("Message").fill("Return the")
    page.get_by_label("Message").press("Enter")
    expect(page.locator("#log small").last).to_contain_text("tokens/s")


def test_the_service_is_shown_and_survives_its_gateway(page: Any, stack: LocalStack) -> None:
    expect(page.locator("#workers article")).to_have_count(2)
    expect(page.locator("#workers canvas")).to_have_count(2)
    expect(page.locator("#service-state")).to_contain_text("leads with epoch")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(18, 22, 28)"
    stack.processes("gateway")[0].kill()
    page.get_by_label("Message").fill("Return the")
    page.get_by_label("Message").press("Enter")
    expect(page.locator("#log small").last).to_contain_text("tokens/s", timeout=30_000)
    expect(page.locator("#service-state")).to_contain_text("leads with epoch", timeout=30_000)
