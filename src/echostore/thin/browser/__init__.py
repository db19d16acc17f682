"""The browser's leaf: one ES module without a build step, and a planner page that uses it.

The thin service hands all of it out on its own port, so that a page and its socket have one origin. No page holds a script or a
style of its own, so that a strict policy of content can be kept.
"""

from importlib.resources import files
from typing import Final

_FILES: Final = {
    "/": ("planner.html", "text/html; charset=utf-8"),
    "/planner.html": ("planner.html", "text/html; charset=utf-8"),
    "/planner.js": ("planner.js", "text/javascript; charset=utf-8"),
    "/planner.css": ("planner.css", "text/css; charset=utf-8"),
    "/echostore-leaf.js": ("echostore-leaf.js", "text/javascript; charset=utf-8"),
}


def page(path: str) -> tuple[str, bytes] | None:
    """The content type and the bytes of what stands under a path; None when nothing does."""
    found = _FILES.get(path.partition("?")[0])
    if found is None:
        return None
    name, content_type = found
    return content_type, files(__name__).joinpath(name).read_bytes()
