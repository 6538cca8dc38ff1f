"""What may not happen while a page is used: it throws, logs an error, opens a dialog, or asks for what is not its own."""

from __future__ import annotations

from playwright.sync_api import Dialog, Page, Request


def watched(page: Page, own: str = "file:") -> list[str]:
    """A list that fills while the page is used: errors thrown or logged, dialogs, and requests to anything but ``own``, the
    beginning of the addresses that are the page's."""
    trouble: list[str] = []

    def dialog(shown: Dialog) -> None:
        trouble.append(f"a dialog said {shown.message}")
        shown.dismiss()

    def request(sent: Request) -> None:
        if not sent.url.startswith((own, "data:")):
            trouble.append(f"asked for {sent.url}")

    page.on("pageerror", lambda error: trouble.append(f"the script threw {error}"))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("dialog", dialog)
    page.on("request", request)
    return trouble
