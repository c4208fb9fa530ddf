"""A headless Chromium for tests, and the demo's page in it as its user sees it."""

import os
import re
import shutil
from contextlib import contextmanager

import pytest

REQUIRED = os.environ.get("MMPREFILL_BROWSER") == "required"  # CI: no browser is a failure there
# Without these it calls its maker at every start, and the connections are refused one by one.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip
PATIENCE = 90_000  # ms; machines that run tests are slow


def chromium():
    """The browser's path; skips where there is none (fails where one is required)."""
    names = (os.environ.get("MMPREFILL_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, filter(None, names))), None)
    if found is None:
        (pytest.fail if REQUIRED else pytest.skip)("no Chromium here: `make browser` installs Debian's, as root")
    return found


@contextmanager
def running():
    """A browser's context, in which every tab is a user of its own: gradio's sessions are per page."""
    path = chromium()
    playwright = pytest.importorskip("playwright.sync_api").sync_playwright()
    with playwright as started:
        browser = started.chromium.launch(executable_path=path, args=QUIET)
        yield browser.new_context(accept_downloads=True)  # one: tabs share its cache of the page's scripts
        browser.close()


class User:
    """One person with one tab. Everything that goes wrong in the tab is kept in `complaints`."""

    def __init__(self, context, address, *, width=1280, height=900):
        self.address, self.complaints, self.elsewhere = address, [], []
        self.page = context.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self._asked(asked.url))
        self.page.goto(address)
        self.box.wait_for()

    def _asked(self, url):
        if not url.startswith((self.address, "data:", "blob:")):
            self.elsewhere.append(url)

    @property
    def box(self):
        return self.page.get_by_role("textbox", name="Your question")

    @property
    def submit(self):
        return self.page.get_by_role("button", name="Submit")

    @property
    def stop(self):
        return self.page.get_by_role("button", name="Stop")

    @property
    def said(self):
        """Messages of the assistant, notes among them."""
        return self.page.locator("#chat [data-testid=bot]")

    @property
    def panel(self):
        return self.page.get_by_role("region", name="What the pipeline did")

    def give(self, *files):
        """Add files to the question, and wait until they are there."""
        self.page.locator("#box input[type=file]").set_input_files([str(file) for file in files])
        self.page.locator("#box .thumbnail-item").nth(len(files) - 1).wait_for()

    def ask(self, text, *files):
        """Ask; does not wait for the answer."""
        if files:
            self.give(*files)
        self.box.fill(text)
        self.box.press("Enter")

    def answer(self, number=1):
        """The text of the n-th message of the assistant, once all work has ended.

        The box was emptied, and got its stop button, when the work began: chat and box are not drawn at the same time.
        """
        self.page.wait_for_function(
            """number => { const all = [...document.querySelectorAll('#chat [data-testid=bot]')];
            return all.length >= number && !all[number - 1].innerText.trim().match(/^…?$/)
                && !document.querySelector('#box textarea').value
                && document.querySelector('#box [data-testid=submit-button]'); }""",
            arg=number,
        )
        return self.said.nth(number - 1).inner_text().strip()

    def reused(self):
        """Tokens and pictures that the panel says were there already."""
        lines = self.panel.locator(".mm-list li").all_inner_texts()
        return [int(re.match(r"\d+", line)[0]) for line in lines if re.match(r"\d+ of", line)]

    def close(self):
        self.page.close()
