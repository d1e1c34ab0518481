"""The page, and the policy under which browsers run it."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

PARTS = ("page.html", "playground.js", "chat.js")


@cache
def page(chats: bool) -> tuple[str, str]:
    """The page, for chats or for plain texts, and the Content-Security-Policy that lets run it alone."""
    frame, *scripts = (files("distgpt.serving").joinpath(name).read_text("utf-8") for name in PARTS)
    frame = frame.replace("<body>", '<body class="chats">') if chats else frame
    text = frame.replace("<script></script>", f"<script>\n{''.join(scripts)}</script>")
    script, style = (_sources(text, name) for name in ("script", "style"))
    policy = (
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return text, "; ".join(policy)


def _sources(text: str, name: str) -> str:
    """Hashes of all inline elements of this name."""
    inside = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in inside)
