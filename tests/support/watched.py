"""How a page is looked at in a browser, and what the browser complains of."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import ConsoleMessage, Page, expect

# What a page shows in the end is what it shows, however slow the machine is.
PATIENCE_MS = 300_000.0
expect.set_options(timeout=PATIENCE_MS)

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"width": 360, "height": 740, "has_touch": True},
    "wall": {"width": 2560, "height": 1300, "color_scheme": "dark"},
}
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


class Watched:
    """Errors and warnings of the console, among them every violation of the content security policy."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure or ""))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _failed(self, url: str, why: str) -> None:
        if "ERR_ABORTED" not in why:  # what the page itself no longer wants
            self.complaints.append(f"{url}: {why}")
