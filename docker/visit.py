"""A browser of a cockpit, for docker/test.sh: it trusts one certificate, and opens a one-time link.

python3 docker/visit.py LINK CERTIFICATE

Prints the state of the first run in the list that the page would ask for, and how many updates it counts.
"""

from __future__ import annotations

import json
import ssl
import sys
from http.cookiejar import CookieJar
from urllib.parse import urljoin
from urllib.request import HTTPCookieProcessor, HTTPSHandler, build_opener


def main() -> None:
    """Go by the link to the page, then ask what the page asks."""
    link, certificate = sys.argv[1:]
    trusted = ssl.create_default_context(cafile=certificate)
    browser = build_opener(HTTPSHandler(context=trusted), HTTPCookieProcessor(CookieJar()))
    with browser.open(link, timeout=30) as page:
        if b"cockpit.js" not in page.read():
            raise SystemExit(f"{page.url} is no cockpit")
    with browser.open(urljoin(link, "/api/runs"), timeout=30) as answer:
        run = json.load(answer)["runs"][0]
    sys.stdout.write(f"{run['state']} {run['updates']}\n")


if __name__ == "__main__":
    main()
